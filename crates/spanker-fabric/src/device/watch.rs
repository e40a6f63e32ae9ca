// SPDX-License-Identifier: Apache-2.0
//! Waiting for a job on all its cards, and deciding who is at fault if it does not end well.

use std::time::Duration;

use spanker_collective::Rank;
use spanker_runtime::{
    Activity, CardState, CardTime, Error, Fault, FaultKind, PortState, SpankerControl, Ticket,
};

use super::error::{DeviceError, DeviceErrorKind};
use super::group::{DeviceGroup, Member};

/// How long cards may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// How long no card may get on with its work, and how long a card may take to say what it is doing. A
    /// card that is gone is found at once, one that is silent or does nothing in less than twice this time.
    pub detect: Duration,
    /// How long the whole may take, as waited by the host.
    pub total: Duration,
    /// How long it may take by the cards' clocks, for cards whose clock shows the time of their profile.
    pub slow_after: Option<Duration>,
}

impl Deadline {
    /// 300 ms without progress, a minute in total, no bound on card time.
    pub const USUAL: Deadline = Deadline {
        detect: Duration::from_millis(300),
        total: Duration::from_secs(60),
        slow_after: None,
    };

    /// How long one wait takes at most. The card's answer may take half as long again.
    fn slice(&self) -> Duration {
        (self.detect / 2).max(Duration::from_millis(1))
    }
}

/// What a card had to say when it was asked. An error is evidence too.
pub(super) type Answer = Result<CardState, Error>;

/// A job on all cards of a group.
#[derive(Debug)]
pub(super) struct Job<'g> {
    pub(super) group: &'g DeviceGroup<'g>,
    pub(super) number: u64,
    pub(super) deadline: Deadline,
}

impl Job<'_> {
    /// Waits for a ticket of each card, in turn. While a wait ends without news, all cards are asked what
    /// they do.
    pub(super) fn watch(&self, tickets: &[Ticket]) -> Result<Vec<CardTime>, DeviceError> {
        let slice = self.deadline.slice();
        let mut finished: Vec<Option<CardTime>> = vec![None; tickets.len()];
        let (mut spent, mut quiet) = (Duration::ZERO, Duration::ZERO);
        let mut before: Vec<u64> = Vec::new();
        let mut next = (!tickets.is_empty()).then_some(0);
        while let Some(rank) = next {
            match self.member(rank).control.wait(tickets[rank], slice) {
                Ok(time) => {
                    finished[rank] = Some(time);
                    next = finished.iter().position(Option::is_none);
                }
                Err(Error::Incomplete { .. }) => {
                    let answers = self.ask(None);
                    let Some(states) = all_well(&answers) else {
                        return Err(self.give_up(self.blame(&answers, None), &answers, tickets));
                    };
                    let progress: Vec<u64> = states.iter().map(|state| state.progress).collect();
                    quiet = if progress == before { quiet + slice } else { Duration::ZERO };
                    before = progress;
                    spent += slice;
                    let late = spent >= self.deadline.total;
                    if late || quiet >= self.deadline.detect {
                        let culprit =
                            self.stuck(&states, tickets, late && quiet < self.deadline.detect);
                        return Err(self.give_up(culprit, &answers, tickets));
                    }
                    // A card that has put the job aside has something to say.
                    let pending = || (0..tickets.len()).filter(|&rank| finished[rank].is_none());
                    let aside = pending().find(|&rank| states[rank].job != self.number);
                    next = aside.or_else(|| pending().next());
                }
                Err(error) => {
                    let fault = match &error {
                        Error::Fault(fault) => Some(*fault),
                        _ => None,
                    };
                    // A card that failed the job is well enough to be asked.
                    let answers = self.ask(fault.is_none().then_some((rank, error)));
                    return Err(self.give_up(self.blame(&answers, fault), &answers, tickets));
                }
            }
        }
        Ok(finished.into_iter().flatten().collect())
    }

    fn member(&self, rank: Rank) -> &Member<'_> {
        &self.group.members[rank]
    }

    /// Asks all cards what they do, except one whose answer is known.
    fn ask(&self, known: Option<(Rank, Error)>) -> Vec<Answer> {
        ask(&self.group.controls(), self.deadline.detect, known)
    }

    /// The culprit by what cards answered and, if nobody's answer is amiss, by what they report.
    fn blame(&self, answers: &[Answer], fault: Option<Fault>) -> DeviceError {
        if let Some(error) = amiss(answers, |rank| self.member(rank).index) {
            return error;
        }
        let Some(fault) = fault else { return DeviceError::refused("a wait failed") };
        let kind = match fault.kind {
            FaultKind::CardLost => DeviceErrorKind::Lost,
            FaultKind::LinkDown => DeviceErrorKind::LinkDown,
            FaultKind::Stuck => DeviceErrorKind::Stuck,
            FaultKind::Slow => DeviceErrorKind::Slow,
            FaultKind::Wrong => DeviceErrorKind::Wrong,
            FaultKind::Mismatch => DeviceErrorKind::Mismatch,
            _ => DeviceErrorKind::Aborted,
        };
        let index = |serial: u64| self.group.rank_of(serial).map(|rank| self.member(rank).index);
        let card = index(fault.card);
        let detail = match card {
            None if kind != DeviceErrorKind::Aborted => format!("serial {:x}", fault.card),
            _ => String::new(),
        };
        DeviceError::new(kind, card, detail).with_peer(index(fault.peer))
    }

    /// The culprit if all cards answer and none gets on: from a card with unfinished work, follow who waits
    /// for whom to one that waits for nobody.
    fn stuck(&self, states: &[CardState], tickets: &[Ticket], late: bool) -> DeviceError {
        let unfinished = |rank: &Rank| states[*rank].completed < tickets[*rank];
        let Some(first) = (0..tickets.len()).find(unfinished) else {
            return DeviceError::refused("a card does not say that its work is complete");
        };
        let mut seen = vec![first];
        let mut at = first;
        while let Activity::Sending { port, peer } | Activity::Receiving { port, peer } =
            states[at].activity
        {
            let there = self.group.rank_of(peer);
            let link = self.member(at).control.port(port);
            if link.is_ok_and(|link| link.state != PortState::Up) {
                let index = |rank: Rank| self.member(rank).index;
                let (kind, card) = (DeviceErrorKind::LinkDown, Some(index(at)));
                return DeviceError::new(kind, card, String::new()).with_peer(there.map(index));
            }
            let Some(there) = there else { break };
            at = there;
            if seen.contains(&at) {
                // Cards name one of those that they wait for. Where that leads in a circle, whoever waits
                // for nobody and is not done holds up the others.
                let waits = |rank: &Rank| {
                    let activity = states[*rank].activity;
                    matches!(activity, Activity::Sending { .. } | Activity::Receiving { .. })
                };
                let free = (0..tickets.len()).find(|rank| unfinished(rank) && !waits(rank));
                at = free.unwrap_or(at);
                break;
            }
            seen.push(at);
        }
        let card = Some(self.member(at).index);
        if late {
            let detail = format!("not done after {} ms", self.deadline.total.as_millis());
            return DeviceError::new(DeviceErrorKind::Slow, card, detail);
        }
        let detail = format!("no progress for {} ms", self.deadline.detect.as_millis());
        DeviceError::new(DeviceErrorKind::Stuck, card, detail)
    }

    /// Ends the job on all cards that can be reached, with the same fault.
    pub(super) fn give_up(
        &self,
        error: DeviceError,
        answers: &[Answer],
        tickets: &[Ticket],
    ) -> DeviceError {
        let serial = |index: Option<usize>| {
            let member = self.group.members.iter().find(|member| Some(member.index) == index);
            member.map_or(0, |member| member.serial)
        };
        let (card, peer) = (serial(error.card()), serial(error.peer()));
        let fault = Fault { kind: error.fault_kind(), card, peer, job: self.number };
        let slice = self.deadline.slice();
        std::thread::scope(|scope| {
            for (rank, member) in self.group.members.iter().enumerate() {
                if answers.get(rank).is_some_and(Result::is_err) {
                    continue;
                }
                let ticket = tickets.get(rank).copied();
                scope.spawn(move || {
                    // What a card answers changes nothing: the job is lost either way. When the wait ends
                    // the card has let go of its buffers.
                    if member.control.abort(fault).is_ok()
                        && let Some(ticket) = ticket
                    {
                        let _ = member.control.wait(ticket, slice);
                    }
                });
            }
        });
        let waiting = self.group.members.iter().zip(answers);
        let waiting = waiting.map(|(member, answer)| (member.index, self.words(answer))).collect();
        error.with_waiting(waiting).after_start()
    }

    /// What a card was doing.
    fn words(&self, answer: &Answer) -> String {
        let named = |peer: u64| match self.group.rank_of(peer) {
            Some(rank) => format!("card {}", self.member(rank).index),
            None => format!("serial {peer:x}"),
        };
        match answer {
            Ok(state) => match state.activity {
                Activity::Idle => "idle".to_owned(),
                Activity::Working => "working".to_owned(),
                Activity::Sending { peer, .. } => format!("sending to {}", named(peer)),
                Activity::Receiving { peer, .. } => format!("receiving from {}", named(peer)),
                _ => "doing something else".to_owned(),
            },
            Err(Error::Gone { .. }) => "gone".to_owned(),
            Err(error) => error.to_string(),
        }
    }
}

/// Asks all cards at once what they do, except one whose answer is known.
pub(super) fn ask(
    cards: &[&SpankerControl],
    timeout: Duration,
    mut known: Option<(Rank, Error)>,
) -> Vec<Answer> {
    let silent = known.as_ref().map(|(rank, _)| *rank);
    std::thread::scope(|scope| {
        let asked: Vec<_> = cards
            .iter()
            .enumerate()
            .map(|(rank, card)| {
                let ask = || scope.spawn(move || card.state(timeout));
                (silent != Some(rank)).then(ask)
            })
            .collect();
        let answer = |thread: Option<std::thread::ScopedJoinHandle<'_, Answer>>| match thread {
            Some(thread) => thread.join().unwrap_or(Err(Error::Gone { op: "STATE" })),
            None => Err(known.take().map_or(Error::Gone { op: "WAIT" }, |(_, error)| error)),
        };
        asked.into_iter().map(answer).collect()
    })
}

/// The card whose answer is the worst, if one's is no good.
pub(super) fn amiss(answers: &[Answer], index: impl Fn(Rank) -> usize) -> Option<DeviceError> {
    let weight = |error: &Error| match error {
        Error::Gone { .. } => 0,
        Error::Unresponsive { .. } => 1,
        Error::Nonsense { .. } => 2,
        _ => 3,
    };
    let bad = answers.iter().enumerate().filter_map(|(rank, answer)| {
        let error = answer.as_ref().err()?;
        Some((weight(error), rank, error))
    });
    let (weight, rank, error) = bad.min_by_key(|&(weight, rank, _)| (weight, rank))?;
    let (kind, detail) = match weight {
        0 => (DeviceErrorKind::Lost, String::new()),
        1 => (DeviceErrorKind::Stuck, error.to_string()),
        2 => (DeviceErrorKind::Wrong, error.to_string()),
        _ => (DeviceErrorKind::Refused, error.to_string()),
    };
    Some(DeviceError::new(kind, Some(index(rank)), detail))
}

/// The states, if every card gave one.
pub(super) fn all_well(answers: &[Answer]) -> Option<Vec<CardState>> {
    answers.iter().map(|answer| answer.as_ref().ok().copied()).collect()
}
