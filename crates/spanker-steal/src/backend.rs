// SPDX-License-Identifier: Apache-2.0
//! What a backend is: something that computes the outputs of a range of items. What it computes and where is its own
//! business; how ranges are chosen, and what becomes of them, is not.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::task::Task;

/// Something that does items of a job: threads of this processor, a card, a GPU, another host.
///
/// A backend is asked for ranges of items again and again, in no order that it may rely on, some of them more than
/// once, and by up to [`Capabilities::in_flight`] threads at a time. The outputs of an item must depend on the item
/// alone. A backend may fail, panic, hang or give wrong bytes: that costs what it held at the time.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Backend, Failure};
/// use std::ops::Range;
///
/// struct Squares;
///
/// impl Backend for Squares {
///     fn id(&self) -> &'static str {
///         "squares"
///     }
///
///     fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
///         for (item, out) in items.zip(out.chunks_exact_mut(8)) {
///             out.copy_from_slice(&(item as u64 * item as u64).to_le_bytes());
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Backend: Send + Sync {
    /// What kind of backend this is. Backends of one kind may share it: reports number them.
    fn id(&self) -> &'static str;

    /// What the scheduler should know beforehand.
    fn capabilities(&self) -> Capabilities {
        Capabilities::PLAIN
    }

    /// Computes the outputs of `items` into `out`, which has the job's bytes for each of them, in order. What `out`
    /// holds before is not specified.
    ///
    /// # Errors
    ///
    /// A [`Failure`]: none of the items counts as done.
    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure>;

    /// Begins a task, which may be completed later and from any thread. A backend whose copies overlap its work
    /// implements this and has [`Capabilities::in_flight`] above one; for others, this runs the task to its end.
    fn submit(&self, mut task: Task) {
        let items = task.items();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run(items, task.output())));
        match outcome {
            Ok(Ok(())) => task.complete(),
            Ok(Err(failure)) => task.fail(failure),
            Err(panic) => task.fail(Failure::passing(panicked(panic.as_ref()))),
        }
    }
}

/// The most tasks at a time of one backend.
const MOST_LANES: usize = 256;

/// What a backend says about itself. All of it may be unknown: speeds are measured anyway.
///
/// # Examples
///
/// ```
/// use spanker_steal::Capabilities;
///
/// let pipelined = Capabilities { in_flight: 2, ..Capabilities::PLAIN };
/// assert_eq!(pipelined.rate, None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capabilities {
    /// How many tasks it works on at a time, 256 at most. Each has a thread of the scheduler.
    pub in_flight: usize,
    /// Items a second of one task, if known. It is what the first chunk is sized by.
    pub rate: Option<f64>,
    /// What a task costs however small it is, if known.
    pub launch: Option<Duration>,
    /// The most items of one task, if there is a limit.
    pub most_items: Option<usize>,
    /// Its results decide when backends disagree.
    pub trusted: bool,
}

impl Capabilities {
    /// One task at a time, nothing known, not trusted more than others.
    pub const PLAIN: Capabilities =
        Capabilities { in_flight: 1, rate: None, launch: None, most_items: None, trusted: false };

    /// Tasks at a time: one at least, and no more than a scheduler has threads for.
    pub(crate) fn lanes(&self) -> usize {
        self.in_flight.clamp(1, MOST_LANES)
    }
}

/// Why a backend could not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    what: String,
    lasting: bool,
}

impl Failure {
    /// A failure that may not happen again: the backend is asked for more.
    #[must_use]
    pub fn passing(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), lasting: false }
    }

    /// A failure after which the backend is of no use: it gets no more work in this run.
    #[must_use]
    pub fn lasting(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), lasting: true }
    }

    /// Whether the backend is of no use any more.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        self.lasting
    }
}

/// What a panic says.
pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic
        .downcast_ref::<&str>()
        .map(|words| (*words).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    match words {
        Some(words) => format!("panicked: {words}"),
        None => "panicked".to_owned(),
    }
}
