// SPDX-License-Identifier: Apache-2.0
//! A group of cards with the links between them, and how it is found.

use std::io::ErrorKind;
use std::path::Path;

use spanker_runtime::SpankerControl;
use spanker_topology::{Link, mesh};

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
    sails: Vec<H>,
    links: Vec<Link>,
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
        Topology { sails: (0..n_sails).map(MockSail::new).collect(), links: mesh(n_sails) }
    }
}

impl Topology<SpankerControl> {
    /// The cards at `/dev/spanker0`, `/dev/spanker1` and so on, up to the first that does not exist.
    /// Links between real cards are not discovered yet: [`Topology::links`] is empty.
    ///
    /// # Errors
    /// [`Error::NoSails`] if there is none, [`Error::Runtime`] if one exists and cannot be opened.
    pub fn enumerate() -> Result<Self> {
        Self::enumerate_in(Path::new("/dev"))
    }

    fn enumerate_in(directory: &Path) -> Result<Self> {
        let mut sails = Vec::new();
        loop {
            let path = directory.join(format!("spanker{}", sails.len()));
            match SpankerControl::open_path(&path) {
                Ok(sail) => sails.push(sail),
                Err(spanker_runtime::Error::Open { source, .. })
                    if source.kind() == ErrorKind::NotFound =>
                {
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if sails.is_empty() {
            return Err(Error::NoSails);
        }
        Ok(Topology { sails, links: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enumerate_stops_at_the_first_index_that_does_not_exist() {
        let directory = tempfile::tempdir().unwrap();
        for index in [0, 1, 3] {
            std::fs::write(directory.path().join(format!("spanker{index}")), b"").unwrap();
        }
        let cards = Topology::enumerate_in(directory.path()).unwrap();
        assert_eq!(cards.n_sails(), 2);
        assert!(cards.links().is_empty());
    }

    #[test]
    fn enumerate_without_a_card_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let error = Topology::enumerate_in(directory.path()).unwrap_err();
        assert!(matches!(error, Error::NoSails), "{error}");
    }

    #[test]
    fn enumerate_with_a_card_that_cannot_be_opened_names_it() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("spanker0")).unwrap();
        let error = Topology::enumerate_in(directory.path()).unwrap_err();
        assert!(error.to_string().contains("spanker0"), "{error}");
    }

    #[test]
    fn mock_cards_carry_their_numbers() {
        let cards = Topology::<MockSail>::with_mock(3);
        assert_eq!(cards.sails(), [MockSail::new(0), MockSail::new(1), MockSail::new(2)]);
        assert_eq!(cards.sails()[2].id(), 2);
    }
}
