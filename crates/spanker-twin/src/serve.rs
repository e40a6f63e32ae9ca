// SPDX-License-Identifier: Apache-2.0
//! A card's process: one thread that plays the card, obeys its supervisor, answers its clients, and moves frames
//! over its cables. It blocks nowhere but in one place, where it waits for all of them at once.

mod clients;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use spanker_topology::LinkState;

use self::clients::Clients;
use crate::CardSpec;
use crate::card::Card;
use crate::orders::{self, Order, Reply, answer, receive};
use crate::spec::Pace;
use crate::wire::{Cable, LinkEnd};

/// Rounds without anything to do before the process sleeps. It gives way to others meanwhile.
const RESTLESS: u32 = 40;

/// The same while there is work on the card: what it waits for comes soon, and waking up is slower than waiting
/// a millisecond or two costs.
const EXPECTANT: u32 = 2000;

/// Rounds without polling the sockets.
const UNSEEN: u32 = 32;

/// Nanoseconds without polling the sockets, at the end of a round: rounds are long while a card computes.
const UNSEEN_NS: u64 = 500_000;

/// Nanoseconds on a clock that all cards of a machine share.
pub(crate) fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Plays a card until the supervisor says so or is gone.
///
/// # Errors
/// The supervisor's orders cannot be read, or what came with them is not what it should be.
pub fn serve(control: UnixStream) -> io::Result<()> {
    let Some((order, fds)) = receive(&control)? else { return Ok(()) };
    let Order::Start { spec, epoch } = order else {
        answer(&control, &Reply::Failed(format!("expected to be started, got {order:?}")))?;
        return Ok(());
    };
    let mut process = Process::start(*spec, epoch, fds, control)?;
    answer(&process.control, &Reply::Ready)?;
    process.run()
}

/// Everything that a card's process has.
struct Process {
    card: Card,
    control: UnixStream,
    clients: Clients,
    /// By port; a port whose peer is gone has none.
    cables: Vec<Option<Cable>>,
    epoch: u64,
}

impl Process {
    fn start(
        spec: CardSpec,
        epoch: u64,
        fds: Vec<std::os::fd::OwnedFd>,
        control: UnixStream,
    ) -> io::Result<Process> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "descriptors are missing");
        let mut fds = fds.into_iter();
        let listener = UnixListener::from(fds.next().ok_or_else(missing)?);
        let mut cables = Vec::new();
        for port in 0..spec.ports.len() {
            let (bell, memory) = (fds.next().ok_or_else(missing)?, fds.next().ok_or_else(missing)?);
            let end = LinkEnd { bell, memory };
            cables.push(Some(Cable::new(end, side(&spec, port))?));
        }
        if spec.pace == Pace::Wall {
            // The default slack of timers is longer than a step of a small collective.
            let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
        }
        let nonce = monotonic() as u32 ^ std::process::id();
        let now = monotonic().saturating_sub(epoch);
        let card = Card::new(spec, nonce, now);
        let clients = Clients::new(listener)?;
        Ok(Process { card, control, clients, cables, epoch })
    }

    fn now(&self) -> u64 {
        monotonic().saturating_sub(self.epoch)
    }

    fn run(&mut self) -> io::Result<()> {
        let (mut idle, mut unseen, mut seen) = (0, 0, self.now());
        loop {
            let now = self.now();
            let mut happened = self.take_frames();
            let pulse = self.card.advance(now);
            happened |= pulse.busy | self.put_frames();
            let (replied, due) = self.clients.replies(&mut self.card, now);
            happened |= replied;
            idle = if happened { 0 } else { idle + 1 };
            unseen += 1;
            let rounds = if self.card.has_work() { EXPECTANT } else { RESTLESS };
            let sleeps = idle > rounds && self.fall_asleep();
            // While frames flow, the sockets are polled now and then only.
            if !sleeps && unseen < UNSEEN && self.now().saturating_sub(seen) < UNSEEN_NS {
                if !happened {
                    rustix::thread::sched_yield();
                }
                continue;
            }
            let timer = [pulse.timer, due].into_iter().flatten().min();
            let timeout = match sleeps {
                true => timer.map(|at| Duration::from_nanos(at.saturating_sub(self.now()))),
                false => Some(Duration::ZERO),
            };
            if !self.look(timeout)? {
                return Ok(());
            }
            (unseen, seen) = (0, self.now());
            if sleeps {
                idle = 0;
            }
        }
    }

    /// Passes frames from the cables to the card.
    fn take_frames(&mut self) -> bool {
        let mut any = false;
        for port in 0..self.cables.len() {
            let Some(cable) = &mut self.cables[port] else { continue };
            let mut damaged = false;
            // No more than a ring's worth at a time, so that the other ports get their turn.
            for _ in 0..64 {
                let card = &mut self.card;
                match cable.next(&mut |stamp, frame| card.arrived(port, stamp, frame)) {
                    Ok(false) => break,
                    Ok(true) => any = true,
                    Err(_) => {
                        damaged = true;
                        break;
                    }
                }
            }
            if damaged {
                self.lose(port);
            }
        }
        any
    }

    fn put_frames(&mut self) -> bool {
        let mut any = false;
        for (port, cable) in self.cables.iter_mut().enumerate() {
            let Some(cable) = cable else { continue };
            any |= self.card.depart(port, cable);
            cable.ring();
        }
        any
    }

    /// The peer at a port is gone.
    fn lose(&mut self, port: usize) {
        self.cables[port] = None;
        self.card.lost(port);
    }

    /// Says on every cable that this process sleeps. False if there is something to read after all.
    fn fall_asleep(&self) -> bool {
        let mut asleep = true;
        for cable in self.cables.iter().flatten() {
            asleep &= cable.sleep();
        }
        if !asleep {
            self.cables.iter().flatten().for_each(Cable::wake);
        }
        asleep
    }

    /// Waits for the supervisor, clients and cables. False when the process is to end.
    fn look(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let mut fds = vec![PollFd::new(&self.control, PollFlags::IN)];
        self.clients.register(&mut fds);
        let ports: Vec<usize> =
            (0..self.cables.len()).filter(|&port| self.cables[port].is_some()).collect();
        let first_cable = fds.len();
        for &port in &ports {
            let cable = self.cables[port].as_ref().expect("it was there");
            fds.push(PollFd::from_borrowed_fd(cable.bell(), PollFlags::IN));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let now = self.now();
        for (at, &port) in ports.iter().enumerate() {
            // The damaged ring of one peer may have been found while another left.
            let Some(cable) = &mut self.cables[port] else { continue };
            cable.wake();
            if ready[first_cable + at] && !cable.answer_bell() {
                // What the peer sent before it went still counts.
                self.take_frames();
                if self.cables[port].is_some() {
                    self.lose(port);
                }
            }
        }
        self.clients.serve(&mut self.card, &ready[1..first_cable], now);
        if ready[0] { self.obey(now) } else { Ok(true) }
    }

    /// Carries out one order. False when the process is to end.
    fn obey(&mut self, now: u64) -> io::Result<bool> {
        // A supervisor whose orders end or make no sense is gone.
        let Ok(Some((order, fds))) = receive(&self.control) else { return Ok(false) };
        let leaves = order == Order::Leave;
        let reply = self.carry_out(&order, fds, now);
        // A supervisor that went meanwhile is seen at the next poll.
        let _ = answer(&self.control, &reply);
        Ok(!leaves)
    }

    fn carry_out(&mut self, order: &Order, fds: Vec<std::os::fd::OwnedFd>, now: u64) -> Reply {
        let port = match *order {
            Order::Connect { port } | Order::Cut { port } | Order::Mend { port } => Some(port),
            Order::Errors { port, .. } => Some(port),
            _ => None,
        };
        if let Some(port) = port.filter(|&port| port as usize >= self.cables.len()) {
            return Reply::Failed(format!("there is no port {port}"));
        }
        match *order {
            Order::Start { .. } => return Reply::Failed("the card is started already".into()),
            Order::Connect { port } => return self.connect(port as usize, fds, now),
            Order::Cut { port } => self.card.cut(port as usize),
            Order::Mend { port } => self.card.mend(port as usize, now),
            Order::Errors { port, bit_error_rate } => {
                self.card.set_errors(port as usize, bit_error_rate);
            }
            Order::Slow { factor } => self.card.slow_down(factor),
            Order::Stick { on } => self.card.stick(on),
            Order::Garble { on } => self.card.garble(on),
            Order::Status => {
                let ports = 0..self.cables.len();
                return Reply::Status { ports: ports.map(|port| self.port_state(port)).collect() };
            }
            Order::Leave => {}
        }
        Reply::Done
    }

    fn connect(&mut self, port: usize, fds: Vec<std::os::fd::OwnedFd>, now: u64) -> Reply {
        let Ok([bell, memory]) = <[_; 2]>::try_from(fds) else {
            return Reply::Failed("a bell and a memory belong to a link".into());
        };
        match Cable::new(LinkEnd { bell, memory }, side(self.card.spec(), port)) {
            Ok(cable) => {
                self.cables[port] = Some(cable);
                self.card.connect_port(port, now);
                Reply::Done
            }
            Err(error) => Reply::Failed(error.to_string()),
        }
    }

    fn port_state(&self, port: usize) -> orders::Port {
        match self.card.port_state(port) {
            LinkState::Up => orders::Port::Up,
            LinkState::Training => orders::Port::Training,
            LinkState::Error => orders::Port::Fault,
            _ => orders::Port::Down,
        }
    }
}

/// The two ends of a link use the two rings the other way round.
fn side(spec: &CardSpec, port: usize) -> bool {
    let peer = &spec.ports[port];
    (spec.index, port as u32) < (peer.peer, peer.peer_port)
}
