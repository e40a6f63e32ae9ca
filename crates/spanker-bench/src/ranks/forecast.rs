// SPDX-License-Identifier: Apache-2.0
//! What a collective between processes will take: a profile of the same processes, from a short probe.
//!
//! What a collective takes between processes is no sum of messages and folds: ranks that share cores hold each other
//! up, MPI changes its way of sending with the size, and caches keep what was just received. So every method that may be
//! chosen is timed as a whole, by all ranks at the same time, at the sizes around the one that is asked for, of a list
//! that doubles; others lie on a line between. The sizes of the list are not those that are usually asked for. Where
//! times differ much from one to the next, MPI may have changed its way in between: sizes closer to the one that is
//! asked for are timed, too.
//!
//! What cores take to reach each other can change from one second to the next, where a virtual machine is moved.
//! So the probe comes right before what it predicts, and again after it.

use std::cell::RefCell;
use std::time::Duration;

use spanker_fabric_mpi::MpiFabric;
use spanker_scheduler::{Algorithm, Collective, DType, ReduceOp, schedule};

use super::Runner;
use crate::collective::{Case, Method, MethodChoice};
use crate::element::BenchElement;
use crate::error::Result;
use crate::turns::{Subject, Turn, take_turns};

/// The least bytes that are timed, and how many times as many the next are.
const LEAST: usize = 48;
const TIMES_AS_MANY: usize = 2;
/// The most: from there on, time is a line.
const MOST: usize = LEAST << 18;
/// How much neighbours may differ, and how far apart they may be if they differ more, as a part of the size.
const ALIKE: f64 = 0.2;
const CLOSE: f64 = 0.002;
/// Sizes that are timed to find out where times change.
const CLOSER: usize = 10;
/// How often each is timed, in turns; the median counts.
const TURNS: usize = 9;
/// How long the calls of a turn take together, unless one takes longer.
const TURN: Duration = Duration::from_millis(2);

/// What the probe found.
#[derive(Debug)]
pub(super) struct ProbeForecast {
    curves: Vec<Curve>,
}

/// What a method takes, by bytes.
#[derive(Debug)]
struct Curve {
    method: Method,
    /// Bytes and seconds, in ascending order of bytes.
    points: Vec<(f64, f64)>,
}

/// One of the things that take turns.
struct Probe<T> {
    method: Method,
    bytes: usize,
    runner: Runner<T>,
}

impl<T: BenchElement> Probe<T> {
    /// Nothing if the method cannot do it.
    fn new(case: &Case, method: Method, bytes: usize, timeout: Duration) -> Result<Option<Self>> {
        // Every number of ranks divides it, for all-to-all.
        let elements = bytes.div_ceil(size_of::<T>()).next_multiple_of(case.ranks);
        if !can(case, method, elements) {
            return Ok(None);
        }
        let (runner, bytes) =
            (Runner::new(case, method, elements, timeout)?, elements * size_of::<T>());
        Ok(Some(Probe { method, bytes, runner }))
    }
}

/// The sizes to time so that this one lies between them, or beyond them if it is larger than all.
fn around(size: usize) -> Vec<usize> {
    // A barrier has no bytes at all.
    if size <= LEAST {
        return vec![size.min(LEAST)];
    }
    let mut above = LEAST;
    while above < size && above < MOST {
        above *= TIMES_AS_MANY;
    }
    vec![above / TIMES_AS_MANY, above]
}

impl ProbeForecast {
    /// Times methods around a size. All ranks must call it, and find the same.
    pub(super) fn measure<T: BenchElement>(
        case: &Case,
        methods: &[Method],
        size: usize,
        timeout: Duration,
        fabric: &mut MpiFabric,
    ) -> Result<ProbeForecast> {
        let mut probes = Vec::new();
        for (&method, bytes) in
            methods.iter().flat_map(|method| around(size).into_iter().map(move |at| (method, at)))
        {
            probes.extend(Probe::<T>::new(case, method, bytes, timeout)?);
        }
        let mut forecast = ProbeForecast { curves: Vec::new() };
        forecast.add(probe_in_turns(case, probes, fabric)?);
        for at in 0..forecast.curves.len() {
            for _ in 0..CLOSER {
                let Some(bytes) = halfway(&forecast.curves[at].points, size as f64) else { break };
                let probe = Probe::<T>::new(case, forecast.curves[at].method, bytes, timeout)?;
                forecast.add(probe_in_turns(case, probe.into_iter().collect(), fabric)?);
            }
        }
        Ok(forecast)
    }

    /// Adds what was timed.
    fn add(&mut self, timed: Vec<(Method, usize, f64)>) {
        for (method, bytes, seconds) in timed {
            let known = self.curves.iter().position(|curve| curve.method == method);
            let at = known.unwrap_or_else(|| {
                self.curves.push(Curve { method, points: Vec::new() });
                self.curves.len() - 1
            });
            let points = &mut self.curves[at].points;
            let before = points.partition_point(|point| point.0 < bytes as f64);
            points.insert(before, (bytes as f64, seconds));
        }
    }

    /// What a method will take, in seconds.
    pub(super) fn of(&self, method: Method, bytes: usize) -> Option<f64> {
        let curve = self.curves.iter().find(|curve| curve.method == method)?;
        between(&curve.points, bytes as f64)
    }

    /// The method that takes the least.
    pub(super) fn cheapest(&self, case: &Case, elements: usize, size: usize) -> Method {
        let able = self.curves.iter().filter(|curve| can(case, curve.method, elements));
        let times = able.filter_map(|curve| {
            Some((curve.method, between(&curve.points, (elements * size) as f64)?))
        });
        let best = times.min_by(|a, b| a.1.total_cmp(&b.1));
        best.map_or(Method::Schedule(Algorithm::Ring), |(method, _)| method)
    }
}

/// Times all in turns: what the machine does meanwhile counts for all of them.
fn probe_in_turns<T: BenchElement>(
    case: &Case,
    mut probes: Vec<Probe<T>>,
    fabric: &mut MpiFabric,
) -> Result<Vec<(Method, usize, f64)>> {
    let places: Vec<(Method, usize)> =
        probes.iter().map(|probe| (probe.method, probe.bytes)).collect();
    let fabric = &RefCell::new(fabric);
    let mut subjects: Vec<Box<Subject<'_>>> = Vec::with_capacity(probes.len());
    for probe in &mut probes {
        subjects.push(Box::new(move |calls| {
            Ok(probe.runner.timed(case, &mut fabric.borrow_mut(), calls)?)
        }));
    }
    let mut turns = Vec::with_capacity(subjects.len());
    for subject in &mut subjects {
        // The first call sets up connections and memory.
        subject(1)?;
        // All ranks get the same time, and so the same number of calls.
        let once = subject(1)?.max(Duration::from_nanos(100));
        let calls = (TURN.as_nanos() / once.as_nanos()).clamp(1, 1000) as usize;
        turns.push(Turn::new(subject, calls));
    }
    let seconds = take_turns(TURNS, &mut turns)?;
    Ok(places
        .into_iter()
        .zip(seconds)
        .map(|((method, bytes), time)| (method, bytes, time))
        .collect())
}

/// The size between the two around `bytes` that is to be timed, too: they differ much and are far apart.
fn halfway(points: &[(f64, f64)], bytes: f64) -> Option<usize> {
    let after = points.iter().position(|&(size, _)| size >= bytes).filter(|&at| at > 0)?;
    let ((small, here), (large, there)) = (points[after - 1], points[after]);
    let differ = (there / here).ln().abs() > ALIKE;
    (differ && large - small > CLOSE * bytes).then_some(f64::midpoint(small, large) as usize)
}

/// The methods that may be chosen.
pub(super) fn methods(case: &Case, choice: MethodChoice, dtype: DType) -> Vec<Method> {
    match choice {
        MethodChoice::Given(method) => vec![method],
        MethodChoice::Auto | MethodChoice::Messages => {
            let native =
                (choice == MethodChoice::Auto && has_native(case, dtype)).then_some(Method::Native);
            native.into_iter().chain(Algorithm::ALL.map(Method::Schedule)).collect()
        }
    }
}

/// Whether MPI has such elements and such an operation.
fn has_native(case: &Case, dtype: DType) -> bool {
    let op = !case.collective.reduces() || case.op != ReduceOp::LogSumExp;
    op && !matches!(dtype, DType::F16 | DType::Bf16)
}

/// Whether a method can do so many elements.
fn can(case: &Case, method: Method, elements: usize) -> bool {
    match method {
        Method::Schedule(algorithm) => {
            schedule(case.collective, algorithm, case.ranks, elements).is_ok()
        }
        _ => case.collective != Collective::AllToAll || elements.is_multiple_of(case.ranks),
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
    fn sizes_that_are_timed_lie_around_the_one_that_is_asked_for() {
        for size in [49, 96, 97, 8 << 10, 1 << 20, 12 << 20] {
            let found = around(size);
            assert!(found[0] < size && found[1] >= size && found[1] == 2 * found[0], "{found:?}");
        }
        // Beyond the largest, the last two make a line.
        assert_eq!(around(1 << 30), [MOST / 2, MOST]);
        assert_eq!([around(0), around(8), around(48)], [vec![0], vec![8], vec![48]]);
    }

    #[test]
    fn step_next_to_a_size_is_found_and_flat_times_are_not_looked_at_again() {
        // From 7920 bytes on, messages go another way.
        let time = |bytes: f64| if bytes < 7920.0 { 5.0 } else { 9.0 + bytes / 1e5 };
        let mut points: Vec<(f64, f64)> =
            around(8192).into_iter().map(|bytes| (bytes as f64, time(bytes as f64))).collect();
        let mut timed = 0;
        while let Some(bytes) = halfway(&points, 8192.0) {
            let before = points.partition_point(|point| point.0 < bytes as f64);
            points.insert(before, (bytes as f64, time(bytes as f64)));
            timed += 1;
        }
        let found = between(&points, 8192.0).unwrap();
        assert!((found / time(8192.0) - 1.0).abs() < 0.02 && timed <= CLOSER, "{found} {points:?}");
        assert_eq!(halfway(&[(6144.0, 5.0), (12288.0, 5.5)], 8192.0), None);
        assert_eq!(halfway(&[(8.0, 5.0)], 8.0), None);
    }

    #[test]
    fn cheapest_way_is_that_of_the_size_and_can_do_it() {
        let case = Case {
            collective: Collective::AllToAll,
            op: ReduceOp::Sum,
            dtype: DType::F32,
            ranks: 3,
            budget: Duration::from_secs(1),
        };
        let curve = |method, points: [f64; 2]| Curve {
            method,
            points: vec![(12.0, points[0]), (12000.0, points[1])],
        };
        let (native, ring) = (Method::Native, Method::Schedule(Algorithm::Ring));
        let forecast =
            ProbeForecast { curves: vec![curve(native, [1.0, 5.0]), curve(ring, [2.0, 3.0])] };
        assert_eq!(forecast.cheapest(&case, 3, 4), native);
        assert_eq!(forecast.cheapest(&case, 3000, 4), ring);
        // MPI's own takes as many elements for every rank.
        assert_eq!(forecast.cheapest(&case, 4, 4), ring);
        assert_eq!(forecast.of(ring, 12), Some(2.0));
        assert_eq!(forecast.of(Method::Schedule(Algorithm::Tree), 12), None);
    }
}
