// SPDX-License-Identifier: Apache-2.0
//! What a collective between processes will take: a profile of the same processes, from a short probe.
//!
//! What a collective takes between processes is no sum of messages and folds: ranks that share cores hold each other
//! up, MPI changes its way of sending with the size, and caches keep what was just received. So every way that may be
//! chosen is timed as a whole, by all ranks at the same time, at sizes a factor of four apart; other sizes lie on lines
//! between. The sizes of the probe are not those that are usually asked for.

use std::time::Duration;

use spanker_fabric_mpi::MpiFabric;
use spanker_scheduler::{Algorithm, Collective, DType, ReduceOp, schedule};

use super::super::data::Sample;
use super::{Case, Choice, Runner};

/// How a collective is run between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Native,
    Schedule(Algorithm),
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Native => "native",
            Way::Schedule(algorithm) => algorithm.name(),
        }
    }
}

/// The least bytes that are timed, and how many times as many the next are.
const LEAST: usize = 48;
const TIMES_AS_MANY: usize = 4;
/// The most: from there on, time is a line.
const MOST: usize = LEAST << 18;
/// How often each is timed, in turns; the median counts.
const TURNS: usize = 9;
/// How long the calls of a turn take together, unless one takes longer.
const TURN: Duration = Duration::from_millis(2);

/// What the probe found.
#[derive(Debug)]
pub(super) struct Forecast {
    curves: Vec<Curve>,
}

/// What a way takes, by bytes.
#[derive(Debug)]
struct Curve {
    way: Way,
    /// Bytes and seconds, in ascending order of bytes.
    points: Vec<(f64, f64)>,
}

/// One of the things that take turns.
struct Probe<T> {
    curve: usize,
    bytes: usize,
    runner: Runner<T>,
    calls: usize,
    seconds: Vec<f64>,
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// The sizes to time so that all of these lie between two, or beyond the largest two.
fn around(sizes: &[usize]) -> Vec<usize> {
    let all: Vec<usize> = std::iter::successors(Some(LEAST), |size| Some(size * TIMES_AS_MANY))
        .take_while(|&size| size <= MOST)
        .collect();
    let mut list = Vec::new();
    // A barrier has no bytes at all.
    for &size in sizes {
        if size == 0 {
            list.push(0);
            continue;
        }
        let above = all.partition_point(|&known| known < size).min(all.len() - 1);
        list.extend([all[above.saturating_sub(1)], all[above]]);
    }
    list.sort_unstable();
    list.dedup();
    list
}

impl Forecast {
    /// Probes the ranks, for these sizes. All of them must call it.
    pub(super) fn measure<T: Sample>(
        case: &Case,
        choice: Choice,
        sizes: &[usize],
        fabric: &mut MpiFabric,
    ) -> anyhow::Result<Forecast> {
        let ways: Vec<Way> = match choice {
            Choice::Given(way) => vec![way],
            Choice::Cheapest { native } => {
                let native = (native && has_native(case, T::DTYPE)).then_some(Way::Native);
                native.into_iter().chain(Algorithm::ALL.map(Way::Schedule)).collect()
            }
        };
        let mut curves = Vec::new();
        let mut probes: Vec<Probe<T>> = Vec::new();
        for way in ways {
            let mut added = false;
            for bytes in around(sizes) {
                // Every number of ranks divides it, for all-to-all.
                let elements = bytes.div_ceil(size_of::<T>()).next_multiple_of(case.ranks);
                if !can(case, way, elements) {
                    continue;
                }
                let runner = Runner::new(case, way, elements)?;
                let (curve, bytes) = (curves.len(), elements * size_of::<T>());
                probes.push(Probe { curve, bytes, runner, calls: 1, seconds: Vec::new() });
                added = true;
            }
            curves.extend(added.then(|| Curve { way, points: Vec::new() }));
        }
        take_turns(case, &mut probes, fabric)?;
        for probe in probes {
            curves[probe.curve].points.push((probe.bytes as f64, median(probe.seconds)));
        }
        Ok(Forecast { curves })
    }

    /// What was timed, in words.
    pub(super) fn text(&self) -> String {
        let names: Vec<&str> = self.curves.iter().map(|curve| curve.way.name()).collect();
        let sizes = self.curves.iter().map(|curve| curve.points.len()).max().unwrap_or(0);
        format!(
            "predicted from {sizes} sizes that were timed before, by all ranks at once: {}",
            names.join(", ")
        )
    }

    /// What a way will take, in seconds.
    pub(super) fn of(&self, way: Way, bytes: usize) -> Option<f64> {
        let curve = self.curves.iter().find(|curve| curve.way == way)?;
        between(&curve.points, bytes as f64)
    }

    /// The way that takes the least.
    pub(super) fn cheapest(&self, case: &Case, elements: usize, size: usize) -> Way {
        let able = self.curves.iter().filter(|curve| can(case, curve.way, elements));
        let times = able.filter_map(|curve| {
            Some((curve.way, between(&curve.points, (elements * size) as f64)?))
        });
        let best = times.min_by(|a, b| a.1.total_cmp(&b.1));
        best.map_or(Way::Schedule(Algorithm::Ring), |(way, _)| way)
    }
}

/// Times all in turns: what the machine does meanwhile counts for all of them.
fn take_turns<T: Sample>(
    case: &Case,
    probes: &mut [Probe<T>],
    fabric: &mut MpiFabric,
) -> anyhow::Result<()> {
    for probe in probes.iter_mut() {
        // All ranks get the same time, and so the same number of calls.
        let once = probe.runner.timed(case, fabric, 1)?.max(Duration::from_nanos(100));
        probe.calls = (TURN.as_nanos() / once.as_nanos()).clamp(1, 1000) as usize;
    }
    for _ in 0..TURNS {
        for Probe { runner, calls, seconds, .. } in probes.iter_mut() {
            let took = runner.timed(case, fabric, *calls)?.as_secs_f64();
            seconds.push(took / *calls as f64);
        }
    }
    Ok(())
}

/// Whether MPI has such elements and such an operation.
fn has_native(case: &Case, dtype: DType) -> bool {
    let op = !case.collective.reduces() || case.op != ReduceOp::LogSumExp;
    op && !matches!(dtype, DType::F16 | DType::Bf16)
}

/// Whether a way can do so many elements.
fn can(case: &Case, way: Way, elements: usize) -> bool {
    match way {
        Way::Native => {
            case.collective != Collective::AllToAll || elements.is_multiple_of(case.ranks)
        }
        Way::Schedule(algorithm) => {
            schedule(case.collective, algorithm, case.ranks, elements).is_ok()
        }
    }
}

/// The value at `bytes`, between samples on a line, and beyond them on that of the last two.
fn between(samples: &[(f64, f64)], bytes: f64) -> Option<f64> {
    let last = samples.len().checked_sub(1)?;
    let after = samples.iter().position(|&(size, _)| size >= bytes).unwrap_or(last);
    let (large, there) = samples[after];
    if after == 0 {
        return Some(there);
    }
    let (small, here) = samples[after - 1];
    Some((here + (there - here) * (bytes - small) / (large - small)).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_between_samples_lie_on_lines() {
        let samples = [(100.0, 1.0), (200.0, 3.0), (400.0, 3.0)];
        let at = |bytes| between(&samples, bytes).unwrap();
        assert_eq!([at(4.0), at(100.0), at(150.0), at(300.0)], [1.0, 1.0, 2.0, 3.0]);
        assert_eq!(at(800.0), 3.0);
        assert_eq!(between(&[], 5.0), None);
    }

    #[test]
    fn sizes_that_are_timed_lie_around_those_that_are_asked_for() {
        for size in [4, 48, 49, 8 << 10, 1 << 20, 12 << 20] {
            let found = around(&[size]);
            assert!(found[0] <= size.max(LEAST) && found[found.len() - 1] >= size, "{found:?}");
            assert!(found.len() <= 2);
        }
        // Beyond the largest, the last two make a line.
        assert_eq!(around(&[1 << 30]), [MOST / 4, MOST]);
        assert_eq!(around(&[4, 8]), [LEAST]);
        assert_eq!(around(&[0]), [0]);
    }

    #[test]
    fn cheapest_way_is_that_of_the_size_and_can_do_it() {
        let case = Case {
            collective: Collective::AllToAll,
            op: ReduceOp::Sum,
            ranks: 3,
            patience: Duration::from_secs(1),
            budget: Duration::from_secs(1),
        };
        let curve = |way, points: [f64; 2]| Curve {
            way,
            points: vec![(12.0, points[0]), (12000.0, points[1])],
        };
        let (native, ring) = (Way::Native, Way::Schedule(Algorithm::Ring));
        let forecast =
            Forecast { curves: vec![curve(native, [1.0, 5.0]), curve(ring, [2.0, 3.0])] };
        assert_eq!(forecast.cheapest(&case, 3, 4), native);
        assert_eq!(forecast.cheapest(&case, 3000, 4), ring);
        // MPI's own takes as many elements for every rank.
        assert_eq!(forecast.cheapest(&case, 4, 4), ring);
        assert_eq!(forecast.of(ring, 12), Some(2.0));
        assert_eq!(forecast.of(Way::Schedule(Algorithm::Tree), 12), None);
    }
}
