// SPDX-License-Identifier: Apache-2.0
//! The states of a link, one rule at a time, over a wire that the test moves by hand.

use std::collections::VecDeque;

use spanker_link::{Body, Config, Event, Fault, Header, Identity, Kind, Link, LinkState, RESERVED};

const TICK: u64 = 20_000;

fn config(serial: u64) -> Config {
    Config::nanoseconds(Identity { serial, port: 0 }, serial as u32)
}

type Frames = VecDeque<(Header, Vec<u8>)>;

/// Everything that an end wants to send now.
fn drain(link: &mut Link<u8>, now: u64) -> Frames {
    let mut frames = Frames::new();
    while let Some((header, body)) = link.transmit(now) {
        let payload = match body {
            Body::Empty => Vec::new(),
            Body::Training(bytes) => bytes.to_vec(),
            Body::Payload(byte) => vec![*byte; usize::from(header.length)],
        };
        frames.push_back((header, payload));
    }
    frames
}

/// Gives frames to an end: what it said and what it delivered.
fn feed(link: &mut Link<u8>, frames: Frames, now: u64) -> (Vec<Event>, Vec<u8>) {
    let (mut events, mut delivered) = (Vec::new(), Vec::new());
    for (header, payload) in frames {
        match link.receive(&header, &payload, now) {
            Event::Nothing => {}
            Event::Deliver => delivered.push(payload[0]),
            event => events.push(event),
        }
    }
    (events, delivered)
}

/// Lets both ends talk until they have nothing more to say; what each said and delivered.
fn settle(ends: &mut [Link<u8>; 2], now: u64) -> [(Vec<Event>, Vec<u8>); 2] {
    let mut reported = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    for _ in 0..20 {
        for from in 0..2 {
            let frames = drain(&mut ends[from], now);
            let (events, delivered) = feed(&mut ends[1 - from], frames, now);
            ends[1 - from].consumed(delivered.len());
            reported[1 - from].0.extend(events);
            reported[1 - from].1.extend(delivered);
        }
    }
    reported
}

/// Two ends that are up at time 0.
fn pair() -> [Link<u8>; 2] {
    let mut ends = [Link::new(config(1)), Link::new(config(2))];
    ends.iter_mut().for_each(|end| end.train(0));
    settle(&mut ends, 0);
    assert_eq!(ends.each_ref().map(Link::state), [LinkState::Up; 2]);
    ends
}

#[test]
fn ends_that_train_learn_who_is_there() {
    let mut ends = [Link::new(config(1)), Link::new(config(2))];
    assert_eq!(ends[0].state(), LinkState::Down);
    ends[0].train(0);
    assert!(settle(&mut ends, 0).iter().all(|(events, _)| events.is_empty()));
    assert_eq!((ends[0].state(), ends[1].state()), (LinkState::Training, LinkState::Down));
    ends[1].train(TICK);
    let reported = settle(&mut ends, TICK);
    let trained = |serial| Event::Trained { peer: config(serial).identity, resumed: false };
    assert_eq!((&reported[0].0, &reported[1].0), (&vec![trained(2)], &vec![trained(1)]));
    assert_eq!(ends[0].peer(), Some(config(2).identity));
}

#[test]
fn smaller_lanes_and_payload_of_the_two_ends_hold() {
    let small = Config { lanes: 2, payload: 600, ..config(2) };
    let mut ends = [Link::new(config(1)), Link::new(small)];
    ends.iter_mut().for_each(|end| end.train(0));
    settle(&mut ends, 0);
    assert_eq!(ends.each_ref().map(Link::lanes), [2, 2]);
    assert_eq!(ends.each_ref().map(Link::payload_limit), [600, 600]);
    assert_eq!(ends[0].push(1, 601), Err(1));
    assert_eq!(ends[0].push(1, 600), Ok(()));
}

#[test]
fn end_that_hears_itself_gives_up_and_says_why() {
    let mut end = Link::<u8>::new(config(1));
    end.train(0);
    let frames = drain(&mut end, 0);
    let (events, _) = feed(&mut end, frames, 0);
    assert_eq!(events, [Event::Faulted(Fault::SelfConnected)]);
    assert_eq!((end.state(), end.fault()), (LinkState::Error, Some(Fault::SelfConnected)));
    // Only the caller leads out of FAULT.
    end.train(TICK);
    assert_eq!((end.state(), end.fault()), (LinkState::Training, None));
}

#[test]
fn peer_of_another_version_is_refused() {
    let mut ends = pair();
    ends[1].train(TICK);
    let mut frames = drain(&mut ends[1], TICK);
    frames[0].1[0] = 99;
    let (events, _) = feed(&mut ends[0], frames, TICK);
    assert_eq!(events, [Event::Faulted(Fault::Version)]);
}

#[test]
fn restart_of_one_end_makes_the_other_train_and_give_its_frames_back() {
    let mut ends = pair();
    ends[0].push(7, 1).unwrap();
    ends[0].push(8, 1).unwrap();
    drain(&mut ends[0], TICK); // lost
    ends[1] = Link::new(config(2)); // with the same nonce, which is the harder case
    ends[1].train(TICK);
    let reported = settle(&mut ends, TICK);
    let fresh = Event::Trained { peer: config(2).identity, resumed: false };
    assert_eq!(reported[0].0, [Event::Retraining, fresh]);
    assert_eq!([ends[0].dropped(), ends[0].dropped(), ends[0].dropped()], [Some(7), Some(8), None]);
    assert!(reported[1].1.is_empty());
    ends[0].push(9, 1).unwrap();
    assert_eq!(settle(&mut ends, 2 * TICK)[1].1, [9]);
}

#[test]
fn late_answer_of_a_peer_that_is_no_more_does_not_bring_the_link_up() {
    let mut ends = pair();
    ends[1].train(TICK);
    let frames = drain(&mut ends[1], TICK);
    feed(&mut ends[0], frames, TICK);
    let frames = drain(&mut ends[0], TICK);
    feed(&mut ends[1], frames, TICK);
    let late = drain(&mut ends[1], TICK);
    assert_eq!((ends[0].state(), late[0].0.kind), (LinkState::Training, Kind::Train));
    ends[1] = Link::new(Config { nonce: 77, ..config(2) });
    ends[1].train(TICK);
    let frames = drain(&mut ends[1], TICK);
    feed(&mut ends[0], frames, TICK);
    assert_eq!(feed(&mut ends[0], late, TICK).0, []);
    assert_eq!(ends[0].state(), LinkState::Training);
    let reported = settle(&mut ends, TICK);
    assert_eq!(reported[0].0, [Event::Trained { peer: config(2).identity, resumed: false }]);
}

#[test]
fn late_search_of_a_peer_that_is_no_more_costs_another_session() {
    let mut ends = pair();
    ends[0].train(TICK);
    let frames = drain(&mut ends[0], TICK);
    feed(&mut ends[1], frames, TICK);
    let late = drain(&mut ends[1], TICK);
    ends[1] = Link::new(Config { nonce: 77, ..config(2) });
    ends[1].train(TICK);
    // The peer that replaced it hears the same session and comes up with it.
    let frames = drain(&mut ends[1], TICK);
    feed(&mut ends[0], frames, TICK);
    let frames = drain(&mut ends[0], TICK);
    feed(&mut ends[1], frames, TICK);
    assert_eq!(ends[1].state(), LinkState::Up);
    assert_eq!(feed(&mut ends[0], late, TICK).0, []);
    assert_eq!(ends[0].state(), LinkState::Training);
    let reported = settle(&mut ends, TICK);
    assert_eq!(reported[0].0, [Event::Trained { peer: config(2).identity, resumed: false }]);
    ends[0].push(5, 1).unwrap();
    assert_eq!(settle(&mut ends, 2 * TICK)[1].1, [5]);
}

#[test]
fn training_between_live_ends_loses_and_repeats_nothing() {
    let mut ends = pair();
    for byte in 0..10 {
        ends[0].push(byte, 1).unwrap();
    }
    // Six arrive, and the answer to them is lost.
    let mut frames = drain(&mut ends[0], TICK);
    frames.truncate(6);
    assert_eq!(feed(&mut ends[1], frames, TICK).1, [0, 1, 2, 3, 4, 5]);
    ends[1].consumed(6);
    drain(&mut ends[1], TICK);
    ends[1].train(TICK);
    let reported = settle(&mut ends, TICK);
    assert!(reported[0].0.contains(&Event::Trained { peer: config(2).identity, resumed: true }));
    assert_eq!(reported[1].1, [6, 7, 8, 9]);
    let acked: Vec<u8> = std::iter::from_fn(|| ends[0].acked()).collect();
    assert_eq!(acked, (0..10).collect::<Vec<u8>>());
}

#[test]
fn frames_of_an_earlier_session_are_refused() {
    let mut ends = pair();
    ends[0].push(7, 1).unwrap();
    let old = drain(&mut ends[0], TICK);
    ends[0].cut();
    assert_eq!((ends[0].state(), ends[0].dropped()), (LinkState::Down, Some(7)));
    ends[0].train(TICK);
    settle(&mut ends, TICK);
    assert_eq!(ends[1].state(), LinkState::Up);
    // The new session expects number 0 too.
    assert_eq!(old[0].0.seq, 0);
    assert_eq!(feed(&mut ends[1], old, TICK), (vec![], vec![]));
    assert_eq!(ends[1].counters().stale, 1);
}

#[test]
fn data_leaves_credits_that_notices_may_use() {
    let mut ends = pair();
    let slots = ends[0].free_slots();
    assert_eq!(slots, usize::from(config(2).window) - RESERVED);
    for _ in 0..slots {
        ends[0].push(1, 1).unwrap();
    }
    assert_eq!(ends[0].push(1, 1), Err(1));
    for _ in 0..RESERVED {
        ends[0].notify(2, 1).unwrap();
    }
    assert_eq!(ends[0].notify(2, 1), Err(2));
    let (_, delivered) = settle(&mut ends, TICK)[1].clone();
    assert_eq!(delivered, [vec![1; slots], vec![2; RESERVED]].concat());
    assert_eq!(ends[0].free_slots(), slots);
}

#[test]
fn credit_that_was_lost_is_asked_for() {
    let mut ends = pair();
    let slots = ends[0].free_slots();
    (0..slots).for_each(|_| ends[0].push(1, 1).unwrap());
    let frames = drain(&mut ends[0], TICK);
    assert_eq!(feed(&mut ends[1], frames, TICK).1.len(), slots);
    let answer = drain(&mut ends[1], TICK);
    feed(&mut ends[0], answer, TICK);
    assert_eq!(ends[0].free_slots(), 0);
    ends[1].consumed(slots);
    drain(&mut ends[1], TICK); // the news is lost
    let at = ends[0].next_timer().expect("a timer");
    assert_eq!(ends[0].tick(at), Event::Nothing);
    settle(&mut ends, at);
    assert_eq!(ends[0].free_slots(), slots);
    assert_eq!(ends[0].counters().replayed, 0);
}

#[test]
fn silence_is_answered_with_replays_and_then_with_a_fault() {
    let mut ends = pair();
    ends[0].push(1, 1).unwrap();
    let mut replays = 0;
    loop {
        assert!(ends[0].transmit(TICK).is_some());
        let at = ends[0].next_timer().expect("a timer");
        match ends[0].tick(at) {
            Event::Faulted(fault) => {
                assert_eq!(fault, Fault::Silent);
                break;
            }
            _ => replays += 1,
        }
    }
    assert_eq!(replays, config(1).attempts);
    assert_eq!(ends[0].dropped(), Some(1));
}

#[test]
fn peer_that_never_comes_costs_all_lanes_and_ends_in_fault() {
    let mut end = Link::<u8>::new(config(1));
    end.train(0);
    let mut lanes = Vec::new();
    let fault = loop {
        lanes.push(end.lanes());
        let at = end.next_timer().expect("a timer");
        drain(&mut end, at);
        if let Event::Faulted(fault) = end.tick(at) {
            break fault;
        }
    };
    lanes.dedup();
    assert_eq!((lanes, fault), (vec![4, 2, 1], Fault::Untrainable));
}

#[test]
fn idle_link_has_no_timer_and_nothing_to_say() {
    let mut ends = pair();
    ends[0].push(1, 1).unwrap();
    settle(&mut ends, TICK);
    for end in &mut ends {
        if let Some(at) = end.next_timer() {
            assert_eq!(end.tick(at), Event::Nothing);
        }
        assert_eq!(end.next_timer(), None);
        assert!(end.transmit(u64::MAX / 2).is_none());
    }
}

#[test]
fn answer_rides_on_data_where_there_is_any() {
    let mut ends = pair();
    ends[0].push(1, 1).unwrap();
    ends[1].push(2, 1).unwrap();
    let frames = drain(&mut ends[0], TICK);
    feed(&mut ends[1], frames, TICK);
    let frames = drain(&mut ends[1], TICK);
    assert_eq!(frames.len(), 1);
    assert_eq!((frames[0].0.kind, frames[0].0.ack), (Kind::Data, 1));
}
