// SPDX-License-Identifier: Apache-2.0
//! What is measured of an emulated device is what runs there, and what is priced. How long it takes says nothing.

use std::cell::RefCell;

use spanker_collective::{Algorithm, Collective};
use spanker_llm::Network;
use spanker_model::Quant;
use spanker_plan::{Split, price};
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};

use super::super::machine::Processors;
use super::super::speeds::{Speeds, Subject};
use super::{Emulated, Event, is_possible};

#[test]
fn exchanges_of_cards_that_share_a_device_are_measured_on_the_device_and_priced_so() {
    if !is_possible() {
        return;
    }
    let recipe = Recipe { layers: 3, ..Recipe::llama(Quant::Q4_0, [8, 4, 32], 256, 512) };
    let network = Network::new(recipe.file()).expect("a network");
    let profile = Profile::builtin("h200-nvlink").expect("a profile");
    let cluster = Cluster::uniform(profile, 2, Shape::Switch).expect("cards");
    for (split, collective) in
        [(Split::Gather, Collective::AllGather), (Split::Reduce, Collective::AllReduce)]
    {
        let groups = vec![vec![(0, 1.0), (1, 1.0)]];
        let (emulated, told) = Emulated::new(1);
        let device = RefCell::new(Some(emulated));
        let on = |cards: &[usize]| {
            let device = device.borrow_mut().take().expect("one measurement");
            Processors::of(vec![Box::new(device)], cards)
        };
        let model = network.model();
        let subject =
            Subject { model, split, groups: &groups, context: 16, batch: 4, kv: Quant::F16 };
        let speeds = Speeds::measured(&on, 1, 1 << 30, &cluster, &subject).expect("speeds");
        let (start, byte) = speeds.exchange.expect("exchanges");
        assert!(start > 0.0 && byte >= 0.0, "{split:?}: {start} {byte}");
        let priced = speeds.cluster(&cluster).expect("a cluster");
        let prices = price(&priced, collective, Algorithm::OneShot, &[0, 1]);
        for bytes in [1024.0, 65536.0] {
            let (found, expected) = (prices.at(bytes).0, start + byte * bytes);
            assert!((found / expected - 1.0).abs() < 0.02, "{split:?}: {found} {expected}");
        }
        // The host wrote a step's tables and read its results or times, and nothing for an exchange.
        let events = told.taken();
        let launches = events.iter().filter(|event| **event == Event::Launch).count();
        let reads = events.iter().filter(|event| **event == Event::Read).count();
        assert!(reads <= 4 * launches, "{split:?}: {reads} reads for {launches} launches");
    }
}
