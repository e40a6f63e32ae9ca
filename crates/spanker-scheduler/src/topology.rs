// SPDX-License-Identifier: Apache-2.0
//! A group of cards with the links between them. How one is found is in [`crate::discover`].

use std::sync::{Mutex, PoisonError};

use spanker_fabric::device::Deadline;
use spanker_runtime::SpankerControl;
use spanker_topology::{Link, mesh};

use crate::choice::Prices;
use crate::sample::{ResultCheck, Sampler};
use crate::{Error, Result};

/// Cards in order, each behind a handle `H`, and the directed links between them.
///
/// ```
/// use spanker_scheduler::{MockSail, Topology};
/// let cards = Topology::<MockSail>::with_mock(3);
/// assert_eq!((cards.n_sails(), cards.links().len()), (3, 6));
/// ```
#[derive(Debug)]
pub struct Topology<H = SpankerControl> {
    pub(crate) sails: Vec<H>,
    pub(crate) links: Vec<Link>,
    /// The number of each card's device.
    pub(crate) indices: Vec<usize>,
    pub(crate) deadline: Deadline,
    /// Held by a collective on cards: two at once could come to the cards in different orders, and wait
    /// for each other.
    pub(crate) turn: Box<Mutex<Turn>>,
}

/// What one collective on cards leaves for the next.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) prices: Prices,
    pub(crate) sampler: Sampler,
}

/// A card that exists only as a number. Its buffers are in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MockSail {
    id: usize,
}

impl MockSail {
    /// The mock card with this number.
    #[must_use]
    pub fn new(id: usize) -> Self {
        MockSail { id }
    }

    /// Its place in the topology.
    #[must_use]
    pub fn id(&self) -> usize {
        self.id
    }
}

impl<H> Topology<H> {
    pub(crate) fn assemble(sails: Vec<H>, links: Vec<Link>, indices: Vec<usize>) -> Self {
        let sampler = Sampler::new(ResultCheck::Sample);
        let turn = Box::new(Mutex::new(Turn { prices: Prices::default(), sampler }));
        Topology { sails, links, indices, deadline: Deadline::USUAL, turn }
    }

    /// Cards of any kind with the links between them, as somebody else has found them. Their indices are their
    /// places.
    ///
    /// ```
    /// use spanker_scheduler::{Link, LinkState, Topology};
    /// let links = vec![Link::new(0, 1, LinkState::Up), Link::new(1, 0, LinkState::Up)];
    /// let cards = Topology::of(vec!["left", "right"], links)?;
    /// assert_eq!((cards.sails()[1], cards.links().len()), ("right", 2));
    /// # Ok::<(), spanker_scheduler::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TopologyMismatch`] if a link names a card that is not there.
    pub fn of(sails: Vec<H>, links: Vec<Link>) -> Result<Self> {
        let count = sails.len();
        let last = links.iter().map(|link| link.local_sail.max(link.remote_sail)).max();
        match last {
            Some(last) if last >= count => {
                Err(Error::TopologyMismatch { expected: count, actual: last.saturating_add(1) })
            }
            _ => Ok(Topology::assemble(sails, links, (0..count).collect())),
        }
    }

    /// The index of each card, in order: the number in its device's name. It differs from the card's
    /// place where cards were left out.
    #[must_use]
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// The same cards, with other deadlines for their collectives. Mock cards need none.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = deadline;
        self
    }

    /// The same cards, with another check of what their collectives give; [`ResultCheck::Sample`] unless
    /// somebody says otherwise. Mock cards need none.
    ///
    /// ```no_run
    /// use spanker_scheduler::{AllReduce, ReduceOp, ResultCheck, Topology};
    /// let cards = Topology::enumerate()?.with_result_check(ResultCheck::Whole);
    /// let mut buffers = vec![vec![1.0; 1_000_000]; cards.n_sails()];
    /// cards.all_reduce_f32(&mut buffers, ReduceOp::Sum)?;
    /// # Ok::<(), spanker_scheduler::Error>(())
    /// ```
    #[must_use]
    pub fn with_result_check(mut self, check: ResultCheck) -> Self {
        let turn = self.turn.get_mut().unwrap_or_else(PoisonError::into_inner);
        turn.sampler = Sampler::new(check);
        self
    }

    /// The same cards without the one of this index, and without its links. Nobody is asked: collectives
    /// find out anew how the rest is wired.
    #[must_use]
    pub fn without(mut self, index: usize) -> Self {
        let Some(gone) = self.indices.iter().position(|&known| known == index) else {
            return self;
        };
        self.sails.remove(gone);
        self.indices.remove(gone);
        self.links.retain(|link| link.local_sail != gone && link.remote_sail != gone);
        let place = |sail: usize| if sail > gone { sail - 1 } else { sail };
        for link in &mut self.links {
            (link.local_sail, link.remote_sail) = (place(link.local_sail), place(link.remote_sail));
        }
        self
    }

    /// Cards in the topology.
    #[must_use]
    pub fn n_sails(&self) -> usize {
        self.sails.len()
    }

    /// The directed links between the cards.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The cards' handles, in order.
    #[must_use]
    pub fn sails(&self) -> &[H] {
        &self.sails
    }

    /// Fails unless there is one buffer for each card.
    pub(crate) fn check_count(&self, buffers: usize) -> Result<()> {
        if buffers == self.n_sails() {
            return Ok(());
        }
        Err(Error::TopologyMismatch { expected: self.n_sails(), actual: buffers })
    }
}

impl Topology<MockSail> {
    /// `n_sails` mock cards, every one linked to every other: n(n - 1) directed links, all up. No cards
    /// are legal.
    #[must_use]
    pub fn with_mock(n_sails: usize) -> Self {
        let sails = (0..n_sails).map(MockSail::new).collect();
        Topology::assemble(sails, mesh(n_sails), (0..n_sails).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_cards_that_are_not_there_are_refused() {
        let link = Link::new(0, 2, spanker_topology::LinkState::Up);
        let refused = Topology::of(vec![(), ()], vec![link]).unwrap_err();
        assert!(matches!(refused, Error::TopologyMismatch { expected: 2, actual: 3 }), "{refused}");
    }

    #[test]
    fn mock_cards_carry_their_numbers() {
        let cards = Topology::<MockSail>::with_mock(3);
        assert_eq!(cards.sails(), [MockSail::new(0), MockSail::new(1), MockSail::new(2)]);
        assert_eq!(cards.sails()[2].id(), 2);
        assert_eq!(cards.indices(), [0, 1, 2]);
    }
}
