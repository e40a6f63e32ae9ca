// SPDX-License-Identifier: Apache-2.0
//! `spanker twin` as a user runs it, and everything that can end before its time. Whatever ends, nothing
//! is left: no process, no socket, no file.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::place::{Place, SOON, pid, signal, within};

#[test]
fn twin_that_is_up_answers_and_is_gone_after_down() {
    let place = Place::new();
    let text = place.ok("up --cards 4 --topology ring --pace wall --seed 9");
    let export = format!("export SPANKER_DEV_DIR={}\n", place.dir.display());
    assert!(text.ends_with(&export), "{text}");
    assert!(text.contains("4 x rev-a, ring, 4 links, all up") && text.contains("wall"), "{text}");
    let status = place.status();
    assert_eq!((&status["pace"], &status["seed"]), (&"wall".into(), &9.into()));
    let states = |what: &str| -> Vec<&str> {
        let all = status[what].as_array().expect("a list").iter();
        all.map(|one| one["state"].as_str().expect("a state")).collect()
    };
    assert_eq!((states("cards"), states("links")), (vec!["up"; 4], vec!["up"; 4]));
    for card in status["cards"].as_array().expect("cards") {
        UnixStream::connect(card["path"].as_str().expect("a path")).expect("the card listens");
    }
    assert_eq!(fs::metadata(&place.dir).expect("it is there").mode() & 0o7777, 0o700);
    let record = fs::read_to_string(place.dir.join("twin.json")).expect("a record");
    let record: Value = serde_json::from_str(&record).expect("JSON");
    assert_eq!(record["keeper"], status["keeper"]);
    assert_eq!(record["cards"][3], status["cards"][3]["pid"]);
    assert_eq!(place.processes().len(), 5);
    let table = place.ok("status");
    assert!(table.contains("0-3") && table.contains("493 MB/s"), "{table}");
    fs::write(place.dir.join("links.toml"), "").expect("written by others");
    assert!(place.ok("down").contains("is down"));
    place.assert_nothing_is_left();
    assert!(place.ok("down").contains("no twin is up"));
    let error = place.error(1, "status");
    assert!(error.contains("no twin is up in") && error.contains("\nhint: "), "{error}");
}

#[test]
fn every_shape_comes_up() {
    let place = Place::new();
    for (flags, cards, links) in [
        ("--cards 1", 1, 0),
        ("--cards 2 --unshaped", 2, 1),
        ("--cards 4 --topology mesh --ber 1e-12", 4, 6),
        ("--cards 3 --topology star", 3, 3),
        ("--profile h200-nvlink --cards 3", 3, 3),
        ("--profile rev-a*2,rev-a@1GB/s --topology ring", 3, 3),
    ] {
        let text = place.ok(&format!("up --replace --json {flags}"));
        let status: Value = serde_json::from_str(&text).expect("JSON");
        let count = |what: &str| status[what].as_array().expect("a list").len();
        assert_eq!((count("cards"), count("links")), (cards, links), "{flags}");
    }
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn second_up_is_refused_unless_it_replaces() {
    let place = Place::new();
    place.ok("up --cards 2");
    let supervisor = place.status()["keeper"].clone();
    let error = place.error(1, "up --cards 2");
    assert!(error.contains(&format!("(supervisor pid {supervisor})")), "{error}");
    assert!(error.contains("\nhint: 'spanker twin down'"), "{error}");
    assert_eq!(place.status()["keeper"], supervisor);
    place.ok("up --cards 3 --replace");
    let status = place.status();
    assert_ne!(status["keeper"], supervisor);
    assert_eq!(place.processes().len(), 4);
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn card_that_is_killed_is_dead_until_it_is_restored() {
    let place = Place::new();
    place.ok("up --cards 4");
    let before = place.status();
    place.ok("kill 2");
    let status = place.status();
    assert_eq!(status["cards"][2]["state"], "dead");
    assert_eq!(status["cards"][2]["faults"][0], "signal 9");
    let links = status["links"].as_array().expect("links").iter();
    let down = links.filter(|link| link["state"] == "down").count();
    assert_eq!(down, 2);
    let socket = place.dir.join("spanker2");
    assert!(socket.exists() && UnixStream::connect(&socket).is_err());
    let error = place.error(1, "slow 2 --factor 2");
    assert!(error.contains("card 2 is dead (signal 9)"), "{error}");
    place.ok("kill 1");
    place.ok("restore 2");
    assert_eq!((place.card_state(1), place.card_state(2)), ("dead".into(), "up".into()));
    place.ok("restore");
    let after = place.status();
    for card in 0..4 {
        assert_eq!(after["cards"][card]["state"], "up");
        assert_eq!(after["cards"][card]["serial"], before["cards"][card]["serial"]);
        let same = after["cards"][card]["pid"] == before["cards"][card]["pid"];
        assert_eq!(same, card == 0 || card == 3);
    }
    assert!(after["links"].as_array().expect("links").iter().all(|link| link["state"] == "up"));
    UnixStream::connect(&socket).expect("the card listens again");
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn harm_shows_in_the_status_until_it_is_restored() {
    let place = Place::new();
    place.ok("up --cards 4");
    for line in
        ["slow 0 --factor 4", "stick 0", "garble 1", "stop 2", "cut 3-0", "corrupt 0-1 --ber 1e-9"]
    {
        assert!(!place.ok(line).is_empty(), "{line}");
    }
    let status = place.status();
    let faults = serde_json::json!(["stuck", "4 times as slow"]);
    assert_eq!(status["cards"][0]["faults"], faults);
    assert_eq!(status["cards"][1]["faults"][0], "garbling");
    assert_eq!(status["cards"][2]["state"], "stopped");
    let link = |status: &Value, pair: [u32; 2]| -> Value {
        let links = status["links"].as_array().expect("links").clone();
        let found = links.into_iter().find(|link| link["between"] == serde_json::json!(pair));
        found.expect("a link")
    };
    assert_eq!(link(&status, [0, 3])["state"], "cut");
    assert_eq!(link(&status, [0, 1])["bit_error_rate"], 1e-9);
    // A cut is remembered by a card that is stopped while the cable is cut.
    place.ok("cut 2-3");
    place.ok("restore 2");
    assert_eq!(place.card_state(2), "up");
    assert_eq!(link(&place.status(), [2, 3])["state"], "cut");
    place.ok("restore 0-3");
    assert_eq!(link(&place.status(), [0, 3])["state"], "up");
    place.ok("restore");
    let status = place.status();
    for card in status["cards"].as_array().expect("cards") {
        assert_eq!((&card["state"], &card["faults"]), (&"up".into(), &serde_json::json!([])));
    }
    for link in status["links"].as_array().expect("links") {
        assert_eq!((&link["state"], &link["bit_error_rate"]), (&"up".into(), &0.0.into()));
    }
    place.ok("stop 1");
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn keeper_that_is_killed_leaves_nothing_even_of_stopped_cards() {
    for stopped in [false, true] {
        let place = Place::new();
        place.ok("up --cards 3");
        if stopped {
            (0..3).for_each(|card| drop(place.ok(&format!("stop {card}"))));
        }
        signal(pid(&place.status()["keeper"]), Signal::KILL);
        place.assert_nothing_is_left();
    }
}

#[test]
fn keeper_that_gets_a_signal_takes_everything_down() {
    for sent in [Signal::INT, Signal::TERM, Signal::HUP] {
        let place = Place::new();
        place.ok("up --cards 2");
        signal(pid(&place.status()["keeper"]), sent);
        place.assert_nothing_is_left();
    }
}

#[test]
fn keeper_that_is_stopped_is_taken_down_all_the_same() {
    let place = Place::new();
    place.ok("up --cards 2");
    signal(pid(&place.status()["keeper"]), Signal::STOP);
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn card_that_dies_by_itself_is_noticed_and_the_others_live_on() {
    let place = Place::new();
    place.ok("up --cards 3");
    signal(pid(&place.status()["cards"][1]["pid"]), Signal::KILL);
    within(SOON, || (place.card_state(1) == "dead").then_some(()));
    assert_eq!((place.card_state(0), place.card_state(2)), ("up".into(), "up".into()));
    assert!(place.dir.join("spanker1").exists());
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn card_that_others_have_stopped_is_silent_and_ends_by_force() {
    let place = Place::new();
    place.ok("up --cards 2");
    let card = pid(&place.status()["cards"][1]["pid"]);
    signal(card, Signal::STOP);
    within(SOON, || (place.card_state(1) == "silent").then_some(()));
    place.ok("restore 1");
    assert_eq!(place.card_state(1), "up");
    signal(card, Signal::STOP);
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn nonsense_and_silence_at_the_desk_do_not_harm_the_twin() {
    let place = Place::new();
    place.ok("up --cards 1");
    let nonsense: [&[u8]; 4] =
        [&[0xff; 64], b"\x02\0\0\0{}", b"\x08\0\0\0\"fly\"", b"\x06\0\0\0\"down\""];
    for bytes in nonsense {
        let mut stream =
            UnixStream::connect(place.dir.join("twin")).expect("the supervisor listens");
        stream.write_all(bytes).expect("it takes anything");
        // The last one is not nonsense, but nobody waits for what comes of it.
        drop(stream);
        if bytes != nonsense[3] {
            assert_eq!(place.card_state(0), "up");
        }
    }
    place.assert_nothing_is_left();
    place.ok("up --cards 1");
    let _silent = UnixStream::connect(place.dir.join("twin")).expect("the supervisor listens");
    assert_eq!(place.card_state(0), "up");
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn what_a_twin_left_that_was_killed_whole_is_swept_by_the_next() {
    let place = Place::new();
    for cleanup in ["up --cards 2", "down"] {
        place.ok("up --cards 2");
        let status = place.status();
        for card in 0..2 {
            signal(pid(&status["cards"][card]["pid"]), Signal::KILL);
        }
        signal(pid(&status["keeper"]), Signal::KILL);
        within(SOON, || place.processes().is_empty().then_some(()));
        assert!(place.dir.join("spanker1").exists(), "nobody was left to sweep");
        place.ok(cleanup);
        place.ok("down");
        place.assert_nothing_is_left();
    }
}

#[test]
fn of_two_ups_at_once_one_wins() {
    let place = Place::new();
    let both = [place.spawn("up --cards 3"), place.spawn("up --cards 3")];
    let outputs = both.map(|child| child.wait_with_output().expect("it ends"));
    let won = outputs.iter().filter(|output| output.status.success()).count();
    let errors: Vec<_> =
        outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    assert_eq!(won, 1, "{errors:?}");
    assert!(errors.concat().contains("a twin is up in"), "{errors:?}");
    assert_eq!(place.processes().len(), 4);
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn up_that_ends_before_the_twin_is_up_leaves_nothing() {
    for sent in [Signal::KILL, Signal::INT, Signal::TERM] {
        for delay in [0, 4, 8, 16, 30] {
            let place = Place::new();
            let mut up = place.spawn("up --cards 16 --topology switch");
            std::thread::sleep(Duration::from_millis(delay));
            signal(up.id() as i32, sent);
            let status = up.wait().expect("it ends");
            if status.success() {
                place.ok("down");
            } else if sent == Signal::KILL {
                // The supervisor may have come first; then the twin is up and stays.
                let settled = || match place.output("status").status.success() {
                    true => Some(place.ok("down")),
                    false => place.processes().is_empty().then(String::new),
                };
                within(SOON, settled);
            }
            place.assert_nothing_is_left();
        }
    }
}

#[test]
fn foreground_twin_ends_with_its_signal() {
    for sent in [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL] {
        let place = Place::new();
        let child = place.spawn("up --cards 2 --foreground");
        within(SOON, || place.output("status").status.success().then_some(()));
        assert_eq!(pid(&place.status()["keeper"]), child.id() as i32);
        signal(child.id() as i32, sent);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.success(), sent != Signal::KILL);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("export SPANKER_DEV_DIR="), "{text}");
        place.assert_nothing_is_left();
    }
}

#[test]
fn directory_that_is_not_safe_is_refused_with_owner_and_mode() {
    let place = Place::new();
    let refused = |reason: &[&str]| {
        let error = place.error(1, "up --cards 2");
        let shown = place.dir.display().to_string();
        assert!(reason.iter().chain([&shown.as_str()]).all(|part| error.contains(part)), "{error}");
        assert!(error.contains("\nhint: "), "{error}");
    };
    let mode = |mode| fs::set_permissions(&place.dir, fs::Permissions::from_mode(mode)).unwrap();
    fs::create_dir(&place.dir).unwrap();
    mode(0o770);
    refused(&["others can write", "mode 0770"]);
    mode(0o700);
    match chown(&place.dir, Some(12345), None) {
        Ok(()) => refused(&["belongs to uid 12345", "mode 0700"]),
        Err(error) => eprintln!("skipped: only root can give a directory away ({error})"),
    }
    let _ = chown(&place.dir, Some(rustix::process::geteuid().as_raw()), None);
    fs::write(place.dir.join("thesis.txt"), "mine").unwrap();
    refused(&["no twin made: thesis.txt"]);
    assert_eq!(fs::read_dir(&place.dir).unwrap().count(), 1);
    let real = place.outer.path().join("real");
    fs::rename(&place.dir, &real).unwrap();
    symlink(&real, &place.dir).unwrap();
    refused(&["symbolic link"]);
    assert_eq!(fs::read_to_string(real.join("thesis.txt")).unwrap(), "mine");
    assert!(place.processes().is_empty());
}

#[test]
fn files_of_others_stay_and_are_named() {
    let place = Place::new();
    fs::create_dir(&place.dir).unwrap();
    place.ok("up --cards 1");
    fs::write(place.dir.join("thesis.txt"), "mine").unwrap();
    let text = place.ok("down");
    assert!(text.contains("thesis.txt belongs to others"), "{text}");
    assert_eq!(fs::read_dir(&place.dir).unwrap().count(), 1);
    assert!(place.processes().is_empty());
}

#[test]
fn directory_that_is_empty_stays_when_there_is_nothing_to_take_down() {
    let place = Place::new();
    fs::create_dir(&place.dir).unwrap();
    assert!(place.ok("down").contains("no twin is up"));
    assert!(place.dir.exists());
}

#[test]
fn mistakes_are_named_and_end_with_2() {
    let place = Place::new();
    for (line, named) in [
        ("up --cards 0", "--cards 0"),
        ("up --cards 65", "--cards 65"),
        ("up --cards 4 --topology moebius", "moebius"),
        ("up --cards 4 --profile rev-q", "rev-q"),
        ("up --pace fast", "fast"),
        ("up --pace wall --unshaped", "--unshaped"),
        ("up --ber 0.7", "0.7"),
        ("up --ber=-1e-9", "-1e-9"),
        ("up --seed x", "'x'"),
        ("kill", "<CARD>"),
        ("kill x", "'x'"),
        ("cut 0", "'0'"),
        ("cut 1-1", "'1-1'"),
        ("corrupt 0-1 --ber nan", "nan"),
        ("slow 1 --factor 0", "'0'"),
        ("restore 1-x", "'1-x'"),
        ("fly", "fly"),
    ] {
        let error = place.error(2, line);
        assert!(error.contains(named), "{line}: {error}");
    }
    assert!(!Path::new(&place.dir).exists());
    place.ok("up --cards 3 --topology ring");
    for (line, named) in
        [("kill 3", "no card 3"), ("restore 7", "no card 7"), ("cut 0-5", "no link 0-5")]
    {
        let error = place.error(2, line);
        assert!(error.contains(named), "{line}: {error}");
    }
    place.ok("down");
    place.assert_nothing_is_left();
}

#[test]
fn help_of_every_command_says_what_it_does_and_hides_the_inner_ones() {
    let place = Place::new();
    let text = place.ok("--help");
    let commands =
        ["up", "status", "kill", "cut", "corrupt", "slow", "stick", "stop", "garble", "restore"];
    for command in commands.into_iter().chain(["down"]) {
        assert!(text.contains(&format!("\n  {command} ")), "{command}: {text}");
        assert!(place.ok(&format!("{command} --help")).lines().count() > 3, "{command}");
    }
    assert!(!text.contains("  keeper") && !text.contains("  card "), "{text}");
}
