// SPDX-License-Identifier: Apache-2.0
//! The half of the kernel that all threads share: what is still to be had, and how much of it a backend should take.
//! A claim of new items is one atomic addition. There is no clock, no thread and no record of who has what here:
//! that is the ledger's.

use std::ops::Range;

use crate::rule;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering};

/// The most backends of one job: sets of them are bits of one word.
pub const MOST_BACKENDS: usize = 128;

/// The most items of one job. Claims that come too late add to a cursor that is past its end; below this, that
/// cannot overflow.
pub const MOST_ITEMS: usize = 1 << 48;

/// Some backends, as bits.
pub(crate) type Set = u128;

/// The set of one backend.
pub(crate) fn only(backend: usize) -> Set {
    1 << backend
}

/// What a claim got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// These items.
    Take(Piece),
    /// Nothing for this backend at the moment; others may yet give items back.
    Wait,
    /// The run is over.
    Over,
}

/// Items that go to one backend together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The items.
    pub items: Range<usize>,
    pub(crate) why: Why,
    /// How often these items were given out in vain.
    pub(crate) attempts: u32,
    /// How often they failed, and on which backends.
    pub(crate) failures: u32,
    pub(crate) failed_on: Set,
    /// Backends that are not to have them.
    pub(crate) not_by: Set,
}

/// Why a piece is given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Nobody has had it.
    Fresh,
    /// Somebody had it and lost it.
    Again,
    /// Somebody has it for longer than the lease. Whoever takes it makes the lease lost.
    Overdue,
    /// It is done, and done again to compare.
    Audit,
}

impl Piece {
    /// Items that nobody has had in vain.
    pub(crate) fn new(items: Range<usize>, why: Why, not_by: Set) -> Piece {
        Piece { items, why, attempts: 0, failures: 0, failed_on: 0, not_by }
    }

    /// Whether the items are done already, and done again only to compare the bytes.
    #[must_use]
    pub fn is_audit(&self) -> bool {
        self.why == Why::Audit
    }
}

/// A run of items that nobody has had yet; one of each priority. It has a cache line (and its neighbour, which is
/// fetched with it) of its own: everybody writes to it.
#[repr(align(128))]
struct Cursor {
    next: AtomicUsize,
    end: usize,
}

impl Cursor {
    fn left(&self) -> usize {
        self.end.saturating_sub(self.next.load(Ordering::Relaxed))
    }

    /// Takes up to `want` items before `limit`. Whoever comes too late adds to a cursor that
    /// is past its end, by no more than was left, so that it never goes far.
    fn take(&self, want: usize, limit: usize) -> Option<Range<usize>> {
        if limit < self.end {
            return self.take_within(want, limit);
        }
        let seen = self.next.load(Ordering::Relaxed);
        if seen >= self.end {
            return None;
        }
        let want = want.min(self.end - seen);
        let start = self.next.fetch_add(want, Ordering::Relaxed);
        (start < self.end).then(|| start..self.end.min(start + want))
    }

    /// The same where somebody must read outputs before there is more: nobody gets an item from `limit` on.
    fn take_within(&self, want: usize, limit: usize) -> Option<Range<usize>> {
        let further = |next: usize| (next < limit).then(|| limit.min(next.saturating_add(want)));
        let start = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, further).ok()?;
        Some(start..limit.min(start.saturating_add(want)))
    }
}

/// What the ledger knows about a backend, for those who claim. Numbers are bits of `f64`.
struct Pace {
    /// Grains a second of one task; zero while unknown.
    rate: AtomicU64,
    /// The shortest chunk, and the longest, in seconds.
    floor: AtomicU64,
    cap: AtomicU64,
    launch: AtomicU64,
    /// The most items that it may have at once, for the time being.
    most: AtomicUsize,
    benched: AtomicBool,
}

/// What is left of a job, shared by all who claim.
///
/// [`Ledger`](crate::Ledger) is its other half. Items that come back are in a list under a lock, which is looked
/// at only while there are any.
pub struct Claims {
    grain: usize,
    cap: f64,
    cursors: Box<[Cursor]>,
    /// No item from here on is given out yet.
    limit: AtomicUsize,
    /// So many items are given out ahead of whoever reads the outputs.
    window: AtomicUsize,
    /// Items in the pool. Only a hint: the lock orders what is in it, and `stirs` makes sure that it is seen.
    pooled: AtomicUsize,
    pool: Mutex<Vec<Piece>>,
    paces: Box<[Pace]>,
    /// Seconds of the next chunk for each item that is left, grains a second of all tasks, and of the fastest; as bits
    /// of `f64`.
    part: AtomicU64,
    rates: AtomicU64,
    fastest: AtomicU64,
    closed: AtomicBool,
    /// How often something changed that those who wait may wait for.
    stirs: AtomicU64,
}

fn load(number: &AtomicU64) -> f64 {
    f64::from_bits(number.load(Ordering::Relaxed))
}

/// Changes a number. One that is the same already is not written: those who claim read it all the time.
fn store(number: &AtomicU64, value: f64) {
    if number.load(Ordering::Relaxed) != value.to_bits() {
        number.store(value.to_bits(), Ordering::Relaxed);
    }
}

impl Claims {
    /// Work of `bands`, the first of them first, for so many backends. Every band begins at a multiple of `grain`.
    pub(crate) fn new(bands: &[Range<usize>], grain: usize, backends: usize, cap: f64) -> Claims {
        let cursor =
            |band: &Range<usize>| Cursor { next: AtomicUsize::new(band.start), end: band.end };
        let pace = |_| Pace {
            rate: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            cap: AtomicU64::new(0),
            launch: AtomicU64::new(0),
            most: AtomicUsize::new(grain),
            benched: AtomicBool::new(false),
        };
        Claims {
            grain,
            cap,
            cursors: bands.iter().map(cursor).collect(),
            limit: AtomicUsize::new(usize::MAX),
            window: AtomicUsize::new(usize::MAX),
            pooled: AtomicUsize::new(0),
            pool: Mutex::new(Vec::new()),
            paces: (0..backends).map(pace).collect(),
            part: AtomicU64::new(0),
            rates: AtomicU64::new(0),
            fastest: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            stirs: AtomicU64::new(0),
        }
    }

    /// A number that changes whenever it is worth claiming again after [`Claim::Wait`].
    #[must_use]
    pub fn stirs(&self) -> u64 {
        self.stirs.load(Ordering::Acquire)
    }

    /// Has those who wait try again.
    pub(crate) fn stir(&self) {
        self.stirs.fetch_add(1, Ordering::Release);
    }

    /// Whether the run is over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Items that nobody holds.
    #[must_use]
    pub fn left(&self) -> usize {
        let fresh: usize = self.cursors.iter().map(Cursor::left).sum();
        fresh + self.pooled.load(Ordering::Relaxed)
    }

    /// Items for `backend`: one atomic addition where nothing has come back.
    #[must_use]
    pub fn claim(&self, backend: usize) -> Claim {
        let pace = &self.paces[backend];
        if self.closed.load(Ordering::Acquire) || pace.benched.load(Ordering::Relaxed) {
            return Claim::Over;
        }
        let want = self.chunk(pace);
        if let Some(piece) = self.take_back(backend, want, false) {
            return Claim::Take(piece);
        }
        if let Some(want) = want {
            let limit = self.limit.load(Ordering::Relaxed);
            for cursor in &self.cursors {
                if let Some(items) = cursor.take(want, limit) {
                    return Claim::Take(Piece::new(items, Why::Fresh, 0));
                }
            }
        }
        // Last what somebody may be about to answer.
        self.take_back(backend, want, true).map_or(Claim::Wait, Claim::Take)
    }

    /// How many items a backend should take now, in whole grains; none where the others would be through with
    /// everything before it has done one.
    fn chunk(&self, pace: &Pace) -> Option<usize> {
        let rate = load(&pace.rate);
        let most = pace.most.load(Ordering::Relaxed);
        if rate <= 0.0 {
            return Some(self.grain.min(most));
        }
        let left = self.left();
        let share = left.min(self.window.load(Ordering::Relaxed));
        let part = share as f64 * load(&self.part);
        let known = rule::Pace {
            rate,
            launch: load(&pace.launch),
            floor: load(&pace.floor),
            cap: load(&pace.cap),
        };
        let units = left as f64 / self.grain as f64;
        let (rates, fastest) = (load(&self.rates), load(&self.fastest));
        let grains = rule::units(&known, part, units, rates, fastest)?;
        Some(grains.saturating_mul(self.grain).min(most))
    }

    /// Takes items that have come back: lost ones first, then those that are only to be compared. A backend that is
    /// too slow for what is left takes only what not everybody may have.
    fn take_back(&self, backend: usize, want: Option<usize>, overdue: bool) -> Option<Piece> {
        if self.pooled.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut pool = self.pool.lock().expect("nobody panics with the pool");
        let may = |piece: &Piece| {
            piece.not_by & only(backend) == 0
                && (want.is_some() || piece.not_by != 0)
                && (overdue || piece.why != Why::Overdue)
        };
        let (place, _) = pool
            .iter()
            .enumerate()
            .filter(|(_, piece)| may(piece))
            .min_by_key(|(_, piece)| (piece.is_audit(), piece.items.start))?;
        let want = want.unwrap_or(self.grain);
        let piece = &mut pool[place];
        let taken = if piece.is_audit() || piece.items.len() <= want {
            pool.swap_remove(place)
        } else {
            let cut = piece.items.start + want;
            let first = Piece { items: piece.items.start..cut, ..piece.clone() };
            piece.items.start = cut;
            first
        };
        self.pooled.fetch_sub(taken.items.len(), Ordering::Relaxed);
        Some(taken)
    }

    /// Gives items back for others to take.
    pub(crate) fn give_back(&self, piece: Piece) {
        let mut pool = self.pool.lock().expect("nobody panics with the pool");
        self.pooled.fetch_add(piece.items.len(), Ordering::Relaxed);
        pool.push(piece);
        self.stir();
    }

    /// Takes all of `items` out of what was given back, if nobody has taken any of them.
    pub(crate) fn retract(&self, items: &Range<usize>) -> bool {
        let mut pool = self.pool.lock().expect("nobody panics with the pool");
        let ours = |piece: &Piece| {
            piece.why == Why::Overdue
                && items.start <= piece.items.start
                && piece.items.end <= items.end
        };
        let there: usize = pool.iter().filter(|piece| ours(piece)).map(|p| p.items.len()).sum();
        if there != items.len() {
            return false;
        }
        pool.retain(|piece| !ours(piece));
        self.pooled.fetch_sub(there, Ordering::Relaxed);
        true
    }

    /// Lets pieces that none of `available` may have go to anyone: they would never be done. Comparisons that none of
    /// `working` may make are taken out and returned.
    pub(crate) fn lift_bans(&self, available: Set, working: Set) -> Vec<Piece> {
        if self.pooled.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let mut pool = self.pool.lock().expect("nobody panics with the pool");
        for piece in pool.iter_mut().filter(|piece| !piece.is_audit()) {
            if available & !piece.not_by == 0 {
                piece.not_by = 0;
                self.stir();
            }
        }
        let hopeless = |piece: &mut Piece| piece.is_audit() && working & !piece.not_by == 0;
        let dropped: Vec<Piece> = pool.extract_if(.., hopeless).collect();
        let items: usize = dropped.iter().map(|piece| piece.items.len()).sum();
        self.pooled.fetch_sub(items, Ordering::Relaxed);
        dropped
    }

    /// What was given back and not taken yet, and whether it is only to be compared.
    pub(crate) fn given_back(&self) -> Vec<(Range<usize>, bool)> {
        let pool = self.pool.lock().expect("nobody panics with the pool");
        pool.iter().map(|piece| (piece.items.clone(), piece.is_audit())).collect()
    }

    /// How far the cursors have come in their bands: everything before was given out.
    pub(crate) fn given_out(&self) -> impl Iterator<Item = usize> + '_ {
        self.cursors.iter().map(|c| c.next.load(Ordering::Acquire).min(c.end))
    }

    /// Ends the run: nobody gets anything any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.stir();
    }

    /// Lets only so many items, in whole grains, be taken ahead of whoever reads the outputs.
    pub(crate) fn set_window(&self, items: usize) {
        self.window.store(items, Ordering::Relaxed);
        self.set_limit(items);
    }

    /// Lets items before `limit`, which does not cut a grain, be taken.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        self.stir();
    }

    /// Gives a backend nothing any more.
    pub(crate) fn bench(&self, backend: usize) {
        self.paces[backend].benched.store(true, Ordering::Relaxed);
        self.stir();
    }

    /// Tells what is known about a backend: items a second of a task, what a launch costs, the seconds of its shortest
    /// chunk, and the most items.
    pub(crate) fn publish(&self, backend: usize, rate: f64, launch: f64, floor: f64, most: usize) {
        let pace = &self.paces[backend];
        store(&pace.rate, rate / self.grain as f64);
        store(&pace.launch, launch);
        store(&pace.floor, floor);
        store(&pace.cap, rule::cap_seconds(self.cap, floor));
        let most = most.max(self.grain);
        if pace.most.load(Ordering::Relaxed) != most {
            pace.most.store(most, Ordering::Relaxed);
        }
    }

    /// Tells how many items a second all tasks do together, and the fastest of them.
    pub(crate) fn publish_rates(&self, rates: f64, fastest: f64) {
        store(&self.part, rule::part_seconds(rates));
        store(&self.rates, rates / self.grain as f64);
        store(&self.fastest, fastest / self.grain as f64);
    }
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claims").field("left", &self.left()).finish_non_exhaustive()
    }
}
