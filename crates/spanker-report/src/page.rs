// SPDX-License-Identifier: Apache-2.0
//! The page: what it is made from, and its text.

use serde_json::{Value, json};
use spanker_plan::{
    Candidate, Choice, Comparison, Conditions, Plan, PlanError, PlanReport, Trace, choose, explain,
    remedies, simulate,
};

use crate::scenarios::Scenarios;
use crate::{lanes, values};

const HTML: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// What a page may have in bytes, and what of it is for traces.
const MOST: usize = 1_000_000;
/// Tokens that are simulated where nobody brings a trace.
const SIMULATED: u32 = 3;

/// Where a page comes from.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The commands that make it again, in order.
    pub commands: &'a [String],
    /// The program's version.
    pub version: &'a str,
}

/// What a page shows.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// What was predicted, in time; simulated where there is nothing.
    pub predicted: Option<&'a Trace>,
    /// What was measured.
    pub measured: Option<&'a Trace>,
    /// The difference of the two.
    pub comparison: Option<&'a Comparison>,
    /// What other cards, links and weights would give.
    pub scenarios: Option<&'a Scenarios>,
    /// Where all of this comes from.
    pub source: Source<'a>,
}

impl<'a> Report<'a> {
    /// A plan that has not run, without what might be different.
    #[must_use]
    pub fn of(plan: &'a Plan) -> Report<'a> {
        let source = Source { commands: &[], version: "" };
        Report { plan, predicted: None, measured: None, comparison: None, scenarios: None, source }
    }
}

impl Report<'_> {
    /// The page as one text: HTML that fetches nothing.
    ///
    /// # Errors
    /// [`PlanError`] if the plan makes no sense.
    pub fn page(&self) -> Result<String, PlanError> {
        let simulated = match self.predicted {
            None => Some(simulate(
                self.plan,
                &Conditions { prompt: true, ..Conditions::calm(SIMULATED) },
            )?),
            Some(_) => None,
        };
        let predicted = self.predicted.or(simulated.as_ref());
        let mut data = self.data()?;
        let mut traces: Vec<(&str, &Trace)> = Vec::new();
        traces.extend(predicted.map(|trace| ("predicted", trace)));
        traces.extend(self.measured.map(|trace| ("measured", trace)));
        let fixed = HTML.len() + STYLE.len() + SCRIPT.len() + data.to_string().len();
        data["timeline"] = lanes::encode(&traces, MOST.saturating_sub(fixed + 1_000));
        Ok(filled(&data))
    }

    fn data(&self) -> Result<Value, PlanError> {
        let Plan { model, cluster, request, layout, .. } = self.plan;
        let cards: Vec<usize> = (0..cluster.cards()).collect();
        let choice = choose(model, cluster, &cards, request)?;
        let own = Candidate {
            strategy: layout.strategy(),
            layout: layout.clone(),
            prediction: self.plan.predict(),
        };
        // Reasons are those of the plan at hand: it comes first, whatever the search would choose.
        let others = choice.candidates.iter().filter(|other| other.layout != own.layout).cloned();
        let mine: Vec<Candidate> = std::iter::once(own.clone()).chain(others).collect();
        let mine = Choice { candidates: mine, exact: choice.exact };
        let explained = explain(model, cluster, request, &mine);
        let remedy = remedies(model, cluster, &cards, request, &choice);
        let report = PlanReport {
            model,
            cluster,
            request,
            choice: &choice,
            proposed: Some(&own),
            explained: explained.as_ref(),
            remedy: remedy.as_ref(),
        };
        Ok(json!({
            "version": 1,
            "title": title(model.name.as_str(), &own),
            "words": own.words(),
            "own": own.to_json(),
            "plan": report.to_json()?,
            "reasons": report.reasons()?,
            "shape": { "hidden": model.hidden, "ffn": model.ffn, "heads": model.heads, "kv_heads": model.kv_heads, "vocab": model.vocab },
            "exchanges": self.plan.exchanges(),
            "kinds": values::kinds(cluster),
            "comparison": self.comparison.map(Comparison::to_json),
            "scenarios": self.scenarios.map(Scenarios::to_json),
            "source": { "commands": self.source.commands, "version": self.source.version },
        }))
    }
}

fn title(model: &str, own: &Candidate) -> String {
    format!("{model}: {}", own.words())
}

/// The template with its style, script and data. Data can hold no end of a script element.
fn filled(data: &Value) -> String {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let title = escaped(data["title"].as_str().unwrap_or_default());
    let data = data.to_string().replace('<', "\\u003c");
    let mut page = String::with_capacity(HTML.len() + STYLE.len() + SCRIPT.len() + data.len());
    let mut rest = HTML;
    for (place, text) in [
        ("{{title}}", title.as_str()),
        ("{{style}}", STYLE),
        ("{{data}}", &data),
        ("{{script}}", SCRIPT),
    ] {
        if let Some((before, after)) = rest.split_once(place) {
            page.push_str(before);
            page.push_str(text);
            rest = after;
        }
    }
    page.push_str(rest);
    page
}
