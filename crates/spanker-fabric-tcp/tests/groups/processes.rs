// SPDX-License-Identifier: Apache-2.0
//! Ranks that are processes of their own, so that they can be killed and stopped.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};
use spanker_fabric_tcp::{Channel, Limits, Listener, Options, Purpose, TcpFabric, lead};

use crate::support::{join, key, options, soon};

/// Where a worker's process is to listen. It is this program with one of these tests alone.
pub const WORKER: &str = "SPANKER_TCP_TEST_WORKER";
/// How many milliseconds it waits for others, if not as long as other tests do.
pub const TIMEOUT: &str = "SPANKER_TCP_TEST_TIMEOUT";
/// What a process says before its address, and before what came of its group.
pub const SAYS: &str = "rank: ";

/// How long nothing may be heard of a process, where that is tried.
const PATIENCE: Duration = Duration::from_secs(3);

/// A rank's process. It ends with the test.
pub struct Rank {
    child: Child,
    said: BufReader<ChildStdout>,
    /// What it said first: where it listens.
    pub address: String,
}

impl Rank {
    fn start() -> Rank {
        Rank::run(program().env(WORKER, "127.0.0.1:0"), "processes::a_worker_of_another_test")
    }

    /// Starts the process that plays this test.
    pub fn run(command: &mut Command, test: &str) -> Rank {
        let command = command.args(["--exact", test, "--nocapture"]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut rank = Rank { child, said, address: String::new() };
        rank.address = rank.says();
        rank
    }

    /// What it says next. The test's harness says things, too.
    pub fn says(&mut self) -> String {
        let mut line = String::new();
        while self.said.read_line(&mut line).expect("a pipe") > 0 {
            if let Some((_, said)) = line.trim_end().split_once(SAYS) {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("a process ended without a word");
    }

    /// Stops it, and waits until all of its threads have stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.expect("a task").path().join("stat"));
            stat.is_ok_and(|stat| {
                stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" T"))
            })
        };
        while !std::fs::read_dir(&tasks).expect("it lives").all(is_stopped) {
            std::thread::yield_now();
        }
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it is ours");
    }
}

/// This program.
pub fn program() -> Command {
    Command::new(std::env::current_exe().expect("this program"))
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rank 0 sends to everyone and everyone answers: an exchange of a step.
pub fn turn(fabric: &mut TcpFabric, deadline: Instant) -> Result<(), FabricError> {
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

/// Options with the timeout that the environment says.
pub fn hurried() -> Options {
    let timeout = std::env::var(TIMEOUT).ok().and_then(|millis| millis.parse().ok());
    let usual = options();
    Options { timeout: timeout.map_or(usual.timeout, Duration::from_millis), ..usual }
}

/// Goes on until something ends the group.
pub fn fault_of(fabric: &mut TcpFabric) -> FabricError {
    let timeout = hurried().timeout;
    (0..).find_map(|_| turn(fabric, Instant::now() + timeout).err()).expect("an endless loop")
}

/// A worker's process: it answers in groups, one after the other, until it is killed, and says what ended each.
#[test]
fn a_worker_of_another_test() {
    let Ok(address) = std::env::var(WORKER) else { return };
    let listener = Listener::bind(&address, Some(key()), Limits::USUAL).expect("a port");
    println!("{SAYS}{}", listener.address());
    loop {
        let mut fabric = join(&listener, &hurried()).expect("a group");
        let ended = fault_of(&mut fabric);
        drop(fabric);
        println!("{SAYS}{ended:?}");
    }
}

/// A group of processes, led by this one.
fn led(workers: &[&Rank]) -> TcpFabric {
    led_with(workers, &options())
}

/// The same with options of the leader's.
fn led_with(workers: &[&Rank], own: &Options) -> TcpFabric {
    let dial = |worker: &&Rank| {
        let timeout = Duration::from_secs(30);
        Channel::dial(&worker.address, Some(&key()), Purpose::Control, timeout).expect("a worker")
    };
    lead(workers.iter().map(dial).collect(), own).expect("a group").0
}

#[test]
fn a_killed_process_is_named_by_all_others_and_the_rest_go_on_in_another_group() {
    let mut workers = [Rank::start(), Rank::start(), Rank::start()];
    let [one, two, three] = &mut workers;
    let mut fabric = led(&[&*one, &*two, &*three]);
    for _ in 0..20 {
        turn(&mut fabric, soon()).expect("nobody is missing");
    }
    two.signal(Signal::KILL);
    let begun = Instant::now();
    let fault = fault_of(&mut fabric);
    assert_eq!(fault, FabricError::Died { rank: 2 });
    println!("killed: named after {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(30), "a death took until the deadline");
    drop(fabric);
    let expected = format!("{:?}", FabricError::Died { rank: 2 });
    assert_eq!([one.says(), three.says()], [expected.clone(), expected]);
    // The two that are left and one that has started again.
    let again = Rank::start();
    let mut fabric = led(&[&*three, &again, &*one]);
    turn(&mut fabric, soon()).expect("nobody is missing");
}

#[test]
fn a_stopped_process_ends_the_wait_at_the_deadline_and_finds_out_when_it_goes_on() {
    let mut workers = [Rank::start(), Rank::start()];
    let [one, two] = &mut workers;
    let mut fabric = led(&[&*one, &*two]);
    turn(&mut fabric, soon()).expect("nobody is missing");
    one.stop();
    let fault =
        turn(&mut fabric, Instant::now() + Duration::from_millis(300)).expect_err("stopped");
    assert!(matches!(fault, FabricError::Deadline { rank: 0, peer: 1, .. }), "{fault}");
    assert_eq!(two.says(), format!("{fault:?}"));
    drop(fabric);
    one.signal(Signal::CONT);
    assert_eq!(one.says(), format!("{fault:?}"), "the fault that it finds");
}

#[test]
fn a_stopped_process_is_taken_for_dead_after_the_timeout_however_long_a_call_may_take() {
    let mut workers = [Rank::start(), Rank::start()];
    let [one, two] = &mut workers;
    // The leader says how long; the workers themselves would wait for thirty seconds.
    let mut fabric = led_with(&[&*one, &*two], &Options { timeout: PATIENCE, ..options() });
    turn(&mut fabric, soon()).expect("nobody is missing");
    one.stop();
    let fault = turn(&mut fabric, soon()).expect_err("stopped");
    assert_eq!(fault, FabricError::Died { rank: 1 }, "not its deadline, which is a minute away");
    assert_eq!(two.says(), format!("{fault:?}"));
    drop(fabric);
    // It finds that the others are gone, and is free for the next leader.
    one.signal(Signal::CONT);
    one.says();
    let mut fabric = led(&[&*two, &*one]);
    turn(&mut fabric, soon()).expect("nobody is missing");
}

#[test]
fn the_leaders_death_frees_the_workers_for_the_next_leader() {
    let mut workers = [Rank::start(), Rank::start()];
    let [one, two] = &mut workers;
    let mut fabric = led(&[&*one, &*two]);
    turn(&mut fabric, soon()).expect("nobody is missing");
    drop(fabric);
    let expected = format!("{:?}", FabricError::Died { rank: 0 });
    assert_eq!([one.says(), two.says()], [expected.clone(), expected]);
    let mut fabric = led(&[&*two, &*one]);
    turn(&mut fabric, soon()).expect("nobody is missing");
}
