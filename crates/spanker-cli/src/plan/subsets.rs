// SPDX-License-Identifier: Apache-2.0
//! Which machines make a model faster: the prediction for this machine alone and with every set of its workers, or with
//! the fastest ones where there are many.

use serde_json::{Value, json};
use spanker_model::Model;
use spanker_plan::{PlanError, Request, Split, choose};
use spanker_topology::Cluster;

use crate::output;

/// Workers up to which every set is looked at.
const MOST_FOR_ALL: usize = 6;
/// How much faster another machine has to make it to be worth its while.
const WORTH: f64 = 1.01;

/// A set of machines and what they give together.
pub(super) struct Set {
    machines: Vec<usize>,
    /// Nothing if the model does not fit them, or cannot be split over them.
    tokens_per_second: Option<f64>,
}

/// The answer for all sets.
pub(super) struct Subsets {
    names: Vec<String>,
    sets: Vec<Set>,
}

/// What each set of machines gives, the one with this machine alone first. All layouts have the bits of one card.
pub(super) fn of(
    names: &[String],
    model: &Model,
    cluster: &Cluster,
    request: &Request,
) -> Result<Subsets, PlanError> {
    let workers: Vec<usize> = (1..cluster.cards()).collect();
    let mut sets = Vec::new();
    for machines in selections(cluster, &workers) {
        let choice = choose(model, cluster, &machines, request)?;
        let exact = choice.candidates.iter().filter(|candidate| {
            let layout = &candidate.layout;
            candidate.prediction.fits()
                && layout.cards() == machines
                && layout.not_runnable().is_none()
                && layout.stages().all(|stage| stage.group.split != Split::Reduce)
        });
        let rate = exact.map(|candidate| candidate.prediction.tokens_per_second);
        let tokens_per_second = rate.reduce(f64::max);
        sets.push(Set { machines, tokens_per_second });
    }
    Ok(Subsets { names: names.to_vec(), sets })
}

/// The sets that are looked at.
fn selections(cluster: &Cluster, workers: &[usize]) -> Vec<Vec<usize>> {
    let with = |some: Vec<usize>| std::iter::once(0).chain(some).collect::<Vec<usize>>();
    if workers.len() <= MOST_FOR_ALL {
        let chosen = |set: usize| {
            let some = workers.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1);
            some.map(|(_, &worker)| worker).collect::<Vec<usize>>()
        };
        let mut sets: Vec<_> = (0..1 << workers.len()).map(|set| with(chosen(set))).collect();
        sets.sort_by_key(Vec::len);
        return sets;
    }
    let speed = |card: usize| cluster.profile(card).memory.bandwidth.value.0;
    let mut fastest = workers.to_vec();
    fastest.sort_by_key(|&card| std::cmp::Reverse(speed(card)));
    let first = |count: usize| {
        let mut some = fastest[..count].to_vec();
        some.sort_unstable();
        with(some)
    };
    (0..=fastest.len()).map(first).collect()
}

impl Subsets {
    /// The fastest set; of about equal ones that with the fewest machines.
    fn best(&self) -> Option<&Set> {
        let rate = |set: &Set| set.tokens_per_second.unwrap_or(0.0);
        let most = self.sets.iter().map(rate).fold(0.0, f64::max);
        self.sets.iter().find(|set| most > 0.0 && rate(set) * WORTH >= most)
    }

    fn words(&self, set: &Set) -> String {
        let names: Vec<&str> = set.machines.iter().map(|&at| &*self.names[at]).collect();
        names.join(" + ")
    }

    /// Why workers that are not in the best set are not.
    fn left_out(&self) -> Vec<String> {
        let Some(best) = self.best() else { return Vec::new() };
        let missing = (0..self.names.len()).filter(|at| !best.machines.contains(at));
        let words = missing.map(|worker| {
            let name = &self.names[worker];
            let mut with = best.machines.clone();
            with.push(worker);
            with.sort_unstable();
            let known = self.sets.iter().find(|set| set.machines == with);
            let rates = (known.and_then(|set| set.tokens_per_second), best.tokens_per_second);
            match rates {
                (Some(with), Some(without)) => format!(
                    "{name} is left out: with it {with:.1} tokens/s, without it {without:.1}"
                ),
                _ => format!("{name} is left out: the model cannot be split over it as well"),
            }
        });
        words.collect()
    }

    pub(super) fn show(&self) -> anyhow::Result<()> {
        let alone = self.sets.first().and_then(|set| set.tokens_per_second);
        let row = |set: &Set| {
            let rate = set.tokens_per_second;
            let times = rate.zip(alone).map(|(rate, alone)| format!("{:.2}x", rate / alone));
            vec![
                self.words(set),
                rate.map_or_else(|| "does not fit".into(), |rate| format!("{rate:.1}")),
                times.unwrap_or_default(),
            ]
        };
        let header = ["machines", "tokens/s", "to this one alone"];
        let rows = self.sets.iter().map(row).collect();
        output::line(&format!("\n{}", output::table(&header, rows, &header[1..])))?;
        if let Some(best) = self.best() {
            output::line(&format!("\nbest: {}", self.words(best)))?;
        }
        self.left_out().iter().try_for_each(|line| output::line(line))
    }

    pub(super) fn to_json(&self) -> Value {
        let set = |set: &Set| {
            let names: Vec<&str> = set.machines.iter().map(|&at| &*self.names[at]).collect();
            json!({ "machines": names, "tokens_per_second": set.tokens_per_second })
        };
        json!({
            "sets": self.sets.iter().map(set).collect::<Vec<_>>(),
            "best": self.best().map(set),
            "left_out": self.left_out(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subsets(rates: [Option<f64>; 4]) -> Subsets {
        let machines = [vec![0], vec![0, 1], vec![0, 2], vec![0, 1, 2]];
        let set = |(machines, tokens_per_second)| Set { machines, tokens_per_second };
        let names = ["this machine", "fast", "slow"].map(str::to_owned).to_vec();
        Subsets { names, sets: machines.into_iter().zip(rates).map(set).collect() }
    }

    #[test]
    fn worker_that_slows_things_down_is_left_out_with_the_reason() {
        let answer = subsets([Some(10.0), Some(18.0), Some(7.0), Some(9.0)]);
        assert_eq!(answer.words(answer.best().unwrap()), "this machine + fast");
        let [line] = &answer.left_out()[..] else { panic!("{:?}", answer.left_out()) };
        assert_eq!(line, "slow is left out: with it 9.0 tokens/s, without it 18.0");
    }

    #[test]
    fn machine_that_changes_next_to_nothing_is_not_asked_for() {
        let answer = subsets([Some(10.0), Some(10.05), Some(9.0), Some(10.08)]);
        assert_eq!(answer.best().unwrap().machines, [0]);
        let none = subsets([None, None, None, Some(3.0)]);
        assert_eq!(none.best().unwrap().machines, [0, 1, 2]);
        assert!(subsets([None; 4]).best().is_none());
    }
}
