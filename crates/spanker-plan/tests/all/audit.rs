// SPDX-License-Identifier: Apache-2.0
//! Taps in programs: what they leave alone, what they reach over time, and what they cost.

use std::collections::{HashMap, HashSet};

use spanker_model::{Model, Quant, builtin};
use spanker_plan::{
    Audit, Buffer, Check, Conditions, Cost, Layout, Objective, Op, Part, Plan, Programs, Reach,
    Request, Space, Split, Step, Taps, USUAL_AUDIT, Want, Work, card_layouts, load, simulate,
};
use spanker_topology::{Bytes, Cluster, Kernels, Profile, Shape};

fn cluster(cards: usize) -> Cluster {
    Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, Shape::Ring).unwrap()
}

/// Three cards in one group, or one after the other.
fn layouts(model: &Model) -> Vec<Layout> {
    let together = vec![(0..3).map(|card| (card, 1.0)).collect()];
    let apart: Vec<Vec<(usize, f64)>> = (0..3).map(|card| vec![(card, 1.0)]).collect();
    vec![
        Layout::of_groups(model, Split::Gather, &together).unwrap(),
        Layout::of_groups(model, Split::Reduce, &together).unwrap(),
        Layout::of_groups(model, Split::Gather, &apart).unwrap(),
    ]
}

fn space(audit: f64) -> Space {
    Space::of(512, 16, 1, Audit::of(audit))
}

/// Blocks of one sequence, in order.
const BLOCKS: [u32; 200] = {
    let (mut blocks, mut at) = ([0; 200], 0);
    while at < 200 {
        blocks[at] = at as u32;
        at += 1;
    }
    blocks
};

fn direct(from: usize, to: usize) -> Vec<usize> {
    vec![from, to]
}

#[test]
fn taps_leave_the_rest_of_a_program_as_it_is_and_are_the_same_every_time() {
    let model = builtin("qwen2.5-0.5b", Quant::Q4_0).unwrap();
    let cluster = cluster(3);
    for layout in layouts(&model) {
        let stages = &layout.replicas[0];
        let plain = Programs::symbolic(&model, &cluster, stages, space(0.0));
        let tapped = Programs::symbolic(&model, &cluster, stages, space(0.3));
        for (past, rows) in [(0, 16), (16, 1), (300, 1)] {
            let tokens: Vec<u32> = (0..rows).collect();
            let part = Part::new(&tokens, past, &BLOCKS, Want::Best(40));
            let parts = [part];
            let step = Step::of(&parts);
            let (programs, taps) = tapped.audited(&step, &direct, 0);
            assert_eq!(programs, tapped.step(&step, &direct));
            assert_eq!((programs.len(), taps.len()), (3, 3));
            let kept: Vec<Vec<Op>> = programs
                .iter()
                .map(|list| list.iter().filter(|op| !matches!(op, Op::Tap(_))).cloned().collect())
                .collect();
            assert_eq!(kept, plain.step(&step, &direct));
            assert_ne!(tapped.audited(&step, &direct, 1).1, taps);
            assert!(plain.audited(&step, &direct, 0).1.is_empty());
        }
    }
}

#[test]
fn captures_lie_in_the_buffers_that_are_allocated() {
    let model = builtin("smollm2-135m", Quant::Q4_1).unwrap();
    let cluster = cluster(3);
    for layout in layouts(&model) {
        for (audit, salt) in [(USUAL_AUDIT, 0), (0.9, 0), (USUAL_AUDIT, 3)] {
            let stages = &layout.replicas[0];
            let sizes: Vec<HashMap<u64, u64>> =
                card_layouts(&model, &cluster, stages, space(audit), None, None)
                    .iter()
                    .map(|card| {
                        card.allocations().map(|(of, size)| (of.symbol().0, size)).collect()
                    })
                    .collect();
            let programs = Programs::symbolic(&model, &cluster, stages, space(audit));
            for (past, rows) in [(0, 16), (16, 1), (511, 1)] {
                let tokens: Vec<u32> = (0..rows).collect();
                let part = Part::new(&tokens, past, &BLOCKS, Want::Best(40));
                let (lists, taps) = programs.audited(&Step::of(&[part]), &direct, salt);
                for ((list, taps), sizes) in lists.iter().zip(&taps).zip(&sizes) {
                    assert!(taps.bytes <= sizes[&Buffer::Audit.symbol().0]);
                    for op in list {
                        let Op::Tap(work) = op else { continue };
                        let Work::Rows { from, into, rows, length, from_stride, into_stride } =
                            *work
                        else {
                            panic!("{work:?}")
                        };
                        let ends =
                            [(from, from_stride), (into, into_stride)].map(|(at, stride)| {
                                (at.offset + (rows - 1) * stride + length, sizes[&at.buffer.0])
                            });
                        assert!(ends.iter().all(|(end, size)| end <= size), "{work:?}: {ends:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_kind_of_operator_of_every_layer_is_checked_in_time() {
    let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    let cluster = cluster(3);
    let layout = layouts(&model).swap_remove(0);
    let programs = Programs::symbolic(&model, &cluster, &layout.replicas[0], space(USUAL_AUDIT));
    let mut seen: HashSet<(usize, u32, std::mem::Discriminant<Check>)> = HashSet::new();
    let mut positions = 0;
    // Two thousand steps; contexts are longer than this one in life.
    for turn in 0..4000u64 {
        let past = turn % 511;
        let tokens = [(turn * 17 % 49152) as u32];
        let blocks: Vec<u32> = (0..8).map(|at| at ^ (turn / 511) as u32).collect();
        let part = Part::new(&tokens, past, &blocks, Want::Best(40));
        let (_, taps) = programs.audited(&Step::of(&[part]), &direct, 0);
        for (member, taps) in taps.iter().enumerate() {
            assert!(taps.list.len() >= 2);
            positions +=
                taps.list.iter().filter(|tap| matches!(tap.check, Check::Cached { .. })).count();
            let kinds = taps.list.iter();
            seen.extend(kinds.map(|tap| (member, tap.layer, std::mem::discriminant(&tap.check))));
        }
    }
    assert!(positions > 4000);
    for member in 0..3 {
        for layer in 0..30 {
            let kinds = seen.iter().filter(|(who, at, _)| (*who, *at) == (member, layer)).count();
            // Product, norm, rounding, rotation, keys and values, attention, gate, sum, copies.
            assert!(kinds >= 9, "member {member}, layer {layer}: {kinds}");
        }
    }
}

#[test]
fn usual_audit_costs_less_than_two_percent_and_is_part_of_price_and_simulation() {
    let model = builtin("smollm2-135m", Quant::Q4_1).unwrap();
    for layout in layouts(&model) {
        let plan = |audit: f64| {
            let request =
                Request { audit, position: 100, prompt: 64, ..Request::new(Objective::Latency) };
            Plan::new(model.clone(), cluster(3), request, layout.clone()).unwrap()
        };
        let (without, with) = (plan(0.0), plan(USUAL_AUDIT));
        let [cheap, dear] = [&without, &with].map(|plan| 1.0 / plan.predict().tokens_per_second);
        let more = dear / cheap - 1.0;
        assert!(more > 0.0 && more < 0.02, "{}: {more}", layout.strategy());
        let conditions = Conditions::calm(8);
        let [cheap_run, dear_run] = [&without, &with].map(|plan| {
            let tokens = simulate(plan, &conditions).unwrap().tokens;
            (tokens[7] - tokens[0]) / 7.0
        });
        let more = dear_run / cheap_run - 1.0;
        assert!(more > 0.0 && more < 0.02, "{}: {more}", layout.strategy());
        assert!((dear / dear_run - 1.0).abs() < 0.01, "{}: {dear} {dear_run}", layout.strategy());
        // The buffer is planned for.
        let memory = |plan: &Plan| plan.predict().memory[0].footprint.buffers.0;
        assert!(memory(&with) > memory(&without));
    }
}

/// The part of a token that audits take at a position: as predicted, and as the programs have it with what the
/// host really reads. Ranks wait for the one that has most to be read.
fn audit_costs(model: &Model, cards: usize, split: Split, position: u64, part: f64) -> (f64, f64) {
    let cluster = cluster(cards);
    let together = vec![(0..cards).map(|card| (card, 1.0)).collect()];
    let layout = Layout::of_groups(model, split, &together).unwrap();
    let plan = |audit: f64| {
        let context = position + 1024;
        let request = Request { audit, position, context, ..Request::new(Objective::Latency) };
        Plan::new(model.clone(), cluster.clone(), request, layout.clone()).unwrap()
    };
    let token = 1.0 / plan(0.0).predict().tokens_per_second;
    let predicted = 1.0 / plan(part).predict().tokens_per_second / token - 1.0;
    let space = Space::of(position + 1024, 16, 1, Audit::of(part));
    let programs = Programs::symbolic(model, &cluster, &layout.replicas[0], space);
    let cost = Cost::of(cluster.profile(0));
    let mut more = 0.0;
    let steps = 150;
    for past in position..position + steps {
        let part = Part::new(&[7], past, &BLOCKS, Want::Best(40));
        let (lists, taps) = programs.audited(&Step::of(&[part]), &direct, 0);
        let on = |(list, taps): (&Vec<Op>, &Taps)| {
            let copies = list.iter().filter_map(|op| match op {
                Op::Tap(work) => {
                    load(work, None, &Reach::default()).map(|load| cost.operator(&load).total().0)
                }
                _ => None,
            });
            copies.sum::<f64>() + cluster.upload(0, Bytes(taps.bytes)).0
        };
        more += lists.iter().zip(&taps).map(on).fold(0.0, f64::max);
    }
    (predicted, more / steps as f64 / token)
}

#[test]
fn usual_audit_costs_less_than_two_percent_at_any_context() {
    for name in ["smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "tinyllama-1.1b"] {
        let model = builtin(name, Quant::Q4_0).unwrap();
        for (cards, split) in [(1, Split::Gather), (3, Split::Gather), (5, Split::Reduce)] {
            for position in [16, 1024, 2048, 4096, 8192] {
                let (predicted, counted) = audit_costs(&model, cards, split, position, USUAL_AUDIT);
                let case = format!("{name} on {cards} at {position}");
                assert!(predicted < 0.02, "{case}: predicted {predicted}");
                assert!(counted < 0.02, "{case}: {counted}");
            }
        }
    }
    // The bound is one that larger samples do not keep.
    let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    let (predicted, counted) = audit_costs(&model, 3, Split::Gather, 1024, 0.05);
    assert!(predicted > 0.02 && counted > 0.02, "{predicted} {counted}");
}

#[test]
fn audit_of_a_request_is_read_back_and_checked() {
    let request = Request { audit: 0.25, ..Request::new(Objective::Latency) };
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
    let plain = serde_json::to_string(&Request::new(Objective::Latency)).unwrap();
    assert!(!plain.contains("audit"), "{plain}");
    for wrong in [-0.1, 1.5, f64::NAN] {
        let request = Request { audit: wrong, ..Request::new(Objective::Latency) };
        assert!(request.check().is_err(), "{wrong}");
    }
}

#[test]
fn a_graphics_processor_has_a_buffer_and_a_price_for_its_audit_and_no_taps() {
    let model = builtin("llama-2-7b", Quant::Q4_0).unwrap();
    let mut profile = Profile::builtin("rev-a").unwrap();
    profile.kernels = Kernels::Gpu { multiprocessors: 132 };
    let cluster = Cluster::uniform(profile, 1, Shape::Switch).unwrap();
    let layout = Layout::of_groups(&model, Split::Gather, &[vec![(0, 1.0)]]).unwrap();
    let plan = |audit: f64| {
        let request = Request { audit, context: 512, ..Request::new(Objective::Latency) };
        Plan::new(model.clone(), cluster.clone(), request, layout.clone()).unwrap()
    };
    let (without, with) = (plan(0.0), plan(USUAL_AUDIT));
    let buffers = |audit: f64| {
        let stages = &layout.replicas[0];
        let all = card_layouts(&model, &cluster, stages, space(audit), None, None);
        all[0].buffers.iter().any(|(buffer, _)| *buffer == Buffer::Audit)
    };
    assert_eq!((buffers(0.0), buffers(USUAL_AUDIT)), (false, true));
    // A read of some tens of kilobytes besides the results.
    let cost = with.predict().token.0 - without.predict().token.0;
    let host = &cluster.profile(0).host;
    let read = |bytes: u64| host.latency.value.0 + host.bandwidth.value.time(Bytes(bytes)).0;
    assert!((read(20_000)..read(100_000)).contains(&cost), "{cost}");
    // Simulated programs have as many operators as those that are run, and the step takes what is predicted of it.
    let ops = |plan: &Plan| simulate(plan, &Conditions::calm(1)).unwrap().events;
    assert_eq!(ops(&with), ops(&without));
}
