// SPDX-License-Identifier: Apache-2.0
//! A card's process: it obeys its keeper and answers its clients.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use spanker_runtime::message::{Parsed, head, parse};

use crate::orders::{Order, Port, Reply, answer, receive};

/// Plays a card until the keeper says so or is gone.
///
/// # Errors
/// The keeper's orders cannot be read.
pub fn serve(control: UnixStream) -> io::Result<()> {
    let mut bells: Vec<Option<OwnedFd>> = Vec::new();
    let mut cut: Vec<bool> = Vec::new();
    while let Some((order, fds)) = receive(&control)? {
        let mut fds = fds.into_iter();
        let reply = match order {
            Order::Start { spec, .. } => {
                let listener = fds.next().map(UnixListener::from);
                std::thread::spawn(move || listener.map(accept));
                cut = vec![false; spec.ports.len()];
                bells.extend(spec.ports.iter().map(|_| {
                    let bell = fds.next();
                    fds.next();
                    bell
                }));
                Reply::Ready
            }
            Order::Connect { port } => match bells.get_mut(port as usize) {
                Some(bell) => {
                    *bell = fds.next();
                    Reply::Done
                }
                None => Reply::Failed(format!("there is no port {port}")),
            },
            Order::Cut { port } | Order::Mend { port } => match cut.get_mut(port as usize) {
                Some(cut) => {
                    *cut = matches!(order, Order::Cut { .. });
                    Reply::Done
                }
                None => Reply::Failed(format!("there is no port {port}")),
            },
            Order::Status => Reply::Status { ports: bells.iter().zip(&cut).map(state).collect() },
            Order::Leave => return answer(&control, &Reply::Done),
            _ => Reply::Done,
        };
        answer(&control, &reply)?;
    }
    Ok(())
}

fn state((bell, cut): (&Option<OwnedFd>, &bool)) -> Port {
    let peeked = |bell: &OwnedFd| {
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        rustix::net::recv(bell, &mut [0u8; 1], flags)
    };
    match bell.as_ref().map(peeked) {
        _ if *cut => Port::Down,
        Some(Err(rustix::io::Errno::AGAIN)) => Port::Up,
        _ => Port::Down,
    }
}

fn accept(listener: UnixListener) {
    for client in listener.incoming().flatten() {
        std::thread::spawn(move || talk(client));
    }
}

fn talk(mut client: UnixStream) -> io::Result<()> {
    let mut bytes = Vec::new();
    let mut more = [0; 4096];
    loop {
        let used = match parse(&bytes) {
            Parsed::Incomplete(_) => {
                let count = client.read(&mut more)?;
                if count == 0 {
                    return Ok(());
                }
                bytes.extend_from_slice(&more[..count]);
                continue;
            }
            Parsed::Request(request) => {
                client.write_all(&head(request.number, 0, request.sequence, 0, 0))?;
                request.used
            }
            Parsed::Refused { .. } => return Ok(()),
        };
        bytes.drain(..used);
    }
}
