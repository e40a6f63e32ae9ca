// SPDX-License-Identifier: Apache-2.0
//! How a job fails. The first card that finds out fails the job with a fault and notifies its neighbours, who do
//! the same: every card of the job ends with the same fault, whoever found it.

use spanker_runtime::{Fault, FaultKind, abi};

use super::port::{Segment, notice_bytes};
use super::{Card, ClientId, NOTICE_BYTES, REMEMBERED};

impl Card {
    /// The fault of a job that is known to have failed.
    pub(super) fn dead_job(&self, job: u64) -> Option<Fault> {
        self.dead.iter().find(|fault| fault.job == job).copied()
    }

    /// Fails a job on this card and notifies the neighbours. The one that notified us gets it as well: our notice
    /// ends the message of that job on the wire, which breaks off here.
    pub(super) fn fail_job(&mut self, fault: Fault) {
        let job = fault.job;
        if self.dead_job(job).is_some() {
            return;
        }
        self.bury(fault);
        self.counters.faults += 1;
        self.note(abi::RECORD_FAULT, 0, fault.card, u64::from(fault.kind.code()));
        self.drop_submissions(job, fault);
        for lane in &mut self.lanes {
            lane.queue.retain(|send| send.job != job);
        }
        for port in &mut self.ports {
            port.receives.retain(|receive| receive.job != job);
        }
        for port in self.ports.iter_mut().filter(|port| port.usable()) {
            port.notices.push_back(fault);
            // A peer that reads none for so long has a worse problem than the loss of the oldest.
            if port.notices.len() > REMEMBERED {
                port.notices.pop_front();
            }
        }
        for index in 0..self.ports.len() {
            self.drain(index);
        }
        self.settle();
    }

    /// A neighbour has reported a fault.
    pub(super) fn noticed(&mut self, port: usize, fault: Fault) {
        self.note(abi::RECORD_NOTICE, port, fault.card, u64::from(fault.kind.code()));
        if self.queue.iter().any(|submission| submission.job == fault.job) {
            return self.fail_job(fault);
        }
        if self.dead_job(fault.job).is_none() {
            self.bury(fault);
        }
    }

    /// Remembers a job that has failed, and forgets the one that failed longest ago.
    fn bury(&mut self, fault: Fault) {
        self.dead.push_back(fault);
        if self.dead.len() > REMEMBERED {
            self.dead.pop_front();
        }
    }

    /// Queues notices that did not fit before.
    pub(super) fn send_notices(&mut self, index: usize) {
        let port = &mut self.ports[index];
        while let Some(fault) = port.notices.front() {
            let notice = Segment::Notice(notice_bytes(fault));
            if port.link.notify(notice, NOTICE_BYTES).is_err() {
                return;
            }
            port.notices.pop_front();
        }
    }

    /// The transfers of a port that no longer works fail their jobs.
    pub(super) fn fail_port(&mut self, index: usize) {
        let serial = self.spec.serial;
        let port = &self.ports[index];
        let mut jobs: Vec<u64> = port.receives.iter().map(|receive| receive.job).collect();
        let lane = self.lane_of(index);
        let sends = self.lanes[lane].queue.iter().filter(|send| send.port == index);
        jobs.extend(sends.map(|send| send.job));
        // What is on the wire without acknowledgement is lost as well.
        jobs.extend(self.queue.iter().filter(|s| s.sends_on(index)).map(|s| s.job));
        let faults: Vec<Fault> = jobs.iter().map(|&job| port.fault(serial, job)).collect();
        for fault in faults {
            self.fail_job(fault);
        }
    }

    /// A client is gone: its work ends, its buffers are free.
    pub fn disconnect(&mut self, client: ClientId) {
        let mut jobs: Vec<u64> =
            self.queue.iter().filter(|s| s.client == client).map(|s| s.job).collect();
        jobs.dedup();
        let pid = self.clients.iter().find(|c| c.id == client).map_or(0, |c| c.pid);
        self.note(abi::RECORD_CLIENT, 0, u64::from(pid), 0);
        self.waiters.retain(|waiter| waiter.client != client);
        for job in jobs {
            let card = self.spec.serial;
            self.fail_job(Fault { kind: FaultKind::Aborted, card, peer: 0, job });
        }
        self.memory.free_all(client);
        self.clients.retain(|c| c.id != client);
        self.replies.retain(|reply| reply.client != client);
        self.unsent = self.replies.iter().map(|reply| reply.bytes.len()).sum();
    }

    /// The card at the other end of a port is gone.
    pub fn lost(&mut self, port: usize) {
        self.ports[port].lost = true;
        self.ports[port].down();
        self.note_link(port);
        self.fail_port(port);
    }

    /// Cuts the link at a port.
    pub fn cut(&mut self, port: usize) {
        self.ports[port].cut = true;
        self.ports[port].down();
        self.note_link(port);
        self.fail_port(port);
    }

    /// Joins a cut link again, or trains one that gave up. What a link that works carries is lost.
    pub fn mend(&mut self, port: usize, now: u64) {
        if !self.ports[port].lost {
            if !self.ports[port].cut {
                self.cut(port);
            }
            self.ports[port].reconnect(now);
            self.note_link(port);
        }
    }

    /// A new wire leads to a card that has been started again.
    pub fn connect_port(&mut self, port: usize, now: u64) {
        if !self.ports[port].lost {
            self.lost(port);
        }
        self.ports[port].reconnect(now);
        self.note_link(port);
    }

    /// Sets the bit error rate of what a port sends. A rate that the saturation policy gives up on cuts
    /// the link.
    pub fn set_errors(&mut self, port: usize, bit_error_rate: f64) {
        if !self.ports[port].frames.set_errors(bit_error_rate) {
            self.cut(port);
        }
    }

    pub(super) fn note_link(&mut self, port: usize) {
        let state = u64::from(self.ports[port].link.state().bits());
        let peer = self.ports[port].peer.map_or(0, |peer| peer.serial);
        self.note(abi::RECORD_LINK, port, state, peer);
    }
}
