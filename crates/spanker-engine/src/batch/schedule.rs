// SPDX-License-Identifier: Apache-2.0
//! Which sequences take part in the next step, and with which of their tokens.
//!
//! Every sequence has tokens and a number of those that are computed, which catches up with them under a budget of rows
//! for each step. Sequences that wait for one token come first, so that nobody's text stops; then those whose text has
//! stopped, because they are computed again; what is left goes to prompts, in pieces, so that a short one need not wait for a
//! long one. A sequence for which there is no block is put back, and computed again when there is room: the one that was
//! admitted last.

use std::collections::VecDeque;
use std::ops::Range;

use spanker_model::KvShape;

use super::blocks::BlockPool;

/// A sequence's number.
pub(crate) type SequenceId = u64;

/// A sequence.
#[derive(Debug)]
pub(crate) struct Member {
    id: SequenceId,
    /// Its prompt, and what was generated.
    tokens: Vec<u32>,
    /// Tokens that steps have begun with.
    begun: usize,
    /// Tokens that are computed.
    computed: usize,
    /// Steps under way that it takes part in.
    flights: usize,
    /// Whether a step under way gives its next token.
    is_asked: bool,
    /// Guesses of what follows, for the next step to check.
    guesses: Vec<u32>,
    blocks: Vec<u32>,
    /// Those of its blocks whose blocks in layers with a window it holds.
    held: Range<usize>,
    /// Blocks whose content is known to others.
    known: usize,
    /// A block that is copied to its last one before it goes on.
    copy_of: Option<u32>,
    /// Whether it takes from the cache, and gives to it.
    reuses: bool,
    /// Whether somebody has seen some of its text: while it is computed again, that text stops.
    is_seen: bool,
    /// Whether nobody wants it any more.
    is_gone: bool,
}

impl Member {
    fn left(&self) -> usize {
        self.tokens.len() - self.begun
    }

    /// Blocks that its tokens need besides those that it has.
    fn lacks(&self) -> usize {
        let needed = KvShape::blocks_for(self.tokens.len() as u64) as usize;
        needed.saturating_sub(self.blocks.len())
    }

    /// Whether it could take part in the next step.
    fn waits(&self) -> bool {
        self.left() > 0 && !self.is_asked && !self.is_gone
    }

    /// Whether it waits for one token that follows others.
    fn decodes(&self) -> bool {
        self.left() == 1 && self.begun > 0
    }
}

/// What a step may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Rows.
    pub(crate) rows: usize,
    /// Rows of prompts, where others wait for a token.
    pub(crate) prompt_rows: usize,
    /// Sequences.
    pub(crate) members: usize,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberPart {
    pub(crate) id: SequenceId,
    /// Tokens that it has, and then those that are guessed.
    pub(crate) tokens: Vec<u32>,
    /// How many of them are guessed: what follows these is asked for as well.
    pub(crate) guessed: usize,
    pub(crate) past: usize,
    pub(crate) blocks: Vec<u32>,
    /// The same in layers with a window, where these have blocks of their own.
    pub(crate) windowed: Vec<u32>,
    /// Whether its next token is asked for.
    pub(crate) asks: bool,
}

impl MemberPart {
    /// Rows that something is asked for.
    pub(crate) fn outputs(&self) -> usize {
        if self.asks { 1 + self.guessed } else { 0 }
    }

    fn guesses(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.guessed..]
    }
}

/// Who asked for something in a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Asked {
    /// The sequence; nothing if nobody wants it any more.
    pub(crate) id: Option<SequenceId>,
    /// Guesses that were checked: there is an output after each of them, besides the one before the first.
    pub(crate) guesses: Vec<u32>,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StepParts {
    pub(crate) parts: Vec<MemberPart>,
    /// Blocks that are copied before: from, and to.
    pub(crate) copies: Vec<[u32; 2]>,
    /// The same in layers with a window, where these have blocks of their own.
    pub(crate) windowed_copies: Vec<[u32; 2]>,
}

impl StepParts {
    /// Rows of all parts.
    pub(crate) fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.tokens.len()).sum()
    }

    /// Rows that something is asked for.
    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(MemberPart::outputs).sum()
    }
}

/// Sequences on one copy of a model.
#[derive(Debug)]
pub(crate) struct Schedule {
    pool: BlockPool,
    /// In the order in which they were admitted.
    running: Vec<Member>,
    waiting: VecDeque<Member>,
    /// Sequences that run at the same time.
    parallel: usize,
    /// How often a sequence was put back.
    put_back: u64,
}

impl Schedule {
    pub(crate) fn new(pool: BlockPool, parallel: usize) -> Schedule {
        Schedule { pool, running: Vec::new(), waiting: VecDeque::new(), parallel, put_back: 0 }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Sequences that run, and that wait for their turn.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Tokens of a sequence that runs, in the mean.
    pub(crate) fn mean_length(&self) -> usize {
        let all: usize = self.running.iter().map(|member| member.tokens.len()).sum();
        all / self.running.len().max(1)
    }

    /// How often a sequence was put back for lack of blocks.
    pub(crate) fn put_back(&self) -> u64 {
        self.put_back
    }

    /// A sequence with a prompt waits for its turn.
    pub(crate) fn add(&mut self, id: SequenceId, tokens: Vec<u32>, reuses: bool) {
        self.wait(id, tokens, reuses, false);
    }

    /// A sequence of which somebody has seen text, here or elsewhere, waits to be computed again.
    pub(crate) fn resume(&mut self, id: SequenceId, tokens: Vec<u32>, reuses: bool) {
        self.wait(id, tokens, reuses, true);
    }

    fn wait(&mut self, id: SequenceId, tokens: Vec<u32>, reuses: bool, is_seen: bool) {
        self.waiting.push_back(Member {
            id,
            tokens,
            begun: 0,
            computed: 0,
            flights: 0,
            is_asked: false,
            guesses: Vec::new(),
            blocks: Vec::new(),
            held: 0..0,
            known: 0,
            copy_of: None,
            reuses,
            is_seen,
            is_gone: false,
        });
    }

    /// Sequences that wait for one token and could take part in the next step, in the order in which they do, with the
    /// positions that each sees.
    pub(crate) fn decoding(&self) -> impl Iterator<Item = (SequenceId, usize)> + '_ {
        let ready = self.running.iter().filter(|member| member.decodes() && member.waits());
        ready.map(|member| (member.id, member.tokens.len()))
    }

    /// Whether a sequence waits for more than one token: of its prompt, or because it is computed again.
    pub(crate) fn is_reading(&self) -> bool {
        self.running.iter().any(|member| member.waits() && !member.decodes())
    }

    /// Guesses of what follows, which the sequence's next step checks as far as there are rows and blocks for them.
    pub(crate) fn guess(&mut self, id: SequenceId, guesses: Vec<u32>) {
        if let Some(member) = self.running.iter_mut().find(|member| member.id == id) {
            member.guesses = guesses;
        }
    }

    /// The token that was pushed last was the next guess of the step that was over last: it is computed.
    pub(crate) fn accept(&mut self, id: SequenceId) {
        if let Some(member) = self.running.iter_mut().find(|member| member.id == id) {
            (member.begun, member.computed) = (member.begun + 1, member.computed + 1);
        }
    }

    /// What became of a sequence's guesses is known: blocks for those that were refused are free again.
    pub(crate) fn settle(&mut self, id: SequenceId) {
        let Some(member) = self.running.iter_mut().find(|member| member.id == id) else { return };
        let needed = KvShape::blocks_for(member.tokens.len() as u64) as usize;
        if member.flights == 0 && member.blocks.len() > needed {
            let held = member.held.end.min(needed);
            self.pool.release(&member.blocks[held..member.held.end]);
            member.held.end = held;
            let spare = member.blocks.split_off(needed);
            self.pool.give_back(&spare);
        }
    }

    /// The next token of a sequence.
    pub(crate) fn push(&mut self, id: SequenceId, token: u32) {
        if let Some(member) = self.running.iter_mut().find(|member| member.id == id) {
            member.tokens.push(token);
            member.is_seen = true;
        }
    }

    /// Nobody wants a sequence any more. Its blocks are free as soon as no step under way uses them.
    pub(crate) fn remove(&mut self, id: SequenceId) {
        self.waiting.retain(|member| member.id != id);
        if let Some(at) = self.running.iter().position(|member| member.id == id) {
            self.running[at].is_gone = true;
            self.release(at);
        }
    }

    /// Frees the blocks of a sequence that nobody wants, if no step uses them.
    fn release(&mut self, at: usize) {
        if self.running[at].is_gone && self.running[at].flights == 0 {
            let mut member = self.running.remove(at);
            self.leave(&mut member, true);
        }
    }

    /// Gives a sequence's blocks back. What is in them is known to others from now on.
    fn leave(&mut self, member: &mut Member, knows: bool) {
        if let Some(original) = member.copy_of.take() {
            // Its copy was never made.
            self.pool.copied(original);
            member.computed = member.known * spanker_model::KV_BLOCK as usize;
        }
        if knows && member.reuses {
            let tokens = &member.tokens[..member.computed];
            self.pool.know(&mut member.blocks, tokens, member.known, true);
        }
        self.pool.release(&member.blocks[member.held.clone()]);
        member.held = 0..0;
        self.pool.give_back(&member.blocks);
        member.blocks.clear();
        member.guesses.clear();
        (member.begun, member.computed, member.known, member.is_asked) = (0, 0, 0, false);
    }

    /// Sequences that wait go on as far as there is room. Gives those that begin, with the tokens that they need not
    /// compute.
    pub(crate) fn admit(&mut self) -> Vec<(SequenceId, usize)> {
        let mut admitted = Vec::new();
        while self.running.len() < self.parallel {
            let Some(member) = self.waiting.front() else { break };
            // A prompt that goes to the end of the blocks would be put back at once, or another whose blocks it takes.
            let shared = if member.reuses { self.pool.in_use(&member.tokens) } else { 0 };
            let owed: usize = self.running.iter().map(Member::lacks).sum();
            let needed = member.lacks() - shared + owed;
            if !self.running.is_empty() && needed > self.pool.available() {
                break;
            }
            let Some(mut member) = self.waiting.pop_front() else { break };
            if member.reuses {
                let reused = self.pool.reuse(&member.tokens);
                member.held = reused.held..reused.blocks.len();
                (member.blocks, member.copy_of) = (reused.blocks, reused.copy_of);
                (member.begun, member.computed) = (reused.tokens, reused.tokens);
                member.known = member.blocks.len() - usize::from(member.copy_of.is_some());
            }
            admitted.push((member.id, member.computed));
            self.running.push(member);
        }
        admitted
    }

    /// The next step, if there is anything to do that no step under way must come before.
    pub(crate) fn next(&mut self, budget: Budget) -> Option<StepParts> {
        let mut step = StepParts::default();
        // Nobody's text stops for somebody's prompt.
        self.fill(&mut step, budget.rows, budget.members, |member| member.decodes());
        let decoding = step.rows();
        // Whose text has stopped goes on as soon as it can, all of them at about the same time.
        self.fill(&mut step, budget.rows, budget.members, |member| {
            member.is_seen && !member.decodes()
        });
        let rows = match step.parts.len() {
            0 => budget.rows,
            _ => (decoding + budget.prompt_rows).min(budget.rows),
        };
        self.fill(&mut step, rows, budget.members, |member| !member.is_seen && !member.decodes());
        (!step.parts.is_empty()).then_some(step)
    }

    /// Lets sequences take part in a step, in the order in which they were admitted, up to so many rows and sequences. One
    /// that could use all rows leaves half of them to those behind it, as far as these need them: nobody waits until
    /// somebody's long prompt is through.
    fn fill(
        &mut self,
        step: &mut StepParts,
        rows: usize,
        members: usize,
        is_meant: impl Fn(&Member) -> bool,
    ) {
        let mut at = 0;
        while at < self.running.len() && step.parts.len() < members && step.rows() < rows {
            let member = &self.running[at];
            if member.waits() && is_meant(member) {
                let free = rows - step.rows();
                let behind =
                    self.running[at + 1..].iter().filter(|one| one.waits() && is_meant(one));
                let behind = behind.take(members - step.parts.len() - 1).map(Member::left);
                let spare = free.saturating_sub(behind.sum());
                let count = member.left().min(spare.max(free.div_ceil(2)));
                if !self.provide(at, member.begun + count, step) {
                    // Another has its place, or it waits for the next step.
                    at += usize::from(self.running.get(at).is_some_and(|next| next.flights > 0));
                    continue;
                }
                // Nobody behind it waits for a row because of a guess.
                let guesses = self.guesses(at, count, spare.saturating_sub(count));
                self.take_part(at, count, guesses, step);
            }
            at += 1;
        }
    }

    /// Gets blocks for the first `tokens` of a member. Where there are none, the last member that is not under way gives
    /// its own up, and comes back when there is room. False if that is the member itself.
    fn provide(&mut self, at: usize, tokens: usize, step: &StepParts) -> bool {
        let needed = KvShape::blocks_for(tokens as u64) as usize;
        while self.running[at].held.end < needed {
            let member = &mut self.running[at];
            if member.blocks.len() == member.held.end {
                member.blocks.extend(self.pool.take());
            }
            // Of a new block, that in layers with a window as well.
            let block = member.blocks.get(member.held.end).copied();
            if block.is_some_and(|block| self.pool.hold(block)) {
                self.running[at].held.end += 1;
                continue;
            }
            let taken = |id: SequenceId| step.parts.iter().any(|part| part.id == id);
            let idle = |member: &Member| member.flights == 0 && !taken(member.id);
            let last = self.running.iter().rposition(idle).filter(|last| *last >= at);
            let Some(last) = last else { return false };
            let mut member = self.running.remove(last);
            self.leave(&mut member, true);
            self.put_back += 1;
            self.waiting.push_front(member);
            if last == at {
                return false;
            }
        }
        true
    }

    /// The guesses that a step can check behind so many tokens of a member: as many as there are rows for, and blocks that
    /// nobody else needs.
    fn guesses(&mut self, at: usize, count: usize, rows: usize) -> Vec<u32> {
        let owed: usize = self.running.iter().map(Member::lacks).sum();
        let member = &mut self.running[at];
        let mut guesses = std::mem::take(&mut member.guesses);
        let end = member.begun + count;
        guesses.truncate(if end == member.tokens.len() { rows } else { 0 });
        let needed = |guesses: usize| KvShape::blocks_for((end + guesses) as u64) as usize;
        while member.held.end < needed(guesses.len()) {
            if member.blocks.len() == member.held.end && self.pool.available() > owed {
                member.blocks.extend(self.pool.take());
            }
            let block = member.blocks.get(member.held.end).copied();
            if block.is_some_and(|block| self.pool.hold(block)) {
                member.held.end += 1;
            } else {
                let places = member.held.end * spanker_model::KV_BLOCK as usize;
                guesses.truncate(places.saturating_sub(end));
            }
        }
        guesses
    }

    /// Puts tokens of the member at a place into a step, and guesses behind them.
    fn take_part(&mut self, at: usize, count: usize, guesses: Vec<u32>, step: &mut StepParts) {
        let member = &mut self.running[at];
        if let Some(original) = member.copy_of.take() {
            let copy = member.blocks[member.known];
            step.copies.push([original, copy]);
            step.windowed_copies.extend(self.pool.windowed_copy(original, copy));
        }
        let end = member.begun + count;
        let asks = end == member.tokens.len();
        step.parts.push(MemberPart {
            id: member.id,
            tokens: member.tokens[member.begun..end].iter().chain(&guesses).copied().collect(),
            guessed: guesses.len(),
            past: member.begun,
            blocks: member.blocks.clone(),
            windowed: self.pool.windowed(&member.blocks, &member.held),
            asks,
        });
        member.begun = end;
        member.flights += 1;
        member.is_asked = asks;
    }

    /// A step has begun: what it copies may change after it, and what windows have left behind.
    pub(crate) fn begun(&mut self, step: &StepParts) {
        for part in &step.parts {
            let Some(member) = self.running.iter_mut().find(|member| member.id == part.id) else {
                continue;
            };
            let seen = self.pool.first_seen(member.begun).clamp(member.held.start, member.held.end);
            self.pool.release(&member.blocks[member.held.start..seen]);
            member.held.start = seen;
        }
        step.copies.iter().for_each(|[original, _]| self.pool.copied(*original));
    }

    /// A step is over. Gives who asked for something, in the order of the outputs.
    pub(crate) fn done(&mut self, step: &StepParts) -> Vec<Asked> {
        let mut asked = Vec::new();
        for part in &step.parts {
            let at = self.running.iter().position(|member| member.id == part.id);
            let asking = |id| Asked { id, guesses: part.guesses().to_vec() };
            let Some(at) = at else {
                asked.extend(part.asks.then(|| asking(None)));
                continue;
            };
            let member = &mut self.running[at];
            member.flights -= 1;
            member.computed = member.computed.max(part.past + part.tokens.len() - part.guessed);
            if part.asks {
                member.is_asked = false;
                asked.push(asking((!member.is_gone).then_some(part.id)));
            }
            if member.reuses && !member.is_gone {
                let tokens = &member.tokens[..member.computed];
                member.known = self.pool.know(&mut member.blocks, tokens, member.known, false);
            }
            self.release(at);
        }
        asked
    }
}

#[cfg(test)]
mod tests;
