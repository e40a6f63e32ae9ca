// SPDX-License-Identifier: Apache-2.0
//! Programs of random layouts: they stay inside the buffers that the layout lists, and what is listed is what is
//! predicted.

use proptest::prelude::*;
use spanker_collective::DType;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{
    ALIGNMENT, Audit, Buffer, BufferId, CardLayout, KvCache, Layout, Numerics, Objective, Op, Part,
    Piece, Place, Plan, Programs, ROW_BYTES, Request, Space, Split, Step, Want, Wiring, Work,
    card_layouts,
};
use spanker_topology::{Cluster, ExchangeKind, Kernels, Profile, Shape};

const NOWHERE: Place = Place { buffer: BufferId(0), offset: 0 };

/// A model with layers of different types, small enough to walk through.
fn model() -> impl Strategy<Value = Model> {
    let names = vec!["smollm2-135m", "tinyllama-1.1b", "qwen2.5-0.5b", "llama-3.2-1b"];
    let quants = vec![Quant::Q4_0, Quant::Q4K, Quant::Q8_0, Quant::F16];
    let quant = prop::sample::select(quants);
    (prop::sample::select(names), quant.clone(), quant, any::<bool>()).prop_map(
        |(name, quant, finer, tied)| {
            let mut model = builtin(name, quant).unwrap();
            model.layers.truncate(6);
            for layer in model.layers.iter_mut().step_by(2) {
                layer.down = layer.down.with_quant(finer);
                layer.v = layer.v.with_quant(finer);
                layer.up = layer.up.with_quant(finer);
            }
            if tied {
                model.head = model.embedding;
                model.tied = true;
            }
            model.validate().unwrap();
            model
        },
    )
}

/// Cards in a shape that exchange in some way.
fn cluster() -> impl Strategy<Value = Cluster> {
    let shapes = vec![Shape::Ring, Shape::Star, Shape::Mesh, Shape::Switch];
    let kinds = vec![ExchangeKind::Schedules, ExchangeKind::Direct, ExchangeKind::SharedMemory];
    let kinds = prop::sample::select(kinds);
    (1usize..6, prop::sample::select(shapes), kinds).prop_map(|(cards, shape, kind)| {
        let mut card = Profile::builtin("rev-a").unwrap();
        card.link.as_mut().unwrap().exchange = kind;
        Cluster::uniform(card, cards, shape).unwrap()
    })
}

/// Cards in groups, each with a share: `cut` says after which card a group ends.
fn layout(model: &Model, cards: usize, split: Split, cut: &[bool], shares: &[f64]) -> Layout {
    let mut groups: Vec<Vec<(usize, f64)>> = vec![Vec::new()];
    for card in 0..cards {
        if card > 0 && cut[card] && groups.len() < model.layers.len() {
            groups.push(Vec::new());
        }
        groups.last_mut().unwrap().push((card, shares[card]));
    }
    Layout::of_groups(model, split, &groups).unwrap()
}

/// The bytes of a layer's KV cache and of the tables that lead there.
fn kept(cache: &KvCache, rows: u64) -> Vec<(Place, u64)> {
    let blocks = cache.count * cache.shape().unwrap().block_bytes();
    let tables = (cache.tables, cache.entries * 4);
    vec![(cache.blocks, blocks), (cache.rows, rows * ROW_BYTES), tables]
}

/// The bytes that an operator names: where each run begins, and its length.
fn extents(work: &Work) -> Vec<(Place, u64)> {
    let row = |id: u32, width: u64| Quant::from_ggml_id(id).unwrap().row_bytes(width);
    match *work {
        Work::Copy { from, into, length } => vec![(from, length), (into, length)],
        Work::Fill { into, length, .. } => vec![(into, length)],
        Work::Reduce { into, ref sources, elements, fold, .. } => {
            let bytes = elements * DType::from_code(fold.dtype).unwrap().size() as u64;
            sources.iter().chain([&into]).map(|&place| (place, bytes)).collect()
        }
        Work::Matmul { a, b, out, shape: [m, k, n], types } => {
            vec![(a, m * row(types[0], k)), (b, n * row(types[1], k)), (out, m * n * 4)]
        }
        Work::Embed { table, ids, into, rows, width, quant, count, .. } => {
            let held = u64::from(count) * row(quant, width);
            vec![(table, held), (ids, rows * 4), (into, rows * width * 4)]
        }
        Work::Norm { from, weight, into, rows, width, .. } => {
            vec![(from, rows * width * 4), (weight, width * 4), (into, rows * width * 4)]
        }
        Work::Quantize { from, into, rows, width, quant } => {
            vec![(from, rows * width * 4), (into, rows * row(quant, width))]
        }
        Work::AddRow { into, row, rows, width } => vec![(into, rows * width * 4), (row, width * 4)],
        Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, .. } => {
            let row = rows * heads * head_size * 4;
            vec![(data, row), (table, positions * dims * 4), (at, rows * ROW_BYTES)]
        }
        Work::Keep { keys, values, cache, rows } => {
            let row = rows * cache.heads * cache.head_size * 4;
            [vec![(keys, row), (values, row)], kept(&cache, rows)].concat()
        }
        Work::AttendBlocks { queries, cache, into, rows, heads, .. } => {
            let row = rows * heads * cache.head_size * 4;
            [vec![(queries, row), (into, row)], kept(&cache, rows)].concat()
        }
        Work::Gate { gate, up, into, elements, .. } => {
            [gate, up, into].map(|place| (place, elements * 4)).to_vec()
        }
        Work::Rows { from, into, rows, length, from_stride, into_stride } => {
            let run = |stride: u64| rows.saturating_sub(1) * stride + length;
            vec![(from, run(from_stride)), (into, run(into_stride))]
        }
        Work::Best { from, into, count, k, .. } => {
            vec![(from, count * 4), (into, u64::from(k) * 8)]
        }
        ref other => panic!("{other:?} is not part of a model's program"),
    }
}

/// The same for any entry of a rank's program.
fn named(op: &Op, rank: usize) -> Vec<(Place, u64)> {
    match op {
        Op::Work(work) => extents(work),
        Op::Gather { parts, rows, from, into } => {
            let own = parts[rank].end - parts[rank].start;
            vec![(*from, rows * own), (*into, rows * parts.last().unwrap().end)]
        }
        Op::Data { into, length } => vec![(*into, *length)],
        Op::Fold { data, elements, fold } | Op::Collective { data, elements, fold, .. } => {
            vec![(*data, elements * fold.size())]
        }
        Op::Send { from, length, .. } => vec![(*from, *length)],
        Op::Receive { into, length, .. } => vec![(*into, *length)],
        Op::Mark { .. } => Vec::new(),
        other => panic!("{other:?} is unknown"),
    }
}

/// What a member's program names outside the buffers of its card.
fn outside(layout: &CardLayout, program: &[Op]) -> Vec<String> {
    let sizes: Vec<(Buffer, u64)> = layout.allocations().collect();
    let mut found = Vec::new();
    for (number, op) in program.iter().enumerate() {
        for (place, bytes) in named(op, layout.rank) {
            let buffer = sizes.iter().find(|(buffer, _)| buffer.symbol() == place.buffer);
            let size = buffer.map_or(0, |(_, size)| *size);
            if bytes > 0 && place.offset + bytes > size {
                let name = buffer.map(|(buffer, _)| *buffer);
                let end = place.offset + bytes;
                found.push(format!("op {number} ends at {end} of {size} in {name:?}: {op:?}"));
            }
        }
    }
    found
}

/// What the host cannot read of what a step asks for, because it is outside of its buffer.
fn unread(layout: &CardLayout, programs: &Programs, member: usize, step: &Step<'_>) -> Vec<String> {
    let sizes: Vec<(Buffer, u64)> = layout.allocations().collect();
    let wanted = programs.wanted(member, step);
    let reads = [wanted.best, wanted.logits].into_iter().flatten();
    let outside = reads.filter_map(|(place, bytes)| {
        let buffer = sizes.iter().find(|(buffer, _)| buffer.symbol() == place.buffer);
        let end = place.offset + bytes;
        let is_outside = end > buffer.map_or(0, |(_, size)| *size);
        is_outside.then(|| format!("{buffer:?} is read to {end}"))
    });
    outside.collect()
}

/// A random step: for each sequence its tokens, those before them and what is wanted.
type Drawn = (u64, u64, u8);

/// The parts of a step of these sequences that a space has room for.
fn parts<'t>(space: Space, drawn: &[Drawn], tokens: &'t [u32], blocks: &'t [u32]) -> Vec<Part<'t>> {
    let (mut left, mut outputs) = (space.batch, space.outputs);
    let mut list = Vec::new();
    for (sequence, &(count, past, want)) in drawn.iter().enumerate() {
        if sequence as u64 >= space.sequences || left == 0 {
            break;
        }
        let count = count.clamp(1, left.min(space.context));
        let past = past % (space.context - count + 1);
        left -= count;
        let want = match want {
            0 => Want::Nothing,
            1 => Want::Logits,
            2 => Want::Best(1024),
            _ => Want::Best(7),
        };
        let tokens = &tokens[..count as usize];
        // Of the last parts as many outputs as there are left.
        let most = outputs.saturating_sub(space.sequences - sequence as u64 - 1);
        let asked = most.clamp(1, count);
        outputs -= if want == Want::Nothing { 0 } else { asked };
        let blocks = &blocks[sequence * blocks.len() / space.sequences as usize..];
        list.push(Part { tokens, past, blocks, want, outputs: asked });
    }
    list
}

/// Every byte outside its buffer that a step's programs name, with the layouts changed by `edit` first.
fn walk(
    (model, cluster, layout): (&Model, &Cluster, &Layout),
    space: Space,
    drawn: &[Drawn],
    edit: impl Fn(&mut CardLayout),
) -> Vec<String> {
    let tokens: Vec<u32> =
        (0..space.batch).map(|at| (at * 0x9E37_79B1 % model.vocab) as u32).collect();
    let blocks: Vec<u32> = (0..space.blocks as u32).rev().collect();
    let parts = parts(space, drawn, &tokens, &blocks);
    let copies = [[0, space.blocks as u32 - 1]];
    let turn = space.turns - 1;
    let mut found = Vec::new();
    for stages in &layout.replicas {
        let mut layouts = card_layouts(model, cluster, stages, space, None, None);
        layouts.iter_mut().for_each(&edit);
        let programs = Programs::symbolic(model, cluster, stages, space);
        let step = Step { parts: &parts, copies: &copies[usize::from(space.blocks < 2)..], turn };
        programs.check(&step).unwrap();
        let cards: Vec<usize> = programs.members().iter().map(|member| member.card).collect();
        let wiring = Wiring::of(cluster, &cards).unwrap();
        let lists = programs.step(&step, &|from, to| wiring.route(from, to));
        for (member, (card, list)) in layouts.iter().zip(&lists).enumerate() {
            found.extend(outside(card, list));
            found.extend(unread(card, &programs, member, &step));
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn no_program_names_a_byte_outside_its_buffers(
        model in model(),
        cluster in cluster(),
        split in prop::sample::select(vec![Split::Gather, Split::Reduce]),
        cut in prop::collection::vec(any::<bool>(), 6),
        shares in prop::collection::vec(0.05f64..2.0, 6),
        (context, batch, sequences) in (1u64..300, 1u64..24, 1u64..4),
        drawn in prop::collection::vec((1u64..24, 0u64..300, 0u8..4), 1..4),
        whole in any::<bool>(),
    ) {
        let layout = layout(&model, cluster.cards(), split, &cut, &shares);
        let space = Space::of(context, batch.min(context).max(sequences), sequences, Audit::NONE);
        let kv = if whole && model.head_size % 32 == 0 { Quant::Q8_0 } else { Quant::F16 };
        let space = Space { kv, ..space };
        let outputs = (sequences + batch % 5).min(space.batch);
        let space = Space { turns: 1 + batch % 3, outputs, ..space };
        let found = walk((&model, &cluster, &layout), space, &drawn, |_| {});
        prop_assert!(found.is_empty(), "{}", found.join("\n"));
    }

    #[test]
    fn allocations_of_any_layout_are_the_predicted_footprint(
        model in model(),
        cluster in cluster(),
        split in prop::sample::select(vec![Split::Gather, Split::Reduce]),
        cut in prop::collection::vec(any::<bool>(), 6),
        shares in prop::collection::vec(0.05f64..2.0, 6),
        (context, batch, sequences) in (1u64..5000, 1u64..300, 1u64..5),
        kernels in prop::sample::select(vec![
            Kernels::Card,
            Kernels::Host { threads: 1 },
            Kernels::Host { threads: 5 },
            Kernels::Gpu { multiprocessors: 132 },
        ]),
    ) {
        let profiles = (0..cluster.cards()).map(|card| {
            Profile { kernels, ..cluster.profile(card).clone() }
        });
        let cluster = Cluster::new(profiles.collect(), cluster.shape()).unwrap();
        let layout = layout(&model, cluster.cards(), split, &cut, &shares);
        let request = Request {
            sequences,
            context,
            batch,
            guesses: batch % 7,
            prompt: context.min(64),
            ..Request::new(Objective::Latency)
        };
        let plan = Plan::new(model, cluster, request, layout).unwrap();
        let prediction = plan.predict();
        for (card, pieces) in plan.allocations() {
            let rounded = pieces.iter().map(|piece| piece.bytes.0.next_multiple_of(ALIGNMENT));
            let stated = prediction.memory.iter().find(|memory| memory.card == card).unwrap();
            prop_assert_eq!(rounded.sum::<u64>(), stated.footprint.total().0, "card {}", card);
        }
    }
}

#[test]
fn a_gpus_kernel_has_room_for_every_program_that_its_plan_has_steps_for() {
    let gpu = Kernels::Gpu { multiprocessors: 132 };
    for name in ["smollm2-135m", "qwen2.5-0.5b"] {
        let model = builtin(name, Quant::Q4K).unwrap();
        for (split, cut) in [
            (Split::Gather, [false; 3]),
            (Split::Reduce, [false; 3]),
            (Split::Gather, [false, true, true]),
        ] {
            let ring =
                Cluster::uniform(Profile::builtin("rev-a").unwrap(), 3, Shape::Ring).unwrap();
            let layout = layout(&model, 3, split, &cut, &[1.0, 2.0, 1.0]);
            let space = Space::of(9000, 40, 1, Audit::NONE);
            let (stages, kind) = (&layout.replicas[0], Some(ExchangeKind::Direct));
            let layouts = card_layouts(&model, &ring, stages, space, kind, Some(gpu));
            let (mut weight, mut buffer) =
                (|_: usize, _: &Piece| NOWHERE, |_: usize, of: Buffer| of.symbol());
            let numerics = Numerics::default();
            let programs = Programs::bound(
                &model,
                &ring,
                stages,
                space,
                numerics,
                kind,
                (&mut weight, false),
                &mut buffer,
            );
            for rows in [1, 40] {
                let tokens: Vec<u32> = (0..rows).map(|at| at * 1001).collect();
                let parts = [Part::new(&tokens, 0, &[0], Want::Logits)];
                let lists = programs.step(&Step::of(&parts), &|from, to| vec![from, to]);
                for (layout, list) in layouts.iter().zip(lists) {
                    let gpu = layout.gpu.unwrap();
                    // Tokens and marks take no instruction; a gather of one card is a copy.
                    let takes = |op: &&Op| matches!(op, Op::Work(_) | Op::Gather { .. });
                    let count = list.iter().filter(takes).count() as u64;
                    let room = gpu.instructions;
                    assert!(count <= room && 2 * count > room, "{name}: {count} of {room}");
                    let (kernel, bytes) = layout.kept[0];
                    assert_eq!((kernel, bytes), (Buffer::Kernel, gpu.places().end), "{name}");
                }
            }
        }
    }
}

#[test]
fn candidates_of_a_step_have_room_for_the_most_that_any_part_asks_for() {
    let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    let ring = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 3, Shape::Ring).unwrap();
    let space = Space::of(64, 8, 4, Audit::NONE);
    let layout = layout(&model, 3, Split::Gather, &[false; 3], &[1.0; 3]);
    let programs = Programs::symbolic(&model, &ring, &layout.replicas[0], space);
    // Whatever the first asks for, the others get theirs.
    let wants = [Want::Logits, Want::Best(3), Want::Best(9), Want::Nothing];
    for turn in 0..wants.len() {
        let wants: Vec<Want> = (0..4).map(|at| wants[(at + turn) % 4]).collect();
        let parts: Vec<Part<'_>> =
            wants.iter().map(|&want| Part::new(&[1, 2], 0, &[0], want)).collect();
        let step = Step::of(&parts);
        let lists = programs.step(&step, &|from, to| vec![from, to]);
        for (member, list) in lists.iter().enumerate() {
            let best = list.iter().filter_map(|op| match op {
                Op::Work(Work::Best { into, k, .. }) => Some((into.offset, *k)),
                _ => None,
            });
            let each: Vec<(u64, u32)> = (0..3).map(|at| (at * 9 * 8, 9)).collect();
            assert_eq!(best.collect::<Vec<_>>(), each, "{wants:?}");
            // The last exchange is that of all candidates.
            let gathered = list.iter().rev().find_map(|op| match op {
                Op::Collective { elements, .. } => Some(*elements),
                _ => None,
            });
            assert_eq!(gathered, Some(3 * 3 * 9 * 8), "{wants:?}");
            let wanted = programs.wanted(member, &step);
            let first = (member == 0).then_some(3 * 3 * 9 * 8);
            assert_eq!(wanted.best.map(|(_, bytes)| bytes), first);
            let vocab = &programs.members()[member].shard.vocab;
            let logits = 3 * (vocab.end - vocab.start) * 4;
            assert_eq!(wanted.logits.map(|(_, bytes)| bytes), Some(logits));
        }
    }
}

#[test]
fn a_buffer_of_half_its_size_is_found_by_the_walk() {
    let model = builtin("smollm2-135m", Quant::Q4K).unwrap();
    let ring = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 4, Shape::Ring).unwrap();
    let space = Space::of(64, 8, 2, Audit::NONE);
    let drawn = [(4, 60, 2), (4, 60, 2)];
    let mut planted = Vec::new();
    for (split, cut) in [
        (Split::Gather, [false; 4]),
        (Split::Reduce, [false; 4]),
        (Split::Gather, [false, false, true, false]),
    ] {
        let layout = layout(&model, 4, split, &cut, &[1.0, 1.3, 0.7, 1.0]);
        let case = (&model, &ring, &layout);
        assert!(walk(case, space, &drawn, |_| {}).is_empty());
        let layouts = card_layouts(&model, &ring, &layout.replicas[0], space, None, None);
        for (buffer, bytes) in layouts[0].allocations() {
            let shrink = |card: &mut CardLayout| {
                if buffer == Buffer::Weights {
                    card.weights.bytes = bytes / 2;
                }
                let one = card.buffers.iter_mut().find(|(known, _)| *known == buffer);
                if let Some((_, size)) = one {
                    *size /= 2;
                }
            };
            if !walk(case, space, &drawn, shrink).is_empty() {
                planted.push(buffer);
            }
        }
    }
    let found = |buffer: Buffer| planted.contains(&buffer);
    for buffer in [
        Buffer::Weights,
        Buffer::Table,
        Buffer::Kv,
        Buffer::Step,
        Buffer::X,
        Buffer::H,
        Buffer::Queries,
        Buffer::Keys,
        Buffer::Values,
        Buffer::Heads,
        Buffer::Part,
        Buffer::Whole,
        Buffer::Y,
        Buffer::Gate,
        Buffer::Up,
        Buffer::Logits,
        Buffer::Best,
        Buffer::AllBest,
        Buffer::Padded,
    ] {
        assert!(found(buffer), "half of {buffer:?} is enough for every step");
    }
}
