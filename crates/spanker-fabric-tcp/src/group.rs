// SPDX-License-Identifier: Apache-2.0
//! How channels become a group: the leader asks every worker to join, workers connect to each other, and everybody begins
//! when all are ready, or nobody does.
//!
//! The leader is rank 0. It names the group by a random number, which only its members learn: who connects to a worker
//! under that number is one of them. Of two workers the one of higher rank dials.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use spanker_collective::Rank;

use crate::channel::{self, Intent, LONGEST_JOIN, closed, flush, is_local, receive};
use crate::frame::{Head, Kind, Reader, Writer};
use crate::link::{Frame, Link};
use crate::wait::{left, sleep_on_links};
use crate::{Channel, Id, Listener, TcpError, TcpFabric};

/// Ranks of a group, at most.
const MOST_RANKS: usize = 1024;
/// How long a worker waits before it looks again whether the leader is still there.
const RECHECK: Duration = Duration::from_millis(50);

/// How an end takes part in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The version of the program. Members of a group run the same.
    pub version: String,
    /// How long a group may take to come together, and how long nothing may be heard of a member before it is taken for
    /// dead, on all members what the leader says. A member that computes is heard of all the same.
    pub timeout: Duration,
    /// How long a rank that waits asks again and again before it sleeps: faster where it has a core of its own. It is
    /// longer, up to a millisecond, where waits turn out to be so short; with none it sleeps at once.
    pub spin: Duration,
    /// Bytes of a message, at most.
    pub longest_message: usize,
}

impl Options {
    /// For this version: 5 seconds, 50 microseconds, 1 GiB.
    #[must_use]
    pub fn new(version: &str) -> Options {
        Options {
            version: version.to_owned(),
            timeout: Duration::from_secs(5),
            spin: Duration::from_micros(50),
            longest_message: 1 << 30,
        }
    }
}

/// What a member knows of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupInfo {
    /// The number of the group.
    pub id: Id,
    /// This end's rank.
    pub rank: Rank,
    /// Where the others are, by rank. Of this end it is nothing.
    pub members: Vec<Option<SocketAddr>>,
}

/// Makes the leader's end of a group: rank 0, with the worker of `channels[i]` as rank `i + 1`.
///
/// # Errors
/// [`TcpError::Version`], [`TcpError::Refused`] or [`TcpError::Closed`] with the worker that it is about, or
/// [`TcpError::Timeout`] after the timeout of `options`. Then there is no group, and no worker believes that there is one.
pub fn lead(channels: Vec<Channel>, options: &Options) -> Result<(TcpFabric, GroupInfo), TcpError> {
    let (deadline, ranks) = (Instant::now() + options.timeout, channels.len() + 1);
    if ranks > MOST_RANKS {
        let reason = format!("a group has {MOST_RANKS} ranks at most, not {ranks}");
        return Err(TcpError::Request { reason });
    }
    let id = Id::random()?;
    let mut links: Vec<Link> = channels.into_iter().map(|channel| channel.link).collect();
    let addresses: Vec<SocketAddr> = links.iter().map(Link::address).collect();
    for (index, link) in links.iter_mut().enumerate() {
        let request = Request {
            id,
            rank: index as u32 + 1,
            timeout: options.timeout,
            version: options.version.clone(),
            workers: addresses.clone(),
        };
        link.set_limit(LONGEST_JOIN);
        link.push_bytes(Head::of_kind(Kind::Join), &request.bytes());
    }
    let mut ready = vec![false; links.len()];
    while !ready.iter().all(|&ready| ready) {
        for (link, ready) in links.iter_mut().zip(&mut ready) {
            link.flush();
            match link.next_frame() {
                Ok(Some(frame)) => *ready = answered(link, &frame, *ready, &options.version)?,
                Ok(None) => {}
                Err(why) => return Err(closed(link, &why)),
            }
        }
        let missing = ready.iter().position(|ready| !ready);
        if let Some(missing) = missing.filter(|_| left(deadline).is_zero()) {
            let (address, timeout) = (addresses[missing], options.timeout);
            return Err(TcpError::Timeout { address, what: "answer to join a group", timeout });
        }
        if missing.is_some() {
            sleep_on_links(links.iter().map(|link| (link, true)), left(deadline).min(RECHECK));
        }
    }
    for link in &mut links {
        link.push(Head::of_kind(Kind::Start), None);
        flush(link, deadline)?;
    }
    let members = std::iter::once(None).chain(addresses.into_iter().map(Some)).collect();
    let links = std::iter::once(None).chain(links.into_iter().map(Some)).collect();
    Ok((TcpFabric::new(0, links, options)?, GroupInfo { id, rank: 0, members }))
}

/// What a worker says about joining.
fn answered(link: &Link, frame: &Frame, before: bool, ours: &str) -> Result<bool, TcpError> {
    let address = link.address();
    let text = String::from_utf8_lossy(frame.body.bytes()).into_owned();
    match frame.head.kind {
        Kind::Ready if !before => Ok(true),
        // A number other than zero: the reason is the version that it runs.
        Kind::Refusal if frame.head.number != 0 => {
            Err(TcpError::Version { address, ours: ours.to_owned(), theirs: text })
        }
        Kind::Refusal => Err(TcpError::Refused { address, reason: text }),
        _ => Err(TcpError::Corrupt { address, what: "no answer to a request to join" }),
    }
}

/// A request to join a group, on a worker. Dropping it closes the connection.
#[derive(Debug)]
pub struct Join {
    link: Link,
    request: Request,
}

/// What the leader asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Request {
    id: Id,
    rank: u32,
    /// How long nothing may be heard of a member.
    timeout: Duration,
    version: String,
    /// Where ranks 1 and up are, as the leader reaches them.
    workers: Vec<SocketAddr>,
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let mut out = Writer(self.id.0.to_vec());
        out.number(self.rank);
        out.number(u32::try_from(self.timeout.as_millis()).unwrap_or(u32::MAX));
        out.text(&self.version);
        out.number(self.workers.len() as u32);
        for worker in &self.workers {
            out.text(&worker.to_string());
        }
        out.0
    }

    fn of(bytes: &[u8]) -> Option<Request> {
        let mut rest = Reader(bytes);
        let id = Id(rest.take(16)?.try_into().ok()?);
        let (rank, timeout) = (rest.number()?, Duration::from_millis(rest.number()?.into()));
        let version = rest.text()?.to_owned();
        let count = rest.number()? as usize;
        if count >= MOST_RANKS || rank == 0 || rank as usize > count {
            return None;
        }
        let mut workers = Vec::with_capacity(count);
        for _ in 0..count {
            workers.push(rest.text()?.parse().ok()?);
        }
        rest.0.is_empty().then_some(Request { id, rank, timeout, version, workers })
    }
}

impl Join {
    pub(crate) fn of(link: Link, bytes: &[u8]) -> Result<Join, TcpError> {
        let address = link.address();
        let what = "a request to join that makes no sense";
        let request = Request::of(bytes).ok_or(TcpError::Corrupt { address, what })?;
        Ok(Join { link, request })
    }

    /// The leader.
    #[must_use]
    pub fn leader(&self) -> SocketAddr {
        self.link.address()
    }

    /// The version that the leader runs.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.request.version
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.request.workers.len() + 1
    }

    /// The rank that this worker is asked to be.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.request.rank as Rank
    }

    /// Does not join, and says why.
    pub fn refuse(self, reason: &str) {
        Channel { link: self.link }.refuse(reason);
    }

    /// Joins: connects to all other workers, through `listener` to those of higher rank, and waits until all are
    /// ready.
    ///
    /// # Errors
    /// [`TcpError::Version`], which the leader learns as well; [`TcpError::Closed`] if the leader gives up; what
    /// keeps this worker from reaching another; or [`TcpError::Timeout`] after the timeout of `options`.
    pub fn accept(
        mut self,
        listener: &Listener,
        options: &Options,
    ) -> Result<(TcpFabric, GroupInfo), TcpError> {
        let deadline = Instant::now() + options.timeout;
        let address = self.link.address();
        if self.request.version != options.version {
            let head = Head { number: 1, ..Head::of_kind(Kind::Refusal) };
            self.link.push_bytes(head, options.version.as_bytes());
            flush(&mut self.link, deadline)?;
            self.link.finish();
            let (ours, theirs) = (options.version.clone(), self.request.version);
            return Err(TcpError::Version { address, ours, theirs });
        }
        let connected = self.connect(listener, deadline);
        let mut links = match connected {
            Ok(links) => links,
            Err(error) => {
                let said = error.to_string();
                self.refuse(said.lines().next().unwrap_or_default());
                return Err(error);
            }
        };
        let mut link = self.link;
        link.push(Head::of_kind(Kind::Ready), None);
        flush(&mut link, deadline)?;
        let frame = receive(&mut link, "start of the group", deadline)?;
        if frame.head.kind != Kind::Start {
            return Err(TcpError::Corrupt { address, what: "no start of a group" });
        }
        links[0] = Some(link);
        let members = links.iter().map(|link| link.as_ref().map(Link::address)).collect();
        let rank = self.request.rank as Rank;
        let info = GroupInfo { id: self.request.id, rank, members };
        let options = Options { timeout: self.request.timeout, ..options.clone() };
        Ok((TcpFabric::new(rank, links, &options)?, info))
    }

    /// The connections to the other workers, by rank.
    fn connect(
        &mut self,
        listener: &Listener,
        deadline: Instant,
    ) -> Result<Vec<Option<Link>>, TcpError> {
        let Request { id, rank, workers, .. } = &self.request;
        let ranks = workers.len() + 1;
        let mut links: Vec<Option<Link>> = (0..ranks).map(|_| None).collect();
        for lower in 1..*rank {
            let address = reachable(workers[lower as usize - 1], self.link.address().ip());
            let intent = Intent::Mesh(*id, *rank);
            let link = channel::dial(address, listener.key(), intent, deadline)?;
            links[lower as usize] = Some(link);
        }
        while let Some(missing) = (*rank as usize + 1..ranks).find(|&rank| links[rank].is_none()) {
            let until = deadline.min(Instant::now() + RECHECK);
            if let Some((from, link)) = listener.next_of(*id, *rank, until)
                && let Some(slot) = links.get_mut(from as usize)
            {
                *slot = Some(link);
                continue;
            }
            match self.link.next_frame() {
                Ok(None) => {}
                Ok(Some(_)) => {
                    let (address, what) = (self.link.address(), "a question in between");
                    return Err(TcpError::Corrupt { address, what });
                }
                Err(why) => return Err(closed(&self.link, &why)),
            }
            if left(deadline).is_zero() {
                let address = workers[missing - 1];
                let (what, timeout) = ("connection of that worker", left(deadline));
                return Err(TcpError::Timeout { address, what, timeout });
            }
        }
        Ok(links)
    }
}

/// Where this worker reaches another one. What the leader reaches on its own machine is on the leader's machine.
fn reachable(worker: SocketAddr, leader: IpAddr) -> SocketAddr {
    match is_local(&worker) && !leader.is_loopback() {
        true => SocketAddr::new(leader, worker.port()),
        false => worker,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        let workers = vec!["127.0.0.1:7077".parse(), "[fe80::1]:7078".parse()];
        let workers = workers.into_iter().map(|worker| worker.expect("an address")).collect();
        let timeout = Duration::from_millis(4_999);
        Request { id: Id([7; 16]), rank: 2, timeout, version: "0.2.0".into(), workers }
    }

    #[test]
    fn requests_read_as_they_were_written() {
        assert_eq!(Request::of(&request().bytes()), Some(request()));
    }

    #[test]
    fn requests_that_make_no_sense_are_refused() {
        let bytes = request().bytes();
        for length in 0..bytes.len() {
            assert_eq!(Request::of(&bytes[..length]), None, "{length}");
        }
        assert_eq!(Request::of(&[&bytes[..], &[0]].concat()), None);
        for rank in [0, 3] {
            assert_eq!(Request::of(&Request { rank, ..request() }.bytes()), None, "rank {rank}");
        }
    }

    #[test]
    fn a_connection_for_another_group_or_from_a_lower_rank_is_not_taken() {
        let limits = crate::Limits::USUAL;
        let listener = Listener::bind("127.0.0.1:0", None, limits).expect("a port");
        let soon = Instant::now() + Duration::from_secs(60);
        let (ours, old) = (Id([1; 16]), Id([2; 16]));
        let links: Vec<Link> = [(old, 3), (ours, 1), (ours, 2)]
            .into_iter()
            .map(|(id, rank)| {
                let intent = Intent::Mesh(id, rank);
                channel::dial(listener.address(), None, intent, soon).expect("a worker")
            })
            .collect();
        assert_eq!(listener.next_of(ours, 1, soon).map(|(from, _)| from), Some(2));
        let none = listener.next_of(ours, 1, Instant::now() + Duration::from_millis(100));
        assert!(none.is_none());
        drop(links);
    }

    #[test]
    fn a_worker_on_the_leaders_machine_is_where_the_leader_is() {
        let (near, far) = ("127.0.0.1:7077", "10.0.0.2:7077");
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let leader: IpAddr = "10.0.0.1".parse().expect("an address");
        assert_eq!(reachable(address(near), leader), address("10.0.0.1:7077"));
        assert_eq!(reachable(address(far), leader), address(far));
        let here: IpAddr = "127.0.0.1".parse().expect("an address");
        let other = address("127.0.0.2:7077");
        assert_eq!(reachable(other, here), other, "all of them on one machine");
    }
}
