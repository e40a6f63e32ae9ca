// SPDX-License-Identifier: Apache-2.0
//! All cards and links of a twin: starting, wiring, harming and mending them. Who asks for it, and when it
//! ends, is decided in `supervisor.rs`.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use spanker_topology::BytesPerSecond;

use super::Program;
use super::card::Card;
use crate::control::{CardStatus, LinkStatus, Target};
use crate::error::Tried;
use crate::orders::{Order, Port, Reply};
use crate::{CardSpec, LinkEnd, PortSpec, TwinError, home, link_pair};

/// How long cards may take to leave once they are ordered to.
const GRACE: Duration = Duration::from_secs(1);

/// The link between two cards, and what was done to it.
#[derive(Debug)]
pub(super) struct Link {
    /// Card and port of either end, the lower card first.
    ends: [(usize, u32); 2],
    cut: bool,
    errors: Option<f64>,
}

/// All cards of a twin. They end when this is dropped.
#[derive(Debug)]
pub(super) struct Fleet {
    program: Program,
    dir: PathBuf,
    cards: Vec<Card>,
    links: Vec<Link>,
    /// When the clocks of all cards begin, also of those that are started again.
    epoch: u64,
}

impl Fleet {
    /// Cards that are not started, and how they are linked.
    pub(super) fn new(program: Program, dir: PathBuf, specs: Vec<CardSpec>) -> Fleet {
        let mut links = Vec::new();
        for spec in &specs {
            for (port, other) in spec.ports.iter().enumerate() {
                if spec.index < other.peer {
                    let ends = [
                        (spec.index as usize, port as u32),
                        (other.peer as usize, other.peer_port),
                    ];
                    links.push(Link { ends, cut: false, errors: None });
                }
            }
        }
        let cards = specs.into_iter().map(Card::new).collect();
        Fleet { program, dir, cards, links, epoch: crate::serve::monotonic() }
    }

    /// Starts every card. Their links train on their own.
    pub(super) fn start(&mut self) -> Result<(), TwinError> {
        for card in &mut self.cards {
            card.spawn(&self.program, &self.dir)?;
        }
        let ports = |card: &Card| card.spec.ports.iter().map(|_| None).collect();
        let mut ends: Vec<Vec<Option<LinkEnd>>> = self.cards.iter().map(ports).collect();
        for link in &self.links {
            let pair = link_pair().tried(|| "make a link".into())?;
            for ((card, port), end) in link.ends.into_iter().zip(pair) {
                ends[card][port as usize] = Some(end);
            }
        }
        for (card, ends) in ends.into_iter().enumerate() {
            let ends: Vec<LinkEnd> = ends.into_iter().flatten().collect();
            self.begin(card, &ends)?;
        }
        let deadline = Instant::now() + super::STARTING;
        self.cards.iter_mut().try_for_each(|card| ready(card, deadline))
    }

    /// Gives a card its first order.
    fn begin(&mut self, card: usize, ends: &[LinkEnd]) -> Result<(), TwinError> {
        let spec = &self.cards[card].spec;
        let path = home::card(&self.dir, spec.index);
        // What a card that has died had left there.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).tried(|| format!("bind {}", path.display()))?;
        let mut fds = vec![listener.as_fd()];
        fds.extend(ends.iter().flat_map(|end| [end.bell.as_fd(), end.memory.as_fd()]));
        let order = Order::Start { spec: Box::new(spec.clone()), epoch: self.epoch };
        self.cards[card].send(&order, &fds)
    }

    /// How many links are up, of how many that should be.
    pub(super) fn linked(&mut self) -> (usize, usize) {
        let states = self.ports();
        let lives = |&(card, _): &(usize, u32)| {
            self.cards[card].pid().is_some() && !self.cards[card].faults.stopped
        };
        let wanted = self.links.iter().filter(|link| !link.cut && link.ends.iter().all(lives));
        let up = |&(card, port): &(usize, u32)| {
            states[card].as_ref().and_then(|ports| ports.get(port as usize)) == Some(&Port::Up)
        };
        let ups: Vec<bool> = wanted.map(|link| link.ends.iter().all(up)).collect();
        (ups.iter().filter(|up| **up).count(), ups.len())
    }

    /// The ports of every card that answers. All are asked at once.
    fn ports(&mut self) -> Vec<Option<Vec<Port>>> {
        let asks = |card: &mut Card| !card.faults.stopped && card.send(&Order::Status, &[]).is_ok();
        let asked: Vec<bool> = self.cards.iter_mut().map(asks).collect();
        let deadline = Instant::now() + super::ANSWER;
        let hears = |(card, asked): (&mut Card, bool)| match card.hear(deadline) {
            Ok(Reply::Status { ports }) if asked => Some(ports),
            _ => None,
        };
        self.cards.iter_mut().zip(asked).map(hears).collect()
    }

    /// Notices which cards have ended; says which of them have since the last call.
    pub(super) fn reap(&mut self) -> Vec<u32> {
        let ended = self.cards.iter_mut().filter_map(|card| card.reap().then_some(card.spec.index));
        ended.collect()
    }

    /// How a card ended.
    pub(super) fn end_of(&self, card: u32) -> &str {
        self.cards[card as usize].end().unwrap_or("it lives")
    }

    /// The process of every card that lives.
    pub(super) fn pids(&self) -> Vec<Option<u32>> {
        self.cards.iter().map(Card::pid).collect()
    }

    pub(super) fn status(&mut self) -> (Vec<CardStatus>, Vec<LinkStatus>) {
        self.reap();
        let ports = self.ports();
        let cards = self.cards.iter().zip(&ports);
        let cards = cards.map(|(card, ports)| self.card_status(card, ports.is_some())).collect();
        let links = self.links.iter().map(|link| self.link_status(link, &ports)).collect();
        (cards, links)
    }

    fn card_status(&self, card: &Card, answers: bool) -> CardStatus {
        let mut notes: Vec<String> = Vec::new();
        notes.extend(card.faults.stuck.then(|| "stuck".into()));
        notes.extend(card.faults.garbling.then(|| "garbling".into()));
        let slow = card.faults.slow;
        notes.extend((slow != 1.0).then(|| format!("{slow} times as slow")));
        notes.extend(card.end().map(str::to_owned));
        let state = match card.end() {
            Some(_) => "dead",
            None if card.faults.stopped => "stopped",
            None if !answers => "silent",
            None => "up",
        };
        CardStatus {
            card: card.spec.index,
            state: state.into(),
            faults: notes,
            pid: card.pid(),
            serial: card.spec.serial,
            profile: card.spec.profile.name.clone(),
            path: home::card(&self.dir, card.spec.index),
        }
    }

    fn link_status(&self, link: &Link, ports: &[Option<Vec<Port>>]) -> LinkStatus {
        let spec = self.port(link.ends[0]);
        let seen = link.ends.map(|(card, port)| {
            let state = ports[card].as_ref().and_then(|ports| ports.get(port as usize));
            // What a dead card has been connected to has no signal; a silent one may yet go on.
            let dead = self.cards[card].pid().is_none();
            if dead { Some(Port::Down) } else { state.copied() }
        });
        let worst = [Port::Fault, Port::Down, Port::Training, Port::Up];
        let state = worst.into_iter().find(|state| seen.contains(&Some(*state)));
        let state = if link.cut { "cut" } else { state.map_or("unknown", Port::name) };
        LinkStatus {
            between: link.ends.map(|(card, _)| card as u32),
            ports: link.ends.map(|(_, port)| port),
            state: state.into(),
            lanes: spec.lanes,
            bandwidth: BytesPerSecond(spec.payload_rate().round() as u64),
            latency: spec.latency,
            bit_error_rate: link.errors.unwrap_or(spec.bit_error_rate),
        }
    }

    fn port(&self, (card, port): (usize, u32)) -> &PortSpec {
        &self.cards[card].spec.ports[port as usize]
    }

    /// A card by its index.
    pub(super) fn card(&mut self, index: u32) -> Result<&mut Card, TwinError> {
        let count = self.cards.len();
        self.cards.get_mut(index as usize).ok_or_else(|| {
            TwinError::Unknown(format!("there is no card {index}: the twin has {count} cards"))
        })
    }

    /// The place of the link between two cards.
    fn link(&self, a: u32, b: u32) -> Result<usize, TwinError> {
        let pair = [a.min(b) as usize, a.max(b) as usize];
        let found = self.links.iter().position(|link| link.ends.map(|(card, _)| card) == pair);
        found.ok_or_else(|| {
            let name = |link: &Link| format!("{}-{}", link.ends[0].0, link.ends[1].0);
            let mut names: Vec<String> = self.links.iter().take(12).map(name).collect();
            if self.links.len() > names.len() {
                names.push("..".into());
            }
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            TwinError::Unknown(format!("there is no link {a}-{b} (links: {names})"))
        })
    }

    /// Kills a card.
    pub(super) fn kill(&mut self, index: u32) -> Result<(), TwinError> {
        let card = self.card(index)?;
        card.signal(Signal::KILL)?;
        card.kill();
        Ok(())
    }

    /// Cuts a link, or plugs it in again.
    pub(super) fn cut(&mut self, a: u32, b: u32, on: bool) -> Result<(), TwinError> {
        let link = self.link(a, b)?;
        self.links[link].cut = on;
        self.both_ends(link, |_, port| if on { Order::Cut { port } } else { Order::Mend { port } })
    }

    /// Sets the bit error rate of a link, or its own one again.
    pub(super) fn corrupt(&mut self, a: u32, b: u32, rate: Option<f64>) -> Result<(), TwinError> {
        let link = self.link(a, b)?;
        self.links[link].errors = rate;
        let own = self.links[link].ends.map(|end| self.port(end).bit_error_rate);
        self.both_ends(link, |end, port| Order::Errors {
            port,
            bit_error_rate: rate.unwrap_or(own[end]),
        })
    }

    /// Gives the cards at both ends of a link an order, if they live.
    fn both_ends(
        &mut self,
        link: usize,
        order: impl Fn(usize, u32) -> Order,
    ) -> Result<(), TwinError> {
        for (end, (card, port)) in self.links[link].ends.into_iter().enumerate() {
            self.cards[card].order_if_alive(&order(end, port), &[])?;
        }
        Ok(())
    }

    /// Puts a card, a link or everything right again.
    pub(super) fn restore(&mut self, what: Option<Target>) -> Result<(), TwinError> {
        self.reap();
        let (cards, links) = match what {
            Some(Target::Card(index)) => {
                self.card(index)?;
                (vec![index as usize], Vec::new())
            }
            Some(Target::Link(a, b)) => (Vec::new(), vec![self.link(a, b)?]),
            None => ((0..self.cards.len()).collect(), (0..self.links.len()).collect()),
        };
        for &card in &cards {
            let card = &mut self.cards[card];
            // Others may have stopped it, too. To one that runs it means nothing.
            if card.pid().is_some() {
                card.signal(Signal::CONT)?;
                card.faults.stopped = false;
            }
        }
        for link in links {
            let [a, b] = self.links[link].ends.map(|(card, _)| card as u32);
            if self.links[link].cut {
                self.cut(a, b, false)?;
            }
            if self.links[link].errors.is_some() {
                self.corrupt(a, b, None)?;
            }
        }
        for card in cards {
            match self.cards[card].pid() {
                Some(_) => self.mend(card)?,
                None => self.restart(card)?,
            }
        }
        Ok(())
    }

    /// Undoes what was done to a card that lives.
    fn mend(&mut self, card: usize) -> Result<(), TwinError> {
        let card = &mut self.cards[card];
        if card.faults.stuck {
            card.order(&Order::Stick { on: false }, &[])?;
            card.faults.stuck = false;
        }
        if card.faults.garbling {
            card.order(&Order::Garble { on: false }, &[])?;
            card.faults.garbling = false;
        }
        if card.faults.slow != 1.0 {
            card.order(&Order::Slow { factor: 1.0 }, &[])?;
            card.faults.slow = 1.0;
        }
        Ok(())
    }

    /// Starts a dead card again, or leaves it dead.
    fn restart(&mut self, card: usize) -> Result<(), TwinError> {
        self.cards[card].spawn(&self.program, &self.dir)?;
        let outcome = self.rewire(card);
        if outcome.is_err() {
            self.cards[card].kill();
        }
        outcome
    }

    /// Gives a card new links to its neighbours. What was done to its links stays.
    fn rewire(&mut self, card: usize) -> Result<(), TwinError> {
        let mut ends = Vec::new();
        for port in self.cards[card].spec.ports.clone() {
            let [own, theirs] = link_pair().tried(|| "make a link".into())?;
            ends.push(own);
            // The end of a dead neighbour is dropped, and with it the signal.
            let fds = [theirs.bell.as_fd(), theirs.memory.as_fd()];
            let order = Order::Connect { port: port.peer_port };
            self.cards[port.peer as usize].order_if_alive(&order, &fds)?;
        }
        self.begin(card, &ends)?;
        ready(&mut self.cards[card], Instant::now() + super::STARTING)?;
        for link in 0..self.links.len() {
            if self.links[link].ends.iter().all(|&(end, _)| end != card) {
                continue;
            }
            let [a, b] = self.links[link].ends.map(|(card, _)| card as u32);
            if self.links[link].cut {
                self.cut(a, b, true)?;
            }
            if let Some(rate) = self.links[link].errors {
                self.corrupt(a, b, Some(rate))?;
            }
        }
        Ok(())
    }

    /// Ends every card: those that can leave by themselves, the others by force.
    pub(super) fn end(&mut self) {
        for card in &mut self.cards {
            if card.faults.stopped || card.send(&Order::Leave, &[]).is_err() {
                card.kill();
            }
        }
        let deadline = Instant::now() + GRACE;
        while self.cards.iter().any(|card| card.pid().is_some()) && Instant::now() < deadline {
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.cards.iter_mut().for_each(Card::kill);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.end();
    }
}

fn ready(card: &mut Card, deadline: Instant) -> Result<(), TwinError> {
    match card.hear(deadline)? {
        Reply::Ready => Ok(()),
        reply => {
            let text = format!("card {} answers {reply:?} to its start", card.spec.index);
            Err(TwinError::Failed(text))
        }
    }
}
