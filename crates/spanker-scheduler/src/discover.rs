// SPDX-License-Identifier: Apache-2.0
//! How cards and the links between them are found.
//!
//! Cards are the files `spanker0`, `spanker1` and so on of `/dev`, or of the folder that the variable
//! `SPANKER_DEV_DIR` names, up to the first that does not exist. A link exists if the cards at both of its
//! ends name each other.
//!
//! A card whose version of the ABI has no questions about cards and ports, or that answers `ENOTTY` to one, does not
//! know the question: it is taken for a card without link discovery. Any other failure is an error, because a card
//! that could not answer once may have links.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use spanker_fabric::device::{DeviceError, DeviceErrorKind, DeviceGroup};
use spanker_runtime::{CardInfo, Feature, PortInfo, PortState, SpankerControl};
use spanker_topology::{Link, LinkState};

use crate::probed::{LinkEnd, ProbedLink, load_links};
use crate::{Error, Result, Topology};

/// The variable that names the folder of the cards' devices, where that is not `/dev`.
pub const DEVICE_DIRECTORY_VARIABLE: &str = "SPANKER_DEV_DIR";

/// Ports that a card is believed to have.
const PORTS: u32 = 256;

/// The folder in which cards are looked for.
#[must_use]
pub fn device_directory() -> PathBuf {
    match std::env::var_os(DEVICE_DIRECTORY_VARIABLE) {
        Some(folder) if !folder.is_empty() => folder.into(),
        _ => "/dev".into(),
    }
}

fn device(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("spanker{index}"))
}

/// A card that answers.
#[derive(Debug)]
#[non_exhaustive]
pub struct SurveyedCard {
    /// The handle.
    pub control: SpankerControl,
    /// What the card is.
    pub info: CardInfo,
    /// Its ports, in order.
    pub ports: Vec<PortInfo>,
}

/// A card's device, whether the card answers or not.
#[derive(Debug)]
#[non_exhaustive]
pub struct Surveyed {
    /// The number in the device's name.
    pub index: usize,
    /// The device.
    pub path: PathBuf,
    /// The card, or why it does not answer.
    pub card: spanker_runtime::Result<SurveyedCard>,
}

/// Looks at every card of a folder, up to the first index that does not exist. Cards that are dead are
/// listed too: their devices are still there.
#[must_use]
pub fn survey(directory: &Path) -> Vec<Surveyed> {
    let is_there = |index: &usize| device(directory, *index).symlink_metadata().is_ok();
    survey_of(directory, &(0..).take_while(is_there).collect::<Vec<_>>())
}

/// Opens these cards and asks each what it is; nobody waits for others, which may hang.
#[must_use]
pub fn survey_of(directory: &Path, indices: &[usize]) -> Vec<Surveyed> {
    let look = |path: &Path| {
        let control = SpankerControl::open_path(path)?;
        let (info, ports) = ask(&control)?;
        Ok(SurveyedCard { control, info, ports })
    };
    let paths: Vec<PathBuf> = indices.iter().map(|&index| device(directory, index)).collect();
    // A card that hangs takes a while to be found out, and several take no longer than one.
    let cards: Vec<_> = std::thread::scope(|scope| {
        let looks: Vec<_> = paths.iter().map(|path| scope.spawn(move || look(path))).collect();
        let gone = || Err(spanker_runtime::Error::Gone { op: "CARD_INFO" });
        looks.into_iter().map(|look| look.join().unwrap_or_else(|_| gone())).collect()
    });
    let all = indices.iter().zip(paths).zip(cards);
    all.map(|((&index, path), card)| Surveyed { index, path, card }).collect()
}

/// The directed links between the cards of a survey that answer, with what a probe has found out about
/// them. Cards are named by their place in the survey, which is their index.
#[must_use]
pub fn surveyed_links(cards: &[Surveyed], probed: &[ProbedLink]) -> Vec<Link> {
    let said = |surveyed: &Surveyed| {
        let card = surveyed.card.as_ref().ok()?;
        Some((card.info.clone(), card.ports.clone()))
    };
    links(&cards.iter().map(said).collect::<Vec<_>>(), probed)
}

/// What a card is, and its ports.
fn ask(control: &SpankerControl) -> spanker_runtime::Result<(CardInfo, Vec<PortInfo>)> {
    let nonsense = |op, what| Err(spanker_runtime::Error::Nonsense { op, what });
    let info = control.info()?;
    if info.ports > PORTS {
        return nonsense("CARD_INFO", format!("{} ports, at most {PORTS}", info.ports));
    }
    let mut ports = Vec::with_capacity(info.ports as usize);
    for number in 0..info.ports {
        let port = control.port(number)?;
        if port.port != number {
            return nonsense("PORT_INFO", format!("port {}, expected {number}", port.port));
        }
        ports.push(port);
    }
    Ok((info, ports))
}

/// Whether a card with this error has no link discovery: its version of the ABI does not have it, or it says `ENOTTY`,
/// which means that it does not know the request, over an ioctl as over a socket. No other error says so.
#[must_use]
pub fn is_without_discovery(error: &spanker_runtime::Error) -> bool {
    use spanker_runtime::Error::{Ioctl, Unsupported};
    matches!(
        error,
        Ioctl { source: Errno::ENOTTY, .. }
            | Unsupported { feature: Feature::CardInfo | Feature::PortInfo, .. }
    )
}

/// What a card has said about itself; nothing if it does not know such questions.
type Said = Option<(CardInfo, Vec<PortInfo>)>;

/// Asks cards all at once; an error names the card by its index and path, and the request.
fn ask_all(sails: &[SpankerControl], indices: &[usize]) -> Result<Vec<Said>> {
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = sails.iter().map(|sail| scope.spawn(|| ask(sail))).collect();
        let gone = || Err(spanker_runtime::Error::Gone { op: "CARD_INFO" });
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(|_| gone())).collect()
    });
    let asked = answers.into_iter().zip(sails.iter().zip(indices));
    let known = asked.map(|(answer, (sail, &index))| match answer {
        Ok(said) => Ok(Some(said)),
        Err(error) if is_without_discovery(&error) => Ok(None),
        Err(error) => Err(Error::Device(DeviceError::discovery(index, sail.path(), error))),
    });
    known.collect()
}

impl Topology<SpankerControl> {
    /// The cards at `/dev/spanker0`, `/dev/spanker1` and so on, up to the first that does not exist, or those
    /// of the folder that `SPANKER_DEV_DIR` names; and the links that their ports tell of.
    ///
    /// A card of a version of the ABI without link discovery has no links, and so has one that answers `ENOTTY`. Any
    /// other answer that is none is an error.
    ///
    /// ```no_run
    /// use spanker_scheduler::{AllReduce, ReduceOp, Topology};
    /// let cards = Topology::enumerate()?;
    /// let mut buffers = vec![vec![1.0f32; 1000]; cards.n_sails()];
    /// if let Err(error) = cards.all_reduce_f32(&mut buffers, ReduceOp::Sum) {
    ///     eprintln!("{error}; cards {:?} can go on", cards.survivors(&error));
    /// }
    /// # Ok::<(), spanker_scheduler::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoSails`] if there is none, [`Error::Runtime`] if one exists and cannot be opened,
    /// [`Error::Device`] if one does not answer, [`Error::Links`] if what was saved of the links makes no
    /// sense.
    pub fn enumerate() -> Result<Self> {
        Self::enumerate_in(&device_directory())
    }

    /// As [`Topology::enumerate`], in a given folder.
    ///
    /// # Errors
    /// As [`Topology::enumerate`].
    pub fn enumerate_in(directory: &Path) -> Result<Self> {
        let mut sails = Vec::new();
        loop {
            match SpankerControl::open_path(device(directory, sails.len())) {
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
        let indices = (0..sails.len()).collect();
        Self::linked(sails, indices, &load_links(directory)?)
    }

    /// The cards of a folder that have these indices, in this order; others may be dead.
    ///
    /// # Errors
    /// As [`Topology::enumerate`]; [`Error::Runtime`] also for a card that does not exist.
    pub fn open_cards(directory: &Path, indices: &[usize]) -> Result<Self> {
        if indices.is_empty() {
            return Err(Error::NoSails);
        }
        let open = |&index: &usize| SpankerControl::open_path(device(directory, index));
        let sails = indices.iter().map(open).collect::<std::result::Result<_, _>>()?;
        Self::linked(sails, indices.to_vec(), &load_links(directory)?)
    }

    /// The cards of a survey of a folder that have these indices, in this order, as the survey has opened them.
    ///
    /// # Errors
    /// As [`Topology::open_cards`].
    pub fn of_surveyed(directory: &Path, cards: Vec<Surveyed>, indices: &[usize]) -> Result<Self> {
        let mut cards: BTreeMap<usize, _> =
            cards.into_iter().map(|card| (card.index, card.card)).collect();
        let mut sails = Vec::with_capacity(indices.len());
        let mut said = Vec::with_capacity(indices.len());
        for index in indices {
            let Some(card) = cards.remove(index) else { return Err(Error::NoSails) };
            let SurveyedCard { control, info, ports } = card?;
            sails.push(control);
            said.push(Some((info, ports)));
        }
        if sails.is_empty() {
            return Err(Error::NoSails);
        }
        let links = links(&said, &load_links(directory)?);
        Ok(Topology::assemble(sails, links, indices.to_vec()))
    }

    /// Cards that the caller has opened, as simulated ones are. Cards are asked for their indices; one that
    /// cannot say has its place in the list.
    ///
    /// # Errors
    /// [`Error::Device`] if a card does not answer.
    pub fn of_cards(sails: Vec<SpankerControl>) -> Result<Self> {
        let places: Vec<usize> = (0..sails.len()).collect();
        let said = ask_all(&sails, &places)?;
        let index = |(place, said): (usize, &Said)| {
            said.as_ref().map_or(place, |(info, _)| info.index as usize)
        };
        let indices = said.iter().enumerate().map(index).collect();
        let links = links(&said, &[]);
        Ok(Topology::assemble(sails, links, indices))
    }

    fn linked(
        sails: Vec<SpankerControl>,
        indices: Vec<usize>,
        probed: &[ProbedLink],
    ) -> Result<Self> {
        let links = links(&ask_all(&sails, &indices)?, probed);
        Ok(Topology::assemble(sails, links, indices))
    }

    /// The cards as a group that runs collectives.
    ///
    /// # Errors
    /// [`Error::Device`] if the links leave cards apart, or a card does not answer.
    pub fn group(&self) -> Result<DeviceGroup<'_>> {
        Ok(DeviceGroup::new(&self.sails.iter().collect::<Vec<_>>())?)
    }

    /// The indices of the cards that can go on without what `error` blames: all but the card, or what a
    /// broken link leaves connected (the larger part, and of equal parts the one with the first card). All
    /// cards if it blames none of them.
    #[must_use]
    pub fn survivors(&self, error: &Error) -> Vec<usize> {
        let Error::Device(error) = error else { return self.indices.clone() };
        let place = |index: Option<usize>| self.indices.iter().position(|&i| Some(i) == index);
        let (card, peer) = (place(error.card()), place(error.peer()));
        let dead = match error.kind() {
            DeviceErrorKind::LinkDown | DeviceErrorKind::Unreachable => None,
            _ => card,
        };
        let broken = |link: &&Link| {
            let ends = (Some(link.local_sail), Some(link.remote_sail));
            ends == (card, peer) || ends == (peer, card)
        };
        let up = |link: &&Link| link.state == LinkState::Up && !broken(link);
        let links: Vec<&Link> = self.links.iter().filter(up).collect();
        let places = largest_part(self.sails.len(), dead, &links);
        places.into_iter().map(|place| self.indices[place]).collect()
    }
}

/// The largest set of places that links connect, without the dead one.
fn largest_part(places: usize, dead: Option<usize>, links: &[&Link]) -> Vec<usize> {
    let mut part: Vec<usize> = (0..places).collect();
    // Every place takes the lowest number that its neighbours know, until nothing changes.
    loop {
        let before = part.clone();
        for link in links {
            let (a, b) = (link.local_sail, link.remote_sail);
            if Some(a) != dead && Some(b) != dead {
                let low = part[a].min(part[b]);
                (part[a], part[b]) = (low, low);
            }
        }
        if part == before {
            break;
        }
    }
    let members = |number: usize| {
        (0..places)
            .filter(|&place| part[place] == number && Some(place) != dead)
            .collect::<Vec<_>>()
    };
    // The first of equals: `max_by_key` alone would take the last.
    (0..places).rev().map(members).max_by_key(Vec::len).unwrap_or_default()
}

/// The directed links between cards that have said what their ports are.
fn links(ends: &[Said], probed: &[ProbedLink]) -> Vec<Link> {
    let mut found: BTreeMap<(usize, usize), Link> = BTreeMap::new();
    for (here, (info, port, peer)) in ends.iter().enumerate().flat_map(|(here, end)| {
        let ports = end.iter().flat_map(|(info, ports)| ports.iter().map(move |port| (info, port)));
        ports.filter_map(move |(info, port)| Some((here, (info, port, port.peer?))))
    }) {
        let known = |end: &Said| end.as_ref().is_some_and(|(info, _)| info.serial == peer.serial);
        let Some(there) = ends.iter().position(known).filter(|&there| there != here) else {
            continue;
        };
        let theirs = ends[there].iter().flat_map(|(_, ports)| ports);
        let Some(back) = theirs.into_iter().find(|back| back.port == peer.port) else { continue };
        // An end that is down may have forgotten whom it was connected to.
        let agrees = match back.peer {
            Some(us) => (us.serial, us.port) == (info.serial, port.port),
            None => back.state != PortState::Up,
        };
        if !agrees {
            continue;
        }
        let mut link = Link::new(here, there, worse(port.state, back.state));
        let from = LinkEnd { serial: info.serial, port: port.port };
        let to = LinkEnd { serial: peer.serial, port: peer.port };
        if let Some(known) = probed.iter().find(|known| (known.from, known.to) == (from, to)) {
            link.bandwidth = Some(known.bandwidth);
            link.latency = Duration::try_from_secs_f64(known.latency.0).ok();
        }
        // Of several links between two cards one that is up counts.
        let kept = found.entry((here, there)).or_insert(link);
        if kept.state != LinkState::Up {
            *kept = link;
        }
    }
    found.into_values().collect()
}

fn worse(one: PortState, other: PortState) -> LinkState {
    let rank = |state: PortState| match state {
        PortState::Up => (0, LinkState::Up),
        PortState::Training => (1, LinkState::Training),
        PortState::Down => (2, LinkState::Down),
        PortState::Fault => (3, LinkState::Error),
    };
    let (one, other) = (rank(one), rank(other));
    if one.0 >= other.0 { one.1 } else { other.1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_runtime::abi::{RawCardInfo, RawPortInfo};

    #[test]
    fn enumerate_stops_at_the_first_index_that_does_not_exist() {
        let directory = tempfile::tempdir().unwrap();
        for index in [0, 1, 3] {
            std::fs::write(directory.path().join(format!("spanker{index}")), b"").unwrap();
        }
        let cards = Topology::enumerate_in(directory.path()).unwrap();
        assert_eq!(cards.n_sails(), 2);
        assert!(cards.links().is_empty());
        let cards = Topology::open_cards(directory.path(), &[3, 1]).unwrap();
        assert_eq!(cards.indices(), [3, 1]);
        assert_eq!(survey(directory.path()).len(), 2);
    }

    #[test]
    fn enumerate_without_a_card_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let error = Topology::enumerate_in(directory.path()).unwrap_err();
        assert!(matches!(error, Error::NoSails), "{error}");
        assert!(error.to_string().starts_with("no cards found at "), "{error}");
    }

    #[test]
    fn enumerate_with_a_card_that_cannot_be_opened_names_it() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("spanker0")).unwrap();
        let error = Topology::enumerate_in(directory.path()).unwrap_err();
        assert!(error.to_string().contains("spanker0"), "{error}");
    }

    #[test]
    fn survey_lists_a_card_whose_socket_nobody_answers() {
        let directory = tempfile::tempdir().unwrap();
        for index in 0..2 {
            let path = directory.path().join(format!("spanker{index}"));
            drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        }
        let found = survey(directory.path());
        assert_eq!(found.iter().map(|card| card.index).collect::<Vec<_>>(), [0, 1]);
        let refused = |card: &Surveyed| {
            matches!(&card.card, Err(spanker_runtime::Error::Open { source, .. })
                if source.kind() == ErrorKind::ConnectionRefused)
        };
        assert!(found.iter().all(refused));
    }

    #[test]
    fn state_of_a_link_is_the_worse_of_its_ends() {
        let states = [PortState::Up, PortState::Training, PortState::Down, PortState::Fault];
        let names = [LinkState::Up, LinkState::Training, LinkState::Down, LinkState::Error];
        for (i, one) in states.into_iter().enumerate() {
            for (j, other) in states.into_iter().enumerate() {
                assert_eq!(worse(one, other), names[i.max(j)]);
            }
        }
    }

    /// What a card says: (state, serial at the other end, port there) for each port.
    fn said(serial: u64, ports: &[(u32, u64, u32)]) -> Said {
        let port = |(port, &(state, peer_serial, peer_port)): (usize, &(u32, u64, u32))| {
            let port = port as u32;
            RawPortInfo { port, state, peer_serial, peer_port, ..RawPortInfo::default() }.into()
        };
        let raw = RawCardInfo { serial, ..RawCardInfo::default() };
        Some((raw.into(), ports.iter().enumerate().map(port).collect()))
    }

    #[test]
    fn links_carry_what_a_probe_found_out_in_their_direction() {
        let ends = [said(7, &[(2, 9, 1)]), None, said(9, &[(0, 0, 0), (2, 7, 0)])];
        let known = ProbedLink {
            from: LinkEnd { serial: 9, port: 1 },
            to: LinkEnd { serial: 7, port: 0 },
            bandwidth: spanker_topology::BytesPerSecond(1_000),
            latency: spanker_topology::Seconds(2e-6),
            fitted: 0,
        };
        let found = links(&ends, &[known]);
        assert_eq!(found[0], Link::new(0, 2, LinkState::Up));
        assert_eq!((found[1].local_sail, found[1].remote_sail), (2, 0));
        assert_eq!(found[1].latency, Some(Duration::from_micros(2)));
        assert_eq!(found[1].bandwidth, Some(known.bandwidth));
    }

    #[test]
    fn links_whose_ends_do_not_agree_are_none() {
        // The other end names another port, another card, nobody although it is up, or does not exist.
        for back in [(2, 7, 5), (2, 8, 0), (2, 0, 0)] {
            assert_eq!(links(&[said(7, &[(2, 9, 0)]), said(9, &[back])], &[]), []);
        }
        assert_eq!(links(&[said(7, &[(2, 9, 4)]), said(9, &[(2, 7, 0)])], &[]), []);
        // One that is down may have forgotten.
        let down = links(&[said(7, &[(2, 9, 0)]), said(9, &[(0, 0, 0)])], &[]);
        assert_eq!(down, [Link::new(0, 1, LinkState::Down)]);
    }
}
