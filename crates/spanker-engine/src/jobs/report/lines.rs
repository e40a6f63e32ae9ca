// SPDX-License-Identifier: Apache-2.0
//! What came of a job, in words.

use spanker_topology::Seconds;

use super::{BackendShare, JobReport, JobTotals};

/// Incidents that are listed.
const SHOWN: usize = 10;

/// A number of things.
pub(in crate::jobs) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

impl JobTotals {
    /// The job, its size and who did it.
    #[must_use]
    pub fn title(&self, over: &str) -> String {
        format!("{}, {} over {over}", self.job, count(self.items, "item"))
    }

    /// How far it was from the ideal time.
    #[must_use]
    pub fn efficiency_line(&self) -> String {
        let (ideal, seconds) = (Seconds(self.ideal_seconds), Seconds(self.seconds));
        match self.efficiency {
            Some(efficiency) => {
                format!("efficiency {efficiency:.3} (ideal {ideal}, took {seconds})")
            }
            None => format!("unfinished after {seconds}"),
        }
    }

    /// How many items there were, and are done, lost and done twice.
    #[must_use]
    pub fn counts_line(&self) -> String {
        let JobTotals { items, done, lost, duplicated, .. } = self;
        let bytes = match self.wrong_bytes {
            None => "not compared".to_owned(),
            Some(0) if done == items => "every byte as expected".to_owned(),
            Some(0) => "every byte of them as expected".to_owned(),
            Some(wrong) => format!("{} wrong", count(wrong, "byte")),
        };
        format!("done {done} of {items}, lost {lost}, duplicated {duplicated}; {bytes}")
    }

    /// The part of the items that a backend did, in per cent.
    #[must_use]
    pub fn percent(&self, items: usize) -> f64 {
        100.0 * items as f64 / self.items.max(1) as f64
    }

    /// What is wrong with what was done, if something is.
    pub(in crate::jobs) fn wrong(&self) -> Option<String> {
        match (self.wrong_bytes, self.duplicated) {
            (Some(wrong @ 1..), _) => Some(format!("{} wrong", count(wrong, "byte"))),
            (_, twice @ 1..) => Some(format!("{} done twice", count(twice, "item"))),
            _ => None,
        }
    }
}

impl BackendShare {
    /// How the backend is in the end.
    #[must_use]
    pub fn state(&self) -> String {
        let state = match &self.benched {
            Some(why) => format!("benched: {why}"),
            None if self.silent => "no answer".to_owned(),
            None => "ok".to_owned(),
        };
        // Backends are named by their place, which need not be a card's number.
        match self.card.filter(|index| self.name != format!("card{index}")) {
            Some(index) => format!("{state} (card:{index})"),
            None => state,
        }
    }
}

impl JobReport {
    /// The job, its size and who did it.
    #[must_use]
    pub fn title(&self) -> String {
        let how = if self.simulated { " in virtual time" } else { "" };
        self.totals.title(&count(self.backends.len(), "backend")) + how
    }

    /// What went wrong, how far the job was from the ideal time, what was counted, and answers.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let failure = |failure: &spanker_steal::Incident| {
            format!("{:>9.3} s  {failure}", failure.at.as_secs_f64())
        };
        let mut lines: Vec<String> = self.failures.iter().take(SHOWN).map(failure).collect();
        let all = self.failures.len() + self.more_failures;
        if all > SHOWN {
            lines.push(format!("{:>11}  and {} more", "", all - SHOWN));
        }
        if all > 0 {
            lines.push(String::new());
        }
        lines.push(self.totals.efficiency_line());
        lines.extend(self.origin_line());
        if self.redone + self.audited > 0 {
            let (audited, redone) = (self.audited, self.redone);
            lines.push(format!("{audited} done again to compare, {redone} thrown out"));
        }
        lines.push(self.totals.counts_line());
        if let Some(answers) = &self.answers {
            lines.push(String::new());
            lines.extend(answers.iter().map(ToString::to_string));
        }
        lines
    }

    /// How the first version's rule did, and how much better this was.
    fn origin_line(&self) -> Option<String> {
        let efficiency = self.origin_efficiency?;
        let mut line = format!("origin's rule {efficiency:.3} ({}", Seconds(self.origin_seconds?));
        if let Some(lost @ 1..) = self.origin_lost {
            line += &format!(", {} lost", count(lost, "item"));
        }
        if let Some(wrong @ 1..) = self.origin_wrong_bytes {
            line += &format!(", {} wrong", count(wrong, "byte"));
        }
        line += ")";
        Some(match self.totals.efficiency {
            Some(here) if efficiency > 0.0 => line + &format!(": {:.2}x", here / efficiency),
            _ => line,
        })
    }

    /// What went wrong with the job, if something did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        if let Some(error) = &self.error {
            let lost = self.backends.iter().any(|one| one.benched.is_some() && one.card.is_some());
            let hint = "\nhint: 'spanker cards' shows which answer, and who has them";
            return Some(format!("{error}{}", if lost { hint } else { "" }));
        }
        let lost = self.totals.lost;
        self.totals.wrong().or_else(|| (lost > 0).then(|| format!("{} lost", count(lost, "item"))))
    }
}
