// SPDX-License-Identifier: Apache-2.0
//! The supervisor's requests to a card, called orders, and the card's replies. Every order has one reply, in sequence;
//! the supervisor waits for a reply no longer than its timeout.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{CardSpec, frame};

/// A request of the supervisor to a card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Be this card. The first order, and given once. Beside it come the listening socket, and for each
    /// port in order the bell and the memory of its link. Answered with [`Reply::Ready`].
    Start {
        /// What the card is.
        spec: Box<CardSpec>,
        /// When the clocks of all cards begin, in nanoseconds of the machine's monotonic clock.
        epoch: u64,
    },
    /// Use another link at a port: what was connected there is gone. Beside it come bell and memory.
    Connect {
        /// The port.
        port: u32,
    },
    /// Behave as if the cable of a port were cut.
    Cut {
        /// The port.
        port: u32,
    },
    /// Behave as if it were plugged in again.
    Mend {
        /// The port.
        port: u32,
    },
    /// Flip bits on the wire in what the port sends.
    Errors {
        /// The port.
        port: u32,
        /// The probability that a bit on the wire flips.
        bit_error_rate: f64,
    },
    /// Take so many times as long for everything; 1 is the card's own speed.
    Slow {
        /// How many times.
        factor: f64,
    },
    /// Answer, but get on with no work.
    Stick {
        /// Whether to, or no longer.
        on: bool,
    },
    /// Compute garbage.
    Garble {
        /// Whether to, or no longer.
        on: bool,
    },
    /// Report the state of the ports. Answered with [`Reply::Status`].
    Status,
    /// Go away. Answered with [`Reply::Done`], and then the process ends.
    Leave,
}

/// What a card answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Reply {
    /// The card listens. Its links may still be training.
    Ready,
    /// The order is carried out.
    Done,
    /// It is not, and why.
    Failed(String),
    /// How the ports are, in their order.
    Status {
        /// The state of each port.
        ports: Vec<Port>,
    },
}

/// The state of a port, as the card sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Port {
    /// No signal.
    Down,
    /// The two ends are finding each other.
    Training,
    /// It carries data.
    Up,
    /// It gave up.
    Fault,
}

impl Port {
    /// The name that tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Port::Down => "down",
            Port::Training => "training",
            Port::Up => "up",
            Port::Fault => "fault",
        }
    }
}

/// Gives an order, with the descriptors that belong to it.
///
/// # Errors
/// The card is gone, or the order is too large.
pub fn send(stream: &UnixStream, order: &Order, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    frame::send(stream, order, fds)
}

/// Waits for an order; `None` when the supervisor is gone. The stream must be a blocking one.
///
/// # Errors
/// What came is no order. Nothing that comes later can be understood either.
pub fn receive(stream: &UnixStream) -> io::Result<Option<(Order, Vec<OwnedFd>)>> {
    frame::receive(stream, None)
}

/// Answers an order.
///
/// # Errors
/// The supervisor is gone.
pub fn answer(stream: &UnixStream, reply: &Reply) -> io::Result<()> {
    frame::send(stream, reply, &[])
}

/// Waits for the answer to an order; `None` when the card is gone.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] at the deadline, and what came if it is no answer.
pub fn reply(stream: &UnixStream, deadline: Instant) -> io::Result<Option<Reply>> {
    Ok(frame::receive(stream, Some(deadline))?.map(|(reply, _)| reply))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pace, specs};
    use spanker_topology::{Cluster, Profile, Shape};
    use std::os::fd::AsFd;

    #[test]
    fn every_order_arrives_as_it_was_given() {
        let profile = Profile::builtin("h200-nvlink").unwrap();
        let cluster = Cluster::uniform(profile, 64, Shape::Switch).unwrap();
        let spec = specs(&cluster, Pace::Wall, 3).unwrap().remove(63);
        let (here, there) = UnixStream::pair().unwrap();
        let ends = vec![there.as_fd(); 1 + 2 * spec.ports.len()];
        let start = Order::Start { spec: Box::new(spec), epoch: 9 };
        send(&here, &start, &ends).unwrap();
        let (order, fds) = receive(&there).unwrap().unwrap();
        assert_eq!((order, fds.len()), (start, 127));
        let orders = [
            Order::Connect { port: 3 },
            Order::Cut { port: 0 },
            Order::Mend { port: 0 },
            Order::Errors { port: 1, bit_error_rate: 1e-9 },
            Order::Slow { factor: 4.5 },
            Order::Stick { on: true },
            Order::Garble { on: false },
            Order::Status,
            Order::Leave,
        ];
        for order in orders {
            send(&here, &order, &[]).unwrap();
            assert_eq!(receive(&there).unwrap().unwrap().0, order);
        }
        let replies = [
            Reply::Ready,
            Reply::Done,
            Reply::Failed("no".into()),
            Reply::Status { ports: vec![Port::Up, Port::Fault] },
        ];
        for given in replies {
            answer(&there, &given).unwrap();
            let soon = Instant::now() + std::time::Duration::from_secs(5);
            assert_eq!(reply(&here, soon).unwrap(), Some(given));
        }
    }
}
