// SPDX-License-Identifier: Apache-2.0
//! Collectives on cards behind the ABI, beside the prediction.
//!
//! Cards in card time are measured by their own clocks: one run says it all, because card time repeats. Others
//! are measured by the host's clock, many repeats in one submission, median of several runs.

mod forecast;

use std::path::Path;
use std::time::Duration;

use spanker_engine::{directory, explain};
use spanker_runtime::{Pace, SpankerControl};
use spanker_scheduler::device::{Timing, examine};
use spanker_scheduler::{Algorithm, Collective, Deadline, DeviceGroup, Error, Topology};

use crate::collective::{BenchTarget, Case, Method};
use crate::element::{BenchElement, count_wrong, fill};
use crate::error::{BenchError, Result};
use crate::row::{Beside, Measured};
use crate::turns::{Turn, take_turns};
use forecast::PriceForecast;

/// Runs by the host's clock of which the median counts.
const RUNS: u32 = 7;
/// Repeats in one submission at most.
const MOST_REPEATS: u128 = 4096;
/// How long one run may take in all, as waited by the host.
const TOTAL: Duration = Duration::from_secs(600);

/// A group of cards.
#[derive(Debug)]
pub struct Cards<'a> {
    cards: &'a Topology<SpankerControl>,
    group: DeviceGroup<'a>,
    pace: Pace,
    forecast: PriceForecast,
    deadline: Deadline,
}

impl<'a> Cards<'a> {
    /// Cards of a folder that are open, for a collective by the algorithm that is wanted, or else the cheapest by
    /// prediction. `detect` is how long no card may get on with its work.
    ///
    /// # Errors
    /// That of the first card that does not answer or cannot be in a group.
    pub fn new(
        folder: &Path,
        cards: &'a Topology<SpankerControl>,
        collective: Collective,
        wanted: Option<Algorithm>,
        detect: Option<Duration>,
    ) -> Result<Cards<'a>> {
        let blamed = |error: &dyn std::fmt::Display| {
            BenchError::from(directory::blamed(folder, cards.indices(), error))
        };
        let group = cards.group().map_err(|error| match error {
            Error::Device(error) => explain(cards, error).into(),
            other => BenchError::from(other),
        })?;
        let pace = pace(cards).map_err(|error| blamed(&error))?;
        let forecast =
            PriceForecast::new(cards, pace, collective, wanted).map_err(|e| blamed(&e))?;
        let usual = Deadline::USUAL;
        let deadline = Deadline { detect: detect.unwrap_or(usual.detect), total: TOTAL, ..usual };
        Ok(Cards { cards, group, pace, forecast, deadline })
    }

    /// What the cards are, and whose clock their times are by.
    #[must_use]
    pub fn nature(&self) -> &'static str {
        directory::nature(self.pace)
    }

    /// Why nothing is predicted, where that is not because of the cards' pace.
    #[must_use]
    pub fn unpredicted(&self) -> Option<&str> {
        self.forecast.unpredicted.as_deref()
    }

    fn measured<T: BenchElement>(&self, case: &Case, elements: usize) -> Result<Measured> {
        let (algorithm, predicted) = self.forecast.of(elements, size_of::<T>(), case.op);
        let (wrong, once) = self.checked::<T>(case, algorithm, elements)?;
        let (seconds, repeats) = match once.card_ps {
            Some(ps) => (ps as f64 / 1e12, 1),
            None => self.timed::<T>(case, algorithm, elements, once.wall)?,
        };
        Ok(Measured {
            method: Method::Schedule(algorithm),
            elements,
            seconds,
            repeats,
            wrong,
            predicted: Some(predicted.map(|predicted| predicted.0)),
            beside: Beside::Cards {
                cards: self.cards.indices().to_vec(),
                emulated: self.pace != Pace::Real,
                pace: directory::pace(self.pace),
                clock: if self.pace == Pace::CardTime { "card" } else { "wall" },
            },
        })
    }

    /// Runs once on known inputs, and counts the wrong elements over all cards.
    fn checked<T: BenchElement>(
        &self,
        case: &Case,
        algorithm: Algorithm,
        elements: usize,
    ) -> Result<(usize, Timing)> {
        let mut call =
            self.group.prepare(case.collective, algorithm, elements, T::DTYPE, case.op, 1)?;
        let mut data = vec![T::default(); call.schedule().data_len()];
        for rank in 0..case.ranks {
            fill(case, rank, 0, &mut data);
            call.write(rank, bytemuck::cast_slice(&data))?;
        }
        let timing = call.run(&self.deadline)?;
        let mut wrong = 0;
        for rank in 0..case.ranks {
            call.read(rank, bytemuck::cast_slice_mut(&mut data))?;
            wrong += count_wrong(case, elements, rank, &data);
        }
        Ok((wrong, timing))
    }

    /// Median seconds of one collective by the host's clock, and how many were run. Buffers are zeros, which
    /// stay zeros however often they are summed.
    fn timed<T: BenchElement>(
        &self,
        case: &Case,
        algorithm: Algorithm,
        elements: usize,
        once: Duration,
    ) -> Result<(f64, usize)> {
        let share = case.budget / RUNS;
        let fill = |once: Duration| {
            (share.as_nanos() / once.as_nanos().max(1)).clamp(1, MOST_REPEATS) as usize
        };
        let prepare = |repeats: usize| {
            self.group.prepare(case.collective, algorithm, elements, T::DTYPE, case.op, repeats)
        };
        // The first run had the host's round trips in it, so many more may fit.
        let first = fill(once);
        let repeats = fill(prepare(first)?.run(&self.deadline)?.wall / first as u32);
        let mut call = prepare(repeats)?;
        let mut subject = |_: usize| Ok(call.run(&self.deadline)?.wall);
        let medians = take_turns(RUNS as usize, &mut [Turn::new(&mut subject, repeats)])?;
        Ok((medians[0], repeats * RUNS as usize))
    }
}

impl BenchTarget for Cards<'_> {
    fn measure<T: BenchElement>(&mut self, case: &Case, elements: usize) -> Result<Measured> {
        self.measured::<T>(case, elements).map_err(|error| match error {
            BenchError::Device(error) => explain(self.cards, error).into(),
            other => other,
        })
    }

    fn verdict(&self, wrong: usize) -> Result<()> {
        if wrong == 0 {
            return Ok(());
        }
        // A card that fails a test on its own is the one to leave out.
        let fails = |&place: &usize| !examine(&self.cards.sails()[place]).unwrap_or(false);
        let Some(place) = (0..self.cards.n_sails()).find(fails) else {
            return Err(BenchError::Wrong(format!(
                "{wrong} elements are wrong, and every card passes a test on its own"
            )));
        };
        let culprit = self.cards.indices()[place];
        let left = self.cards.indices().iter().copied().filter(|&index| index != culprit);
        let hint = directory::go_on(&left.collect::<Vec<_>>());
        let hint = hint.map_or_else(String::new, |hint| format!("\nhint: {hint}"));
        Err(BenchError::Wrong(format!(
            "{wrong} elements are wrong: card {culprit} gives wrong answers{hint}"
        )))
    }
}

/// What the cards' clocks show. Cards of different kinds are measured by the host's clock.
fn pace(cards: &Topology<SpankerControl>) -> Result<Pace, spanker_runtime::Error> {
    let mut paces = Vec::new();
    for sail in cards.sails() {
        paces.push(sail.info()?.pace);
    }
    let first = paces.first().copied().unwrap_or(Pace::Real);
    Ok(if paces.iter().all(|&pace| pace == first) { first } else { Pace::Real })
}
