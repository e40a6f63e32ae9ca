// SPDX-License-Identifier: Apache-2.0
//! What one message takes between emulated cards, against the profile of the link.

use std::time::Duration;

use spanker_fabric::device::{Deadline, DeviceErrorKind, DeviceGroup};
use spanker_plan::Line;
use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Disturbance, Pace, World, specs};

fn world(cards: usize, pace: Pace) -> (World, Vec<SpankerControl>) {
    let profile = Profile::builtin("rev-a").unwrap();
    let ring = Cluster::uniform(profile, cards, Shape::Ring).unwrap();
    let world = World::new(specs(&ring, pace, 1).unwrap(), 1);
    let controls = (0..cards).map(|card| world.control(card)).collect();
    (world, controls)
}

#[test]
fn messages_take_what_the_profile_says_in_every_direction() {
    let (_world, controls) = world(4, Pace::Card);
    let group = DeviceGroup::new(&controls.iter().collect::<Vec<_>>()).unwrap();
    for (from, to) in [(0, 1), (1, 0), (3, 0), (2, 1)] {
        let samples = [64, 1024, 16384, 1 << 20].map(|bytes| {
            let time = group.message_time(from, to, bytes, &Deadline::USUAL).unwrap();
            (bytes, time.as_secs_f64())
        });
        let line = Line::fit(&samples).unwrap();
        assert!((line.latency.micros() - 2.0).abs() < 0.2, "{line:?}");
        assert!((line.bandwidth.0 as f64 / 493e6 - 1.0).abs() < 0.01, "{line:?}");
        assert!(line.worst < 0.02, "{line:?}");
    }
    let free = |control: &SpankerControl| {
        let info = control.info().unwrap();
        info.available == info.capacity
    };
    assert!(controls.iter().all(free));
}

#[test]
fn messages_between_cards_that_are_not_neighbours_are_refused_by_name() {
    let (_world, controls) = world(4, Pace::Card);
    let group = DeviceGroup::new(&controls.iter().collect::<Vec<_>>()).unwrap();
    let error = group.message_time(0, 2, 64, &Deadline::USUAL).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unreachable);
    assert_eq!((error.card(), error.peer()), (Some(0), Some(2)));
}

#[test]
fn ping_pong_between_unshaped_cards_gives_a_time() {
    let (_world, controls) = world(2, Pace::Unshaped);
    let group = DeviceGroup::new(&controls.iter().collect::<Vec<_>>()).unwrap();
    let time = group.message_time(0, 1, 4096, &Deadline::USUAL).unwrap();
    assert!(time < Duration::from_secs(1), "{time:?}");
}

#[test]
fn message_to_a_card_that_is_gone_names_it() {
    let (world, controls) = world(2, Pace::Card);
    let group = DeviceGroup::new(&controls.iter().collect::<Vec<_>>()).unwrap();
    world.disturb(Disturbance::Kill(1));
    let error = group.message_time(0, 1, 64, &Deadline::USUAL).unwrap_err();
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Lost, Some(1)));
}
