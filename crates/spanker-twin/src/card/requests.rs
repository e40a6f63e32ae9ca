// SPDX-License-Identifier: Apache-2.0
//! What hosts ask of a card. Every request is hostile until it has been checked, and every request gets an
//! answer, at once or when what it waits for has happened.

use std::collections::VecDeque;

use bytemuck::{Pod, bytes_of, pod_read_unaligned};
use nix::errno::Errno;
use spanker_runtime::abi::{
    self, ABI_VERSION_MAJOR, Ping, RawAccess, RawAllocate, RawCardInfo, RawFault, RawFree,
    RawPortInfo, RawRead, RawRecord, RawRecords, RawReset, RawState, RawSubmit, RawVersion,
    RawWait, Request,
};
use spanker_runtime::message::{HEAD_BYTES, Message, head_of, is_of_every_version};
use spanker_runtime::{
    AbiVersion, BufferId, Counters, Fault, FaultKind, Feature, Place, decode_work,
};

use super::check::{check, check_version};
use super::costs::later;
use super::engine::Submission;
use super::{Card, ClientId, REMEMBERED, Reply};
use crate::spec::Pace;

/// The most descriptors that wait on a card at a time, as [`Submission::weight`] counts them.
const MAX_QUEUED: usize = 1 << 20;
/// The most waits that a program has at a time.
const MAX_WAITS: usize = 16;

/// A program that is connected.
#[derive(Debug)]
pub(crate) struct Client {
    pub(super) id: ClientId,
    pub(super) pid: u32,
    /// When its last tickets were complete, or why they failed. Each program has its own list, so that none
    /// can make the card forget what became of another's work.
    outcomes: VecDeque<(u64, Result<u64, Fault>)>,
}

/// A program that waits for work.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(super) client: ClientId,
    sequence: u64,
    request: RawWait,
    pub(super) deadline: u64,
}

/// Card time within which a request of the host follows the one before, in picoseconds.
const STREAM: u64 = 1_000_000_000;

/// An answer: the struct's bytes, further bytes, and when it is due.
struct Answer {
    argument: Vec<u8>,
    payload: Vec<u8>,
    due: u64,
}

impl Answer {
    fn with<T: Pod>(argument: T) -> Answer {
        Answer { argument: bytes_of(&argument).to_vec(), payload: Vec::new(), due: 0 }
    }

    fn due(self, due: u64) -> Answer {
        Answer { due, ..self }
    }
}

fn read<T: Pod>(bytes: &[u8]) -> Result<T, Errno> {
    match bytes.len() == size_of::<T>() {
        true => Ok(pod_read_unaligned(bytes)),
        false => Err(Errno::EBADMSG),
    }
}

impl Card {
    /// A program has connected.
    pub fn connect(&mut self, client: ClientId, pid: u32) {
        self.clients.push(Client { id: client, pid, outcomes: VecDeque::new() });
        self.note(abi::RECORD_CLIENT, 0, u64::from(pid), 1);
    }

    /// Accepts a request of a client that is connected. `arrived` is when its first byte came, in nanoseconds.
    pub fn request(&mut self, client: ClientId, message: &Message<'_>, arrived: u64) {
        if let Err(error) = self.known(message.number) {
            return self.push_reply(client, message.number, message.sequence, Err(error));
        }
        if message.number == RawWait::NUMBER {
            return self.wait(client, message);
        }
        let answer = self.answer(client, message, arrived);
        self.push_reply(client, message.number, message.sequence, answer);
    }

    /// Whether the version that the card speaks has a request. Programs speak the major version of this crate: others
    /// have been refused before.
    fn known(&self, number: u32) -> Result<(), Errno> {
        let abi = self.spec.abi;
        if abi.major != ABI_VERSION_MAJOR && !is_of_every_version(number) {
            return Err(Errno::EPROTONOSUPPORT);
        }
        match Feature::of_request(number) {
            Some(feature) if !abi.has(feature) => Err(Errno::ENOTTY),
            _ => Ok(()),
        }
    }

    /// Answers bytes that are no request; the client is to be cut off.
    pub fn refuse(&mut self, client: ClientId, number: u32, sequence: u64, error: Errno) {
        self.push_reply(client, number, sequence, Err(error));
        if let Some(reply) = self.replies.back_mut() {
            reply.last = true;
        }
    }

    fn push_reply(
        &mut self,
        client: ClientId,
        number: u32,
        sequence: u64,
        answer: Result<Answer, Errno>,
    ) {
        let (status, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(error) => {
                (error as i32, Answer { argument: Vec::new(), payload: Vec::new(), due: 0 })
            }
        };
        let Answer { argument, payload, due } = answer;
        let mut bytes = Vec::with_capacity(HEAD_BYTES + argument.len() + payload.len());
        let (abi, lengths) = (self.spec.abi, (argument.len(), payload.len()));
        bytes.extend_from_slice(&head_of(abi, number, status, sequence, lengths.0, lengths.1));
        bytes.extend_from_slice(&argument);
        bytes.extend_from_slice(&payload);
        self.unsent += bytes.len();
        self.replies.push_back(Reply { client, bytes, due, last: false });
    }

    fn answer(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        arrived: u64,
    ) -> Result<Answer, Errno> {
        let (argument, payload) = (message.argument, message.payload);
        match message.number {
            Ping::NUMBER => Ok(Answer { argument: Vec::new(), payload: Vec::new(), due: 0 }),
            RawVersion::NUMBER => {
                let AbiVersion { major, minor, patch } = self.spec.abi;
                Ok(Answer::with(RawVersion { major, minor, patch, reserved: 0 }))
            }
            RawCardInfo::NUMBER => Ok(Answer::with(self.info())),
            RawPortInfo::NUMBER => self.port_info(read(argument)?).map(Answer::with),
            RawAllocate::NUMBER => {
                let request: RawAllocate = read(argument)?;
                let buffer = self.memory.allocate(client, request.length)?.0;
                Ok(Answer::with(RawAllocate { buffer, ..request }))
            }
            RawFree::NUMBER => {
                let request: RawFree = read(argument)?;
                if self.queue.iter().any(|s| s.client == client && s.uses(request.buffer)) {
                    return Err(Errno::EBUSY);
                }
                self.memory.free(client, BufferId(request.buffer))?;
                Ok(Answer::with(request))
            }
            RawAccess::NUMBER => self.write(client, read(argument)?, payload, arrived),
            RawRead::NUMBER => self.read(client, read(argument)?, arrived),
            RawSubmit::NUMBER => self.submit(client, read(argument)?, payload).map(Answer::with),
            Counters::NUMBER => Ok(Answer::with(self.counters())),
            RawReset::NUMBER => self.reset(client, read(argument)?).map(Answer::with),
            RawState::NUMBER => Ok(Answer::with(self.state())),
            RawRecords::NUMBER => self.records(read(argument)?),
            _ => Err(Errno::ENOTTY),
        }
    }

    fn info(&self) -> RawCardInfo {
        let mut profile = [0; 32];
        let name = self.spec.profile.name.as_bytes();
        let length = name.len().min(profile.len());
        profile[..length].copy_from_slice(&name[..length]);
        let pace = match self.spec.pace {
            Pace::Card => 0,
            Pace::Wall => abi::CARD_PACE_WALL,
            Pace::Unshaped => abi::CARD_UNSHAPED,
        };
        let owner = self.queue.front().map(|submission| submission.client);
        let pid = |id| self.clients.iter().find(|client| client.id == id).map(|client| client.pid);
        RawCardInfo {
            serial: self.spec.serial,
            capacity: self.memory.capacity(),
            available: self.memory.available(),
            card_time_ps: self.time(),
            index: self.spec.index,
            ports: self.ports.len() as u32,
            flags: abi::CARD_EMULATED | pace,
            owner: owner.and_then(pid).unwrap_or(0),
            profile,
        }
    }

    fn port_info(&self, request: RawPortInfo) -> Result<RawPortInfo, Errno> {
        let port = self.ports.get(request.port as usize).ok_or(Errno::EINVAL)?;
        let state = self.port_state(request.port as usize).bits();
        let (bandwidth, latency_ps) = match self.spec.pace {
            Pace::Unshaped => (0, 0),
            _ => (port.frames.rate(), port.frames.latency),
        };
        // A link that is down still says who was at its other end.
        let peer = port.peer;
        Ok(RawPortInfo {
            port: request.port,
            state: u32::from(state),
            lanes: port.frames.lanes(),
            peer_port: peer.map_or(0, |peer| peer.port),
            peer_serial: peer.map_or(0, |peer| peer.serial),
            bandwidth,
            latency_ps,
            shared: u32::from(port.spec.shared_lanes),
            reserved: 0,
        })
    }

    /// Moves the clock on by a message of the host, and says when that is over.
    fn host_message(&mut self, bytes: u64, arrived: u64) -> u64 {
        if !self.queue.is_empty() {
            // The host link works beside the queue; the clock shows the queue.
            return 0;
        }
        match self.spec.pace {
            Pace::Card => {
                self.clock = later(self.clock, self.costs.host(bytes));
                0
            }
            Pace::Wall => {
                // Requests that follow each other are one stream: what the host's own software takes between
                // two of them is not the link's.
                let arrived = arrived.saturating_mul(1000);
                let streams = arrived.saturating_sub(self.clock) < STREAM;
                let start = if streams { self.clock } else { arrived };
                self.clock = later(start, self.costs.host(bytes));
                self.clock / 1000
            }
            Pace::Unshaped => 0,
        }
    }

    fn write(
        &mut self,
        client: ClientId,
        request: RawAccess,
        payload: &[u8],
        arrived: u64,
    ) -> Result<Answer, Errno> {
        let place = Place { buffer: BufferId(request.buffer), offset: request.offset };
        self.memory.owned(client, place.buffer)?;
        if request.length != payload.len() as u64 {
            return Err(Errno::EINVAL);
        }
        let target = self.memory.get_mut(place, request.length).ok_or(Errno::EINVAL)?;
        target.copy_from_slice(payload);
        self.counters.host_in += request.length;
        let due = self.host_message(request.length, arrived);
        Ok(Answer::with(request).due(due))
    }

    fn read(&mut self, client: ClientId, request: RawRead, arrived: u64) -> Result<Answer, Errno> {
        let RawRead(access) = request;
        let place = Place { buffer: BufferId(access.buffer), offset: access.offset };
        self.memory.owned(client, place.buffer)?;
        if access.length > u64::from(abi::MESSAGE_MAX_PAYLOAD) {
            return Err(Errno::EMSGSIZE);
        }
        let payload = self.memory.get(place, access.length).ok_or(Errno::EINVAL)?.to_vec();
        self.counters.host_out += access.length;
        let due = self.host_message(access.length, arrived);
        Ok(Answer { payload, ..Answer::with(request).due(due) })
    }

    fn submit(
        &mut self,
        client: ClientId,
        request: RawSubmit,
        payload: &[u8],
    ) -> Result<RawSubmit, Errno> {
        if request.job == 0 || request.length != payload.len() as u64 {
            return Err(Errno::EINVAL);
        }
        // All of the queue is one client's.
        if self.queue.front().is_some_and(|submission| submission.client != client) {
            return Err(Errno::EBUSY);
        }
        let work = decode_work(payload).map_err(|_| Errno::EINVAL)?;
        check_version(self.spec.abi, &work)?;
        let ticket = self.next_ticket;
        let submission = Submission::new(ticket, request.job, client, work, self.ports.len());
        if self.queued + submission.weight() > MAX_QUEUED {
            return Err(Errno::EOVERFLOW);
        }
        check(&self.memory, client, self.ports.len(), &submission.work)?;
        self.next_ticket += 1;
        match self.dead_job(request.job) {
            Some(fault) => self.remember(client, ticket, Err(fault)),
            None => self.enqueue(submission),
        }
        Ok(RawSubmit { ticket, ..request })
    }

    fn reset(&mut self, client: ClientId, request: RawReset) -> Result<RawReset, Errno> {
        self.note(abi::RECORD_RESET, 0, request.job, 0);
        let aborted =
            |job| Fault { kind: FaultKind::Aborted, card: self.spec.serial, peer: 0, job };
        let fault = |job| Fault { job, ..request.fault.fault().unwrap_or(aborted(job)) };
        let mut jobs: Vec<u64> = self
            .queue
            .iter()
            .filter(|s| s.client == client && (request.job == 0 || s.job == request.job))
            .map(|s| s.job)
            .collect();
        jobs.dedup();
        // A job that is not here yet, or no longer, is dead all the same, unless it is another client's.
        let another = self.queue.iter().any(|s| s.client != client && s.job == request.job);
        if jobs.is_empty() && request.job != 0 && !another {
            jobs.push(request.job);
        }
        let faults: Vec<Fault> = jobs.into_iter().map(fault).collect();
        for fault in faults {
            self.fail_job(fault);
        }
        Ok(request)
    }

    fn counters(&self) -> Counters {
        let mut counters = self.counters;
        for port in &self.ports {
            let link = port.link.counters();
            counters.frames_replayed += link.replayed;
            counters.retrainings += link.trainings.saturating_sub(1);
        }
        counters
    }

    fn state(&self) -> RawState {
        let waits = if self.stuck { None } else { self.waits_for() };
        let activity = match waits {
            _ if self.queue.is_empty() => abi::ACTIVITY_IDLE,
            None => abi::ACTIVITY_WORKING,
            Some((_, activity)) => activity,
        };
        let port = waits.map_or(0, |(port, _)| port);
        let peer = waits.and_then(|(port, _)| self.ports[port].peer);
        RawState {
            activity,
            port: port as u32,
            peer: peer.map_or(0, |peer| peer.serial),
            job: self.queue.front().map_or(0, |submission| submission.job),
            submitted: self.next_ticket - 1,
            completed: self.completed,
            progress: self.progress,
            card_time_ps: self.time(),
        }
    }

    fn records(&self, request: RawRecords) -> Result<Answer, Errno> {
        let most = (request.length as usize).min(1 << 20) / size_of::<RawRecord>();
        let mut payload = Vec::new();
        let mut count = 0;
        for record in self.recorder.since(request.first).take(most) {
            payload.extend_from_slice(bytes_of(record));
            count += 1;
        }
        Ok(Answer { payload, ..Answer::with(RawRecords { count, ..request }) })
    }

    fn wait(&mut self, client: ClientId, message: &Message<'_>) {
        let (number, sequence) = (message.number, message.sequence);
        let request = match read::<RawWait>(message.argument) {
            Ok(request) if self.knows(client, request.ticket) => request,
            _ => return self.push_reply(client, number, sequence, Err(Errno::EINVAL)),
        };
        if self.waiters.iter().filter(|waiter| waiter.client == client).count() >= MAX_WAITS {
            return self.push_reply(client, number, sequence, Err(Errno::EAGAIN));
        }
        let deadline = self.now.saturating_add(request.timeout_ns);
        self.waiters.push(Waiter { client, sequence, request, deadline });
        self.answer_waiters();
    }

    /// Whether a ticket is of a client's work that is queued, or that ended not too long ago.
    fn knows(&self, client: ClientId, ticket: u64) -> bool {
        let queued = self.queue.iter().any(|s| s.client == client && s.ticket == ticket);
        queued || self.outcome(client, ticket).is_some()
    }

    /// What became of a client's ticket: when it was complete, or why it failed.
    fn outcome(&self, client: ClientId, ticket: u64) -> Option<Result<u64, Fault>> {
        let client = self.clients.iter().find(|c| c.id == client)?;
        let mut newest_first = client.outcomes.iter().rev();
        newest_first.find(|(ended, _)| *ended == ticket).map(|(_, outcome)| *outcome)
    }

    /// Remembers what became of a ticket, and answers those who wait for it.
    pub(super) fn remember(&mut self, client: ClientId, ticket: u64, outcome: Result<u64, Fault>) {
        if let Some(client) = self.clients.iter_mut().find(|c| c.id == client) {
            client.outcomes.push_back((ticket, outcome));
            if client.outcomes.len() > REMEMBERED {
                client.outcomes.pop_front();
            }
        }
        self.answer_waiters();
    }

    /// Answers those whose work is complete or has failed.
    fn answer_waiters(&mut self) {
        let mut index = 0;
        while let Some(waiter) = self.waiters.get(index) {
            let ticket = waiter.request.ticket;
            let Some(outcome) = self.outcome(waiter.client, ticket) else {
                index += 1;
                continue;
            };
            let (end, fault) = match outcome {
                Ok(end) => (end, RawFault::default()),
                Err(fault) => (0, fault.into()),
            };
            let waiter = self.waiters.remove(index);
            let due = match self.spec.pace {
                Pace::Wall if fault.kind == 0 => end / 1000,
                _ => 0,
            };
            let completed =
                if fault.kind == 0 { self.completed.max(ticket) } else { self.completed };
            self.finish_wait(&waiter, completed, end, fault, due);
        }
    }

    /// Answers those who have waited long enough.
    pub(super) fn expire_waiters(&mut self) {
        let now = self.now;
        while let Some(index) = self.waiters.iter().position(|waiter| waiter.deadline <= now) {
            let waiter = self.waiters.remove(index);
            let completed = self.completed.min(waiter.request.ticket - 1);
            self.finish_wait(&waiter, completed, 0, RawFault::default(), 0);
        }
    }

    fn finish_wait(
        &mut self,
        waiter: &Waiter,
        completed: u64,
        end: u64,
        fault: RawFault,
        due: u64,
    ) {
        let answer = RawWait { completed, card_time_ps: end, fault, ..waiter.request };
        let answer = Answer::with(answer).due(due);
        self.push_reply(waiter.client, RawWait::NUMBER, waiter.sequence, Ok(answer));
    }
}
