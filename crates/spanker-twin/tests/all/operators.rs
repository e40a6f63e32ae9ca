// SPDX-License-Identifier: Apache-2.0
//! The operators of a model on an emulated card, against the functions that define their bits. Sizes are such
//! that a card cuts the work into several slices. What is refused and what work costs is in `rules.rs`.

use ggml_spanker::ops::{self, AttendScratch, KvView, Pairs, Queries};
use ggml_spanker::{
    Gating, Inputs, KV_BLOCK, KvShape, Quant, WEIGHT_TYPES, decode, multiply, quantize,
};
use spanker_runtime::{
    Activation, BufferId, Descriptor, KvCache, Picks, Scores, SpankerControl, Work,
};
use spanker_twin::World;

use crate::support::{SECOND, at, ring};

/// A card with buffers.
struct Bench {
    card: SpankerControl,
    _world: World,
}

impl Bench {
    fn new() -> Bench {
        let world = ring(2);
        Bench { card: world.control(0), _world: world }
    }

    fn holding(&self, bytes: &[u8]) -> BufferId {
        let buffer = self.card.allocate(bytes.len() as u64).unwrap();
        self.card.write(buffer, 0, bytes).unwrap();
        buffer
    }

    fn floats(&self, values: &[f32]) -> BufferId {
        self.holding(&bytes(values))
    }

    fn run(&self, work: Work) {
        let ticket = self.card.submit(1, &[work.into()]).unwrap();
        self.card.wait(ticket, SECOND).unwrap();
    }

    fn read(&self, buffer: BufferId, length: usize) -> Vec<u8> {
        let mut found = vec![0; length];
        self.card.read(buffer, 0, &mut found).unwrap();
        found
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Numbers from -2 to 2 without much order.
fn numbers(count: usize, salt: u32) -> Vec<f32> {
    let number = |i: u32| {
        let mixed = (i.wrapping_mul(0x9E37_79B9) ^ salt).wrapping_mul(0x85EB_CA6B);
        (mixed >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..count as u32).map(number).collect()
}

/// Rows of weights: any bytes, with scales that are small numbers.
fn weights(quant: Quant, count: usize, salt: usize) -> Vec<u8> {
    let (block, size) = (quant.block() as usize, quant.block_bytes() as usize);
    if block == 1 {
        let plain = numbers(count, salt as u32);
        return match size {
            4 => bytes(&plain),
            // The upper half of an f32 is a bf16, and some f16.
            _ => plain.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect(),
        };
    }
    let mut blocks: Vec<u8> =
        (0..count / block * size).map(|i| (i * 131 + i / 7 + salt) as u8).collect();
    if quant == Quant::Mxfp4 {
        blocks.chunks_exact_mut(size).for_each(|block| block[0] = 0x78);
        return blocks;
    }
    let scales: &[usize] = match quant {
        Quant::Q4_1 | Quant::Q5_1 | Quant::Q4K | Quant::Q5K => &[0, 2],
        Quant::Q6K => &[208],
        Quant::Q2K => &[80, 82],
        Quant::Q3K => &[108],
        Quant::Tq1_0 => &[52],
        Quant::Tq2_0 => &[64],
        _ => &[0],
    };
    for block in blocks.chunks_exact_mut(size) {
        for &place in scales {
            block[place + 1] = 0x20;
        }
    }
    blocks
}

fn blocks(input: Quant, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; input.row_bytes(values.len() as u64) as usize];
    quantize(input, values, &mut out).unwrap();
    out
}

#[test]
fn products_of_every_type_of_weights_have_the_bits_of_the_host() {
    for quant in WEIGHT_TYPES {
        let bench = Bench::new();
        // Several runs of inputs, and several of weights for each.
        let [m, k, n] = [130, 4096, 10];
        let input = quant.input();
        let given = blocks(input, &numbers(m * k, 3));
        let rows = weights(quant, n * k, 5);
        let mut inputs = Inputs::new();
        inputs.load(input, &given, m, k).unwrap();
        let mut expected = vec![0.0; m * n];
        multiply(quant, &rows, n, &inputs, &mut expected).unwrap();
        let (a, b) = (bench.holding(&given), bench.holding(&rows));
        let out = bench.card.allocate((m * n * 4) as u64).unwrap();
        let types = [input, quant].map(|quant| quant.ggml_id().unwrap());
        let shape = [m, k, n].map(|size| size as u64);
        bench.run(Work::Matmul { a: at(a, 0), b: at(b, 0), out: at(out, 0), shape, types });
        assert!(bench.read(out, m * n * 4) == bytes(&expected), "{quant}");
    }
}

#[test]
fn routers_pick_what_the_host_picks_by_every_gating() {
    for gating in Gating::ALL {
        let bench = Bench::new();
        let [rows, experts, used] = [700, 61, 5];
        let given = numbers(rows * experts, 9);
        let (logits, into) = (bench.floats(&given), bench.floats(&vec![0.0; rows * used * 2]));
        let picks = Picks { at: at(into, 0), used: used as u64, experts: experts as u64 };
        let (rows_of, code) = (rows as u64, gating.code());
        bench.run(Work::Route { logits: at(logits, 0), picks, rows: rows_of, gating: code });
        let mut expected = Vec::new();
        for logits in given.chunks(experts) {
            let mut picks = vec![(0, 0.0); used];
            ops::route(logits, gating, &mut picks);
            for (expert, weight) in picks {
                expected.extend(expert.to_le_bytes());
                expected.extend(weight.to_le_bytes());
            }
        }
        assert!(bench.read(into, expected.len()) == expected, "{gating:?}");
    }
}

#[test]
fn experts_have_the_bits_of_the_host_and_those_that_are_not_there_are_left_alone() {
    let [m, k, n, experts, used] = [3, 1024, 700, 4, 2];
    let (input, quant) = (Quant::Q8_0, Quant::Q4_0);
    let bench = Bench::new();
    // One of them is not there, one comes twice in a row.
    let chosen: [u32; 6] = [2, 0, 3, 3, 9, 1];
    let picks: Vec<u8> =
        chosen.iter().flat_map(|e| [e.to_le_bytes(), 1f32.to_le_bytes()]).flatten().collect();
    let picks = Picks { at: at(bench.holding(&picks), 0), used, experts };
    let each = quant.row_bytes(k) * n;
    let stride = each + 128;
    let all = weights(quant, (experts * (k * n + 256 / 18 * 32)) as usize, 4);
    let all = &all[..(stride * experts) as usize];
    for apart in [false, true] {
        let given = blocks(input, &numbers((m * used * k) as usize, 3));
        let row = input.row_bytes(k) as usize;
        let out = bench.floats(&vec![7.0; (m * used * n) as usize]);
        let (a, b) = (bench.holding(&given), bench.holding(all));
        let types = [input, quant].map(|quant| quant.ggml_id().unwrap());
        let (a, b, into) = (at(a, 0), at(b, 0), at(out, 0));
        bench.run(Work::MatmulExperts {
            a,
            b,
            out: into,
            picks,
            shape: [m, k, n],
            types,
            stride,
            apart,
        });
        let mut expected = vec![7.0; (m * used * n) as usize];
        for (pick, (&expert, out)) in chosen.iter().zip(expected.chunks_mut(n as usize)).enumerate()
        {
            let first = if apart { pick } else { pick / used as usize } * row;
            let mut inputs = Inputs::new();
            inputs.load(input, &given[first..first + row], 1, k as usize).unwrap();
            let Some(own) = all.get(expert as usize * stride as usize..).filter(|_| expert < 4)
            else {
                continue;
            };
            multiply(quant, &own[..each as usize], n as usize, &inputs, out).unwrap();
        }
        let found = bench.read(out, expected.len() * 4);
        assert!(found == bytes(&expected), "{apart}");
        for add in [false, true] {
            let into = bench.floats(&vec![2.0; (m * n) as usize]);
            let (from, width) = (at(out, 0), n);
            bench.run(Work::Combine { from, picks, into: at(into, 0), rows: m, width, add });
            let mut sums = vec![2.0; (m * n) as usize];
            for (rows, sum) in expected.chunks((used * n) as usize).zip(sums.chunks_mut(n as usize))
            {
                ops::combine(rows, [1.0; 2].into_iter(), add, sum);
            }
            assert!(bench.read(into, sums.len() * 4) == bytes(&sums), "{add}");
        }
    }
}

#[test]
fn rows_that_picks_add_have_the_bits_of_the_host_and_experts_that_are_not_there_add_nothing() {
    let (rows, width, experts, used, stride) = (9, 3000, 4, 2, 3008);
    let bench = Bench::new();
    let chosen: Vec<(u32, f32)> = (0..rows * used).map(|at| (at % 5, at as f32 / 7.0)).collect();
    let own: Vec<u8> =
        chosen.iter().flat_map(|(e, w)| [e.to_le_bytes(), w.to_le_bytes()]).flatten().collect();
    let picks = Picks { at: at(bench.holding(&own), 0), used: used.into(), experts };
    let table = numbers(stride * experts as usize, 5);
    let held = at(bench.floats(&table), 0);
    for weighed in [false, true] {
        let (count, each) = if weighed { (rows, used) } else { (rows * used, 1) };
        let mut sums = numbers(count as usize * width, 7);
        let into = bench.floats(&sums);
        bench.run(Work::AddPicked {
            into: at(into, 0),
            table: held,
            picks,
            rows: rows.into(),
            width: width as u64,
            stride: stride as u64 * 4,
            weighed,
        });
        for (sum, picks) in sums.chunks_mut(width).zip(chosen.chunks(each as usize)) {
            for &(expert, weight) in picks.iter().filter(|(expert, _)| *expert < 4) {
                let more = &table[expert as usize * stride..][..width];
                let weight = if weighed { weight } else { 1.0 };
                sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += weight * more);
            }
        }
        assert!(bench.read(into, sums.len() * 4) == bytes(&sums), "{weighed}");
    }
}

#[test]
fn product_of_one_row_with_many_weights_has_the_bits_of_the_host() {
    let bench = Bench::new();
    let ([k, n], quant) = ([1024, 6000], Quant::Q4_0);
    let given = blocks(Quant::Q8_0, &numbers(k, 1));
    let rows = weights(quant, n * k, 2);
    let mut inputs = Inputs::new();
    inputs.load(Quant::Q8_0, &given, 1, k).unwrap();
    let mut expected = vec![0.0; n];
    multiply(quant, &rows, n, &inputs, &mut expected).unwrap();
    // All in one buffer: the result behind the inputs and the weights.
    let all = [given.clone(), rows.clone(), vec![0; n * 4 + 2]].concat();
    let buffer = bench.holding(&all);
    let place = (given.len() + rows.len()).next_multiple_of(4);
    let shape = [1, k as u64, n as u64];
    let (a, b, out) = (at(buffer, 0), at(buffer, given.len() as u64), at(buffer, place as u64));
    bench.run(Work::Matmul { a, b, out, shape, types: [8, 2] });
    assert!(bench.read(buffer, all.len())[place..place + n * 4] == bytes(&expected));
}

#[test]
fn rows_of_a_table_come_for_own_ids_and_leave_others_alone() {
    for quant in WEIGHT_TYPES {
        let bench = Bench::new();
        let (width, first, count) = (1024, 40, 50u32);
        let table = weights(quant, count as usize * width, 9);
        let ids: Vec<u32> =
            (0..200).map(|i| [i * 7 % 120, u32::MAX, 39, 40, 89, 90][i as usize % 6]).collect();
        let before = numbers(ids.len() * width, 4);
        let mut expected = before.clone();
        let row = table.len() / count as usize;
        for (&id, out) in ids.iter().zip(expected.chunks_exact_mut(width)) {
            if (first..first + count).contains(&id) {
                let start = (id - first) as usize * row;
                decode(quant, &table[start..start + row], out).unwrap();
            }
        }
        let (rows, into) = (ids.len() as u64, bench.floats(&before));
        let listed: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (table, ids) = (at(bench.holding(&table), 0), at(bench.holding(&listed), 0));
        let (width, quant) = (width as u64, quant.ggml_id().unwrap());
        bench.run(Work::Embed { table, ids, into: at(into, 0), rows, width, quant, first, count });
        assert!(bench.read(into, expected.len() * 4) == bytes(&expected), "{quant}");
    }
}

#[test]
fn norms_apart_and_in_place_have_the_bits_of_the_host() {
    let bench = Bench::new();
    let (rows, width) = (150, 1000);
    let (given, weight) = (numbers(rows * width, 1), numbers(width, 2));
    let mut expected = vec![0.0; given.len()];
    for (row, out) in given.chunks_exact(width).zip(expected.chunks_exact_mut(width)) {
        ops::norm(row, &weight, 1e-5, out);
    }
    let (from, weight) = (bench.floats(&given), at(bench.floats(&weight), 0));
    let into = bench.card.allocate((given.len() * 4) as u64).unwrap();
    for into in [into, from] {
        let (rows, width, epsilon) = (rows as u64, width as u64, 1e-5f32.to_bits());
        bench.run(Work::Norm {
            from: at(from, 0),
            weight,
            into: at(into, 0),
            rows,
            width,
            epsilon,
        });
        assert!(bench.read(into, expected.len() * 4) == bytes(&expected));
    }
}

#[test]
fn rows_as_blocks_of_every_type_have_the_bits_of_the_host() {
    for input in [Quant::Q8_0, Quant::Q8K, Quant::F32] {
        let bench = Bench::new();
        let (rows, width) = (70, 2048);
        let given = numbers(rows * width, 8);
        let expected = blocks(input, &given);
        let into = bench.card.allocate(expected.len() as u64).unwrap();
        let from = at(bench.floats(&given), 0);
        let (rows, width, quant) = (rows as u64, width as u64, input.ggml_id().unwrap());
        bench.run(Work::Quantize { from, into: at(into, 0), rows, width, quant });
        assert!(bench.read(into, expected.len()) == expected, "{input}");
    }
}

#[test]
fn rotations_by_neighbours_and_halves_have_the_bits_of_the_host() {
    for (id, pairs) in [(0, Pairs::Adjacent), (1, Pairs::Halves)] {
        let bench = Bench::new();
        let (rows, heads, head_size, dims) = (61, 9, 128, 96);
        let given = numbers(rows * heads * head_size, 1);
        let table = numbers(rows * dims, 2);
        let mut expected = given.clone();
        let turns = table.chunks_exact(dims);
        for (row, turns) in expected.chunks_exact_mut(heads * head_size).zip(turns) {
            ops::rotate(row, head_size, turns, pairs);
        }
        let (data, table) = (bench.floats(&given), at(bench.floats(&table), 0));
        let [rows, heads, head_size, dims] = [rows, heads, head_size, dims].map(|n| n as u64);
        let data_at = at(data, 0);
        bench.run(Work::Rotate { data: data_at, table, rows, heads, head_size, dims, pairs: id });
        assert!(bench.read(data, expected.len() * 4) == bytes(&expected), "{pairs:?}");
    }
}

#[test]
fn halves_and_gates_of_many_numbers_have_the_bits_of_the_host() {
    let bench = Bench::new();
    let elements = 100_001;
    let (gate, up) = (numbers(elements, 1), numbers(elements, 2));
    let mut halves = vec![0; elements * 2];
    ops::to_half(&gate, &mut halves);
    let mut opened = vec![0.0; elements];
    ops::gate(Activation::Silu, &gate, &up, &mut opened);
    let into = bench.card.allocate((elements * 4) as u64).unwrap();
    let from = bench.floats(&gate);
    let count = elements as u64;
    bench.run(Work::Halve { from: at(from, 0), into: at(into, 0), elements: count });
    assert!(bench.read(into, halves.len()) == halves);
    for place in 0..3 {
        let (gate, up) = (bench.floats(&gate), bench.floats(&up));
        let into = [into, gate, up][place];
        let [gate, up] = [gate, up].map(|buffer| at(buffer, 0));
        bench.run(Work::Gate {
            gate,
            up,
            into: at(into, 0),
            elements: count,
            activation: Activation::Silu,
        });
        assert!(bench.read(into, elements * 4) == bytes(&opened), "{place}");
    }
}

/// Heads of queries: how many, how many share a head of keys and values, and where they begin.
fn attention(heads: usize, group: usize, offset: usize, kv_heads: usize) {
    let (rows, past, head_size, scale) = (23, 150, 32, 0.125f32);
    let queries = numbers(rows * heads * head_size, 1);
    let width = kv_heads * head_size;
    let [plain_keys, plain_values] = [2, 3].map(|salt| numbers((past + rows) * width, salt));
    let [keys, values] = [&plain_keys, &plain_values].map(|numbers| {
        let mut out = vec![0; numbers.len() * 2];
        ops::to_half(numbers, &mut out);
        out
    });
    let shape = KvShape { heads: kv_heads as u64, head_size: head_size as u64, quant: Quant::F16 };
    let sequence = Sequence::new(shape, &plain_keys, &plain_values);
    let expected = sequence.attended(&queries, [heads, group, offset, past], scale);
    let bench = Bench::new();
    let from = bench.floats(&queries);
    let (keys, values) = (at(bench.holding(&keys), 0), at(bench.holding(&values), 0));
    let apart = bench.card.allocate((queries.len() * 4) as u64).unwrap();
    for into in [apart, from] {
        bench.run(Work::Attend {
            queries: at(from, 0),
            keys,
            values,
            into: at(into, 0),
            rows: rows as u64,
            heads: heads as u64,
            kv_heads: kv_heads as u64,
            head_size: head_size as u64,
            group: group as u64,
            offset: offset as u64,
            past: past as u64,
            scale: scale.to_bits(),
        });
        let found = bench.read(into, expected.len() * 4);
        assert!(found == bytes(&expected), "{heads} heads from {offset} in groups of {group}");
    }
}

/// Keys and values of a sequence in blocks that follow each other backwards.
struct Sequence {
    shape: KvShape,
    cache: Vec<u8>,
    table: Vec<u32>,
}

impl Sequence {
    fn new(shape: KvShape, keys: &[f32], values: &[f32]) -> Sequence {
        let width = (shape.heads * shape.head_size) as usize;
        let blocks = KvShape::blocks_for((keys.len() / width) as u64) as usize;
        let size = shape.block_bytes() as usize;
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut cache = vec![0; blocks * size];
        let rows = keys.chunks_exact(width).zip(values.chunks_exact(width));
        for (position, (keys, values)) in rows.enumerate() {
            let block = table[position / KV_BLOCK as usize] as usize * size;
            ops::keep(shape, position, keys, values, &mut cache[block..block + size]);
        }
        Sequence { shape, cache, table }
    }

    /// Attention of rows of queries from a position on.
    fn attended(
        &self,
        queries: &[f32],
        [heads, group, offset, first]: [usize; 4],
        scale: f32,
    ) -> Vec<f32> {
        let (size, mut scratch) = (self.shape.head_size as usize, AttendScratch::default());
        let mut out = vec![0.0; queries.len()];
        let each = queries.chunks_exact(size).zip(out.chunks_exact_mut(size));
        for (at, (rows, out)) in each.enumerate() {
            let head = (offset + at % heads) / group;
            let (cache, table, shape) = (&self.cache[..], &self.table[..], self.shape);
            let queries = Queries::plain(rows, 1, first + at / heads, scale);
            ops::attend(queries, KvView { cache, table, shape, head }, &mut scratch, out);
        }
        out
    }
}

/// The words of tables.
fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Rows of two sequences in one cache: kept, turned and attended as each would be alone; rows without blocks are left out.
fn blocks_of_sequences(quant: Quant, [heads, group, offset, kv_heads]: [usize; 4]) {
    let (head_size, scale, count) = (32, 0.25f32, 9u64);
    let shape = KvShape { heads: kv_heads as u64, head_size: head_size as u64, quant };
    let width = kv_heads * head_size;
    // A prompt of 70 rows whose blocks are 3 and 6, a token after 64 others in 1 and 8, and a row that has no block.
    let tables = [3, 6, 1, 8, 77];
    let mut rows: Vec<[u32; 2]> = (0..70).map(|position| [position, 0]).collect();
    rows.extend([[64, 2], [0, 4], [1 << 20, 0]]);
    let [keys, values] = [5, 6].map(|salt| numbers(rows.len() * width, salt));
    let [old_keys, old_values] = [7, 8].map(|salt| numbers(65 * width, salt));
    let bench = Bench::new();
    let mut before = vec![0xCD; (count * shape.block_bytes()) as usize];
    let size = shape.block_bytes() as usize;
    let block = |cache: &mut [u8], number: usize, position: usize, keys: &[f32], values: &[f32]| {
        ops::keep(shape, position, keys, values, &mut cache[number * size..][..size]);
    };
    for position in 0..64 {
        let row = position * width..(position + 1) * width;
        block(&mut before, 1, position, &old_keys[row.clone()], &old_values[row]);
    }
    let mut expected = before.clone();
    for (row, [position, first]) in rows[..71].iter().enumerate() {
        let number = tables[(first + position / 64) as usize] as usize;
        let own = row * width..(row + 1) * width;
        block(&mut expected, number, *position as usize, &keys[own.clone()], &values[own]);
    }
    let cache = KvCache {
        blocks: at(bench.holding(&before), 0),
        count,
        rows: at(bench.holding(&words(rows.iter().flatten().copied())), 0),
        tables: at(bench.holding(&words(tables)), 0),
        entries: tables.len() as u64,
        heads: kv_heads as u64,
        head_size: head_size as u64,
        quant: quant.ggml_id().unwrap(),
    };
    let (from, more) = (at(bench.floats(&keys), 0), at(bench.floats(&values), 0));
    let count = rows.len() as u64;
    bench.run(Work::Keep { keys: from, values: more, cache, rows: count });
    assert!(bench.read(cache.blocks.buffer, expected.len()) == expected, "{quant}");
    let queries = numbers(rows.len() * heads * head_size, 9);
    let row = heads * head_size;
    let sizes = [heads, group, offset];
    let [h, g, o] = sizes;
    let prompt = Sequence { shape, cache: expected.clone(), table: vec![3, 6] };
    let token = Sequence { shape, cache: expected, table: vec![1, 8] };
    let mut right = prompt.attended(&queries[..70 * row], [h, g, o, 0], scale);
    right.extend(token.attended(&queries[70 * row..71 * row], [h, g, o, 64], scale));
    let place = bench.floats(&queries);
    let apart = bench.floats(&queries);
    for into in [apart, place] {
        let [heads, group, offset] = sizes.map(|size| size as u64);
        bench.run(Work::AttendBlocks {
            queries: at(place, 0),
            cache,
            into: at(into, 0),
            rows: count,
            heads,
            group,
            offset,
            scores: Scores::plain(scale.to_bits()),
        });
        let found = bench.read(into, queries.len() * 4);
        assert!(found[..right.len() * 4] == bytes(&right), "{quant}: {sizes:?}");
        assert!(found[right.len() * 4..] == bytes(&queries[right.len()..]), "{quant}: left alone");
    }
}

#[test]
fn rows_of_several_sequences_in_blocks_have_the_bits_of_the_host() {
    for quant in KvShape::QUANTS {
        blocks_of_sequences(quant, [8, 4, 0, 2]);
        blocks_of_sequences(quant, [7, 4, 2, 3]);
        blocks_of_sequences(quant, [1, 1, 0, 1]);
    }
}

#[test]
fn rows_turn_by_their_own_positions_and_those_beyond_the_table_are_left_alone() {
    let bench = Bench::new();
    let (heads, head_size, dims, positions) = (9, 128, 96, 300u32);
    let rows: Vec<[u32; 2]> = [5, 299, 0, 300, u32::MAX, 5].map(|position| [position, 7]).to_vec();
    let (given, table) =
        (numbers(rows.len() * heads * head_size, 1), numbers(positions as usize * dims, 2));
    let mut expected = given.clone();
    for (row, [position, _]) in expected.chunks_exact_mut(heads * head_size).zip(&rows) {
        if *position < positions {
            let turns = &table[*position as usize * dims..][..dims];
            ops::rotate(row, head_size, turns, Pairs::Halves);
        }
    }
    let data = bench.floats(&given);
    bench.run(Work::RotateRows {
        data: at(data, 0),
        table: at(bench.floats(&table), 0),
        positions: positions.into(),
        at: at(bench.holding(&words(rows.iter().flatten().copied())), 0),
        rows: rows.len() as u64,
        heads: heads as u64,
        head_size: head_size as u64,
        dims: dims as u64,
        pairs: 1,
    });
    assert!(bench.read(data, expected.len() * 4) == bytes(&expected));
}

#[test]
fn bytes_that_come_with_the_work_and_sums_with_a_row_have_the_bits_of_the_host() {
    let bench = Bench::new();
    let (rows, width) = (150, 1000);
    let (given, row) = (numbers(rows * width, 1), numbers(width, 2));
    let into = bench.floats(&given);
    let mut expected = given;
    expected.chunks_exact_mut(width).for_each(|sum| ops::add(sum, &row));
    let (row, rows, width) = (at(bench.floats(&row), 0), rows as u64, width as u64);
    bench.run(Work::AddRow { into: at(into, 0), row, rows, width });
    assert!(bench.read(into, expected.len() * 4) == bytes(&expected));
    let data: Vec<u8> = (0..300_004u32).map(|at| (at * 7) as u8).collect();
    let into = bench.holding(&vec![0; data.len() + 8]);
    bench.run(Work::Write { into: at(into, 8), bytes: data.clone().into() });
    assert!(bench.read(into, data.len() + 8)[8..] == data);
}

#[test]
fn attention_of_whole_and_of_cut_groups_has_the_bits_of_the_host() {
    attention(8, 4, 0, 2);
    // The groups at both ends are cut.
    attention(7, 4, 2, 3);
    attention(1, 1, 0, 1);
}

#[test]
fn pieces_at_a_stride_are_copied_and_gaps_left_alone() {
    let bench = Bench::new();
    for (rows, length, from_stride, into_stride) in
        [(300usize, 1000usize, 1004usize, 3001usize), (3, 300_000, 300_000, 300_016)]
    {
        let source: Vec<u8> = (0..rows * from_stride).map(|i| (i * 7 + i / 251) as u8).collect();
        let mut expected = vec![0xEE; rows * into_stride];
        let pieces = expected.chunks_exact_mut(into_stride).zip(source.chunks_exact(from_stride));
        pieces.for_each(|(into, from)| into[..length].copy_from_slice(&from[..length]));
        let (from, into) = (bench.holding(&source), bench.holding(&vec![0xEE; rows * into_stride]));
        let [rows, length, from_stride, into_stride] =
            [rows, length, from_stride, into_stride].map(|n| n as u64);
        let (from, into_at) = (at(from, 0), at(into, 0));
        bench.run(Work::Rows { from, into: into_at, rows, length, from_stride, into_stride });
        assert!(bench.read(into, expected.len()) == expected);
    }
}

#[test]
fn best_of_many_and_of_too_few_numbers_have_the_places_of_the_host() {
    let bench = Bench::new();
    let mut values = numbers(200_000, 6);
    // The same number in several slices, zeros of both signs, and what is no number.
    for at in [5, 70_000, 70_001, 199_999] {
        values[at] = 3.0;
    }
    values[40_000] = f32::NAN;
    let few = [-0.0, f32::NAN, 0.0, f32::INFINITY];
    for (values, k) in [(&values[..], 40u32), (&values[..], 1), (&few[..], 6), (&[], 2)] {
        let first = 1000;
        let found = ops::best(values, k as usize).into_iter();
        let rest = std::iter::repeat((u32::MAX - first, f32::NEG_INFINITY));
        let expected: Vec<u8> = found
            .chain(rest)
            .take(k as usize)
            .flat_map(|(place, value)| {
                [(place + first).to_le_bytes(), value.to_le_bytes()].concat()
            })
            .collect();
        let (from, into) = (bench.floats(values), bench.card.allocate(expected.len() as u64));
        let (into, count) = (into.unwrap(), values.len() as u64);
        bench.run(Work::Best { from: at(from, 0), into: at(into, 0), count, k, first });
        assert!(bench.read(into, expected.len()) == expected, "{k} of {count}");
    }
}

#[test]
fn eight_thousand_descriptors_of_one_submission_all_run() {
    let bench = Bench::new();
    let buffer = bench.floats(&[1.0; 256]);
    let weight = at(bench.floats(&[2.0; 8]), 0);
    let (rows, width) = (1, 8);
    let one = |at_row: u64| {
        let place = at(buffer, at_row % 32 * 32);
        Descriptor::from(Work::Norm { from: place, weight, into: place, rows, width, epsilon: 0 })
    };
    let work: Vec<Descriptor> = (0..8000).map(one).collect();
    let before = bench.card.counters().unwrap().work;
    let tickets: Vec<_> = (0..3).map(|_| bench.card.submit(1, &work).unwrap()).collect();
    for ticket in tickets {
        bench.card.wait(ticket, SECOND * 60).unwrap();
    }
    assert_eq!(bench.card.counters().unwrap().work - before, 24_000);
    assert_eq!(bench.read(buffer, 1024), bytes(&[2.0; 256]));
}
