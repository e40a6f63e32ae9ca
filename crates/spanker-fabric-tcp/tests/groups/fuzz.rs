// SPDX-License-Identifier: Apache-2.0
//! What strangers can send before they are authenticated: random bytes, and every beginning of a handshake.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rand::{Rng, RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_fabric_tcp::{Channel, Limits, Listener, Purpose};

use crate::support::{dial, key, listener, soon, stranger};

/// Random bytes that a run sends, unless `SPANKER_FUZZ_BYTES` says how many.
const BYTES: u64 = 1_000_000;

/// Whoever has the key still gets in.
fn still_works(listener: &Listener) {
    let mut leader = dial(listener);
    leader.send(b"hello", soon()).expect("sent");
    let mut worker = listener.next(soon()).expect("a leader");
    assert_eq!(worker.receive(10, soon()).expect("a message").bytes(), b"hello");
}

#[test]
fn random_bytes_of_strangers_get_no_answer_and_keep_nobody_out() {
    let wanted = std::env::var("SPANKER_FUZZ_BYTES").ok();
    let wanted = wanted.and_then(|bytes| bytes.parse().ok()).unwrap_or(BYTES);
    let listener = listener();
    let mut random = Pcg64Mcg::seed_from_u64(23);
    let mut sent = 0;
    while sent < wanted {
        // Most bytes come in long pieces, most connections send short ones.
        let length = if random.random::<f64>() < 0.3 {
            random.random_range(48..20_000)
        } else {
            random.random_range(48..100)
        };
        let mut bytes = vec![0; length];
        random.fill_bytes(&mut bytes);
        assert!(stranger(&listener, &bytes).is_empty(), "seed 23, after {sent} bytes");
        sent += length as u64;
    }
    still_works(&listener);
}

/// The first message of a handshake, as somebody with the key sends it.
fn good_hello() -> Vec<u8> {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    let dialer = std::thread::spawn(move || {
        let timeout = Duration::from_secs(30);
        Channel::dial(&address, Some(&key()), Purpose::Control, timeout).map(|_| ())
    });
    let (mut stream, _) = silent.accept().expect("a dialer");
    let mut hello = vec![0; 48];
    stream.read_exact(&mut hello).expect("a hello");
    drop(stream);
    assert!(dialer.join().expect("no panic").is_err());
    hello
}

#[test]
fn every_beginning_of_a_handshake_ends_quietly_and_every_changed_bit_is_refused() {
    let handshake = Duration::from_millis(500);
    let limits = Limits { handshake, unauthenticated: 256, ..Limits::USUAL };
    let listener = Listener::bind("127.0.0.1:0", Some(key()), limits).expect("a port");
    let hello = good_hello();
    let begin = |length: usize| {
        let mut stream = TcpStream::connect(listener.address()).expect("it listens");
        stream.write_all(&hello[..length]).expect("sent");
        // Half of them stay, and their time runs out.
        if length.is_multiple_of(2) {
            stream.shutdown(std::net::Shutdown::Write).expect("open");
        }
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        stream
    };
    let streams: Vec<TcpStream> = (0..=hello.len()).map(begin).collect();
    for (length, mut stream) in streams.into_iter().enumerate() {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let expected = if length == hello.len() { 48 } else { 0 };
        assert_eq!(answer.len(), expected, "after {length} bytes");
    }
    for bit in 0..8 * hello.len() {
        let mut changed = hello.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(stranger(&listener, &changed).is_empty(), "bit {bit}");
    }
    // Behind a good first message, the second one of every length and all kinds of content.
    let mut random = Pcg64Mcg::seed_from_u64(24);
    std::thread::scope(|scope| {
        for length in 0..=64 {
            let mut bytes = hello.clone();
            bytes.resize(hello.len() + length, 0);
            random.fill_bytes(&mut bytes[hello.len()..]);
            let listener = &listener;
            scope.spawn(move || {
                let answer = stranger(listener, &bytes);
                assert_eq!(answer.len(), 48, "{length} bytes behind a hello");
            });
        }
    });
    still_works(&listener);
}
