// SPDX-License-Identifier: Apache-2.0
//! What strangers make a worker allocate before they are authenticated. The only test here, since what is counted is
//! the allocator of the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use spanker_fabric_tcp::{Channel, Key, Limits, Listener, Purpose};

/// Bytes that a stranger may cost, all its allocations added up.
const MOST: usize = 64 << 10;

/// Adds up what all threads allocate.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The first message of a handshake, as somebody with the key sends it.
fn good_hello(key: &Key) -> [u8; 48] {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    std::thread::scope(|scope| {
        let timeout = Duration::from_secs(30);
        scope.spawn(move || Channel::dial(&address, Some(key), Purpose::Control, timeout).is_err());
        let mut hello = [0; 48];
        silent.accept().expect("a dialer").0.read_exact(&mut hello).expect("a hello");
        hello
    })
}

/// Connects, sends these bytes and waits until the listener closes the connection. How many bytes come back.
fn stranger(listener: &Listener, bytes: &[u8]) -> usize {
    let mut stream = TcpStream::connect(listener.address()).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let _ = stream.write_all(bytes);
    let mut part = [0; 256];
    let mut answer = 0;
    while let Ok(read @ 1..) = stream.read(&mut part) {
        answer += read;
    }
    answer
}

#[test]
fn no_stranger_costs_more_than_64_kib_whatever_it_sends() {
    let key = Key::from_bytes([7; 32]);
    let limits = Limits { handshake: Duration::from_millis(200), ..Limits::USUAL };
    let listener = Listener::bind("127.0.0.1:0", Some(key.clone()), limits).expect("a port");
    let hello = good_hello(&key);
    let long = vec![0xa5; 1 << 20];
    let copied = [&hello[..], &long].concat();
    let kinds: [(&str, &[u8], usize); 5] = [
        ("says nothing", &[], 0),
        ("stops in its first message", &hello[..47], 0),
        ("sends a megabyte of nonsense", &long, 0),
        ("stops after a good first message", &hello, 48),
        ("sends a megabyte behind a good first message", &copied, 48),
    ];
    for (kind, bytes, answer) in kinds {
        let before = ALLOCATED.load(Ordering::Relaxed);
        for _ in 0..4 {
            assert_eq!(stranger(&listener, bytes), answer, "one that {kind}");
        }
        let each = (ALLOCATED.load(Ordering::Relaxed) - before) / 4;
        assert!(each <= MOST, "one that {kind}: {each} bytes");
        println!("one that {kind}: {each} bytes");
    }
    // What is counted is there: somebody with the key costs more, in buffers, once something comes.
    let before = ALLOCATED.load(Ordering::Relaxed);
    let soon = Instant::now() + Duration::from_secs(60);
    let address = listener.address().to_string();
    let timeout = Duration::from_secs(30);
    let dialed = Channel::dial(&address, Some(&key), Purpose::Control, timeout);
    dialed.expect("a worker").send(&long[..MOST], soon).expect("sent");
    listener.next(soon).expect("a leader").receive(MOST, soon).expect("a message");
    assert!(ALLOCATED.load(Ordering::Relaxed) - before > MOST);
}
