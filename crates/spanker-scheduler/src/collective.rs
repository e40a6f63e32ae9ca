// SPDX-License-Identifier: Apache-2.0
//! Collectives over a topology: the traits that runtimes program against, and the mock cards' own
//! methods for every element type.

use spanker_reduce::{self as fused, Element, Team, Threads};

use crate::{MockSail, Result, Topology};

pub use spanker_collective::ReduceOp;

/// Reduces over all cards; each gets the result.
///
/// `per_card` has one contiguous buffer for each card, in topology order. Implementations read a whole
/// buffer in one sweep, so a buffer is never interleaved with another.
///
/// The method takes `&self`: a topology is shared by the threads of a runtime, and an implementation
/// that needs to change anything (a queue, a ring of descriptors) does so behind interior mutability.
pub trait AllReduce {
    /// Reduces `per_card` by `op`. The sum's bits are those of the serial fold in card order, whatever
    /// the number of threads.
    ///
    /// # Errors
    /// [`Error::TopologyMismatch`](crate::Error::TopologyMismatch) for a wrong number of buffers,
    /// [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) naming the first card whose buffer is not
    /// as long as card 0's. On error no buffer has changed.
    fn all_reduce_f32(&self, per_card: &mut [Vec<f32>], op: ReduceOp) -> Result<()>;
}

/// Gathers from all cards.
///
/// Takes `&self` for the reason that [`AllReduce`] gives.
pub trait AllGather {
    /// The concatenation of `per_card`, in card order.
    ///
    /// # Errors
    /// As [`AllReduce::all_reduce_f32`].
    fn all_gather_f32(&self, per_card: &[Vec<f32>]) -> Result<Vec<f32>>;
}

/// A group that can split each matrix over its cards.
///
/// Takes `&self` for the reason that [`AllReduce`] gives.
pub trait TensorParallel {
    /// How many shards a matrix is split into.
    fn shard_count(&self) -> usize;
}

/// A group that can give each card whole layers.
///
/// Takes `&self` for the reason that [`AllReduce`] gives.
pub trait ModelParallel {
    /// How many shards a model is split into.
    fn shard_count(&self) -> usize;
}

impl<H> TensorParallel for Topology<H> {
    fn shard_count(&self) -> usize {
        self.n_sails()
    }
}

impl<H> ModelParallel for Topology<H> {
    fn shard_count(&self) -> usize {
        self.n_sails()
    }
}

impl AllReduce for Topology<MockSail> {
    fn all_reduce_f32(&self, per_card: &mut [Vec<f32>], op: ReduceOp) -> Result<()> {
        self.all_reduce(per_card, op)
    }
}

impl AllGather for Topology<MockSail> {
    fn all_gather_f32(&self, per_card: &[Vec<f32>]) -> Result<Vec<f32>> {
        self.check_count(per_card.len())?;
        let len = per_card.first().map_or(0, Vec::len);
        for (sail, buffer) in per_card.iter().enumerate() {
            if buffer.len() != len {
                let actual = buffer.len();
                return Err(crate::Error::ShapeMismatch { sail, expected: len, actual });
            }
        }
        Ok(per_card.concat())
    }
}

/// Collectives over cards whose buffers are in host memory: no messages, each buffer read once and
/// written once, on as many threads as pay. For a chosen number of threads or a team of one's own see
/// the functions of the same names in [`crate::host`].
impl Topology<MockSail> {
    /// Reduces the cards' buffers; each gets the result.
    ///
    /// ```
    /// use spanker_scheduler::{MockSail, ReduceOp, Topology, bf16};
    /// let cards = Topology::<MockSail>::with_mock(2);
    /// let (mut a, mut b) = ([bf16::from_f32(1.5)], [bf16::from_f32(2.0)]);
    /// cards.all_reduce(&mut [&mut a[..], &mut b[..]], ReduceOp::Product)?;
    /// assert_eq!(a[0].to_f32(), 3.0);
    /// # Ok::<(), spanker_scheduler::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`AllReduce::all_reduce_f32`], and
    /// [`Error::UndefinedOperation`](crate::Error::UndefinedOperation) for an operation that the type
    /// does not have. On error no buffer has changed.
    pub fn all_reduce<T: Element, B: AsMut<[T]>>(
        &self,
        per_card: &mut [B],
        op: ReduceOp,
    ) -> Result<()> {
        self.check_count(per_card.len())?;
        Ok(fused::all_reduce(Team::global(), Threads::Auto, per_card, op)?)
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
        Ok(fused::reduce_scatter(Team::global(), Threads::Auto, inputs, outputs, op)?)
    }

    /// Gives each card the concatenation of all inputs, which may have different lengths.
    ///
    /// # Errors
    /// [`Error::TopologyMismatch`](crate::Error::TopologyMismatch) for a wrong number of buffers,
    /// [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) naming the first output that is not as long
    /// as all inputs together.
    pub fn all_gather<T: Element, A: AsRef<[T]>, B: AsMut<[T]>>(
        &self,
        inputs: &[A],
        outputs: &mut [B],
    ) -> Result<()> {
        self.check_count(inputs.len())?;
        self.check_count(outputs.len())?;
        Ok(fused::all_gather(Team::global(), Threads::Auto, inputs, outputs)?)
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
        Ok(fused::broadcast(Team::global(), Threads::Auto, source, outputs)?)
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
        Ok(fused::all_to_all(Team::global(), Threads::Auto, inputs, outputs)?)
    }
}
