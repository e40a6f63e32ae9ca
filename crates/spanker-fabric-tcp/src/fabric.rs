// SPDX-License-Identifier: Apache-2.0
//! The fabric whose ranks are connected by TCP: an end for the calls of a rank (`end.rs`), and a thread that keeps it alive
//! between them.
//!
//! The thread never takes part in a call: it looks a few times within the timeout whether the rank is in one, and reads
//! and sends heartbeats if not. So no message waits for it, a rank that computes for long is heard of all the same, and
//! what is sent to it meanwhile does not fill the kernel's buffers.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Instant;

use spanker_collective::Rank;
use spanker_fabric::{Call, Fabric, FabricError, Message};

use crate::end::End;
use crate::link::Link;
use crate::{Options, TcpError};

/// Looks of the thread in the time between two heartbeats while the rank is in a call.
const LOOKS: u32 = 8;

/// One rank's end of a group.
///
/// Dropping an end closes its connections: whoever still needs it gets [`FabricError::Died`].
#[derive(Debug)]
pub struct TcpFabric {
    rank: Rank,
    ranks: usize,
    end: Arc<Mutex<End>>,
    /// Sends heartbeats until its channel is closed.
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl TcpFabric {
    /// The end of `rank`, with its connections to all ranks.
    ///
    /// # Errors
    /// [`TcpError::System`] if there can be no more threads.
    pub(crate) fn new(
        rank: Rank,
        links: Vec<Option<Link>>,
        options: &Options,
    ) -> Result<TcpFabric, TcpError> {
        let (ranks, first) = (links.len(), links.iter().flatten().next().map(Link::address));
        let end = Arc::new(Mutex::new(End::new(rank, links, options)));
        let mut fabric = TcpFabric { rank, ranks, end, thread: None };
        // Alone there is nobody to hear.
        if let Some(address) = first {
            let (stop, stopped) = channel();
            let end = Arc::clone(&fabric.end);
            let named = std::thread::Builder::new().name("spanker-heartbeat".into());
            let thread = named.spawn(move || keep_alive(&end, &stopped));
            let what = "cannot start a thread for the group with";
            let system = |error: std::io::Error| TcpError::System {
                what,
                address,
                reason: error.to_string(),
            };
            fabric.thread = Some((stop, thread.map_err(system)?));
        }
        Ok(fabric)
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ticks until it is stopped.
fn keep_alive(end: &Mutex<End>, stopped: &Receiver<()>) {
    let interval = end.lock().unwrap_or_else(PoisonError::into_inner).interval();
    let mut wait = interval;
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        wait = match end.try_lock() {
            Ok(mut end) => end.tick(),
            Err(TryLockError::Poisoned(end)) => end.into_inner().tick(),
            // The rank is in a call, and does it itself.
            Err(TryLockError::WouldBlock) => interval / LOOKS,
        };
    }
}

impl Fabric for TcpFabric {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        self.end().exchange(call, sends, receives, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.end().commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.end().fail(error, None)
    }
}

impl Drop for TcpFabric {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            // A thread that has panicked holds nothing that is needed here.
            let _ = thread.join();
        }
        self.end().leave();
    }
}
