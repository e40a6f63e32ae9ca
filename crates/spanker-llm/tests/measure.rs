// SPDX-License-Identifier: Apache-2.0
//! A profile that was measured on a model has a rate for every kind of operator that the model's program has. How
//! fast anything is, is not tested.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use spanker_llm::{Network, Subject, measure};
use spanker_model::Quant;
use spanker_plan::{Layout, Load, Op, Part, Programs, Space, Split, Step, Want, load};
use spanker_test_support::Recipe;
use spanker_topology::{Bytes, Cluster, ExchangeKind, OperatorKind, Profile, Provenance, Shape};

use splits::{Open, mixed, one_by_one, together};

/// Operators of steps of several sizes that a profile has no rate for, by kind and type of weights.
fn unpriced(
    network: &Network<Vec<u8>>,
    layout: &Layout,
    profile: &Profile,
) -> Vec<(OperatorKind, Option<Quant>)> {
    let cards = layout.cards().len();
    let cluster = Cluster::uniform(profile.clone(), cards, Shape::Switch).unwrap();
    let space = Space::of(64, 16, 1, spanker_plan::Audit::NONE);
    let programs = Programs::symbolic(network.model(), &cluster, &layout.replicas[0], space);
    let mut missing = Vec::new();
    for rows in [1, 2, 5, 16] {
        let tokens = vec![1; rows];
        let parts = [Part::new(&tokens, 3, &[0], Want::Best(1))];
        let step = Step::of(&parts);
        let lists = programs.step(&step, &|from, to| vec![from, to]);
        for op in lists.iter().flatten() {
            let counted = match op {
                Op::Work(work) => load(work, None, &step.reach()),
                Op::Data { length, .. } => Some(Load::data(*length)),
                _ => None,
            };
            let Some(load) = counted else { continue };
            let name = load.weights.map(|quant| quant.name().to_owned());
            let known = profile.compute.operators.iter();
            let mut known = known.filter(|entry| entry.kind == load.kind);
            let key = (load.kind, load.weights);
            if !known.any(|entry| entry.weights == name) && !missing.contains(&key) {
                missing.push(key);
            }
        }
    }
    missing
}

fn measured(network: &Arc<Network<Vec<u8>>>, layout: &Layout, threads: usize) -> Profile {
    let subject = Subject { layout, batch: 16, threads, memory: Bytes(8 << 30) };
    let mut rows = Vec::new();
    let profile = measure(network, &subject, &mut |next| rows.push(next)).unwrap();
    assert_eq!(rows, [1, 2, 4, 8, 16]);
    profile
}

#[test]
fn measured_profile_has_a_rate_for_every_operator_of_every_split() {
    for quant in [Quant::Q4_0, Quant::F16] {
        let network = Arc::new(Recipe::llama(quant, [4, 2, 32], 128, 256).network());
        let splits = [
            (Split::Gather, together(&[1.0])),
            (Split::Gather, together(&[1.0, 1.0])),
            (Split::Reduce, together(&[1.0, 1.0])),
            (Split::Gather, one_by_one(2)),
            (Split::Gather, mixed(3)),
        ];
        for (split, groups) in splits {
            let layout = Layout::of_groups(network.model(), split, &groups).unwrap();
            let profile = measured(&network, &layout, 2);
            assert_eq!(unpriced(&network, &layout, &profile), [], "{quant} {groups:?}");
            assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile.clone()));
            let cards = layout.cards().len() as u64;
            assert_eq!(profile.memory.capacity.value, Bytes((8 << 30) / cards));
            let link = profile.link.as_ref().unwrap();
            assert_eq!(link.exchange, ExchangeKind::SharedMemory);
            let expected = if cards > 1 { Provenance::Measured } else { Provenance::Assumed };
            assert_eq!(link.latency.provenance, expected, "{groups:?}");
            assert_eq!(profile.host.latency.provenance, Provenance::Measured);
        }
    }
}

#[test]
fn head_of_a_type_of_its_own_is_measured_for_the_tokens_of_many_sequences() {
    let recipe = Recipe { plain_head: true, ..Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 256) };
    let network = Arc::new(recipe.network());
    let head = network.model().head.quant.name();
    assert_ne!(head, Quant::Q4_0.name());
    let layout = Layout::of_groups(network.model(), Split::Gather, &together(&[1.0])).unwrap();
    let profile = measured(&network, &layout, 2);
    let rows = |weights: &str| -> Vec<u64> {
        let products = profile.compute.operators.iter();
        let of = products.filter(|entry| entry.weights.as_deref() == Some(weights));
        of.filter(|entry| entry.kind == OperatorKind::Product).map(|entry| entry.rows).collect()
    };
    assert_eq!(rows(head), [1, 2, 4, 8, 16]);
    assert_eq!(rows(Quant::Q4_0.name()), [1, 2, 4, 8, 16]);
}

#[test]
fn kind_that_is_taken_out_of_a_profile_is_missed() {
    let network = Arc::new(Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 256).network());
    let layout = Layout::of_groups(network.model(), Split::Gather, &together(&[1.0])).unwrap();
    let whole = measured(&network, &layout, 1);
    for (kind, weights) in [(OperatorKind::Norm, None), (OperatorKind::Product, Some(Quant::Q4_0))]
    {
        let mut profile = whole.clone();
        profile.compute.operators.retain(|entry| entry.kind != kind);
        assert_eq!(unpriced(&network, &layout, &profile), [(kind, weights)]);
    }
}

#[test]
fn stages_of_several_layers_are_measured_through_some_of_them_and_still_hand_over() {
    let recipe = Recipe { layers: 6, ..Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 256) };
    let network = Arc::new(recipe.network());
    let layout = Layout::of_groups(network.model(), Split::Gather, &one_by_one(2)).unwrap();
    let profile = measured(&network, &layout, 2);
    assert_eq!(unpriced(&network, &layout, &profile), []);
    assert_eq!(profile.link.unwrap().latency.provenance, Provenance::Measured);
}
