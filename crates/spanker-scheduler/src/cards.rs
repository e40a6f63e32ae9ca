// SPDX-License-Identifier: Apache-2.0
//! Collectives over the cards of a topology, from and to buffers of the host.
//!
//! The host writes each card's input to the card, the cards do the collective between them, and the host
//! reads the results and compares them with what it computes itself, bit for bit, before anything reaches a
//! buffer of the caller. The algorithm is the one whose folds are those of the serial fold in card order.

use std::sync::PoisonError;

use spanker_collective::{Algorithm, Collective, ReduceOp, chunk};
use spanker_fabric::device::{DeviceError, examine};
use spanker_reduce::{self as fused, Element, Team, Threads, divide};
use spanker_runtime::SpankerControl;

use crate::collective::{AllGather, AllReduce};
use crate::{Error, Result, Topology};

/// What every collective on cards uses: contributions are kept apart and folded in card order.
const ALGORITHM: Algorithm = Algorithm::TwoShot;

impl AllReduce for Topology<SpankerControl> {
    fn all_reduce_f32(&self, per_card: &mut [Vec<f32>], op: ReduceOp) -> Result<()> {
        self.all_reduce(per_card, op)
    }
}

impl AllGather for Topology<SpankerControl> {
    fn all_gather_f32(&self, per_card: &[Vec<f32>]) -> Result<Vec<f32>> {
        self.check_count(per_card.len())?;
        check_equal(per_card)?;
        let mut outputs = vec![vec![0.0; per_card.iter().map(Vec::len).sum()]; per_card.len()];
        self.all_gather(per_card, &mut outputs)?;
        Ok(outputs.into_iter().next().unwrap_or_default())
    }
}

/// Collectives on cards. Buffers are the host's: they travel to the cards and back. Errors are those of the
/// methods of the same names for mock cards, and [`Error::Device`] if a card or a link fails or a result is
/// wrong. On error no buffer has changed.
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
        let inputs: Vec<Vec<T>> = per_card.iter_mut().map(|card| card.as_mut().to_vec()).collect();
        check_equal(&inputs)?;
        let Some(first) = inputs.first() else { return Ok(()) };
        let elements = first.len();
        let mut sum = vec![T::zeroed(); elements];
        fused::reduce(Team::global(), Threads::Auto, &inputs, &mut sum, as_sum(op))?;
        if op == ReduceOp::Avg {
            divide(&mut sum, inputs.len());
        }
        let expected = vec![sum; inputs.len()];
        let found = self.run(Collective::AllReduce, elements, op, &inputs, &expected)?;
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
        let mut expected = alike(outputs);
        fused::reduce_scatter(Team::global(), Threads::Auto, inputs, &mut expected, as_sum(op))?;
        if op == ReduceOp::Avg {
            expected.iter_mut().for_each(|chunk| divide(chunk, inputs.len()));
        }
        let inputs: Vec<Vec<T>> = inputs.iter().map(|input| input.as_ref().to_vec()).collect();
        let elements = inputs.first().map_or(0, Vec::len);
        let found = self.run(Collective::ReduceScatter, elements, op, &inputs, &expected)?;
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
        let mut gathered = alike(outputs);
        fused::all_gather(Team::global(), Threads::Auto, inputs, &mut gathered)?;
        // On the cards all chunks are as long as the longest.
        let count = inputs.len();
        let longest = inputs.iter().map(|input| input.as_ref().len()).max().unwrap_or(0);
        let elements = longest.saturating_mul(count);
        let mut whole = vec![T::zeroed(); elements];
        let mut padded = vec![whole.clone(); count];
        for (card, input) in inputs.iter().map(AsRef::as_ref).enumerate() {
            let range = card * longest..card * longest + input.len();
            whole[range.clone()].copy_from_slice(input);
            padded[card][range].copy_from_slice(input);
        }
        let expected = vec![whole; count];
        let found = self.run(Collective::AllGather, elements, ReduceOp::Sum, &padded, &expected)?;
        let cut = |whole: &Vec<T>| -> Vec<T> {
            let parts = inputs.iter().zip(whole.chunks(longest.max(1)));
            parts.flat_map(|(input, part)| &part[..input.as_ref().len()]).copied().collect()
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
        let mut expected = alike(outputs);
        fused::broadcast(Team::global(), Threads::Auto, source, &mut expected)?;
        let mut inputs = vec![Vec::new(); outputs.len()];
        if let Some(root) = inputs.first_mut() {
            *root = source.to_vec();
        }
        let broadcast = Collective::Broadcast { root: 0 };
        let found = self.run(broadcast, source.len(), ReduceOp::Sum, &inputs, &expected)?;
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
        let mut expected = alike(outputs);
        fused::all_to_all(Team::global(), Threads::Auto, inputs, &mut expected)?;
        let inputs: Vec<Vec<T>> = inputs.iter().map(|input| input.as_ref().to_vec()).collect();
        let elements = inputs.first().map_or(0, Vec::len);
        let found = self.run(Collective::AllToAll, elements, ReduceOp::Sum, &inputs, &expected)?;
        store(outputs, &found);
        Ok(())
    }

    /// Runs a collective on the cards and returns each card's result, which is as expected.
    fn run<T: Element>(
        &self,
        collective: Collective,
        elements: usize,
        op: ReduceOp,
        inputs: &[Vec<T>],
        expected: &[Vec<T>],
    ) -> Result<Vec<Vec<T>>> {
        if inputs.is_empty() {
            return Ok(Vec::new());
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let group = self.group()?;
        let mut call = group.prepare(collective, ALGORITHM, elements, T::DTYPE, op, 1)?;
        for (rank, input) in inputs.iter().enumerate() {
            call.write(rank, bytemuck::cast_slice(input))?;
        }
        call.run(&self.deadline)?;
        let mut results = Vec::with_capacity(inputs.len());
        for rank in 0..inputs.len() {
            let mut whole = vec![T::zeroed(); call.schedule().data_len()];
            call.read(rank, bytemuck::cast_slice_mut(&mut whole))?;
            results.push(whole[call.result(rank)].to_vec());
        }
        drop(call);
        self.audit(collective, elements, &results, expected)?;
        Ok(results)
    }

    /// Compares results with what they must be. If one differs, the culprit is a card that fails a test on
    /// its own; else the card that had to compute or send what is wrong, or, if others have it right from
    /// there, the card that has it wrong.
    fn audit<T: Element>(
        &self,
        collective: Collective,
        elements: usize,
        found: &[Vec<T>],
        expected: &[Vec<T>],
    ) -> Result<()> {
        let wrong = |card: usize| {
            let mut pairs = found[card].iter().zip(&expected[card]);
            pairs.position(|(found, expected)| !same(found, expected))
        };
        let first = (0..found.len()).find_map(|card| Some((card, wrong(card)?)));
        let Some((holder, element)) = first else { return Ok(()) };
        let owner = match collective {
            Collective::AllReduce | Collective::AllGather => {
                let owns = |&card: &usize| chunk(elements, found.len(), card).contains(&element);
                (0..found.len()).find(owns).unwrap_or(holder)
            }
            Collective::Broadcast { root } => root,
            _ => holder,
        };
        // Where another card got it right from the owner, the one that has it wrong is to blame.
        let right = |&card: &usize| {
            let both = (found[card].get(element), expected[card].get(element));
            matches!(both, (Some(found), Some(expected)) if same(found, expected))
        };
        let others = (0..found.len()).filter(|&card| card != owner).any(|card| right(&card));
        let suspect = if right(&owner) && others { holder } else { owner };
        let broken = (0..found.len()).find(|&card| !examine(&self.sails[card]).unwrap_or(false));
        let detail =
            format!("element {element} of card {} is not what it must be", self.indices[holder]);
        let culprit = self.indices[broken.unwrap_or(suspect)];
        Err(Error::Device(DeviceError::wrong(culprit, detail)))
    }
}

/// Whether two results are the same bits. Which of many NaNs one is depends on the order of the operands of
/// an addition, which no one promises.
#[allow(clippy::eq_op)]
fn same<T: Element>(one: &T, other: &T) -> bool {
    bytemuck::bytes_of(one) == bytemuck::bytes_of(other) || (one != one && other != other)
}

/// What steps fold by: an average is a sum that is divided at the end.
fn as_sum(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}

/// Buffers as long as the outputs.
fn alike<T: Element, B: AsMut<[T]>>(outputs: &mut [B]) -> Vec<Vec<T>> {
    outputs.iter_mut().map(|output| vec![T::zeroed(); output.as_mut().len()]).collect()
}

fn store<T: Element, B: AsMut<[T]>>(outputs: &mut [B], found: &[Vec<T>]) {
    for (output, found) in outputs.iter_mut().zip(found) {
        output.as_mut().copy_from_slice(found);
    }
}

fn check_equal<T>(buffers: &[Vec<T>]) -> Result<()> {
    let expected = buffers.first().map_or(0, Vec::len);
    let differs = buffers.iter().map(Vec::len).enumerate().find(|&(_, actual)| actual != expected);
    match differs {
        Some((sail, actual)) => Err(Error::ShapeMismatch { sail, expected, actual }),
        None => Ok(()),
    }
}
