// SPDX-License-Identifier: Apache-2.0
//! Threads of this processor as a backend.

use std::ops::Range;

use crate::backend::{Backend, Capabilities, Failure};

/// A function that computes the outputs of items, run by so many threads at a time.
///
/// Its results are trusted where others disagree.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Backend, Cpu};
///
/// let lengths = Cpu::new(2, |items, out| {
///     for (item, out) in items.zip(out.chunks_exact_mut(8)) {
///         out.copy_from_slice(&item.to_string().len().to_le_bytes());
///     }
///     Ok(())
/// });
/// let mut out = [0; 8];
/// lengths.run(1234..1235, &mut out)?;
/// assert_eq!(usize::from_le_bytes(out), 4);
/// # Ok::<(), spanker_steal::Failure>(())
/// ```
pub struct Cpu<F> {
    threads: usize,
    work: F,
}

impl<F> Cpu<F>
where
    F: Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync,
{
    /// So many threads that call `work` with items and room for their outputs.
    #[must_use]
    pub fn new(threads: usize, work: F) -> Cpu<F> {
        Cpu { threads, work }
    }
}

impl<F> Backend for Cpu<F>
where
    F: Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync,
{
    fn id(&self) -> &'static str {
        "cpu"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { in_flight: self.threads, trusted: true, ..Capabilities::PLAIN }
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        (self.work)(items, out)
    }
}

impl<F> std::fmt::Debug for Cpu<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpu").field("threads", &self.threads).finish_non_exhaustive()
    }
}
