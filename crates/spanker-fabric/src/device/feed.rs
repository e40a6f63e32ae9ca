// SPDX-License-Identifier: Apache-2.0
//! A program as submissions of a size that cards take, once or many times over.

use std::ops::Range;

use spanker_runtime::{Descriptor, Work, encode_work};

/// Bytes that a submission has at most, unless a run between two fences has more.
const SUBMISSION: usize = 1 << 20;

/// Deals out the submissions of one card.
#[derive(Debug)]
pub(super) struct Feed<'a> {
    program: &'a [Descriptor],
    /// Runs of descriptors that end with a fence, and their bytes. No descriptor refers to another run.
    runs: Vec<(Range<usize>, usize)>,
    next: usize,
    left: usize,
}

impl<'a> Feed<'a> {
    /// The program, `repeats` times.
    pub(super) fn new(program: &'a [Descriptor], repeats: usize) -> Self {
        let mut runs = Vec::new();
        let mut start = 0;
        for (at, descriptor) in program.iter().enumerate() {
            let fence = matches!(descriptor.work, Work::Fence { .. });
            if fence || at + 1 == program.len() {
                let range = start..at + 1;
                start = at + 1;
                let bytes = encode_work(&program[range.clone()]).len();
                runs.push((range, bytes));
            }
        }
        Feed { program, runs, next: 0, left: repeats }
    }

    /// The next submission, behind `first` if there is something that must come first.
    pub(super) fn next(&mut self, first: Option<Work>) -> Option<Vec<Descriptor>> {
        let mut out: Vec<Descriptor> = first.map(Descriptor::from).into_iter().collect();
        let (front, mut bytes) = (out.len(), 0);
        while self.left > 0 && self.next < self.runs.len() {
            let (range, size) = &self.runs[self.next];
            if out.len() > front && bytes + size > SUBMISSION {
                break;
            }
            bytes += size;
            let moved = out.len();
            out.extend(self.program[range.clone()].iter().map(|descriptor| {
                let after = descriptor.after.map(|at| (at as usize - range.start + moved) as u32);
                Descriptor { after, work: descriptor.work.clone() }
            }));
            self.next += 1;
            if self.next == self.runs.len() {
                self.next = 0;
                self.left -= 1;
            }
        }
        (out.len() > front).then_some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_runtime::{BufferId, Landing, Place};

    #[test]
    fn submissions_of_a_repeated_program_keep_what_descriptors_wait_for() {
        let place = Place { buffer: BufferId(1), offset: 0 };
        let receive =
            Work::Receive { into: place, length: 8, port: 0, tag: 0, landing: Landing::Store };
        let send = Work::Send { from: place, length: 8, port: 1, tag: 0 };
        let fence = Work::Fence { not_before_ps: 0 };
        let program = [
            receive.into(),
            Descriptor { after: Some(0), work: send },
            Descriptor::from(fence.clone()),
        ];
        let mut feed = Feed::new(&program, 20_000);
        let (mut seen, mut submissions, mut first) = (0, 0, Some(fence));
        while let Some(work) = feed.next(first.take()) {
            submissions += 1;
            for (at, descriptor) in work.iter().enumerate() {
                if let Work::Send { .. } = descriptor.work {
                    assert_eq!(descriptor.after, Some(at as u32 - 1));
                    seen += 1;
                }
            }
            assert!(encode_work(&work).len() <= SUBMISSION + 64);
        }
        assert_eq!(seen, 20_000);
        assert!(submissions > 1);
    }
}
