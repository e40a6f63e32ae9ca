// SPDX-License-Identifier: Apache-2.0
//! Atomics, locks, threads, channels and the clock, from the standard library or from a checker that tries
//! many orders. This is the only place that knows which.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(all(feature = "shuttle", not(feature = "loom")))]
pub(crate) use shuttle::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(any(feature = "loom", feature = "shuttle")))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(feature = "shuttle")]
pub(crate) use modelled as run;
#[cfg(not(feature = "shuttle"))]
pub(crate) use real as run;

/// What a run of threads is made of.
#[cfg(not(feature = "shuttle"))]
pub(crate) mod real {
    use std::sync::mpsc::RecvTimeoutError;
    use std::time::{Duration, Instant};

    pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub(crate) use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;

    /// The time since a run began.
    #[derive(Clone)]
    pub(crate) struct Clock(Instant);

    impl Clock {
        pub(crate) fn start() -> Clock {
            Clock(Instant::now())
        }

        pub(crate) fn elapsed(&self) -> Duration {
            self.0.elapsed()
        }
    }

    /// Waits for a message, for so long.
    pub(crate) fn receive<T>(from: &Receiver<T>, time: Duration, _: &Clock) -> Option<T> {
        let heard = from.recv_timeout(time);
        if matches!(heard, Err(RecvTimeoutError::Disconnected)) {
            // Nobody is left who could tell anything: there is only time to wait for.
            thread::sleep(time);
        }
        heard.ok()
    }
}

/// The same under a checker. It has no time: the clock goes on whenever a wait for a message is given up, which
/// may happen at any point; and no other wait is ever given up, so that a call that is missed shows.
#[cfg(feature = "shuttle")]
pub(crate) mod modelled {
    use std::sync::Arc;
    use std::time::Duration;

    use shuttle::rand::{Rng, thread_rng};
    use shuttle::sync::mpsc::TryRecvError;

    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub(crate) use shuttle::sync::mpsc::{Receiver, SyncSender, sync_channel};
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread;

    /// The time since a run began.
    #[derive(Clone)]
    pub(crate) struct Clock(Arc<std::sync::Mutex<Duration>>);

    impl Clock {
        pub(crate) fn start() -> Clock {
            Clock(Arc::default())
        }

        pub(crate) fn elapsed(&self) -> Duration {
            *self.0.lock().expect("nobody panics with the clock")
        }

        fn advance(&self, time: Duration) {
            *self.0.lock().expect("nobody panics with the clock") += time;
        }
    }

    /// Waits for a message, for so long.
    pub(crate) fn receive<T>(from: &Receiver<T>, time: Duration, clock: &Clock) -> Option<T> {
        loop {
            match from.try_recv() {
                Ok(message) => return Some(message),
                Err(TryRecvError::Empty) if !thread_rng().gen_bool(0.25) => thread::yield_now(),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                    clock.advance(time);
                    thread::yield_now();
                    return None;
                }
            }
        }
    }
}
