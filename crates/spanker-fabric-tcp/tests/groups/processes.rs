// SPDX-License-Identifier: Apache-2.0
//! Ranks that are processes of their own, so that they can be killed and stopped.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};
use spanker_fabric_tcp::{Channel, Options, Purpose, TcpFabric, lead};

use crate::support::{join, key, listener, options, soon};

/// Set for a worker's process, which is this program with this test alone.
const WORKER: &str = "SPANKER_TCP_TEST_WORKER";
/// What a worker says before its address, and before what came of its group.
const SAYS: &str = "worker: ";

/// A worker's process. It ends with the test.
struct Worker {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    address: String,
}

impl Worker {
    fn start() -> Worker {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args(["--exact", "processes::a_worker_of_another_test", "--nocapture"]);
        let child = command.env(WORKER, "1").stdout(Stdio::piped()).spawn();
        let mut child = child.expect("this program");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut worker = Worker { child, said, address: String::new() };
        worker.address = worker.says();
        worker
    }

    /// What it says next. The test's harness says things, too.
    fn says(&mut self) -> String {
        let mut line = String::new();
        while self.said.read_line(&mut line).expect("a pipe") > 0 {
            if let Some((_, said)) = line.trim_end().split_once(SAYS) {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("a worker ended without a word");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it is ours");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rank 0 sends to everyone and everyone answers: an exchange of a step.
fn turn(fabric: &mut TcpFabric, deadline: Instant) -> Result<(), FabricError> {
    let mut pool = Pool::default();
    let others: Vec<usize> = (1..fabric.ranks()).collect();
    if fabric.rank() > 0 {
        let asked = fabric.exchange(&Call::BARRIER, &[], &[0], deadline)?;
        fabric.exchange(&Call::BARRIER, &[(0, asked[0].clone())], &[], deadline)?;
        return Ok(());
    }
    let message = pool.write(8192, |out| out.fill(3));
    let sends: Vec<(usize, Message)> = others.iter().map(|&to| (to, message.clone())).collect();
    let answers = fabric.exchange(&Call::BARRIER, &sends, &others, deadline)?;
    assert!(answers.iter().all(|answer| answer.bytes() == message.bytes()));
    Ok(())
}

/// A worker's process: it answers in groups, one after the other, until it is killed, and says what ended each.
#[test]
fn a_worker_of_another_test() {
    if std::env::var(WORKER).is_err() {
        return;
    }
    let listener = listener();
    println!("{SAYS}{}", listener.address());
    loop {
        let mut fabric = join(&listener, &options()).expect("a group");
        let ended = loop {
            if let Err(fault) = turn(&mut fabric, soon()) {
                break fault;
            }
        };
        drop(fabric);
        println!("{SAYS}{ended:?}");
    }
}

/// A group of processes, led by this one.
fn led(workers: &[&Worker]) -> TcpFabric {
    let dial = |worker: &&Worker| {
        let timeout = Duration::from_secs(30);
        Channel::dial(&worker.address, Some(&key()), Purpose::Control, timeout).expect("a worker")
    };
    let options = Options { timeout: Duration::from_secs(30), ..options() };
    lead(workers.iter().map(dial).collect(), &options).expect("a group").0
}

#[test]
fn a_killed_process_is_named_by_all_others_and_the_rest_go_on_in_another_group() {
    let mut workers = [Worker::start(), Worker::start(), Worker::start()];
    let [one, two, three] = &mut workers;
    let mut fabric = led(&[&*one, &*two, &*three]);
    for _ in 0..20 {
        turn(&mut fabric, soon()).expect("nobody is missing");
    }
    two.signal(Signal::KILL);
    let begun = Instant::now();
    let fault = (0..).find_map(|_| turn(&mut fabric, soon()).err()).expect("a fault");
    assert_eq!(fault, FabricError::Died { rank: 2 });
    assert!(begun.elapsed() < Duration::from_secs(30), "a death took until the deadline");
    drop(fabric);
    let expected = format!("{:?}", FabricError::Died { rank: 2 });
    assert_eq!([one.says(), three.says()], [expected.clone(), expected]);
    // The two that are left and one that has started again.
    let again = Worker::start();
    let mut fabric = led(&[&*three, &again, &*one]);
    turn(&mut fabric, soon()).expect("nobody is missing");
}

#[test]
fn a_stopped_process_ends_the_wait_at_the_deadline_and_finds_out_when_it_goes_on() {
    let mut workers = [Worker::start(), Worker::start()];
    let [one, two] = &mut workers;
    let mut fabric = led(&[&*one, &*two]);
    turn(&mut fabric, soon()).expect("nobody is missing");
    one.signal(Signal::STOP);
    let fault =
        turn(&mut fabric, Instant::now() + Duration::from_millis(300)).expect_err("stopped");
    assert!(matches!(fault, FabricError::Deadline { rank: 0, peer: 1, .. }), "{fault}");
    assert_eq!(two.says(), format!("{fault:?}"));
    drop(fabric);
    one.signal(Signal::CONT);
    assert_eq!(one.says(), format!("{fault:?}"), "the fault that it finds");
}

#[test]
fn the_leaders_death_frees_the_workers_for_the_next_leader() {
    let mut workers = [Worker::start(), Worker::start()];
    let [one, two] = &mut workers;
    let mut fabric = led(&[&*one, &*two]);
    turn(&mut fabric, soon()).expect("nobody is missing");
    drop(fabric);
    let expected = format!("{:?}", FabricError::Died { rank: 0 });
    assert_eq!([one.says(), two.says()], [expected.clone(), expected]);
    let mut fabric = led(&[&*two, &*one]);
    turn(&mut fabric, soon()).expect("nobody is missing");
}
