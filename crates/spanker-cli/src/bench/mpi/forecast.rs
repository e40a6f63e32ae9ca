// SPDX-License-Identifier: Apache-2.0
//! What a collective between processes will take, from a short probe of the same processes.
//!
//! A round in which every rank sends to the next one gives the line of a message while all ranks are busy; folds,
//! copies and commits are timed while all ranks do them. What that leaves out (caches, cores that ranks share) is a
//! factor from one schedule that is run at a few sizes. MPI's own collectives are no schedules: a few sizes are
//! timed, and others lie between.

use std::time::{Duration, Instant};

use spanker_collective::{Local, Schedule, Step, Transfer};
use spanker_fabric_mpi::MpiFabric;
use spanker_plan::Line;
use spanker_scheduler::{
    Algorithm, Collective, DType, Fabric, FabricError, ReduceOp, Registered, Team, Threads,
    Workspace, execute_registered, host, schedule,
};

use super::{Case, Runner, slowest};

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

/// Bytes of the messages that are timed.
const MESSAGES: [usize; 5] = [64, 2048, 16 << 10, 128 << 10, 1 << 20];
/// Bytes of MPI's own collectives that are timed.
const NATIVE: [usize; 6] = [64, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20];
/// Bytes of the schedule that is run to compare.
const SCHEDULES: [usize; 5] = [1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20];
/// Bytes of the folds and copies that are timed.
const LOCAL: usize = 256 << 10;
/// How often each is timed; the median counts.
const TIMES: usize = 9;

/// What the probe found.
#[derive(Debug)]
pub(super) struct Forecast {
    /// A round of messages: its latency has the commit of a call in it once.
    message: Option<Line>,
    commit: f64,
    /// Seconds for each byte of a result.
    fold: f64,
    copy: f64,
    /// How many times longer a schedule over so many bytes takes than its parts say.
    factors: Vec<(f64, f64)>,
    native: Vec<(f64, f64)>,
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// The median time of a call, on the slowest rank.
fn time(
    fabric: &mut MpiFabric,
    calls: usize,
    mut call: impl FnMut(&mut MpiFabric) -> Result<(), FabricError>,
) -> Result<f64, FabricError> {
    let mut samples = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        call(fabric)?;
        let begun = Instant::now();
        for _ in 0..calls {
            call(fabric)?;
        }
        samples.push(begun.elapsed().as_secs_f64() / calls as f64);
    }
    slowest(fabric, median(samples))
}

/// A schedule in which every rank sends `elements` to the next one.
fn shift(ranks: usize, elements: usize) -> Schedule {
    use spanker_collective::Span;
    let step = |rank: usize| Step {
        transfers: vec![
            Transfer::Send { to: (rank + 1) % ranks, span: Span::data(0..elements) },
            Transfer::Recv {
                from: (rank + ranks - 1) % ranks,
                span: Span::data(elements..2 * elements),
                fold: None,
            },
        ],
        locals: Vec::new(),
    };
    let steps = (0..ranks).map(|rank| if ranks > 1 { vec![step(rank)] } else { Vec::new() });
    let (kind, how) = (Collective::ReduceScatter, Algorithm::Ring);
    Schedule::from_parts(kind, how, 2 * elements, 2 * elements, 0, steps.collect())
}

impl Forecast {
    /// Probes the ranks. All of them must call it.
    pub(super) fn measure(
        case: &Case,
        dtype: DType,
        fabric: &mut MpiFabric,
    ) -> anyhow::Result<Forecast> {
        let soon = || Instant::now() + case.patience.max(Duration::from_secs(1));
        let (ranks, sum) = (case.ranks, ReduceOp::Sum);
        let empty = schedule(Collective::AllReduce, Algorithm::Ring, ranks, 0)?;
        let (mut space, mut none) = (Workspace::<f32>::new(), Registered::new(0));
        let commit = time(fabric, 20, |fabric| {
            execute_registered(fabric, &empty, &mut space, &mut none, sum, soon())
        })?;
        let mut samples = Vec::new();
        for bytes in MESSAGES {
            let plan = shift(ranks, bytes / 4);
            let mut buffer = Registered::<f32>::new(plan.data_len());
            let calls = if bytes > 100_000 { 3 } else { 20 };
            // What the call copies in the end is measured with it: the probe wants messages.
            let took = time(fabric, calls, |fabric| {
                execute_registered(fabric, &plan, &mut space, &mut buffer, sum, soon())
            })?;
            samples.push((bytes as u64, (took - commit).max(1e-9)));
        }
        let (fold, copy) = local(fabric)?;
        let native = if Self::has_native(case, dtype) { native(case, fabric)? } else { Vec::new() };
        let (message, factors) = (Line::fit(&samples), Vec::new());
        let mut forecast = Forecast { message, commit, fold, copy, factors, native };
        forecast.factors = forecast.calibrate(case, fabric)?;
        Ok(forecast)
    }

    /// Runs one schedule, and compares.
    fn calibrate(&self, case: &Case, fabric: &mut MpiFabric) -> anyhow::Result<Vec<(f64, f64)>> {
        let own = Case { op: ReduceOp::Sum, ..*case };
        let way = Way::Schedule(Algorithm::TwoShot);
        let mut factors = Vec::new();
        for bytes in SCHEDULES {
            let mut runner = Runner::<f32>::new(&own, way, bytes / 4)?;
            let took = typical(&own, &mut runner, bytes, fabric)?;
            let expected = self.of(&own, way, bytes / 4, 4).filter(|&time| time > 0.0);
            factors.push((bytes as f64, expected.map_or(1.0, |expected| took / expected)));
        }
        Ok(factors)
    }

    /// Whether MPI has such elements and such an operation.
    fn has_native(case: &Case, dtype: DType) -> bool {
        let op = !case.collective.reduces() || case.op != ReduceOp::LogSumExp;
        op && !matches!(dtype, DType::F16 | DType::Bf16)
    }

    /// The probe's findings in words.
    pub(super) fn text(&self) -> String {
        let line = match &self.message {
            Some(line) => format!(
                "{:.1} us and {:.2} GB/s for a round of messages",
                line.latency.micros(),
                line.bandwidth.0 as f64 / 1e9
            ),
            None => "no messages".into(),
        };
        format!(
            "probe: {line}, {:.1} us to end a call, folds at {:.2} GB/s, copies at {:.2} GB/s",
            self.commit * 1e6,
            1e-9 / self.fold,
            1e-9 / self.copy
        )
    }

    /// What a way will take, in seconds.
    pub(super) fn of(&self, case: &Case, way: Way, elements: usize, size: usize) -> Option<f64> {
        match way {
            Way::Native => between(&self.native, (elements * size) as f64),
            Way::Schedule(algorithm) => {
                let plan = schedule(case.collective, algorithm, case.ranks, elements).ok()?;
                let factor = between(&self.factors, (elements * size) as f64).unwrap_or(1.0);
                Some(self.schedule_time(&plan, size) * factor)
            }
        }
    }

    /// The way that takes the least, MPI's own among them if `native` is.
    pub(super) fn cheapest(&self, case: &Case, elements: usize, size: usize, native: bool) -> Way {
        let uneven =
            case.collective == Collective::AllToAll && !elements.is_multiple_of(case.ranks);
        let ways = Algorithm::ALL.map(Way::Schedule).into_iter();
        let native = (native && !uneven && !self.native.is_empty()).then_some(Way::Native);
        let times = native
            .into_iter()
            .chain(ways)
            .filter_map(|way| Some((way, self.of(case, way, elements, size)?)));
        let best = times.min_by(|a, b| a.1.total_cmp(&b.1));
        best.map_or(Way::Schedule(Algorithm::Ring), |(way, _)| way)
    }

    fn schedule_time(&self, plan: &Schedule, size: usize) -> f64 {
        let ranks = plan.ranks();
        let steps = (0..ranks).map(|rank| plan.program(rank).len()).max().unwrap_or(0);
        let mut total = self.commit;
        for at in 0..steps {
            let on =
                |rank: usize| plan.program(rank).get(at).map_or(0.0, |s| self.step_time(s, size));
            total += (0..ranks).map(on).fold(0.0, f64::max);
        }
        // The result goes to the caller's buffer.
        total + (plan.elements() * size) as f64 * self.copy
    }

    fn step_time(&self, step: &Step, size: usize) -> f64 {
        let (mut messages, mut received, mut folded) = (0usize, 0usize, 0usize);
        for transfer in &step.transfers {
            if let Transfer::Recv { span, fold, .. } = transfer {
                messages += 1;
                received += span.len * size;
                folded += if fold.is_some() { span.len * size } else { 0 };
            }
        }
        for local in &step.locals {
            match local {
                // A fold of two reads as much as a message's: more operands cost more.
                Local::Fold { sources, into } => {
                    folded += into.len * size * (sources.len() + 1) / 3;
                }
                Local::Copy { .. } => {}
            }
        }
        let (latency, rate) = match &self.message {
            Some(line) => (line.latency.0, line.bandwidth.0 as f64),
            None => (0.0, f64::INFINITY),
        };
        // Messages of one round are under way together; each further one costs some of the latency.
        let rounds = if messages > 0 { 1.0 + 0.3 * (messages as f64 - 1.0) } else { 0.0 };
        rounds * latency + received as f64 / rate + folded as f64 * self.fold
    }
}

/// The value at `bytes`, between samples on a line, and beyond them in proportion to the last.
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

/// The median seconds of a call of so many bytes.
fn typical(
    case: &Case,
    runner: &mut Runner<f32>,
    bytes: usize,
    fabric: &mut MpiFabric,
) -> anyhow::Result<f64> {
    let calls = (20_000_000 / bytes.max(100_000)).clamp(1, 50);
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(runner.timed(case, fabric, calls)?.as_secs_f64() / calls as f64);
    }
    Ok(median(times))
}

/// Seconds for each byte of a fold of two and of a copy, while all ranks do the same.
fn local(fabric: &mut MpiFabric) -> anyhow::Result<(f64, f64)> {
    let len = LOCAL / size_of::<f32>();
    let (one, other, mut out) = (vec![1.0f32; len], vec![2.0f32; len], vec![0.0f32; len]);
    let team = Team::new(1);
    // Everyone begins at the same time.
    slowest(fabric, 0.0)?;
    let fold = time(fabric, 8, |_| {
        let sources: [&[f32]; 2] = [&one, &other];
        let _ = host::reduce(&team, Threads::Exactly(1), &sources, &mut out, ReduceOp::Sum);
        Ok(())
    })?;
    slowest(fabric, 0.0)?;
    let copy = time(fabric, 8, |_| {
        std::hint::black_box(&mut out).copy_from_slice(std::hint::black_box(&one));
        Ok(())
    })?;
    anyhow::ensure!(fabric.ranks() > 0 && out[0] == 1.0, "a copy is not a copy");
    Ok((fold / LOCAL as f64, copy / LOCAL as f64))
}

/// Times of MPI's own collective.
fn native(case: &Case, fabric: &mut MpiFabric) -> anyhow::Result<Vec<(f64, f64)>> {
    let mut samples = Vec::new();
    let own = Case { op: ReduceOp::Sum, ..*case };
    for bytes in NATIVE {
        // Every number of ranks divides it, for all-to-all.
        let elements = (bytes / 4).div_ceil(case.ranks) * case.ranks;
        let mut runner = Runner::<f32>::new(&own, Way::Native, elements)?;
        let took = typical(&own, &mut runner, bytes, fabric)?;
        samples.push(((elements * 4) as f64, took));
    }
    Ok(samples)
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
}
