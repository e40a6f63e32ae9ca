// SPDX-License-Identifier: Apache-2.0
//! Cards that are threads of this process: each a thread, with a team of helpers if there are threads to
//! spare. Weights are read where the file lies in memory; everything else belongs to one card alone, and
//! what cards tell each other goes over a board.

mod board;
mod card;
mod memory;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spanker_plan::Plan;
use spanker_runtime::{BufferId, Place};

use crate::program::{Lowering, Room, Rooms, Space};
use crate::runner::{Outcome, Runner, Step, Timing, Want};
use crate::{Cut, LlmError, Network, Op, Recorder};
use board::{Boards, Link};
use card::{Card, Report};
use memory::Memory;

/// How long a card's thread looks for the next step before it sleeps: longer than sampling a token takes.
const LOOK: Duration = Duration::from_micros(200);

/// What a card's thread is told to do.
struct Job {
    programs: Arc<Vec<Vec<Op>>>,
    number: u64,
    traced: bool,
    read: Option<(Place, u64)>,
}

/// What it answers.
struct Done {
    seat: usize,
    report: Option<Report>,
}

/// A network on cards that are threads of this process.
///
/// The first card works on the thread that calls [`Runner::step`].
pub struct InProcess<B> {
    network: Arc<Network<B>>,
    lowering: Lowering,
    boards: Arc<Boards>,
    first: Card<B>,
    jobs: Vec<Sender<Job>>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
    steps: u64,
    trace: Option<(Instant, Recorder)>,
}

impl<B> std::fmt::Debug for InProcess<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcess")
            .field("cards", &self.lowering.seats.len())
            .finish_non_exhaustive()
    }
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> InProcess<B> {
    /// Lays a network out over threads: `threads` in all, shared out over the cards, at least one each.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run, [`LlmError::Unsupported`] if
    /// the system has not the memory or the threads.
    pub fn new(
        network: Arc<Network<B>>,
        plan: &Plan,
        context: usize,
        batch: usize,
        threads: usize,
    ) -> Result<Self, LlmError> {
        let seats = plan.layout.cards().len();
        let mut memories: Vec<Memory<B>> =
            (0..seats).map(|_| Memory::new(Arc::clone(&network))).collect();
        let mut sizes = Vec::new();
        let lowering = {
            let mut copies: Vec<Vec<u8>> = vec![Vec::new(); seats];
            let space = Space { context, batch };
            let mut put = |seat: usize, piece: &crate::Piece| match &piece.cut {
                Cut::Rows(rows) => {
                    let offset = network.rows_at(piece, rows)?.start as u64;
                    Ok(Place { buffer: memory::FILE, offset })
                }
                Cut::Columns(_) => {
                    let copy = &mut copies[seat];
                    let offset = copy.len() as u64;
                    network.copy_piece(piece, copy)?;
                    copy.resize(copy.len().next_multiple_of(64), 0);
                    Ok(Place { buffer: memory::COPIES, offset })
                }
            };
            let mut rooms = |_: usize, list: &[(Room, u64)]| {
                let first = memory::COPIES.0 + 1;
                sizes.push(list.to_vec());
                let numbered = list.iter().zip(first..);
                Ok(Rooms::new(numbered.map(|(&(room, _), id)| (room, BufferId(id)))))
            };
            let lowering = Lowering::new(&network, plan, space, &mut put, &mut rooms)?;
            for (memory, copy) in memories.iter_mut().zip(&copies) {
                memory.add(copy.len() as u64)?;
                memory.bytes_mut(memory::COPIES, |bytes| bytes.copy_from_slice(copy));
            }
            lowering
        };
        for (memory, list) in memories.iter_mut().zip(&sizes) {
            list.iter().try_for_each(|&(_, bytes)| memory.add(bytes))?;
        }
        let table = network.rope().table(0..context);
        for (memory, seat) in memories.iter_mut().zip(&lowering.seats) {
            let place = seat.rooms.place(Room::Table);
            memory.bytes_mut(place.buffer, |bytes| {
                bytes.copy_from_slice(bytemuck::cast_slice(&table))
            });
        }
        Self::start(network, lowering, memories, threads)
    }

    fn start(
        network: Arc<Network<B>>,
        lowering: Lowering,
        memories: Vec<Memory<B>>,
        threads: usize,
    ) -> Result<Self, LlmError> {
        let seats = lowering.seats.len();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let patient = seats.max(threads) <= cores;
        let boards = Arc::new(Boards::new(&lowering, patient));
        let share = |seat: usize| (threads / seats + usize::from(seat < threads % seats)).max(1);
        let mut cards = memories.into_iter().enumerate().map(|(seat, memory)| {
            let (stage, rank) = (lowering.seats[seat].stage, lowering.seats[seat].rank);
            let link = Link { boards: Arc::clone(&boards), seat, stage, rank };
            Card::new(memory, link, share(seat))
        });
        let first = cards.next().expect("a plan has cards");
        let (answer, done) = channel();
        let (mut jobs, mut handles) = (Vec::new(), Vec::new());
        for (index, card) in cards.enumerate() {
            let (sender, receiver) = channel();
            let answer = answer.clone();
            let work = move || serve(card, index + 1, &receiver, &answer);
            let named = std::thread::Builder::new().name(format!("spanker-card-{}", index + 1));
            // Without its sender, a thread that runs already ends.
            let refused =
                |error| LlmError::unsupported(format!("card {}: no thread: {error}", index + 1));
            handles.push(named.spawn(work).map_err(refused)?);
            jobs.push(sender);
        }
        Ok(InProcess {
            network,
            lowering,
            boards,
            first,
            jobs,
            done,
            threads: handles,
            steps: 0,
            trace: None,
        })
    }

    /// Records from now on what each card does when.
    pub fn record(&mut self, recorder: &Recorder) {
        self.trace = Some((Instant::now(), recorder.clone()));
    }

    /// The network.
    #[must_use]
    pub fn network(&self) -> &Arc<Network<B>> {
        &self.network
    }

    /// What a seat reads out for the host after a step.
    fn wanted(&self, seat: usize, want: Want) -> Option<(Place, u64)> {
        let last = self.lowering.last();
        let rooms = &self.lowering.seats[seat].rooms;
        match want {
            Want::Best(k) if seat == last.start => {
                let (room, cards) =
                    if last.len() == 1 { (Room::Best, 1) } else { (Room::AllBest, last.len()) };
                Some((rooms.place(room), u64::from(k) * 8 * cards as u64))
            }
            Want::Logits if last.contains(&seat) => {
                let vocab = &self.lowering.seats[seat].shard.vocab;
                Some((rooms.place(Room::Logits), (vocab.end - vocab.start) * 4))
            }
            _ => None,
        }
    }
}

/// A card's thread.
fn serve<B: AsRef<[u8]> + Send + Sync>(
    mut card: Card<B>,
    seat: usize,
    jobs: &Receiver<Job>,
    answer: &Sender<Done>,
) {
    while let Some(job) = next(jobs) {
        let report = card.run(&job.programs[seat], job.number, job.traced, job.read);
        if answer.send(Done { seat, report }).is_err() {
            return;
        }
    }
}

/// The next job, or nothing when there will be none.
fn next(jobs: &Receiver<Job>) -> Option<Job> {
    let begun = Instant::now();
    loop {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if begun.elapsed() > LOOK => return jobs.recv().ok(),
            Err(TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Runner for InProcess<B> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        self.lowering.check(step)?;
        let begun = Instant::now();
        self.steps += 1;
        let programs = Arc::new(self.lowering.programs(step, &|from, to| vec![from, to]));
        let traced = self.trace.is_some();
        for (index, jobs) in self.jobs.iter().enumerate() {
            let read = self.wanted(index + 1, step.want);
            let job = Job { programs: Arc::clone(&programs), number: self.steps, traced, read };
            if jobs.send(job).is_err() {
                return Err(LlmError::Panicked { card: self.lowering.seats[index + 1].card });
            }
        }
        let read = self.wanted(0, step.want);
        let mut reports: Vec<Option<Report>> =
            (0..self.lowering.seats.len()).map(|_| None).collect();
        reports[0] = self.first.run(&programs[0], self.steps, traced, read);
        for _ in 0..self.jobs.len() {
            let Ok(Done { seat, report }) = self.done.recv() else { break };
            reports[seat] = report;
        }
        let culprit = self.boards.culprit();
        if let Some(seat) = culprit.or_else(|| reports.iter().position(Option::is_none)) {
            return Err(LlmError::Panicked { card: self.lowering.seats[seat].card });
        }
        let reports: Vec<Report> = reports.into_iter().flatten().collect();
        self.keep(&reports, begun, step.past);
        Ok(outcome(step.want, begun.elapsed(), reports))
    }

    fn batch(&self) -> usize {
        self.lowering.batch
    }
}

impl<B> InProcess<B> {
    /// Adds what cards did to the trace.
    fn keep(&self, reports: &[Report], begun: Instant, token: usize) {
        let Some((origin, recorder)) = &self.trace else { return };
        let shift = begun.duration_since(*origin).as_secs_f64();
        for (seat, report) in self.lowering.seats.iter().zip(reports) {
            recorder.add(report.marks.iter().map(|&(mut mark)| {
                mark.card = seat.card as u32;
                mark.label.token = token as u32;
                mark.start += shift;
                mark.end += shift;
                mark
            }));
        }
    }
}

fn outcome(want: Want, wall: Duration, reports: Vec<Report>) -> Outcome {
    let cards = reports.len() as u32;
    let sync = reports.iter().map(|report| report.sync).sum::<Duration>() / cards.max(1);
    let sent = reports.iter().map(|report| report.sent).sum();
    let timing = Timing { wall, card: None, sync, sent };
    let mut outcome = Outcome { timing, ..Outcome::default() };
    match want {
        Want::Best(k) => {
            let read = reports.iter().find_map(|report| report.read.as_deref());
            outcome.best = crate::runner::candidates(read.unwrap_or(&[]), k as usize);
        }
        Want::Logits => {
            let parts = reports.iter().filter_map(|report| report.read.as_deref());
            let words = parts.flat_map(|part| part.as_chunks().0.iter());
            outcome.logits = Some(words.map(|&word| f32::from_le_bytes(word)).collect());
        }
        Want::Nothing => {}
    }
    outcome
}

impl<B> Drop for InProcess<B> {
    fn drop(&mut self) {
        self.jobs.clear();
        for handle in self.threads.drain(..) {
            // A card's thread catches the panics of its work.
            let _ = handle.join();
        }
    }
}
