// SPDX-License-Identifier: Apache-2.0
//! A card as a process plays it: behind its socket, behind ioctls, and against programs that mean no good.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spanker_runtime::abi::{RawAccess, RawAllocate, RawRead, RawSubmit, Request};
use spanker_runtime::message::head;
use spanker_runtime::{BufferId, Error, Fold, Place, SpankerControl, Work};
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::orders::{self, Order, Reply};
use spanker_twin::{Pace, serve, specs};

/// A card without links, played by a thread.
struct Lone {
    folder: tempfile::TempDir,
    control: UnixStream,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Lone {
    fn start(pace: Pace) -> Lone {
        let folder = tempfile::tempdir().unwrap();
        let cluster = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 1, Shape::Ring).unwrap();
        let spec = Box::new(specs(&cluster, pace, 1).unwrap().remove(0));
        let listener = UnixListener::bind(folder.path().join("spanker0")).unwrap();
        let (control, theirs) = UnixStream::pair().unwrap();
        orders::send(&control, &Order::Start { spec, epoch: 0 }, &[listener.as_fd()]).unwrap();
        let thread = Some(std::thread::spawn(move || serve(theirs)));
        let soon = Instant::now() + Duration::from_secs(5);
        assert_eq!(orders::reply(&control, soon).unwrap(), Some(Reply::Ready));
        Lone { folder, control, thread }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("spanker0")
    }

    fn open(&self) -> SpankerControl {
        SpankerControl::open_path(self.path()).unwrap()
    }
}

impl Drop for Lone {
    fn drop(&mut self) {
        orders::send(&self.control, &Order::Leave, &[]).unwrap();
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

/// A little of everything that a card does.
fn exercise(card: &SpankerControl) {
    card.ping().unwrap();
    let info = card.info().unwrap();
    assert_eq!((info.profile.as_str(), info.index, info.ports), ("rev-a", 0, 0));
    let buffer = card.allocate(3 << 20).unwrap();
    let bytes: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 251) as u8).collect();
    card.write(buffer, 0, &bytes).unwrap();
    let place = |offset| Place { buffer, offset };
    let fold = Fold { dtype: 6, op: 0 };
    let sources = vec![place(0), place(1 << 20)];
    let into = place(2 << 20);
    let work = [Work::Reduce { into, sources, elements: 1 << 20, fold, divisor: 0 }.into()];
    let ticket = card.submit(3, &work).unwrap();
    card.wait(ticket, Duration::from_secs(5)).unwrap();
    let mut sums = vec![0; 1 << 20];
    card.read(buffer, 2 << 20, &mut sums).unwrap();
    let right = (0..1 << 20).all(|i| sums[i] == bytes[i].wrapping_add(bytes[i + (1 << 20)]));
    assert!(right, "sums of bytes");
    let refused =
        card.submit(4, &[Work::Fill { into: place(4 << 20), length: 4, pattern: 0 }.into()]);
    assert!(matches!(
        refused,
        Err(Error::Ioctl { op: "SUBMIT", source: nix::errno::Errno::EINVAL })
    ));
    assert!(card.counters().unwrap().work >= 1);
    assert!(card.records().unwrap().iter().any(|record| record.kind == 4));
    card.free(buffer).unwrap();
}

#[test]
fn requests_by_message_do_their_work() {
    let lone = Lone::start(Pace::Card);
    exercise(&lone.open());
}

#[test]
fn requests_by_ioctl_are_the_same_requests() {
    const CHILD: &str = "SPANKER_BRIDGE_CHILD";
    if let Some(device) = std::env::var_os(CHILD) {
        exercise(&SpankerControl::open_path(device).unwrap());
        println!("exercised by ioctl");
        return;
    }
    let lone = Lone::start(Pace::Card);
    let device = lone.folder.path().join("device");
    std::fs::write(&device, "").unwrap();
    let bridge = lone.folder.path().join("bridge.so");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"])
        .arg(root.join("../spanker-runtime/include"))
        .arg(root.join("tests/ioctl_bridge.c"))
        .arg("-o")
        .arg(&bridge)
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process::requests_by_ioctl_are_the_same_requests", "--nocapture"])
        .env(CHILD, &device)
        .env("LD_PRELOAD", &bridge)
        .env("SPANKER_BRIDGE", lone.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && said.contains("exercised by ioctl"),
        "{said}{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

#[test]
fn programs_that_send_nonsense_lose_their_connection_and_nothing_else() {
    let lone = Lone::start(Pace::Card);
    let honest = lone.open();
    honest.ping().unwrap();
    let mut huge = head(RawSubmit::NUMBER, 0, 1, 32, 0).to_vec();
    huge[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    let half = head(RawSubmit::NUMBER, 0, 1, 32, 1000).to_vec();
    let garbage = vec![0xA5; 100_000];
    for bytes in [&huge, &garbage, &half] {
        let mut client = UnixStream::connect(lone.path()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // The card may cut the line before all of it is written.
        let _ = client.write_all(bytes);
        if bytes != &half {
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer);
            assert!(answer.len() <= 32, "{} bytes", answer.len());
        }
        drop(client);
        honest.ping().unwrap();
    }
    exercise(&honest);
}

/// Bytes of this process, in which the card is a thread, that are in memory.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_program_that_does_not_read_its_answers_gets_them_later_and_costs_little_memory() {
    let lone = Lone::start(Pace::Card);
    let honest = lone.open();
    let mut client = UnixStream::connect(lone.path()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let length = 16u64 << 20;
    let allocate = RawAllocate { length, buffer: 0 };
    client.write_all(&head(RawAllocate::NUMBER, 0, 0, 16, 0)).unwrap();
    client.write_all(bytemuck::bytes_of(&allocate)).unwrap();
    let mut answer = [0; 48];
    client.read_exact(&mut answer).unwrap();
    let allocated: RawAllocate = bytemuck::pod_read_unaligned(&answer[32..]);
    let access = RawAccess { address: 0, length, buffer: allocated.buffer, offset: 0 };
    let mut request = head(RawRead::NUMBER, 0, 1, 32, 0).to_vec();
    request.extend_from_slice(bytemuck::bytes_of(&access));
    let (before, count) = (resident(), 20);
    client.write_all(&request.repeat(count)).unwrap();
    for _ in 0..20 {
        honest.ping().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 192 << 20, "{grown} bytes for answers that nobody reads");
    let mut piece = vec![0; 64 + length as usize];
    for _ in 0..count {
        client.read_exact(&mut piece).unwrap();
        assert_eq!(piece[..4], *b"SPKR");
    }
}

#[test]
fn a_random_stream_of_bytes_never_takes_a_card_down() {
    use rand::{Rng, SeedableRng};
    let lone = Lone::start(Pace::Card);
    let seed = 11;
    let mut dice = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
    for _ in 0..200 {
        let mut client = UnixStream::connect(lone.path()).unwrap();
        for _ in 0..dice.random_range(1..4) {
            let number =
                0x4000_E300 | dice.random_range(1u32..16) | dice.random_range(0u32..4) << 30;
            let size = dice.random_range(0..100usize);
            let payload = dice.random_range(0..64usize);
            let mut bytes =
                head(number | (size as u32) << 16, 0, dice.random(), size, payload).to_vec();
            let body: Vec<u8> = (0..size + payload).map(|_| dice.random()).collect();
            bytes.extend_from_slice(&body);
            let _ = client.write_all(&bytes);
        }
    }
    lone.open().ping().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

#[test]
fn a_paced_card_takes_the_time_of_its_profile() {
    let lone = Lone::start(Pace::Wall);
    let card = lone.open();
    let buffer: BufferId = card.allocate(2 << 20).unwrap();
    let bytes = vec![1; 2 << 20];
    let begun = Instant::now();
    card.write(buffer, 0, &bytes).unwrap();
    // Two mebibytes at 100 MB/s; how close it is on a quiet machine is a matter for the bench.
    assert!(begun.elapsed() >= Duration::from_micros(20_970), "{:?}", begun.elapsed());
    let clock = card.info().unwrap().clock;
    let mut back = vec![0; 1 << 20];
    card.read(buffer, 0, &mut back).unwrap();
    assert!(card.info().unwrap().clock.since(clock) >= Duration::from_micros(10_485));
}
