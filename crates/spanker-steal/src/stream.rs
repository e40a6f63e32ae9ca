// SPDX-License-Identifier: Apache-2.0
//! Outputs in order of the items, as they come, while the run goes on.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::dispatch::{Accepted, Run};
use crate::error::StealError;
use crate::report::Report;
use crate::sync::run::MutexGuard;

/// Outputs of consecutive items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The items.
    pub items: Range<usize>,
    /// Their outputs, one after the other.
    pub bytes: Vec<u8>,
}

impl Block {
    /// What is left of it on either side of `items`.
    fn without(self, items: &Range<usize>) -> impl Iterator<Item = Block> {
        let Block { items: all, bytes } = self;
        let size = bytes.len() / all.len().max(1);
        let before = all.start..items.start.clamp(all.start, all.end);
        let after = items.end.clamp(all.start, all.end)..all.end;
        [before, after].into_iter().filter(|part| !part.is_empty()).map(move |part| {
            let at = |item: usize| (item - all.start) * size;
            Block { bytes: bytes[at(part.start)..at(part.end)].to_vec(), items: part }
        })
    }
}

/// The outputs of a job in order; see
/// [`run_streaming`](crate::WorkStealingScheduler::run_streaming).
///
/// The run is looked after whenever the next block is asked for. Leases do not run out in between: what has been
/// answered by then counts. Where bytes are compared, a block waits for its comparisons.
pub struct Stream<'s> {
    run: Option<Run>,
    ready: BTreeMap<usize, Block>,
    next: usize,
    items: usize,
    window: usize,
    report: Option<Report>,
    _running: MutexGuard<'s, ()>,
}

impl<'s> Stream<'s> {
    pub(crate) fn new(
        run: Run,
        items: usize,
        window: usize,
        running: MutexGuard<'s, ()>,
    ) -> Stream<'s> {
        Stream {
            run: Some(run),
            ready: BTreeMap::new(),
            next: 0,
            items,
            window,
            report: None,
            _running: running,
        }
    }

    /// What happened, after the last block.
    #[must_use]
    pub fn report(&self) -> Option<&Report> {
        self.report.as_ref()
    }

    /// The block that comes next, if it is there and nobody doubts it.
    fn take_ready(&mut self) -> Option<Block> {
        let run = self.run.as_ref()?;
        let block = self.ready.get(&self.next)?;
        if run.ledger.is_doubtful(&block.items) {
            return None;
        }
        let block = self.ready.remove(&self.next)?;
        self.next = block.items.end;
        run.claims.set_limit(self.next.saturating_add(self.window));
        Some(block)
    }

    /// Lets the run go on for a moment.
    fn step(&mut self) -> Result<(), StealError> {
        let Some(run) = &mut self.run else { return Ok(()) };
        let mut accepted = VecDeque::new();
        let (ready, next) = (&mut self.ready, self.next);
        let mut tainted = None;
        run.step(&mut accepted, |items, accepted| {
            // All that was accepted before; what comes after is done again.
            for Accepted { items, out } in accepted.drain(..) {
                ready.insert(items.start, Block { items, bytes: out });
            }
            let first = ready.range(..items.start).next_back().map_or(items.start, |(&at, _)| at);
            let hit: Vec<usize> = ready.range(first..items.end).map(|(&at, _)| at).collect();
            for block in hit.iter().filter_map(|at| ready.remove(at)).collect::<Vec<_>>() {
                for rest in block.without(&items) {
                    ready.insert(rest.items.start, rest);
                }
            }
            if items.start < next {
                tainted = Some(items.start..items.end.min(next));
            }
        });
        if let Some(items) = tainted {
            return Err(StealError::Tainted { items });
        }
        for Accepted { items, out } in accepted {
            self.ready.insert(items.start, Block { items, bytes: out });
        }
        Ok(())
    }

    fn end(&mut self) -> Option<Result<Block, StealError>> {
        match self.run.take()?.end() {
            Ok(report) => {
                self.report = Some(report);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<Block, StealError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(block) = self.take_ready() {
                return Some(Ok(block));
            }
            let run = self.run.as_ref()?;
            if run.ledger.is_over() && (self.next == self.items || run.ledger.has_failed()) {
                return self.end();
            }
            if let Err(error) = self.step() {
                self.run.take()?.end().ok();
                return Some(Err(error));
            }
        }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            run.end().ok();
        }
    }
}

impl std::fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("next", &self.next).finish_non_exhaustive()
    }
}
