// SPDX-License-Identifier: Apache-2.0
//! The operators of a model: what a card refuses, what it takes them for on its clock, and that a card that
//! computes garbage does so in all of them. What they compute is in `operators.rs`.

use nix::errno::Errno;
use spanker_runtime::{
    Activation, BufferId, Descriptor, Error, Fold, KvCache, Landing, Picks, Place, Scores,
    SpankerControl, Work, abi,
};
use spanker_twin::Disturbance;

use crate::support::{SECOND, at, ring};

/// Bytes of the buffers of these tests.
const SIZE: u64 = 1 << 20;

fn buffers<const N: usize>(card: &SpankerControl) -> [BufferId; N] {
    std::array::from_fn(|_| card.allocate(SIZE).unwrap())
}

/// One operator of each kind on small sizes, with operands in `x` and `y` and the result in `z`.
fn operators(x: BufferId, y: BufferId, z: BufferId) -> Vec<Work> {
    let [x, y, z] = [x, y, z].map(|buffer| at(buffer, 0));
    let (rows, width) = (2, 256);
    vec![
        Work::Embed { table: x, ids: y, into: z, rows, width, quant: 8, first: 0, count: 4 },
        Work::Norm { from: x, weight: y, into: z, rows, width, epsilon: 1 },
        Work::Quantize { from: x, into: z, rows, width, quant: 15 },
        Work::Rotate { data: z, table: x, rows, heads: 2, head_size: 64, dims: 64, pairs: 0 },
        Work::Halve { from: x, into: z, elements: 64 },
        attend([x, y, y, z], [2, 4, 2, 64, 2, 0, 3]),
        Work::Gate { gate: x, up: y, into: z, elements: 64, activation: Activation::Silu },
        Work::Rows { from: x, into: z, rows, length: 8, from_stride: 8, into_stride: 16 },
        Work::Best { from: x, into: z, count: 64, k: 4, first: 0 },
        Work::Matmul { a: x, b: y, out: z, shape: [2, 256, 3], types: [15, 14] },
        Work::Write { into: z, bytes: [1; 64].into() },
        Work::AddRow { into: z, row: y, rows, width },
        turn(z, x, Place { offset: 64, ..y }, [3, rows, 2, 64, 64]),
        Work::Keep { keys: x, values: x, cache: cache(z, y, [2, 2, 64]), rows },
        attend_blocks(
            [x, z],
            cache(y, Place { offset: SIZE / 2, ..y }, [2, 2, 64]),
            [rows, 4, 2, 0],
        ),
        Work::Route { logits: x, picks: picks(z), rows, gating: 1 },
        experts([x, y, z], Place { offset: 4096, ..x }),
        Work::Combine { from: x, picks: picks(y), into: z, rows, width, add: true },
        added([z, x, y], [rows, width, width * 4], true),
    ]
}

/// Rows of a table that picks add.
fn added([into, table, at]: [Place; 3], [rows, width, stride]: [u64; 3], weighed: bool) -> Work {
    Work::AddPicked { into, table, picks: picks(at), rows, width, stride, weighed }
}

/// Two of four experts.
fn picks(at: Place) -> Picks {
    Picks { at, used: 2, experts: 4 }
}

fn experts([a, b, out]: [Place; 3], at: Place) -> Work {
    let (shape, types) = ([2, 256, 3], [15, 14]);
    Work::MatmulExperts { a, b, out, picks: picks(at), shape, types, stride: 640, apart: true }
}

fn turn(data: Place, table: Place, at: Place, sizes: [u64; 5]) -> Work {
    let [positions, rows, heads, head_size, dims] = sizes;
    Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs: 0 }
}

/// A cache as F16 whose rows and tables are in one buffer.
fn cache(blocks: Place, tables: Place, [count, heads, head_size]: [u64; 3]) -> KvCache {
    let rows = tables;
    let tables = Place { offset: tables.offset + 4096, ..tables };
    KvCache { blocks, count, rows, tables, entries: 4, heads, head_size, quant: 1 }
}

fn attend_blocks([queries, into]: [Place; 2], cache: KvCache, sizes: [u64; 4]) -> Work {
    let [rows, heads, group, offset] = sizes;
    let scores = Scores::plain(1.0f32.to_bits());
    Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores }
}

fn attend(places: [Place; 4], sizes: [u64; 7]) -> Work {
    let [queries, keys, values, into] = places;
    let [rows, heads, kv_heads, head_size, group, offset, past] = sizes;
    let scale = 1.0f32.to_bits();
    Work::Attend {
        queries,
        keys,
        values,
        into,
        rows,
        heads,
        kv_heads,
        head_size,
        group,
        offset,
        past,
        scale,
    }
}

/// Submits work behind a fill that must not run, and returns why it was refused.
fn refusal(card: &SpankerControl, marked: BufferId, work: Work) -> Errno {
    let fill = Work::Fill { into: at(marked, 0), length: 4, pattern: 0xFFFF_FFFF };
    match card.submit(1, &[fill.into(), work.clone().into()]) {
        Err(Error::Ioctl { source, .. }) => source,
        other => panic!("expected a refusal of {work:?}, got {other:?}"),
    }
}

/// Operators of sizes that do not fit.
fn ill_sized([a, b, c]: [Place; 3]) -> Vec<Work> {
    let (rows, width, huge) = (2, 256, u64::MAX / 3);
    let embed = |rows, width, quant, count| Work::Embed {
        table: a,
        ids: b,
        into: c,
        rows,
        width,
        quant,
        first: 0,
        count,
    };
    let norm = |rows, width| Work::Norm { from: a, weight: b, into: c, rows, width, epsilon: 0 };
    let rotate = |heads, head_size, dims| Work::Rotate {
        data: a,
        table: b,
        rows,
        heads,
        head_size,
        dims,
        pairs: 1,
    };
    let blocks = |rows, width, quant| Work::Quantize { from: a, into: b, rows, width, quant };
    let strided = |rows, length, stride| Work::Rows {
        from: a,
        into: b,
        rows,
        length,
        from_stride: stride,
        into_stride: stride,
    };
    let best = |count, first| Work::Best { from: a, into: b, count, k: 2, first };
    let product = |shape, types| Work::Matmul { a, b, out: c, shape, types };
    vec![
        embed(rows, 100, 8, 1),
        embed(rows, width, 8, 1 << 20),
        embed(huge, width, 8, 1),
        embed(1 << 20, width, 8, 1),
        norm(rows, 0),
        norm(huge, 4),
        norm(1, 1 << 21),
        blocks(rows, 100, 8),
        blocks(rows, huge, 15),
        blocks(0, 1 << 62, 15),
        rotate(2, 64, 66),
        rotate(2, 64, 63),
        rotate(0, 64, 64),
        rotate(huge, huge, 2),
        strided(2, 8, 7),
        strided(huge, 8, 8),
        strided(3, 8, SIZE / 2),
        best(SIZE / 4 + 1, 0),
        best(10, u32::MAX - 9),
        product([1, 100, 1], [8, 8]),
        product([huge, 256, huge], [15, 12]),
        product([0, 256, huge], [15, 12]),
        attend([a, b, b, c], [2, 4, 2, 64, 0, 0, 3]),
        attend([a, b, b, c], [2, 5, 2, 64, 2, 0, 3]),
        attend([a, b, b, c], [2, 4, 2, 64, 2, 1, 3]),
        attend([a, b, b, c], [2, 4, 2, 64, 2, 0, u64::MAX]),
        attend([a, b, b, c], [2, 4, 2, 0, 2, 0, 3]),
        attend([a, b, b, c], [2, 4, 2, huge, 2, huge, 3]),
    ]
}

/// The same, of work with rows of many sequences.
fn ill_sized_steps([a, b, c]: [Place; 3]) -> Vec<Work> {
    let (rows, width, huge) = (2, 256, u64::MAX / 3);
    vec![
        Work::AddRow { into: a, row: b, rows, width: 0 },
        Work::AddRow { into: a, row: b, rows: huge, width },
        turn(a, b, c, [3, rows, 2, 64, 66]),
        turn(a, b, c, [3, rows, 2, 64, 63]),
        turn(a, b, c, [huge, rows, 2, 64, 64]),
        turn(a, b, c, [3, huge, 2, 64, 64]),
        Work::Keep { keys: a, values: a, cache: cache(b, c, [huge, 2, 64]), rows },
        Work::Keep { keys: a, values: a, cache: cache(b, c, [2, huge, 64]), rows },
        Work::Keep { keys: a, values: a, cache: cache(b, c, [SIZE, 2, 64]), rows },
        Work::Keep { keys: a, values: a, cache: cache(b, c, [2, 2, 64]), rows: huge },
        attend_blocks([a, a], cache(b, c, [2, 2, 64]), [rows, 4, 0, 0]),
        attend_blocks([a, a], cache(b, c, [2, 2, 64]), [rows, 5, 2, 0]),
        attend_blocks([a, a], cache(b, c, [2, 2, 64]), [rows, 4, 2, 1]),
        attend_blocks([a, a], cache(b, c, [2, 2, 64]), [huge, 4, 2, 0]),
        attend_blocks(
            [a, a],
            KvCache { entries: huge, ..cache(b, c, [2, 2, 64]) },
            [rows, 4, 2, 0],
        ),
    ]
}

/// The same, of mixtures of experts.
fn ill_sized_experts([a, b, c]: [Place; 3]) -> Vec<Work> {
    let (rows, width, huge) = (2, 256, u64::MAX / 3);
    let route = |picks, rows| Work::Route { logits: a, picks, rows, gating: 0 };
    let sized = |shape, picks, stride| {
        let (types, out) = ([15, 14], c);
        let a = Place { offset: 4096, ..a };
        Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart: false }
    };
    let at = |used, experts| Picks { at: Place { offset: SIZE / 2, ..a }, used, experts };
    let sum = |rows, width| {
        let picks = at(2, 4);
        Work::Combine { from: b, picks, into: c, rows, width, add: false }
    };
    vec![
        route(picks(c), huge),
        route(picks(c), SIZE),
        // Picks in the logits.
        route(picks(Place { offset: 8, ..a }), rows),
        sized([rows, 100, 3], at(2, 4), 640),
        sized([huge, width, 3], at(2, 4), 640),
        sized([rows, width, huge], at(2, 4), 640),
        // Experts over each other, and the last one outside.
        sized([rows, width, 3], at(2, 4), 629),
        sized([rows, width, 3], at(2, 4), SIZE / 3),
        sized([rows, width, 3], at(2, 4), huge),
        sum(huge, width),
        sum(rows, huge),
        sum(SIZE, width),
        added([c, b, a], [huge, width, width * 4], true),
        added([c, b, a], [rows, huge, width * 4], false),
        added([c, b, a], [SIZE, width, width * 4], false),
        // Rows of experts over each other, at odd bytes, and the last one outside; sums in the table and in the picks.
        added([c, b, a], [rows, width, width * 4 - 4], true),
        added([c, b, a], [rows, width, width * 4 + 2], true),
        added([c, b, a], [rows, width, SIZE / 3], true),
        added([c, b, a], [rows, width, huge], true),
        added([b, b, a], [rows, width, width * 4], true),
        added([a, b, a], [rows, width, width * 4], false),
    ]
}

#[test]
fn operators_with_bad_sizes_or_types_are_refused_and_nothing_runs() {
    let world = ring(2);
    let card = world.control(0);
    let [x, y, z, marked] = buffers(&card);
    let [a, b, c] = [x, y, z].map(|buffer| at(buffer, 0));
    let steps = ill_sized_steps([a, b, c]).into_iter().chain(ill_sized_experts([a, b, c]));
    for work in ill_sized([a, b, c]).into_iter().chain(steps) {
        assert_eq!(refusal(&card, marked, work), Errno::EINVAL);
    }
    let (rows, width) = (1, 256);
    let embed =
        |quant| Work::Embed { table: a, ids: b, into: c, rows, width, quant, first: 0, count: 1 };
    let product = |types| Work::Matmul { a, b, out: c, shape: [1, 256, 1], types };
    let blocks = Work::Quantize { from: a, into: b, rows, width, quant: 12 };
    for work in [embed(9), embed(999), blocks, product([8, 12]), product([12, 14])] {
        assert_eq!(refusal(&card, marked, work), Errno::EOPNOTSUPP);
    }
    let mut found = [0; 4];
    card.read(marked, 0, &mut found).unwrap();
    assert_eq!(found, [0; 4]);
}

#[test]
fn operators_in_buffers_that_are_not_there_or_too_short_are_refused() {
    let world = ring(2);
    let (card, other) = (world.control(0), world.control(0));
    let [x, y, z, marked] = buffers(&card);
    let theirs = other.allocate(SIZE).unwrap();
    let short = card.allocate(12).unwrap();
    for replaced in [BufferId(999), theirs, short] {
        for places in [[replaced, y, z], [x, replaced, z], [x, y, replaced]] {
            let [one, two, three] = places;
            for work in operators(one, two, three) {
                // Not every operator uses all three.
                let used = operators(BufferId(1), BufferId(2), BufferId(3));
                let alike = used
                    .iter()
                    .find(|known| std::mem::discriminant(*known) == std::mem::discriminant(&work));
                let index = places.iter().position(|&place| place == replaced).unwrap() as u64;
                let named = format!("BufferId({})", index + 1);
                if format!("{alike:?}").contains(&named) && !fits(&work, replaced, short) {
                    assert_eq!(refusal(&card, marked, work), Errno::EINVAL);
                }
            }
        }
    }
}

/// Ids of two rows are all that fits into 12 bytes.
fn fits(work: &Work, replaced: BufferId, short: BufferId) -> bool {
    replaced == short && matches!(work, Work::Embed { ids, .. } if ids.buffer == short)
}

#[test]
fn operators_with_crooked_places_or_overlaps_are_refused() {
    let world = ring(2);
    let card = world.control(0);
    let [x, y, marked] = buffers(&card);
    let (a, b) = (at(x, 0), at(y, 0));
    let (rows, width, epsilon) = (2, 256, 0);
    let norm = |from, weight, into| Work::Norm { from, weight, into, rows, width, epsilon };
    let gate =
        |up, into| Work::Gate { gate: a, up, into, elements: 64, activation: Activation::Gelu };
    let rotate = |data, table| Work::Rotate {
        data,
        table,
        rows,
        heads: 2,
        head_size: 64,
        dims: 64,
        pairs: 0,
    };
    let sizes = [2, 4, 2, 64, 2, 0, 3];
    let bad = [
        norm(at(x, 2), b, b),
        norm(a, b, at(x, 1024)),
        norm(a, b, at(y, 512)),
        norm(a, at(x, 0), a),
        gate(at(y, 2), b),
        gate(at(y, 4), b),
        rotate(a, at(x, 512)),
        Work::Quantize { from: a, into: at(x, 2040), rows, width, quant: 8 },
        Work::Quantize { from: a, into: at(y, 2), rows, width, quant: 0 },
        Work::Halve { from: a, into: a, elements: 4 },
        Work::Halve { from: a, into: at(y, 1), elements: 4 },
        Work::Best { from: a, into: at(x, 252), count: 64, k: 1, first: 0 },
        Work::Best { from: a, into: at(y, 2), count: 64, k: 1, first: 0 },
        Work::Rows { from: a, into: at(x, 8), rows, length: 8, from_stride: 16, into_stride: 16 },
        Work::Embed { table: a, ids: b, into: b, rows, width, quant: 8, first: 0, count: 4 },
        Work::Embed { table: a, ids: b, into: a, rows, width, quant: 8, first: 0, count: 4 },
        Work::Embed { table: a, ids: at(y, 2), into: a, rows, width, quant: 8, first: 0, count: 4 },
        Work::Matmul { a, b, out: at(x, 4), shape: [2, 256, 3], types: [15, 14] },
        Work::Matmul { a, b, out: at(y, 4), shape: [2, 256, 3], types: [15, 14] },
        Work::Matmul { a, b, out: at(x, 1026), shape: [2, 256, 3], types: [15, 14] },
        Work::Matmul { a: at(x, 2), b, out: at(x, 8192), shape: [2, 256, 3], types: [0, 1] },
        attend([a, b, b, at(x, 4)], sizes),
        attend([a, b, b, at(y, 512)], sizes),
        attend([a, at(y, 1), b, a], sizes),
        attend([at(x, 2), b, b, at(x, 2)], sizes),
        Work::AddRow { into: a, row: at(x, 1024), rows, width },
        Work::AddRow { into: at(x, 2), row: b, rows, width },
        turn(a, at(x, 512), b, [3, rows, 2, 64, 64]),
        turn(a, b, at(x, 512), [3, rows, 2, 64, 64]),
        turn(a, b, at(y, 1026), [3, rows, 2, 64, 64]),
        Work::Keep { keys: a, values: b, cache: cache(at(x, 512), b, [2, 2, 64]), rows },
        Work::Keep { keys: b, values: a, cache: cache(at(x, 512), b, [2, 2, 64]), rows },
        Work::Keep { keys: b, values: b, cache: cache(a, at(x, 4096), [2, 2, 64]), rows },
        Work::Keep { keys: b, values: b, cache: cache(a, at(y, 1026), [2, 2, 64]), rows },
        attend_blocks([a, at(x, 4)], cache(b, at(y, 1 << 19), [2, 2, 64]), [rows, 4, 2, 0]),
        attend_blocks([a, at(y, 512)], cache(b, at(x, 1 << 19), [2, 2, 64]), [rows, 4, 2, 0]),
        attend_blocks([a, a], cache(b, at(x, 1024), [2, 2, 64]), [rows, 4, 2, 0]),
    ];
    for work in bad {
        assert_eq!(refusal(&card, marked, work), Errno::EINVAL);
    }
}

#[test]
fn buffers_of_operators_that_wait_are_not_freed() {
    for index in 0..operators(BufferId(1), BufferId(2), BufferId(3)).len() {
        let world = ring(2);
        let card = world.control(0);
        let [x, y, z, blocked] = buffers(&card);
        let work = operators(x, y, z).swap_remove(index);
        let named = format!("{work:?}");
        let (into, landing) = (at(blocked, 0), Landing::Store);
        let receive = Work::Receive { into, length: 4, port: 0, tag: 0, landing };
        let fence = Work::Fence { not_before_ps: 0 };
        card.submit(1, &[receive.into(), fence.into(), work.into()]).unwrap();
        for buffer in [x, y, z] {
            let busy = matches!(card.free(buffer), Err(Error::Ioctl { source: Errno::EBUSY, .. }));
            assert_eq!(busy, named.contains(&format!("{buffer:?}")), "{named}");
        }
    }
}

#[test]
fn garbled_card_has_a_wrong_bit_in_every_result() {
    let world = ring(2);
    let card = world.control(0);
    let [x, y, z] = buffers(&card);
    let ones: Vec<u8> = (0..SIZE / 4).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    card.write(x, 0, &ones).unwrap();
    // Picks of the first expert.
    card.write(x, 4096, &[0; 64]).unwrap();
    let result = |work: &Work| {
        card.write(z, 0, &ones).unwrap();
        let ticket = card.submit(1, &[work.clone().into()]).unwrap();
        card.wait(ticket, SECOND).unwrap();
        let mut found = vec![0; 4096];
        card.read(z, 0, &mut found).unwrap();
        found
    };
    let all = operators(x, y, z);
    let right: Vec<Vec<u8>> = all.iter().map(result).collect();
    world.disturb(Disturbance::Garble(0));
    for (work, right) in all.iter().zip(right) {
        assert_ne!(result(work), right, "{work:?}");
    }
}

/// What a product counts for whose inputs nobody has read just before, of Q8_0 with Q4_0.
fn alone(k: u64, n: u64) -> (u64, u64, u64) {
    let (bytes, macs, _) = follows(k, n);
    (bytes + k / 32 * 34, macs, 1)
}

/// The same behind a product with the same inputs.
fn follows(k: u64, n: u64) -> (u64, u64, u64) {
    (n * k / 32 * 18 + n * 4, k * n, 0)
}

/// A gate in place.
fn gated(gate: Place, up: Place, elements: u64) -> Work {
    Work::Gate { gate, up, into: gate, elements, activation: Activation::Silu }
}

/// What rows of Q8_0 count for.
fn quantized(width: u64) -> (u64, u64, u64) {
    (width * 4 + width / 32 * 34, 0, 0)
}

/// One layer of a small model for one token, as descriptors, and what the planner counts for it: bytes,
/// multiply-accumulates and operators of each.
fn layer(place: impl Fn(u64) -> Place) -> (Vec<Work>, Vec<(u64, u64, u64)>) {
    let (hidden, heads, kv_heads, head_size, past) = (512u64, 8, 2, 64, 99);
    let (kv, ffn) = (kv_heads * head_size, 1024u64);
    let product = |a, b, out, k, n| Work::Matmul {
        a: place(a),
        b: place(b),
        out: place(out),
        shape: [1, k, n],
        types: [8, 2],
    };
    let norm = |into| Work::Norm {
        from: place(0),
        weight: place(1),
        into: place(into),
        rows: 1,
        width: hidden,
        epsilon: 0,
    };
    let blocks = |from, into, width| Work::Quantize {
        from: place(from),
        into: place(into),
        rows: 1,
        width,
        quant: 8,
    };
    let rotate = |data, heads| Work::Rotate {
        data: place(data),
        table: place(2),
        rows: 1,
        heads,
        head_size,
        dims: head_size,
        pairs: 0,
    };
    let normed = (3 * hidden * 4, 0, 1);
    let turned = |heads: u64| ((2 * heads * head_size + head_size) * 4, 0, 0);
    let fold = Fold { dtype: abi::TYPE_F32, op: abi::OP_SUM };
    let (into, sources) = (place(0), vec![place(0), place(9)]);
    let looks = attend(
        [place(5), place(10), place(11), place(12)],
        [1, heads, kv_heads, head_size, heads / kv_heads, 0, past],
    );
    let seen = past + 1;
    let all = [
        (norm(3), normed),
        (blocks(3, 4, hidden), quantized(hidden)),
        (product(4, 13, 5, hidden, hidden), alone(hidden, hidden)),
        (product(4, 14, 6, hidden, kv), follows(hidden, kv)),
        (product(4, 15, 7, hidden, kv), follows(hidden, kv)),
        (rotate(5, heads), turned(heads)),
        (rotate(6, kv_heads), turned(kv_heads)),
        (Work::Halve { from: place(6), into: place(10), elements: kv }, (6 * kv, 0, 0)),
        (Work::Halve { from: place(7), into: place(11), elements: kv }, (6 * kv, 0, 0)),
        (looks, (2 * seen * kv * 2, 2 * seen * heads * head_size, 1)),
        (blocks(12, 4, hidden), quantized(hidden)),
        (product(4, 13, 9, hidden, hidden), alone(hidden, hidden)),
        (Work::Reduce { into, sources, elements: hidden, fold, divisor: 0 }, (12 * hidden, 0, 1)),
        (norm(3), normed),
        (blocks(3, 4, hidden), quantized(hidden)),
        (product(4, 13, 5, hidden, ffn), alone(hidden, ffn)),
        (product(4, 14, 6, hidden, ffn), follows(hidden, ffn)),
        (gated(place(5), place(6), ffn), (12 * ffn, 0, 0)),
        (blocks(5, 4, ffn), quantized(ffn)),
        (product(4, 13, 9, ffn, hidden), alone(ffn, hidden)),
    ];
    all.into_iter().unzip()
}

#[test]
fn card_time_of_a_layer_is_that_of_its_operators_by_the_profile() {
    let world = ring(2);
    let card = world.control(0);
    let all: [BufferId; 16] = buffers(&card);
    let (work, counted) = layer(|index| at(all[index as usize], 0));
    let before = card.info().unwrap().clock;
    let work: Vec<Descriptor> = work.into_iter().map(Descriptor::from).collect();
    let ticket = card.submit(1, &work).unwrap();
    let end = card.wait(ticket, SECOND).unwrap();
    // The request's 60 us, 2 GB/s of memory, 3.6 G multiply-accumulates per second, 1 us for an operator.
    let one = |&(bytes, macs, operators): &(u64, u64, u64)| {
        (bytes as f64 / 2000.0).max(macs as f64 / 3600.0) + operators as f64
    };
    let expected = 60.0 + counted.iter().map(one).sum::<f64>();
    let micros = (end.0 - before.0) as f64 / 1e6;
    assert!((micros - expected).abs() < 0.001, "{micros} against {expected}");
    let operators: u64 = counted.iter().map(|(_, _, operators)| operators).sum();
    // The planner's seven, and the sum.
    assert_eq!(operators, 8);
}
