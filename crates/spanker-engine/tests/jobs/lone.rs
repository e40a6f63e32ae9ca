// SPDX-License-Identifier: Apache-2.0
//! A card without links behind a socket, played by a thread.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::orders::{self, Order, Reply};
use spanker_twin::{Pace, serve, specs};

pub struct Lone {
    folder: tempfile::TempDir,
    control: UnixStream,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Lone {
    pub fn start(pace: Pace) -> Lone {
        let folder = tempfile::tempdir().expect("a folder");
        let profile = Profile::builtin("rev-a").expect("a profile");
        let cluster = Cluster::uniform(profile, 1, Shape::Ring).expect("a card");
        let spec = Box::new(specs(&cluster, pace, 1).expect("a card").remove(0));
        let listener = UnixListener::bind(folder.path().join("spanker0")).expect("a socket");
        let (control, theirs) = UnixStream::pair().expect("a pair");
        let start = Order::Start { spec, epoch: 0 };
        orders::send(&control, &start, &[listener.as_fd()]).expect("a card that listens");
        let thread = Some(std::thread::spawn(move || serve(theirs)));
        let soon = Instant::now() + Duration::from_secs(10);
        assert_eq!(orders::reply(&control, soon).expect("a reply"), Some(Reply::Ready));
        Lone { folder, control, thread }
    }

    pub fn open(&self) -> SpankerControl {
        SpankerControl::open_path(self.folder.path().join("spanker0")).expect("a card")
    }

    /// The card goes, whatever it is doing.
    pub fn leave(&mut self) {
        if let Some(thread) = self.thread.take() {
            orders::send(&self.control, &Order::Leave, &[]).expect("a card that listens");
            thread.join().expect("no panic").expect("an end in order");
        }
    }
}

impl Drop for Lone {
    fn drop(&mut self) {
        self.leave();
    }
}
