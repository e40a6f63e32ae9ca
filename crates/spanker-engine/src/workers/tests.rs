// SPDX-License-Identifier: Apache-2.0
//! Workers that are threads: the tokens of one card whoever has the file, and whoever dies.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spanker_fabric::inproc::{Inproc, group};
use spanker_fabric::{Call, Message};

use super::offer::Shelf;
use super::serve::{Served, serve};
use super::*;
use crate::content::cache::Cache;
use crate::engine::Engine;
use crate::generation::Limits;
use crate::host::{Event, Host};
use crate::layout::{Wish, request};
use crate::ranks::Ranks;
use crate::sampling::Sampling;

const TIMEOUT: Duration = Duration::from_secs(20);

/// An end of a fabric that dies after so many exchanges.
struct Mortal {
    inner: Inproc,
    left: usize,
}

impl Mortal {
    fn is_dead(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    fn die(&mut self) -> FabricError {
        let rank = self.inner.rank();
        self.inner.abort(FabricError::Died { rank })
    }
}

impl Fabric for Mortal {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(usize, Message)],
        receives: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        if self.is_dead() {
            return Err(self.die());
        }
        self.inner.exchange(call, sends, receives, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.inner.commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.inner.abort(error)
    }
}

/// What came of a group, and whether it ended well.
type Outcome = (Option<Served>, bool);

/// A worker that is a thread: where it gets its ends, and what came of each group.
struct Desk {
    ends: Mutex<Sender<Inproc>>,
    /// Exchanges after which it dies in its next group; a worker that has died does not answer until this is set again.
    life: Arc<AtomicUsize>,
    served: Arc<Mutex<Vec<Outcome>>>,
}

const IMMORTAL: usize = usize::MAX;

struct Threads {
    desks: Vec<Desk>,
}

impl Threads {
    fn new(shelves: Vec<Shelf>) -> Threads {
        let desk = |shelf: Shelf| {
            let (ends, came) = channel::<Inproc>();
            let (life, served) = (Arc::new(AtomicUsize::new(IMMORTAL)), Arc::default());
            let (lives, list) = (Arc::clone(&life), Arc::<Mutex<Vec<_>>>::clone(&served));
            std::thread::spawn(move || {
                for inner in came {
                    let left = lives.load(Ordering::SeqCst);
                    let mut end = Mortal { inner, left };
                    let (one, outcome) = serve(&mut end, &shelf, 1, &|_| {});
                    if end.left == 0 {
                        lives.store(0, Ordering::SeqCst);
                    }
                    list.lock().unwrap().push((one, outcome.is_ok()));
                }
            });
            Desk { ends: Mutex::new(ends), life, served }
        };
        Threads { desks: shelves.into_iter().map(desk).collect() }
    }

    /// What came of a worker's groups so far, of which there must be so many.
    fn served(&self, card: usize, groups: usize) -> Vec<Outcome> {
        let until = Instant::now() + TIMEOUT;
        loop {
            let list = self.desks[card - 1].served.lock().unwrap().clone();
            if list.len() >= groups || Instant::now() > until {
                assert_eq!(list.len(), groups, "{list:?}");
                return list;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_there(&self, card: usize) -> bool {
        self.desks[card - 1].life.load(Ordering::SeqCst) > 0
    }
}

impl Sessions for Threads {
    fn names(&self) -> Vec<String> {
        (0..=self.desks.len()).map(|card| format!("desk-{card}")).collect()
    }

    fn connect(&self, cards: &[usize]) -> Result<Box<dyn Fabric>, Unreached> {
        let missing = cards.iter().filter(|&&card| !self.is_there(card));
        let missing: Vec<_> = missing.map(|&card| (card, "it is not there".to_owned())).collect();
        if !missing.is_empty() {
            return Err(Unreached::Missing(missing));
        }
        let mut ends = group(cards.len() + 1).into_iter();
        let own = ends.next().expect("an end");
        for (end, card) in ends.zip(cards) {
            self.desks[card - 1].ends.lock().unwrap().send(end).expect("a thread");
        }
        Ok(Box::new(own))
    }

    fn answering(&self, among: &[usize]) -> Vec<(usize, MachineInfo)> {
        let there = among.iter().filter(|&&card| self.is_there(card));
        let info = |&card: &usize| {
            let (name, version) = (format!("desk-{card}"), "1".to_owned());
            let (processor, cached) = ("?".to_owned(), Vec::new());
            let (cores, threads, memory, busy) = (1, 1, 1 << 33, false);
            (card, MachineInfo { name, version, processor, cores, threads, memory, busy, cached })
        };
        there.map(info).collect()
    }
}

fn shelf(folder: &Path, files: Vec<PathBuf>) -> Shelf {
    let cache = Cache { folder: folder.to_path_buf(), limit: 1 << 40 };
    Shelf { files, folders: Vec::new(), cache }
}

/// What was said of cards that were lost, and of weights that were sent.
#[derive(Default)]
struct Said {
    lost: Vec<String>,
    sent: u64,
}

/// Runs a prompt on these workers with a plan for all of them.
fn tokens(sessions: &Arc<Threads>, model: &Model, count: usize) -> (Vec<u32>, Said) {
    let shared: Arc<Mutex<Said>> = Arc::default();
    let said = Arc::clone(&shared);
    let reached = Arc::clone(sessions) as Arc<dyn Sessions>;
    let host = Host::test(Ranks::of_workers(Group::new(reached, true), TIMEOUT, 1));
    let host = host.observed(move |event| match event {
        Event::Note(text) => said.lock().unwrap().lost.push((*text).to_owned()),
        Event::Lost { error, left } => {
            said.lock().unwrap().lost.push(format!("{error} {left:?}"));
        }
        Event::Loading { done, .. } => said.lock().unwrap().sent += done,
        _ => {}
    });
    let prompt = model.encode("ab w260 cd", true, 512).expect("tokens");
    let wish = Wish { split: Some(crate::Split::Gather), shares: None };
    let asked = request(512, 8, prompt.len(), count);
    let plan = host.plan_untimed(model, &asked, {
        let shares = vec![1.0; sessions.desks.len() + 1];
        wish.split.expect("a split").layout(model.shape(), &shares).expect("a layout")
    });
    let mut engine = Engine::load(&host, model, plan.expect("a plan")).expect("it loads");
    let limits = Limits { ignore_end: true, ..Limits::tokens(count) };
    let mut generation = engine.generate(&prompt, Sampling::greedy(), limits).expect("a prompt");
    for piece in &mut generation {
        piece.expect("a token");
    }
    let (answer, _) = generation.into_answer();
    drop(engine);
    drop(host);
    let said = std::mem::take(&mut *shared.lock().unwrap());
    (answer.tokens, said)
}

fn on_one_card(model: &Model, count: usize) -> Vec<u32> {
    tokens(&Arc::new(Threads::new(Vec::new())), model, count).0
}

#[test]
fn workers_without_the_file_get_it_once_and_give_the_tokens_of_one_card() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let model = crate::testing::model(folders[0].path());
    let expected = on_one_card(&model, 12);
    let shelves = vec![
        shelf(folders[1].path(), Vec::new()),
        shelf(folders[2].path(), vec![model.path().to_path_buf()]),
    ];
    let threads = Arc::new(Threads::new(shelves.clone()));
    let (found, said) = tokens(&threads, &model, 12);
    assert_eq!(found, expected);
    assert!(said.lost.is_empty() && said.sent > 0);
    let [(Some(served), true)] = &threads.served(1, 1)[..] else {
        panic!("{:?}", threads.served(1, 1))
    };
    assert!(!served.is_own && served.fetched > 0, "{served:?}");
    let [(Some(other), true)] = &threads.served(2, 1)[..] else { panic!() };
    assert!(other.is_own && other.fetched == 0, "{other:?}");
    // A restart finds what it has got.
    let threads = Arc::new(Threads::new(shelves));
    let (found, said) = tokens(&threads, &model, 12);
    assert_eq!((found, said.sent), (expected, 0));
    let [(Some(served), true)] = &threads.served(1, 1)[..] else { panic!() };
    assert!(!served.is_own && served.fetched == 0, "{served:?}");
}

#[test]
fn worker_that_dies_in_an_answer_is_named_and_the_tokens_are_the_same() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let model = crate::testing::model(folders[0].path());
    let expected = on_one_card(&model, 16);
    for life in [100, 140, 200] {
        let files = || vec![model.path().to_path_buf()];
        let shelves = folders[1..].iter().map(|folder| shelf(folder.path(), files())).collect();
        let threads = Arc::new(Threads::new(shelves));
        threads.desks[0].life.store(life, Ordering::SeqCst);
        let (found, said) = tokens(&threads, &model, 16);
        assert_eq!(found, expected, "{life}");
        assert_eq!(said.lost, ["rank 1 is worker desk-1", "rank 1 died [0, 2]"], "{life}");
        // The other one was in a second group, which ended well.
        let [(_, false), (_, true)] = &threads.served(2, 2)[..] else { panic!() };
    }
}

#[test]
fn all_workers_may_go_and_a_worker_that_is_gone_is_found_to_be_so() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let model = crate::testing::model(folders[0].path());
    let expected = on_one_card(&model, 16);
    let files = || vec![model.path().to_path_buf()];
    let shelves = folders[1..].iter().map(|folder| shelf(folder.path(), files())).collect();
    let threads = Arc::new(Threads::new(shelves));
    threads.desks[0].life.store(120, Ordering::SeqCst);
    threads.desks[1].life.store(130, Ordering::SeqCst);
    let (found, said) = tokens(&threads, &model, 16);
    assert_eq!(found, expected);
    assert!(said.lost.last().unwrap().ends_with("[0]"), "{:?}", said.lost);
}

#[test]
fn worker_that_does_not_answer_is_left_out_and_not_the_one_that_waited_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let shelves = (0..2).map(|_| shelf(folder.path(), Vec::new())).collect();
    let threads = Arc::new(Threads::new(shelves));
    let group = Group::new(Arc::clone(&threads) as Arc<dyn Sessions>, true);
    *group.members.borrow_mut() = vec![0, 1, 2];
    let fault = FabricError::Deadline { rank: 0, peer: 2, what: "to receive from" };
    threads.desks[0].life.store(0, Ordering::SeqCst);
    assert_eq!(group.survivors(&fault, &[0, 1, 2]), Some(vec![0, 2]));
    // Where all answer, it is the one that was waited for.
    threads.desks[0].life.store(IMMORTAL, Ordering::SeqCst);
    group.absent.borrow_mut().clear();
    assert_eq!(group.survivors(&fault, &[0, 1, 2]), Some(vec![0, 1]));
    // What the leader was waited for in vain is about the one that waited.
    group.absent.borrow_mut().clear();
    let fault = FabricError::Deadline { rank: 1, peer: 0, what: "to receive from" };
    assert_eq!(group.survivors(&fault, &[0, 1, 2]), Some(vec![0, 2]));
    // What a worker cannot hold the others may; what the leader cannot do nobody can.
    group.absent.borrow_mut().clear();
    let refused = |rank| FabricError::Refused { rank, reason: "no".into() };
    assert_eq!(group.survivors(&refused(1), &[0, 1, 2]), Some(vec![0, 2]));
    group.absent.borrow_mut().clear();
    assert_eq!(group.survivors(&refused(0), &[0, 1, 2]), None);
}

#[test]
fn file_that_is_not_what_its_manifest_says_is_refused_by_chunk_and_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::testing::model(folder.path());
    let mut bytes = model.network().bytes().to_vec();
    bytes[5] ^= 1;
    let manifest = Manifest::of(&bytes);
    let mut ends = group(2).into_iter();
    let (mut own, mut other) = (ends.next().unwrap(), ends.next().unwrap());
    let (cache, nothing) = (folder.path().join("cache"), Vec::new());
    let worker =
        std::thread::spawn(move || serve(&mut other, &shelf(&cache, nothing), 1, &|_| {}).1);
    let offered = Offered {
        path: model.path().to_path_buf(),
        network: Arc::clone(model.network()),
        manifest: Arc::new(manifest),
        timeout: TIMEOUT,
    };
    let refused = offer::offer(&mut own, &offered).unwrap_err().to_string();
    assert!(refused.contains("chunk 0 of x.gguf is not what"), "{refused}");
    assert_eq!(worker.join().unwrap().unwrap_err().to_string(), refused);
}

#[test]
fn worker_that_is_back_with_an_empty_cache_has_its_weights_before_it_is_taken_in() {
    let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let model = crate::testing::model(folders[0].path());
    let threads = Arc::new(Threads::new(vec![shelf(folders[1].path(), Vec::new())]));
    let group = Group::new(Arc::clone(&threads) as Arc<dyn Sessions>, true);
    // What it needed when it was in the last group, which has gone on without it.
    group.offered(&model, TIMEOUT);
    let whole = 0..model.network().bytes().len() as u64;
    group.need(1, vec![whole.clone()]);
    assert_eq!(group.returned(&[0]), None, "nobody is waited for");
    let until = Instant::now() + TIMEOUT;
    let back = loop {
        match group.returned(&[0]) {
            Some(back) => break back,
            None => assert!(Instant::now() < until, "it is not taken in"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(back, [0, 1]);
    let [(Some(served), true)] = &threads.served(1, 1)[..] else { panic!() };
    assert_eq!(served.fetched, whole.end, "{served:?}");
    // In the group nothing is left to be sent.
    let (_, said) = tokens(&threads, &model, 3);
    assert_eq!(said.sent, 0);
}

#[test]
fn worker_says_that_its_leader_is_of_another_version() {
    let folder = tempfile::tempdir().unwrap();
    let error = {
        let mut ends = group(2).into_iter();
        let (mut own, mut other) = (ends.next().unwrap(), ends.next().unwrap());
        let shelf = shelf(folder.path(), Vec::new());
        let worker = std::thread::spawn(move || serve(&mut other, &shelf, 1, &|_| {}).1);
        let text =
            br#"{"version":"0.0.1","id":"","name":"x","length":1,"header":1,"timeout_ms":10}"#;
        let message =
            spanker_fabric::Pool::default().write(text.len(), |out| out.copy_from_slice(text));
        let until = Instant::now() + TIMEOUT;
        let _ = own.exchange(&Call::BARRIER, &[(1, message)], &[1], until);
        worker.join().unwrap().unwrap_err().to_string()
    };
    assert!(error.contains("the leader 0.0.1"), "{error}");
}
