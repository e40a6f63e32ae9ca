// SPDX-License-Identifier: Apache-2.0
//! A product on one card behind the ABI: the right operand lies in its memory, rows of the left one come and results
//! go while it works on others. It knows nothing of other cards.

use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use nix::errno::Errno;
use spanker_fabric::device::Deadline;
use spanker_model::Quant;
use spanker_runtime::{
    BufferId, CardInfo, Descriptor, Error, Fault, Feature, Place, SpankerControl, Ticket, Work,
};
use spanker_steal::{Backend, Capabilities, Failure, Task};

use super::JobError;
use super::product::{GRAIN, Product};
use super::watch::{Unfinished, take_back, watch, words};
use super::worker::{Order, Worker};

/// Tasks on a card at a time: one is computed, another's rows come or its results go.
const IN_FLIGHT: usize = 2;
/// Bytes of the largest buffer of a task, about.
const TASK_BYTES: usize = 16 << 20;
/// How long a card that has one task is not asked for it because another may come: longer than whoever got an answer
/// takes for the next claim.
const GRACE: Duration = Duration::from_micros(500);

/// The types of operands and of what rows are rounded to, in the ABI's numbers.
pub(super) const WEIGHTS: u32 = number(Quant::Q4K);
const INPUTS: u32 = number(Quant::Q8K);

const fn number(quant: Quant) -> u32 {
    match quant.ggml_id() {
        Some(id) => id,
        None => panic!("GGML has no such type"),
    }
}

/// A product on one card.
///
/// The card gets rows as they are, in Q4_K, rounds them to Q8_K itself and multiplies: these are the steps of
/// [`HostMatmul`](ggml_spanker::HostMatmul), with its bits. Two tasks are in flight: a thread of the backend's own
/// is the only user of the card's handle, and it writes the rows of one task and reads the results of the other
/// before it waits.
///
/// A card that is gone, silent or answers nonsense has a lasting failure. Work that makes no progress for
/// `deadline.detect`, or takes `deadline.total`, is given up on the card, which is a passing failure, and so is a card
/// that is at work for another program. A card shows progress when it has done one of the steps of a task, so
/// `deadline.detect` is to be longer than sixteen rows take. `deadline.slow_after` is not looked at: whoever shares out the rows knows
/// how fast the card is.
#[derive(Debug)]
pub struct CardProduct {
    worker: Worker,
    most_items: usize,
}

impl CardProduct {
    /// Brings the right operand onto a card and makes room for tasks there. It is given back with the handle when
    /// the backend is dropped.
    ///
    /// # Errors
    /// [`JobError::Card`] for a card that has not the memory, or fails, and [`JobError::Thread`].
    pub fn new(
        product: Arc<Product>,
        card: SpankerControl,
        deadline: Deadline,
    ) -> Result<CardProduct, JobError> {
        let (worker, most_items) = Worker::start("card", move |ready, orders| {
            match CardContext::open(&product, &card, deadline) {
                Err(error) => drop(ready.send(Err(error))),
                Ok(mut context) => {
                    if ready.send(Ok(context.rows)).is_ok() {
                        context.serve(orders);
                    }
                }
            }
        })?;
        Ok(CardProduct { worker, most_items })
    }
}

impl Backend for CardProduct {
    fn id(&self) -> &'static str {
        "card"
    }

    fn capabilities(&self) -> Capabilities {
        let most_items = Some(self.most_items);
        Capabilities { in_flight: IN_FLIGHT, most_items, ..Capabilities::PLAIN }
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let bytes = out.len().checked_div(items.len()).unwrap_or(0);
        if bytes * items.len() != out.len() {
            return Err(Failure::passing(format!("{items:?} into {} bytes", out.len())));
        }
        let mut starts = items.clone().step_by(self.most_items);
        let mut parts = out.chunks_mut((self.most_items * bytes).max(1));
        starts.try_for_each(|start| {
            let end = items.end.min(start.saturating_add(self.most_items));
            self.worker.run(start..end, parts.next().unwrap_or_default())
        })
    }

    fn submit(&self, task: Task) {
        self.worker.submit(task);
    }
}

/// Room on a card for the rows and the results of one task.
#[derive(Debug, Clone, Copy)]
struct Slot {
    rows: BufferId,
    results: BufferId,
}

/// A task that the card has.
struct InFlight {
    order: Order,
    slot: Slot,
    ticket: Ticket,
    job: u64,
}

/// What a card needs to round rows before it multiplies them. Tasks use it one after the other.
#[derive(Debug, Clone, Copy)]
struct Rounding {
    /// Numbers of rows, from 0.
    ids: BufferId,
    /// Rows as f32.
    values: BufferId,
    /// Rows as the card multiplies them.
    blocks: BufferId,
}

/// What a card must have to round rows. One that has not multiplies them as they are: that takes longer, because it
/// rounds a row for each piece of the right operand, and gives the same bits.
const ROUNDING: [Feature; 3] = [Feature::WorkEmbed, Feature::WorkQuantize, Feature::MatmulTypes];

/// A card with what lies on it.
struct CardContext<'a> {
    product: &'a Product,
    card: &'a SpankerControl,
    info: CardInfo,
    deadline: Deadline,
    /// The most rows of a task.
    rows: usize,
    right: BufferId,
    /// Nothing for a card that multiplies rows as they are.
    rounding: Option<Rounding>,
    free: Vec<Slot>,
    flights: VecDeque<InFlight>,
    next_job: u64,
}

impl<'a> CardContext<'a> {
    fn open(
        product: &'a Product,
        card: &'a SpankerControl,
        deadline: Deadline,
    ) -> Result<CardContext<'a>, JobError> {
        let unknown = || match card.path() {
            Some(path) => path.display().to_string(),
            None => "a card".to_owned(),
        };
        let silent = |source| blamed(unknown(), "it says nothing", source);
        let info = card.info().map_err(silent)?;
        let rounds = ROUNDING.iter().try_fold(true, |all, &one| Ok(all && card.supports(one)?));
        let rounds = rounds.map_err(silent)?;
        let name = || format!("card {}", info.index);
        let [m, k, n] = product.dims();
        let fits = TASK_BYTES / (4 * k.max(n));
        let rows = fits.clamp(1, m).next_multiple_of(GRAIN);
        let allocate = |bytes: usize| {
            let what = format!("no room for {bytes} bytes");
            card.allocate(bytes as u64).map_err(|source| blamed(name(), &what, source))
        };
        let write = |buffer: BufferId, bytes: &[u8]| {
            let what = format!("{} bytes were not written", bytes.len());
            card.write(buffer, 0, bytes).map_err(|source| blamed(name(), &what, source))
        };
        let right = allocate(product.right().len())?;
        let rounding = match rounds {
            false => None,
            true => Some(Rounding {
                ids: allocate(4 * rows)?,
                values: allocate(rows * k * 4)?,
                blocks: allocate(rows * Quant::Q8K.row_bytes(k as u64) as usize)?,
            }),
        };
        let mut free = Vec::with_capacity(IN_FLIGHT);
        for _ in 0..IN_FLIGHT {
            let results = allocate(rows * product.output_bytes())?;
            free.push(Slot { rows: allocate(rows * product.row_bytes())?, results });
        }
        let numbers: Vec<u8> = (0..rows as u32).flat_map(u32::to_le_bytes).collect();
        if let Some(Rounding { ids, .. }) = rounding {
            write(ids, &numbers)?;
        }
        write(right, product.right())?;
        // A number that no other program is likely to begin with; zero stands for all jobs.
        let next_job = RandomState::new().build_hasher().finish() | 1;
        let flights = VecDeque::with_capacity(IN_FLIGHT);
        Ok(Self { product, card, info, deadline, rows, right, rounding, free, flights, next_job })
    }

    /// Takes orders as long as there is room on the card, and answers the oldest.
    fn serve(&mut self, orders: &Receiver<Order>) {
        loop {
            let next = match (self.flights.is_empty(), self.free.last()) {
                (true, _) => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (false, Some(_)) => orders.recv_timeout(GRACE),
                (false, None) => Err(RecvTimeoutError::Timeout),
            };
            match next {
                Ok(order) => self.begin(order),
                Err(RecvTimeoutError::Disconnected) if self.flights.is_empty() => return,
                Err(_) => self.finish(),
            }
        }
    }

    /// Brings the rows of a task onto the card and has it begin, or fails it.
    fn begin(&mut self, mut order: Order) {
        let Some(slot) = self.free.pop() else {
            return order.answer(Err(Failure::passing(self.named("it has no room"))));
        };
        match self.submit(&mut order, slot) {
            Ok((ticket, job)) => self.flights.push_back(InFlight { order, slot, ticket, job }),
            Err(failure) => {
                self.free.push(slot);
                order.answer(Err(failure));
            }
        }
    }

    fn submit(&mut self, order: &mut Order, slot: Slot) -> Result<(Ticket, u64), Failure> {
        let items = order.items();
        let left = self.product.left(&items, order.output().len())?;
        if items.len() > self.rows {
            let what = format!("{} rows, and there is room for {}", items.len(), self.rows);
            return Err(Failure::passing(self.named(what)));
        }
        self.card.write(slot.rows, 0, left).map_err(|error| self.failure(&error))?;
        let job = self.next_job;
        self.next_job = job.wrapping_add(1).max(1);
        let work = self.work(items.len() as u64, slot);
        let ticket = self.card.submit(job, &work).map_err(|error| self.failure(&error))?;
        Ok((ticket, job))
    }

    /// Decodes rows, rounds them, multiplies; or multiplies them as they are. With the fence, an emulated card that is held
    /// to its profile's pace is not done before it would be.
    fn work(&self, rows: u64, slot: Slot) -> Vec<Descriptor> {
        let [_, k, n] = self.product.dims().map(|size| size as u64);
        let at = |buffer: BufferId| Place { buffer, offset: 0 };
        let multiply = |a: BufferId, input: u32| Work::Matmul {
            a: at(a),
            b: at(self.right),
            out: at(slot.results),
            shape: [rows, k, n],
            types: [input, WEIGHTS],
        };
        let done = Work::Fence { not_before_ps: 0 };
        let Some(Rounding { ids, values, blocks }) = self.rounding else {
            return vec![multiply(slot.rows, WEIGHTS).into(), done.into()];
        };
        let decode = Work::Embed {
            table: at(slot.rows),
            ids: at(ids),
            into: at(values),
            rows,
            width: k,
            quant: WEIGHTS,
            first: 0,
            count: rows as u32,
        };
        let (from, into) = (at(values), at(blocks));
        let round = Work::Quantize { from, into, rows, width: k, quant: INPUTS };
        vec![decode.into(), round.into(), multiply(blocks, INPUTS).into(), done.into()]
    }

    /// Waits for the oldest task and answers it.
    fn finish(&mut self) {
        let Some(flight) = self.flights.pop_front() else { return };
        let outcome = self.wait(&flight);
        let InFlight { mut order, slot, .. } = flight;
        self.free.push(slot);
        let read = outcome.and_then(|()| {
            let read = self.card.read(slot.results, 0, order.output());
            read.map_err(|error| self.failure(&error))
        });
        order.answer(read);
    }

    /// Waits until a task is complete. When this fails, the card has let go of the task's buffers, or is lost.
    fn wait(&self, flight: &InFlight) -> Result<(), Failure> {
        let is_wanted = || flight.order.is_wanted();
        let (kind, what) = match watch(self.card, flight.ticket, self.deadline, is_wanted) {
            Ok(()) => return Ok(()),
            Err(Unfinished::Card(error)) => return Err(self.failure(&error)),
            Err(Unfinished::Pending(kind, what)) => (kind, what),
        };
        let fault = Fault { kind, card: self.info.serial, peer: 0, job: flight.job };
        Err(match take_back(self.card, flight.ticket, fault) {
            Ok(()) => Failure::passing(self.named(what)),
            // A card that does not let go of work does not do other work either.
            Err(error) => Failure::lasting(self.named(format!("{what}; {error}"))),
        })
    }

    fn failure(&self, error: &Error) -> Failure {
        let what = self.named(words(error));
        if is_lasting(error) { Failure::lasting(what) } else { Failure::passing(what) }
    }

    fn named(&self, what: impl Display) -> String {
        format!("card {}: {what}", self.info.index)
    }
}

fn blamed(card: String, what: &str, source: Error) -> JobError {
    let what = format!("{what}: {}", words(&source));
    JobError::Card { card, what, source }
}

/// Whether a card is of no use after an error. After a refusal it is, unless the card itself is what is missing.
fn is_lasting(error: &Error) -> bool {
    match error {
        Error::Ioctl { source, .. } => {
            matches!(source, Errno::ENODEV | Errno::ENXIO | Errno::EIO | Errno::ENOTTY)
        }
        Error::Fault(_) | Error::Incomplete { .. } => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use spanker_runtime::{FaultKind, REQUEST_TIMEOUT};

    use super::*;

    #[test]
    fn errors_after_which_a_card_is_of_no_use_are_lasting_and_refusals_are_not() {
        let refused = |source| Error::Ioctl { op: "SUBMIT", source };
        let nonsense = Error::Nonsense { op: "WAIT", what: "one byte".into() };
        let silent = Error::Unresponsive { op: "WAIT", waited: REQUEST_TIMEOUT };
        for error in [Error::Gone { op: "WAIT" }, nonsense, silent, refused(Errno::ENODEV)] {
            assert!(is_lasting(&error), "{error}");
        }
        let late = Error::Incomplete { ticket: Ticket(1), waited: REQUEST_TIMEOUT };
        let aborted = Fault { kind: FaultKind::Aborted, card: 1, peer: 0, job: 1 };
        for error in [late, Error::Fault(aborted), refused(Errno::EBUSY), refused(Errno::EINVAL)] {
            assert!(!is_lasting(&error), "{error}");
        }
    }
}
