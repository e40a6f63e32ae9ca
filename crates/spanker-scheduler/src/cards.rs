// SPDX-License-Identifier: Apache-2.0
//! Collectives over the cards of a topology, from and to buffers of the host.
//!
//! The host writes each card's input to the card, the cards do the collective between them, and the host
//! reads the results and compares a random sample of every card's result with what it computes itself, bit for
//! bit, before anything reaches a buffer of the caller ([`crate::ResultCheck`] says how much, and asks for all
//! of it). The schedule is the cheapest that gives the promised bits: for folds of floats, where the order
//! shows, one whose folds are those of the serial fold in card order, and else any.

use std::error::Error as _;
use std::sync::PoisonError;

use nix::errno::Errno;
use spanker_collective::{Algorithm, Collective, DType, Rank, ReduceOp, chunk};
use spanker_fabric::device::{DeviceCall, DeviceError, DeviceGroup, examine, examine_pair};
use spanker_plan::Wiring;
use spanker_reduce::Element;
use spanker_runtime::SpankerControl;

use crate::blame::suspects;
use crate::choice::{Prices, Wanted, linked};
use crate::collective::{AllGather, AllReduce};
use crate::expected::{Expected, Seen};
use crate::{Error, Result, Topology};

impl AllReduce for Topology<SpankerControl> {
    fn all_reduce_f32(&self, per_card: &mut [Vec<f32>], op: ReduceOp) -> Result<()> {
        self.all_reduce(per_card, op)
    }
}

impl AllGather for Topology<SpankerControl> {
    fn all_gather_f32(&self, per_card: &[Vec<f32>]) -> Result<Vec<f32>> {
        self.check_count(per_card.len())?;
        check_lengths(per_card, |_| per_card.first().map_or(0, Vec::len))?;
        let mut outputs = vec![vec![0.0; per_card.iter().map(Vec::len).sum()]; per_card.len()];
        self.all_gather(per_card, &mut outputs)?;
        Ok(outputs.into_iter().next().unwrap_or_default())
    }
}

/// Collectives on cards. Buffers are the host's: they travel to the cards and back. Errors are those of the
/// methods of the same names for mock cards, and [`Error::Device`] if a card or a link fails or a result is
/// wrong: then the cards are tested one by one, and the one at fault is named. On error no buffer has changed.
///
/// Programs whose data lives on the cards use [`Topology::group`] instead.
impl Topology<SpankerControl> {
    /// Reduces the cards' buffers; each gets the result.
    ///
    /// # Errors
    /// As [`AllReduce::all_reduce_f32`],
    /// [`Error::UndefinedOperation`] for an operation that the type does not have, and [`Error::Device`].
    pub fn all_reduce<T: Element, B: AsMut<[T]>>(
        &self,
        per_card: &mut [B],
        op: ReduceOp,
    ) -> Result<()> {
        self.check_count(per_card.len())?;
        let inputs: Vec<&[T]> = per_card.iter_mut().map(|card| &*card.as_mut()).collect();
        let elements = inputs.first().map_or(0, |first| first.len());
        check_lengths(&inputs, |_| elements)?;
        check_defined::<T>(op)?;
        let collective = Collective::AllReduce;
        let found = self.run(&Expected { collective, elements, op, inputs: &inputs })?;
        store(per_card, &found);
        Ok(())
    }

    /// Reduces the cards' buffers; card `r` gets chunk `r` of the result.
    ///
    /// # Errors
    /// As [`Topology::all_reduce`].
    pub fn reduce_scatter<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
        &self,
        inputs: &[A],
        outputs: &mut [B],
        op: ReduceOp,
    ) -> Result<()> {
        self.check_count(inputs.len())?;
        check_defined::<T>(op)?;
        let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
        let elements = inputs.first().map_or(0, |first| first.len());
        check_lengths(&inputs, |_| elements)?;
        self.check_count(outputs.len())?;
        check_lengths(&shared(outputs), |card| chunk(elements, inputs.len(), card).len())?;
        let collective = Collective::ReduceScatter;
        let found = self.run(&Expected { collective, elements, op, inputs: &inputs })?;
        store(outputs, &found);
        Ok(())
    }

    /// Gives each card the concatenation of all inputs, which may have different lengths.
    ///
    /// # Errors
    /// [`Error::TopologyMismatch`] for a wrong number of buffers, [`Error::ShapeMismatch`] naming the first
    /// output that is not as long as all inputs together, and [`Error::Device`].
    pub fn all_gather<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
        &self,
        inputs: &[A],
        outputs: &mut [B],
    ) -> Result<()> {
        self.check_count(inputs.len())?;
        self.check_count(outputs.len())?;
        let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
        let lengths = inputs.iter().map(|input| input.len());
        let total = lengths.clone().fold(0, usize::saturating_add);
        check_lengths(&shared(outputs), |_| total)?;
        // On the cards all chunks are as long as the longest.
        let longest = lengths.max().unwrap_or(0);
        let elements = longest.saturating_mul(inputs.len());
        let pad = |input: &&[T]| {
            let mut padded = vec![T::zeroed(); longest];
            padded[..input.len()].copy_from_slice(input);
            padded
        };
        let padded: Vec<Vec<T>> = inputs.iter().map(pad).collect();
        let padded: Vec<&[T]> = padded.iter().map(Vec::as_slice).collect();
        let (collective, op) = (Collective::AllGather, ReduceOp::Sum);
        let found = self.run(&Expected { collective, elements, op, inputs: &padded })?;
        let cut = |whole: &Vec<T>| -> Vec<T> {
            let parts = inputs.iter().zip(whole.chunks(longest.max(1)));
            parts.flat_map(|(input, part)| &part[..input.len()]).copied().collect()
        };
        store(outputs, &found.iter().map(cut).collect::<Vec<_>>());
        Ok(())
    }

    /// Gives each card a copy of `source`.
    ///
    /// # Errors
    /// As [`Topology::all_reduce`].
    pub fn broadcast<T: Element, B: AsMut<[T]>>(
        &self,
        source: &[T],
        outputs: &mut [B],
    ) -> Result<()> {
        self.check_count(outputs.len())?;
        check_lengths(&shared(outputs), |_| source.len())?;
        let mut inputs = vec![&[][..]; outputs.len()];
        if let Some(root) = inputs.first_mut() {
            *root = source;
        }
        let (collective, op) = (Collective::Broadcast { root: 0 }, ReduceOp::Sum);
        let elements = source.len();
        let found = self.run(&Expected { collective, elements, op, inputs: &inputs })?;
        store(outputs, &found);
        Ok(())
    }

    /// Gives card `j` the chunks `j` of all inputs, in card order.
    ///
    /// # Errors
    /// As [`Topology::all_reduce`].
    pub fn all_to_all<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
        &self,
        inputs: &[A],
        outputs: &mut [B],
    ) -> Result<()> {
        self.check_count(inputs.len())?;
        self.check_count(outputs.len())?;
        let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
        let (count, elements) = (inputs.len(), inputs.first().map_or(0, |first| first.len()));
        check_lengths(&inputs, |_| elements)?;
        check_lengths(&shared(outputs), |card| chunk(elements, count, card).len() * count)?;
        let (collective, op) = (Collective::AllToAll, ReduceOp::Sum);
        let found = self.run(&Expected { collective, elements, op, inputs: &inputs })?;
        store(outputs, &found);
        Ok(())
    }

    /// The algorithm that a collective of this topology takes for so many elements of a type: the cheapest that
    /// gives the promised bits, by the planner's prices for [`Topology::cluster`]. Cards whose profiles have
    /// no prices take two-shot.
    ///
    /// # Errors
    /// [`Error::Device`] if the links leave cards apart, or a card does not answer.
    pub fn algorithm(
        &self,
        collective: Collective,
        elements: usize,
        dtype: DType,
    ) -> Result<Algorithm> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = Wanted { collective, elements, dtype };
        let ranked = turn.prices.ranked(self, self.group()?.wiring(), wanted)?;
        Ok(ranked[0])
    }

    /// Runs a collective on the cards and returns each card's result, a sample of which is as expected.
    fn run<T: Element>(&self, expected: &Expected<'_, T>) -> Result<Vec<Vec<T>>> {
        if expected.inputs.is_empty() {
            return Ok(Vec::new());
        }
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let group = self.group()?;
        let mut call = self.prepare(&group, &mut turn.prices, expected)?;
        for (rank, &input) in expected.inputs.iter().enumerate() {
            let first = match expected.collective {
                Collective::AllGather => rank * input.len(),
                _ => 0,
            };
            let offset = (first * size_of::<T>()) as u64;
            call.write_at(rank, offset, bytemuck::cast_slice(input))?;
        }
        call.run(&self.deadline)?;
        let mut results = Vec::with_capacity(expected.ranks());
        for rank in 0..expected.ranks() {
            let mut whole = vec![T::zeroed(); call.schedule().data_len()];
            call.read(rank, bytemuck::cast_slice_mut(&mut whole))?;
            let result = call.result(rank);
            whole.truncate(result.end);
            whole.drain(..result.start);
            results.push(whole);
        }
        let algorithm = call.schedule().algorithm();
        // The memory is free again for the test of the cards.
        drop(call);
        let seen = expected.compare(&results, &mut turn.sampler)?;
        match seen.iter().find_map(|seen| Some((seen.holder, seen.wrong?))) {
            None => Ok(results),
            Some(first) => {
                Err(self.blame(&group, (expected.collective, algorithm), &seen, first)?.into())
            }
        }
    }

    /// Makes the cheapest schedule ready for whose buffers every card has the memory.
    fn prepare<'g, T: Element>(
        &self,
        group: &'g DeviceGroup<'g>,
        prices: &mut Prices,
        expected: &Expected<'_, T>,
    ) -> Result<DeviceCall<'g>> {
        let &Expected { collective, elements, op, .. } = expected;
        let wanted = Wanted { collective, elements, dtype: T::DTYPE };
        let ranked = prices.ranked(self, group.wiring(), wanted)?;
        let mut ranked = ranked.into_iter().peekable();
        loop {
            let algorithm = ranked.next().unwrap_or(Algorithm::TwoShot);
            match group.prepare(collective, algorithm, elements, T::DTYPE, op, 1) {
                Err(error) if ranked.peek().is_some() && is_out_of_memory(&error) => {}
                outcome => return Ok(outcome?),
            }
        }
    }

    /// The error for a wrong result. To blame is a card that fails a test on its own; or else one whose messages
    /// do not arrive at its neighbours as they were; or else the card through whose hands everything has gone
    /// that is wrong, and the least that is right.
    fn blame(
        &self,
        group: &DeviceGroup<'_>,
        (collective, algorithm): (Collective, Algorithm),
        seen: &[Seen],
        (holder, element): (Rank, usize),
    ) -> Result<DeviceError> {
        let fails = |card: &SpankerControl| match examine(card) {
            Ok(sound) => !sound,
            // It has no memory or no time for the test, which says nothing about its answers.
            Err(spanker_runtime::Error::Ioctl { .. }) => false,
            Err(_) => true,
        };
        let mut named: Vec<Rank> = self.sails.iter().position(fails).into_iter().collect();
        if named.is_empty() {
            named = garblers(&self.garbled(group.wiring()));
        }
        if named.is_empty() {
            named = suspects(collective, algorithm, group.wiring(), seen)?;
        }
        let card = |rank: &Rank| self.indices[*rank];
        let mut detail =
            format!("element {element} of card {} is not what it must be", card(&holder));
        let culprit = named.first().unwrap_or(&holder);
        if named.len() > 1 {
            let others: Vec<String> = named[1..].iter().map(|r| card(r).to_string()).collect();
            detail += &format!(" (it may as well be card {})", others.join(" or "));
        }
        Ok(DeviceError::wrong(card(culprit), detail))
    }

    /// Pairs of a sender and a receiver between which a test message was changed. Pairs that cannot be tested
    /// are left out: the wrong result is what has to be reported, and other evidence names the card.
    fn garbled(&self, wiring: &Wiring) -> Vec<(Rank, Rank)> {
        let mut garbled = Vec::new();
        for (a, b) in linked(wiring) {
            let pair = [&self.sails[a], &self.sails[b]];
            let senders = examine_pair(pair, &self.deadline).unwrap_or_default();
            garbled.extend(senders.into_iter().map(|from| if from == 0 { (a, b) } else { (b, a) }));
        }
        garbled
    }
}

/// The ranks that most of the garbled messages have in common, the first senders first: a card that changes what
/// it sends does so to all its neighbours.
fn garblers(garbled: &[(Rank, Rank)]) -> Vec<Rank> {
    let ends = garbled.iter().map(|pair| pair.0).chain(garbled.iter().map(|pair| pair.1));
    let ends: Vec<Rank> = ends.collect();
    let count = |rank: Rank| ends.iter().filter(|&&end| end == rank).count();
    let most = ends.iter().map(|&rank| count(rank)).max();
    let mut named = Vec::new();
    for &rank in ends.iter().filter(|&&rank| Some(count(rank)) == most) {
        if !named.contains(&rank) {
            named.push(rank);
        }
    }
    named
}

/// Whether a card has refused a buffer because it has no memory for it.
fn is_out_of_memory(error: &DeviceError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref());
    matches!(source, Some(spanker_runtime::Error::Ioctl { source: Errno::ENOMEM, .. }))
}

/// Buffers of the caller, to be looked at.
fn shared<T: Element, B: AsMut<[T]>>(buffers: &mut [B]) -> Vec<&[T]> {
    buffers.iter_mut().map(|buffer| &*buffer.as_mut()).collect()
}

fn store<T: Element, B: AsMut<[T]>>(outputs: &mut [B], found: &[Vec<T>]) {
    for (output, found) in outputs.iter_mut().zip(found) {
        output.as_mut().copy_from_slice(found);
    }
}

/// Fails unless every buffer is as long as it must be.
fn check_lengths<T, B: AsRef<[T]>>(buffers: &[B], expected: impl Fn(usize) -> usize) -> Result<()> {
    for (sail, buffer) in buffers.iter().enumerate() {
        let (expected, actual) = (expected(sail), buffer.as_ref().len());
        if actual != expected {
            return Err(Error::ShapeMismatch { sail, expected, actual });
        }
    }
    Ok(())
}

fn check_defined<T: Element>(op: ReduceOp) -> Result<()> {
    let dtype = T::DTYPE;
    if op.is_defined_for(dtype) { Ok(()) } else { Err(Error::UndefinedOperation { op, dtype }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbler_is_the_end_that_most_changed_messages_share_and_else_the_sender() {
        assert_eq!(garblers(&[]), [0usize; 0]);
        assert_eq!(garblers(&[(2, 3)]), [2, 3]);
        assert_eq!(garblers(&[(2, 1), (2, 3)]), [2]);
        // All that arrives at 3 is wrong, and what others send each other is not.
        assert_eq!(garblers(&[(2, 3), (0, 3)]), [3]);
    }
}
