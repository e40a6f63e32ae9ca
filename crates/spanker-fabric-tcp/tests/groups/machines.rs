// SPDX-License-Identifier: Apache-2.0
//! Three network namespaces as three machines on a switch: what a cut cable does that a dead process does not.
//!
//! It takes root and `ip` to make them. Where they cannot be made, the tests say so and pass.

use std::process::Command;
use std::time::{Duration, Instant};

use spanker_fabric_tcp::{Channel, Purpose, lead};

use crate::processes::{Rank, SAYS, TIMEOUT, WORKER, fault_of, hurried, program, turn};
use crate::support::key;

/// What a leader's process leads: the addresses of its workers.
const LEADER: &str = "SPANKER_TCP_TEST_LEADER";
/// How long the ranks wait for each other, in milliseconds.
const PATIENCE: &str = "3000";

/// Namespaces on a bridge, which is in one of its own. They are gone with the test.
struct Network {
    name: String,
    machines: usize,
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

impl Network {
    /// So many machines, or why there are none here.
    fn of(machines: usize, name: &str) -> Result<Network, String> {
        let name = format!("spk{}{name}", std::process::id());
        let network = Network { name, machines };
        let switch = network.namespace(machines);
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add switch type bridge"))?;
        ip(&format!("-n {switch} link set switch up"))?;
        for machine in 0..machines {
            let namespace = network.namespace(machine);
            ip(&format!("netns add {namespace}"))?;
            ip(&format!(
                "-n {switch} link add port{machine} type veth peer name cable netns {namespace}"
            ))?;
            ip(&format!("-n {switch} link set port{machine} master switch up"))?;
            ip(&format!("-n {namespace} address add 10.77.0.{}/24 dev cable", machine + 1))?;
            ip(&format!("-n {namespace} link set cable up"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        Ok(network)
    }

    fn namespace(&self, machine: usize) -> String {
        format!("{}n{machine}", self.name)
    }

    /// This program on a machine.
    fn on(&self, machine: usize) -> Command {
        let this = program();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(machine)]).arg(this.get_program());
        command.env(TIMEOUT, PATIENCE);
        command
    }

    /// A worker on a machine.
    fn worker(&self, machine: usize) -> Rank {
        let address = format!("10.77.0.{}:7077", machine + 1);
        let mut command = self.on(machine);
        Rank::run(command.env(WORKER, address), "processes::a_worker_of_another_test")
    }

    /// A leader of workers. It says so when the group runs, and what ends it.
    fn leader(&self, machine: usize, workers: &[&Rank]) -> Rank {
        let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
        let mut command = self.on(machine);
        let command = command.env(LEADER, addresses.join(","));
        Rank::run(command, "machines::a_leader_of_another_test")
    }

    /// Cuts a machine's cable at the switch, or mends it: neither end is informed.
    fn cable(&self, machine: usize, state: &str) {
        let switch = self.namespace(self.machines);
        let master = if state == "cut" { "nomaster" } else { "master switch" };
        ip(&format!("-n {switch} link set port{machine} {master}")).expect("our own namespace");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for machine in 0..=self.machines {
            // What was not made need not go.
            let _ = ip(&format!("netns del {}", self.namespace(machine)));
        }
    }
}

/// A leader's process: it asks until something ends the group.
#[test]
fn a_leader_of_another_test() {
    let Ok(workers) = std::env::var(LEADER) else { return };
    let options = hurried();
    let dial = |address: &str| {
        let timeout = Duration::from_secs(30);
        Channel::dial(address, Some(&key()), Purpose::Control, timeout).expect("a worker")
    };
    let (mut fabric, _) = lead(workers.split(',').map(dial).collect(), &options).expect("a group");
    turn(&mut fabric, Instant::now() + options.timeout).expect("nobody is missing");
    println!("{SAYS}runs");
    let fault = fault_of(&mut fabric);
    drop(fabric);
    println!("{SAYS}{fault:?}");
}

/// Whether a fault says that rank 1 cannot be reached: the kernel may notice before the deadline, or after it.
fn names_rank_one(fault: &str) -> bool {
    fault == "Died { rank: 1 }" || (fault.starts_with("Deadline {") && fault.contains("peer: 1,"))
}

#[test]
fn a_cut_cable_ends_the_call_in_time_on_both_sides_and_the_workers_come_back() {
    let network = match Network::of(3, "c") {
        Ok(network) => network,
        Err(reason) => return eprintln!("skipped: no network namespaces here: {reason}"),
    };
    let (mut one, mut two) = (network.worker(1), network.worker(2));
    let mut leader = network.leader(0, &[&one, &two]);
    assert_eq!(leader.address, "runs");
    network.cable(1, "cut");
    let begun = Instant::now();
    let fault = leader.says();
    println!("cut, with a deadline of {PATIENCE} ms: {fault} after {:?}", begun.elapsed());
    assert!(names_rank_one(&fault), "the leader says {fault}");
    assert_eq!(two.says(), fault, "the worker whose cable is whole");
    let alone = one.says();
    let others = ["Died { rank: 0 }", "Died { rank: 2 }"].contains(&alone.as_str());
    assert!(
        others || alone.starts_with("Deadline { rank: 1,"),
        "the worker behind the cut: {alone}"
    );
    // The same processes, once the cable is whole.
    network.cable(1, "mended");
    let again = network.leader(0, &[&two, &one]);
    assert_eq!(again.address, "runs");
}

#[test]
fn a_group_over_a_link_that_loses_packets_loses_nothing() {
    let network = match Network::of(2, "l") {
        Ok(network) => network,
        Err(reason) => return eprintln!("skipped: no network namespaces here: {reason}"),
    };
    let switch = network.namespace(2);
    let shaped = Command::new("tc")
        .args(["-n", &switch, "qdisc", "add", "dev", "port1", "root", "netem"])
        .args(["delay", "1ms", "loss", "1%"])
        .output();
    if !shaped.as_ref().is_ok_and(|shaped| shaped.status.success()) {
        return eprintln!("skipped: links cannot be shaped here: {shaped:?}");
    }
    let mut worker = network.worker(1);
    let mut leader = network.leader(0, &[&worker]);
    std::thread::sleep(Duration::from_millis(500));
    worker.signal(rustix::process::Signal::KILL);
    assert_eq!(leader.says(), "Died { rank: 1 }", "nothing but the death ended it");
    let _ = &mut worker;
}
