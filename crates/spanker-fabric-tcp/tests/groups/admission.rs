// SPDX-License-Identifier: Apache-2.0
//! Who gets past the handshake, and what those who do not can see or keep from others.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use spanker_fabric_tcp::{Channel, Event, Key, Limits, Listener, Purpose, TcpError};

use crate::support::{dial, key, listener, soon, stranger};

/// Bytes of a message of the handshake.
const HELLO: usize = 48;

/// A channel from a dialer to a listener through a relay, and what went from the dialer to the listener.
fn recorded(listener: &Listener) -> (Channel, Channel, Vec<u8>) {
    let relay = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = relay.local_addr().expect("bound").to_string();
    let far = listener.address();
    let record = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let record = &record;
        scope.spawn(move || {
            let (mut from, _) = relay.accept().expect("a dialer");
            let mut to = TcpStream::connect(far).expect("it listens");
            let mut bytes = [0; HELLO];
            from.read_exact(&mut bytes).expect("a hello");
            record.lock().expect("no panic").extend(bytes);
            to.write_all(&bytes).expect("it listens");
            to.read_exact(&mut bytes).expect("a hello");
            from.write_all(&bytes).expect("it listens");
            from.read_exact(&mut bytes).expect("an intent");
            record.lock().expect("no panic").extend(bytes);
            to.write_all(&bytes).expect("it listens");
            // Both ends have their connection; nothing passes any more.
        });
        let timeout = Duration::from_secs(30);
        let dialer =
            Channel::dial(&near, Some(&key()), Purpose::Control, timeout).expect("a worker");
        let worker = listener.next(soon()).expect("a leader");
        (dialer, worker, record.lock().expect("no panic").clone())
    })
}

#[test]
fn a_wrong_key_a_missing_key_and_nonsense_get_the_same_answer() {
    let listener = listener();
    let address = listener.address().to_string();
    let timeout = Duration::from_secs(30);
    for other in [Some(Key::from_bytes([8; 32])), None] {
        let refused = Channel::dial(&address, other.as_ref(), Purpose::Control, timeout);
        let refused = refused.expect_err("another key");
        assert!(matches!(refused, TcpError::Handshake { .. }), "{refused}");
        assert!(
            refused.to_string().contains("\nhint: do both ends have the same key"),
            "{refused}"
        );
    }
    for first in [[0; HELLO], [0xff; HELLO], std::array::from_fn(|at| at as u8)] {
        assert!(stranger(&listener, &first).is_empty(), "nothing is answered");
    }
    // Whoever has the key still gets in.
    drop(dial(&listener));
    listener.next(soon()).expect("a leader");
}

#[test]
fn a_recorded_handshake_opens_nothing() {
    let listener = listener();
    let (_dialer, _worker, record) = recorded(&listener);
    assert_eq!(record.len(), 2 * HELLO);
    // The first message is good, so it is answered; what follows it is sealed under keys of that connection.
    let answer = stranger(&listener, &record);
    assert_eq!(answer.len(), HELLO, "the answer of a handshake that is not completed");
    let nobody = listener.next(Instant::now() + Duration::from_millis(200));
    assert!(matches!(nobody, Err(TcpError::Timeout { .. })), "a copy got in");
    // The same bytes sent to a listener with another key get no answer at all.
    let other = Listener::bind("127.0.0.1:0", Some(Key::from_bytes([9; 32])), Limits::USUAL);
    assert!(stranger(&other.expect("a port"), &record).is_empty());
}

#[test]
fn beyond_this_machine_a_listener_needs_a_key() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let refused = Listener::bind(address, None, Limits::USUAL).expect_err("no key").to_string();
        assert!(refused.contains("is not on this machine: a key is needed\nhint: "), "{refused}");
    }
    let here =
        Listener::bind("127.0.0.1:0", None, Limits::USUAL).expect("nobody else can reach it");
    let address = here.address().to_string();
    let timeout = Duration::from_secs(30);
    let mut leader = Channel::dial(&address, None, Purpose::Control, timeout).expect("a worker");
    leader.send(b"hello", soon()).expect("sent");
    let mut worker = here.next(soon()).expect("a leader");
    assert_eq!(worker.receive(10, soon()).expect("a message").bytes(), b"hello");
    Listener::bind("0.0.0.0:0", Some(key()), Limits::USUAL).expect("a key");
}

#[test]
fn silent_connections_make_way_and_end() {
    let handshake = Duration::from_secs(3);
    let limits = Limits { unauthenticated: 8, handshake, ..Limits::USUAL };
    let listener = Listener::bind("127.0.0.1:0", Some(key()), limits).expect("a port");
    let connect = || TcpStream::connect(listener.address()).expect("it listens");
    // More than it takes at once, some of which have begun.
    let mut silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    for (index, stream) in silent.iter_mut().enumerate() {
        let _ = stream.write_all(&[1; HELLO][..index]);
    }
    drop(dial(&listener));
    listener.next(soon()).expect("a leader gets in");
    // All of them are gone in the end, the last ones because their time is over.
    for stream in &mut silent {
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let ended = stream.read(&mut [0; 8]);
        assert!(
            matches!(ended, Ok(0))
                || ended.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
        );
    }
}

#[test]
fn a_dialer_does_not_wait_longer_than_its_timeout() {
    // It takes connections and says nothing, as a port of another program may.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    let timeout = Duration::from_millis(100);
    let late = Channel::dial(&address, Some(&key()), Purpose::Control, timeout);
    assert!(matches!(late, Err(TcpError::Timeout { .. })), "{late:?}");
    // One that answers with something else is no worker.
    let other = std::thread::spawn(move || {
        drop(silent.accept().expect("the dialer before"));
        let (mut stream, _) = silent.accept().expect("a dialer");
        let _ = stream.write_all(&[b'x'; 200]);
        let _ = stream.read(&mut [0; HELLO]);
    });
    let refused = Channel::dial(&address, Some(&key()), Purpose::Control, Duration::from_secs(30));
    let refused = refused.expect_err("no worker");
    assert!(matches!(refused, TcpError::Handshake { .. }), "{refused}");
    other.join().expect("no panic");
}

#[test]
fn a_channel_that_is_changed_on_the_way_is_named() {
    let listener = listener();
    let relay = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = relay.local_addr().expect("bound").to_string();
    let far = listener.address();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut from, _) = relay.accept().expect("a dialer");
            let mut to = TcpStream::connect(far).expect("it listens");
            let mut bytes = [0; HELLO];
            from.read_exact(&mut bytes).expect("a hello");
            to.write_all(&bytes).expect("it listens");
            to.read_exact(&mut bytes).expect("a hello");
            from.write_all(&bytes).expect("it listens");
            let mut rest = Vec::new();
            let mut part = [0; 512];
            while rest.len() < HELLO + 64 + 21 {
                let read = from.read(&mut part).expect("a message");
                rest.extend(&part[..read]);
            }
            // A bit of the message's body.
            rest[HELLO + 64 + 2] ^= 4;
            to.write_all(&rest).expect("it listens");
            let _ = to.read(&mut part);
        });
        let timeout = Duration::from_secs(30);
        let mut dialer =
            Channel::dial(&near, Some(&key()), Purpose::Control, timeout).expect("a worker");
        dialer.send(b"hello", soon()).expect("sent");
        let worker = listener.next(soon()).expect("a leader");
        let error = worker.next(100, soon()).map(|_: Event| ()).expect_err("a changed record");
        assert!(matches!(error, TcpError::Corrupt { .. }), "{error}");
        assert!(error.to_string().ends_with("a record was changed on the way"), "{error}");
    });
}
