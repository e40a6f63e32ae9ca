// SPDX-License-Identifier: Apache-2.0
//! The process as one rank of many: how MPI is started, who the others are, and how it ends.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_collective::{Algorithm, Collective, DType, ReduceOp};
use spanker_fabric::wire::Notice;
use spanker_fabric::{Call, Fabric, FabricError, Launcher, launcher};

use crate::fabric::{MpiFabric, NOTICES};
use crate::raw::{Comm, Requests};
use crate::watch::Watch;
use crate::watchdog::{Blocking, watchdog};
use crate::{MpiError, raw};

/// How long starting MPI may take.
const STARTING: Duration = Duration::from_secs(120);
/// How long a rank that is done waits for the others before it leaves without them.
const LEAVING: Duration = Duration::from_secs(60);
/// Bytes in which a rank introduces itself. Every version says it in as many, and its version in the same place.
const CARD: usize = 512;
const MAGIC: &[u8; 8] = b"SPANKER\0";

/// This process as a rank. There is one for each process, and only the thread that made it may use it.
///
/// When the last of a world and its fabrics is dropped and nothing has failed, the ranks wait for each other and
/// MPI is ended. After a fault MPI is never ended, because that could wait for ever: the process ends, and its
/// launcher cleans up.
#[derive(Debug)]
pub struct World {
    hosts: Vec<String>,
    library: String,
    own: RefCell<MpiFabric>,
    life: Rc<Life>,
    one_thread: PhantomData<*const ()>,
}

/// What the world and its fabrics share. It ends MPI when the last of them is gone.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) watch: Arc<Watch>,
    /// More ranks on this host than cores: a rank that waits gives up its core at once.
    pub(crate) crowded: bool,
    /// How often it asks MPI before it does so: Open MPI gives up the core by itself when ranks are many.
    pub(crate) polls_per_yield: u32,
    pub(crate) faulty: Cell<bool>,
    /// Communicators of fabrics that are gone, and how many ranks have not said good-bye there yet.
    pub(crate) ended: RefCell<Vec<(Comm, usize)>>,
    comm: Comm,
}

/// What a rank says of itself.
struct Card {
    version: String,
    pid: i32,
    /// The machine and the space of process numbers.
    place: String,
    host: String,
}

fn read_line(path: &str) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

impl Card {
    fn own() -> Card {
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Card {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: i32::try_from(std::process::id()).unwrap_or(0),
            place: format!(
                "{} {}",
                read_line("/proc/sys/kernel/random/boot_id"),
                namespace.display()
            ),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        }
    }

    fn bytes(&self) -> [u8; CARD] {
        let mut out = [0; CARD];
        out[..8].copy_from_slice(MAGIC);
        let mut put = |at: usize, most: usize, text: &str| {
            let len = text.len().min(most);
            out[at..at + len].copy_from_slice(&text.as_bytes()[..len]);
        };
        put(8, 32, &self.version);
        put(44, 84, &self.place);
        put(128, CARD - 128, &self.host);
        out[40..44].copy_from_slice(&self.pid.to_le_bytes());
        out
    }

    fn of(bytes: &[u8]) -> Option<Card> {
        if bytes.len() != CARD || !bytes.starts_with(MAGIC) {
            return None;
        }
        let text = |range: std::ops::Range<usize>| {
            let field = &bytes[range];
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).into_owned()
        };
        let pid = i32::from_le_bytes(bytes[40..44].try_into().ok()?);
        Some(Card { version: text(8..40), pid, place: text(44..128), host: text(128..CARD) })
    }
}

/// The library's name and number, without where it was built.
fn short(version: &str) -> String {
    let first = version.split([',', ';']).next().unwrap_or(version).trim();
    first
        .replace("Version:", "")
        .replace(" v", " ")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

/// Refuses a launcher that belongs to another MPI.
fn check_launcher(library: &str, ranks: usize) -> Result<(), MpiError> {
    let Some((found, started)) = launcher().filter(|(_, started)| ranks == 1 && *started > 1)
    else {
        return Ok(());
    };
    let launcher = match found {
        Launcher::OpenMpi => "Open MPI's mpirun",
        Launcher::Pmi => "a launcher of MPICH's family",
        _ => "srun",
    };
    let right = match (library.starts_with("Open MPI"), found) {
        (_, Launcher::Slurm) => "an 'srun --mpi=' that this MPI knows, or its own mpirun",
        (true, _) => "Open MPI's mpirun (Debian: mpirun.openmpi)",
        (false, _) => "MPICH's mpirun (Debian: mpirun.mpich)",
    };
    Err(MpiError::Launcher { library: library.to_owned(), launcher, ranks: started, right })
}

/// Everyone's card, in rank order, or why they cannot work together.
fn introductions(all: &[u8]) -> Result<Vec<Card>, MpiError> {
    let mut cards: Vec<Card> = Vec::new();
    for (rank, bytes) in all.chunks(CARD).enumerate() {
        let card = Card::of(bytes).ok_or(MpiError::Stranger { rank })?;
        if let Some(first) = cards.first().filter(|first| first.version != card.version) {
            let (ours, theirs) = (first.version.clone(), card.version);
            return Err(MpiError::Version { rank, ours, theirs });
        }
        cards.push(card);
    }
    Ok(cards)
}

/// The MPI that this program was built for, as in `Open MPI 4.1.4`. MPI need not be started for it.
///
/// # Errors
/// What MPI says.
pub fn library() -> Result<String, MpiError> {
    Ok(short(&raw::library_version()?))
}

impl World {
    /// Starts MPI and learns who the other ranks are.
    ///
    /// # Errors
    /// If MPI cannot be started or was started before, if another MPI's launcher started the program, or if
    /// ranks run different versions.
    pub fn start() -> Result<World, MpiError> {
        let guard = watchdog().arm(Blocking::Start, Instant::now() + STARTING);
        raw::start()?;
        drop(guard);
        let all = Comm::world();
        let (rank, ranks, library) = (all.rank()?, all.size()?, library()?);
        check_launcher(&library, ranks)?;
        let guard = watchdog().arm(Blocking::Introduction, Instant::now() + STARTING);
        let own = Card::own();
        let cards = introductions(&all.all_gather(&own.bytes())?)?;
        let pid = |card: &Card| (card.place == own.place).then_some(card.pid);
        let pids: Vec<Option<i32>> = cards.iter().map(pid).collect();
        let watch = Arc::new(Watch::new(rank, &pids));
        // Nobody has left yet, so every process number still belongs to the rank that sent it.
        all.all_gather(&[0])?;
        let (comm, group) = (all.duplicate()?, all.duplicate()?);
        drop(guard);
        watchdog().introduce(rank, &watch);
        let here = pids.iter().flatten().count();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (crowded, faulty, ended) = (here > cores, Cell::new(false), RefCell::default());
        let polls_per_yield = if library.starts_with("Open MPI") { 8 } else { 1 };
        let life =
            Rc::new(Life { rank, ranks, watch, crowded, polls_per_yield, faulty, ended, comm });
        let own = RefCell::new(MpiFabric::new(&life, group));
        let hosts = cards.into_iter().map(|card| card.host).collect();
        Ok(World { hosts, library, own, life, one_thread: PhantomData })
    }

    /// This process's rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.life.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.life.ranks
    }

    /// The host of each rank.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// The MPI that this is, as in `Open MPI 4.1.4`.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// A fabric of all ranks, whose messages are apart from those of all others. Every rank must ask for it.
    /// A rank that waits longer than `timeout` for the others to do so ends with an error.
    ///
    /// # Errors
    /// What MPI says if it cannot.
    pub fn fabric(&self, timeout: Duration) -> Result<MpiFabric, MpiError> {
        let guard = watchdog().arm(Blocking::Duplicate, Instant::now() + timeout);
        let comm = Comm::world().duplicate()?;
        drop(guard);
        Ok(MpiFabric::new(&self.life, comm))
    }

    /// Makes sure that all ranks have the same `value` of `what`, say of a plan. Every rank must call it.
    ///
    /// # Errors
    /// [`FabricError::Mismatch`] with two ranks that differ and their values, the same on all ranks; or the fault
    /// that kept the ranks from comparing.
    pub fn agree(
        &self,
        what: &'static str,
        value: u64,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        let call = Call {
            collective: Collective::Barrier,
            algorithm: Algorithm::OneShot,
            elements: 0,
            dtype: DType::U8,
            op: ReduceOp::Sum,
            plan: value,
        };
        self.own.borrow_mut().commit(&call, deadline).map_err(|error| match error {
            FabricError::Mismatch { rank, peer, field: "schedule", ours, theirs } => {
                FabricError::Mismatch { rank, peer, field: what, ours, theirs }
            }
            other => other,
        })
    }

    /// Whether this rank is the one that prints a fault that all ranks have: the lowest that lives.
    #[must_use]
    pub fn speaks(&self) -> bool {
        self.life.watch.check();
        self.life.watch.is_lowest()
    }

    /// Whether a rank is known to be dead. Ranks of other hosts are not watched.
    #[must_use]
    pub fn is_dead(&self, rank: usize) -> bool {
        self.life.watch.check();
        rank < self.life.ranks && self.life.watch.is_dead(rank)
    }

    /// Ends without the others: MPI is not ended when this is dropped, as after a fault.
    pub fn give_up(&self) {
        self.life.faulty.set(true);
    }
}

impl Life {
    /// Waits until everyone is done. Returns false if somebody never will be.
    fn everyone_leaves(&self) -> Result<bool, MpiError> {
        let (begun, mut receiving, mut completed) =
            (Instant::now(), Requests::default(), Vec::new());
        receiving.barrier(self.comm)?;
        let mut next_look = begun;
        loop {
            receiving.poll(&mut completed)?;
            if receiving.left() == 0 {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= next_look {
                if self.watch.check().is_some() || now >= begun + LEAVING {
                    return Ok(false);
                }
                next_look = now + Duration::from_millis(5);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Life {
    /// Reads the notices that nobody has waited for, up to everyone's last: MPI wants no message left over.
    fn read_leftovers(&self) -> Result<(), MpiError> {
        let begun = Instant::now();
        for (comm, mut expected) in self.ended.borrow_mut().drain(..) {
            while expected > 0 && begun.elapsed() < Duration::from_secs(1) {
                match comm.probe(NOTICES)? {
                    None => std::thread::yield_now(),
                    Some((from, len)) => {
                        let notice = Notice::of(&comm.receive(from, NOTICES, len)?);
                        expected -= usize::from(notice == Some(Notice::Left));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if self.faulty.get() || std::thread::panicking() {
            return;
        }
        if matches!(self.everyone_leaves(), Ok(true)) {
            let _guard = watchdog().arm(Blocking::Finalize, Instant::now() + LEAVING);
            let _ = self.read_leftovers();
            // The work is done, and nobody is left to whom an error would matter.
            let _ = raw::finalize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(version: &str) -> [u8; CARD] {
        Card { version: version.into(), ..Card::own() }.bytes()
    }

    #[test]
    fn ranks_of_one_version_know_each_other() {
        let cards = introductions(&[card("0.2.0"), card("0.2.0")].concat()).unwrap();
        assert_eq!(cards[1].pid, std::process::id() as i32);
        assert_eq!(cards[0].place, Card::own().place);
        assert!(!cards[0].host.is_empty());
    }

    #[test]
    fn another_version_is_refused_by_rank_and_number() {
        let all = [card("0.2.0"), card("0.2.0"), card("0.3.1")].concat();
        let error = introductions(&all).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("rank 2 runs spanker 0.3.1, rank 0 runs spanker 0.2.0"));
        let stranger = introductions(&[card("0.2.0"), [7; CARD]].concat()).err();
        assert_eq!(stranger, Some(MpiError::Stranger { rank: 1 }));
    }

    #[test]
    fn libraries_are_named_in_short() {
        let open = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4";
        assert_eq!(short(open), "Open MPI 4.1.4");
        assert_eq!(short("MPICH Version:\t4.0.2; MPICH Release date:\tThu Apr  7"), "MPICH 4.0.2");
    }
}
