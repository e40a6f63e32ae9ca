// SPDX-License-Identifier: Apache-2.0
//! Groups whose ranks are threads of a test, each with connections of its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use spanker_fabric_tcp::{
    Channel, Event, Key, Limits, Listener, Options, Purpose, TcpError, TcpFabric, lead,
};

/// The version that tests run.
pub const VERSION: &str = "1.2.3";

/// A moment that no test reaches.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Options that a busy machine can keep.
pub fn options() -> Options {
    Options { timeout: Duration::from_secs(30), ..Options::new(VERSION) }
}

/// A key, always the same.
pub fn key() -> Key {
    Key::from_bytes([7; 32])
}

/// A worker's listener at any port.
pub fn listener() -> Listener {
    Listener::bind("127.0.0.1:0", Some(key()), Limits::USUAL).expect("a port")
}

/// A leader's channel to a worker.
pub fn dial(listener: &Listener) -> Channel {
    let address = listener.address().to_string();
    let timeout = Duration::from_secs(30);
    Channel::dial(&address, Some(&key()), Purpose::Control, timeout).expect("a worker")
}

/// A worker's part: joins the first group that it is asked to.
pub fn join(listener: &Listener, options: &Options) -> Result<TcpFabric, TcpError> {
    match listener.next(soon())?.next(1 << 10, soon())? {
        Event::Join(join) => join.accept(listener, options).map(|(fabric, _)| fabric),
        Event::Message(..) => panic!("a question that nobody asked"),
    }
}

/// The ends of a group, in rank order.
pub fn group(ranks: usize) -> Vec<TcpFabric> {
    group_with(ranks, &options())
}

/// The same with options of the leader's.
pub fn group_with(ranks: usize, own: &Options) -> Vec<TcpFabric> {
    let listeners: Vec<Listener> = (1..ranks).map(|_| listener()).collect();
    std::thread::scope(|scope| {
        let worker = |listener| scope.spawn(move || join(listener, &options()).expect("a group"));
        let workers: Vec<_> = listeners.iter().map(worker).collect();
        let (leader, _) = lead(listeners.iter().map(dial).collect(), own).expect("a group");
        let workers = workers.into_iter().map(|worker| worker.join().expect("no panic"));
        std::iter::once(leader).chain(workers).collect()
    })
}

/// Connects and sends bytes as a stranger does. What comes back until the listener closes the connection.
pub fn stranger(listener: &Listener, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(listener.address()).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    // A listener that has seen enough does not take the rest.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut part = [0; 256];
    // A connection that is closed with something unread is reset.
    while let Ok(1..) = stream.read(&mut part).inspect(|&read| answer.extend(&part[..read])) {}
    answer
}
