// SPDX-License-Identifier: Apache-2.0
//! Which machines make a model faster: the prediction for one alone and with every set of the others, or with the fastest
//! of them where there are many.

use serde::Serialize;
use spanker_model::Model;
use spanker_plan::{PlanError, Request, Split, choose};
use spanker_topology::Cluster;

/// Workers up to which every set is looked at.
const MOST_FOR_ALL: usize = 6;
/// How much faster another machine has to make it to be worth its while.
const WORTH: f64 = 1.01;

/// A set of machines and what they give together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineSet {
    #[serde(skip)]
    cards: Vec<usize>,
    /// Their names.
    pub machines: Vec<String>,
    /// Nothing if the model does not fit them, or cannot be split over them.
    pub tokens_per_second: Option<f64>,
}

/// What every set of machines gives, the one with the first machine alone first. All layouts have the bits of one card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineSets {
    /// The sets.
    pub sets: Vec<MachineSet>,
    /// The fastest set; of about equal ones that with the fewest machines.
    pub best: Option<MachineSet>,
    /// Why machines that are not in the best set are not.
    pub left_out: Vec<String>,
}

impl MachineSets {
    /// What sets of the cards of a cluster give, each of them a machine with a name; the first is in all of them.
    ///
    /// # Errors
    /// [`PlanError`] for a request that makes no sense.
    pub fn of(
        names: &[String],
        model: &Model,
        cluster: &Cluster,
        request: &Request,
    ) -> Result<MachineSets, PlanError> {
        let workers: Vec<usize> = (1..cluster.cards()).collect();
        let rated = selections(cluster, &workers).into_iter().map(|cards| {
            let choice = choose(model, cluster, &cards, request)?;
            let exact = choice.candidates.iter().filter(|candidate| {
                let layout = &candidate.layout;
                candidate.prediction.fits()
                    && layout.cards() == cards
                    && layout.not_runnable().is_none()
                    && layout.stages().all(|stage| stage.group.split != Split::Reduce)
            });
            let rates = exact.map(|candidate| candidate.prediction.tokens_per_second);
            let rate = rates.reduce(f64::max);
            Ok((cards, rate))
        });
        Ok(MachineSets::rated(names, rated.collect::<Result<_, PlanError>>()?))
    }

    fn rated(names: &[String], rated: Vec<(Vec<usize>, Option<f64>)>) -> MachineSets {
        let set = |(cards, tokens_per_second): (Vec<usize>, Option<f64>)| {
            let machines = cards.iter().map(|&card| names[card].clone()).collect();
            MachineSet { cards, machines, tokens_per_second }
        };
        let sets: Vec<MachineSet> = rated.into_iter().map(set).collect();
        let rate = |set: &MachineSet| set.tokens_per_second.unwrap_or(0.0);
        let most = sets.iter().map(rate).fold(0.0, f64::max);
        let best = sets.iter().find(|set| most > 0.0 && rate(set) * WORTH >= most).cloned();
        let left_out = best.as_ref().map_or_else(Vec::new, |best| left_out(names, &sets, best));
        MachineSets { sets, best, left_out }
    }
}

/// Why machines that are not in the best set are not.
fn left_out(names: &[String], sets: &[MachineSet], best: &MachineSet) -> Vec<String> {
    let missing = (0..names.len()).filter(|at| !best.cards.contains(at));
    let words = missing.map(|worker| {
        let name = &names[worker];
        let mut with = best.cards.clone();
        with.push(worker);
        with.sort_unstable();
        let known = sets.iter().find(|set| set.cards == with);
        match (known.and_then(|set| set.tokens_per_second), best.tokens_per_second) {
            (Some(with), Some(without)) => {
                format!("{name} is left out: with it {with:.1} tokens/s, without it {without:.1}")
            }
            _ => format!("{name} is left out: the model cannot be split over it as well"),
        }
    });
    words.collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(rates: [Option<f64>; 4]) -> MachineSets {
        let cards = [vec![0], vec![0, 1], vec![0, 2], vec![0, 1, 2]];
        let names = ["this machine", "fast", "slow"].map(str::to_owned);
        MachineSets::rated(&names, cards.into_iter().zip(rates).collect())
    }

    fn best(rates: [Option<f64>; 4]) -> Vec<String> {
        sets(rates).best.map_or_else(Vec::new, |best| best.machines)
    }

    #[test]
    fn worker_that_slows_things_down_is_left_out_with_the_reason() {
        let rates = [Some(10.0), Some(18.0), Some(7.0), Some(9.0)];
        assert_eq!(best(rates), ["this machine", "fast"]);
        let why = "slow is left out: with it 9.0 tokens/s, without it 18.0";
        assert_eq!(sets(rates).left_out, [why]);
    }

    #[test]
    fn machine_that_changes_next_to_nothing_is_not_asked_for() {
        assert_eq!(best([Some(10.0), Some(10.05), Some(9.0), Some(10.08)]), ["this machine"]);
        assert_eq!(best([None, None, None, Some(3.0)]), ["this machine", "fast", "slow"]);
        assert!(best([None; 4]).is_empty());
    }
}
