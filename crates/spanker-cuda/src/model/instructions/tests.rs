// SPDX-License-Identifier: Apache-2.0
//! Programs and the instructions that come of them.

use spanker_collective::{DType, ReduceOp};
use spanker_runtime::{BufferId, Fold, Scores};

use super::*;

fn at(buffer: u64) -> Place {
    Place { buffer: BufferId(buffer), offset: 0 }
}

fn translated(program: &[Op]) -> Result<Parts, CudaError> {
    on(program, 0)
}

fn on(program: &[Op], streams: u32) -> Result<Parts, CudaError> {
    let address = |place: Place| place.buffer.0 << 32 | place.offset;
    let setting = Setting {
        address: &address,
        blocks: 264,
        counters: 1,
        counted: 8192,
        packed: (77, 1 << 20),
        tile_rows: 32,
        streams,
    };
    translate(program, true, &setting)
}

fn instructions(program: &[Op]) -> Vec<Instruction> {
    match &translated(program).unwrap().parts[..] {
        [Part::Instructions(instructions)] => instructions.clone(),
        other => panic!("{other:?}"),
    }
}

fn op<T: operands::Operands>(instruction: &Instruction) -> &T {
    instruction.get().expect("operands of this kind")
}

fn kinds(instructions: &[Instruction]) -> Vec<u32> {
    instructions.iter().map(Instruction::kind).collect()
}

/// Where a product or attention reads its inputs.
fn input(instruction: &Instruction) -> u64 {
    let streamed = instruction.get::<operands::Streamed>().map(|op| op.input);
    let vector = instruction.get::<operands::Vector>().map(|op| op.input);
    let attend = instruction.get::<operands::Attend>().map(|op| op.queries);
    streamed.or(vector).or(attend).expect("a product or attention")
}

fn id(quant: Quant) -> u32 {
    quant.ggml_id().unwrap()
}

fn norm(rows: u64) -> Op {
    let (from, weight, into) = (at(1), at(2), at(3));
    Op::Work(Work::Norm { from, weight, into, rows, width: 4096, epsilon: 7 })
}

fn round(from: u64, into: u64, rows: u64, width: u64) -> Op {
    let quant = id(Quant::Q8_0);
    Op::Work(Work::Quantize { from: at(from), into: at(into), rows, width, quant })
}

fn product(a: u64, out: u64, shape: [u64; 3]) -> Op {
    let types = [id(Quant::Q8_0), id(Quant::Q4_0)];
    Op::Work(Work::Matmul { a: at(a), b: at(10 + out), out: at(out), shape, types })
}

fn copy(from: u64, into: u64, bytes: u64) -> Op {
    let parts = std::iter::once(0..bytes).collect();
    Op::Gather { parts, rows: 1, from: at(from), into: at(into) }
}

fn add(into: u64, more: u64, elements: u64) -> Op {
    let fold = Fold { dtype: DType::F32.code(), op: ReduceOp::Sum.code().unwrap_or_default() };
    let sources = vec![at(into), at(more)];
    Op::Work(Work::Reduce { into: at(into), sources, elements, fold, divisor: 0 })
}

/// Rows of queries at 50, keys at 51 and values at 52, in 32 heads, over a KV cache at 41; the tables of the step are at 42.
fn attention(rows: u64, head_size: u64) -> [Op; 4] {
    let heads = 32;
    let cache = KvCache {
        blocks: at(41),
        count: 9,
        rows: at(42),
        tables: Place { offset: 16 * rows, ..at(42) },
        entries: 9,
        heads,
        head_size,
        quant: id(Quant::F16),
    };
    let rotate = |data| {
        let (data, table, at, dims) = (at(data), at(40), cache.rows, head_size);
        let (positions, pairs) = (512, 0);
        Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs }
    };
    let keep = Work::Keep { keys: at(51), values: at(52), cache, rows };
    let (queries, into, group, offset) = (at(50), at(43), 1, 0);
    let scores = Scores::plain(0);
    let attend = Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores };
    [rotate(50), rotate(51), keep, attend].map(Op::Work)
}

/// A normed row, gate and up, and what they make together.
fn gate_and_up() -> Vec<Op> {
    let gate = Work::Gate {
        gate: at(5),
        up: at(6),
        into: at(5),
        elements: 11008,
        activation: Activation::Silu,
    };
    let [one, two] = [5, 6].map(|out| product(4, out, [1, 4096, 11008]));
    vec![norm(1), round(3, 4, 1, 4096), one, two, Op::Work(gate)]
}

/// Its blocks, and where they are copied to.
fn blocks_of_gate() -> Vec<Op> {
    vec![round(5, 8, 1, 11008), copy(8, 9, 11008 / 32 * 34)]
}

#[test]
fn projections_of_one_row_are_one_instruction_whose_tiles_cover_every_row() {
    let shape = |rows| [1, 4096, rows];
    let program = [
        norm(1),
        round(3, 4, 1, 4096),
        product(4, 5, shape(4096)),
        product(4, 6, shape(1024)),
        product(4, 7, shape(1024)),
    ];
    let instructions = instructions(&program);
    assert_eq!(instructions.len(), 1);
    let op: &operands::Vector = op(&instructions[0]);
    assert_eq!((op.is_normed, op.epsilon, op.keep), (1, 7, keep::STORE));
    assert_eq!(op.matrices.map(|matrix| matrix.rows), [4096, 1024, 1024]);
    let tiles = [4096u32, 1024, 1024].map(|rows| rows.div_ceil(op.tile_rows));
    assert_eq!(op.tile_ends, [tiles[0], tiles[0] + tiles[1], tiles.iter().sum()]);
    assert_eq!((op.input, op.norm_weight), (1 << 32, 2 << 32));
}

#[test]
fn a_gated_pair_and_its_blocks_are_one_instruction() {
    let program = [gate_and_up(), blocks_of_gate()].concat();
    let instructions = instructions(&program);
    assert_eq!(instructions.len(), 1);
    let op: &operands::GatedVector = op(&instructions[0]);
    assert_eq!((op.keep, op.block_quant), (keep::GATED, id(Quant::Q8_0)));
    // Blocks go where the copy would have brought them; counters are where they were said to be.
    assert_eq!((op.counters, op.blocks), (1, 9 << 32));
    assert_eq!(op.tile_ends, [11008u32.div_ceil(op.tile_rows); 3]);
}

#[test]
fn a_product_is_added_where_it_belongs_without_a_stop_on_the_way() {
    let program = [product(4, 5, [1, 11008, 4096]), copy(5, 6, 4096 * 4), add(1, 6, 4096)];
    let instructions = instructions(&program);
    assert_eq!(instructions.len(), 1);
    let op: &operands::Vector = op(&instructions[0]);
    assert_eq!((op.keep, op.input, op.outs[0]), (keep::INTO, 4 << 32, 1 << 32));
    // A sum of something else stays what it is.
    let other = [product(4, 5, [1, 11008, 4096]), add(1, 7, 4096)];
    assert_eq!(self::instructions(&other).len(), 2);
}

#[test]
fn weights_are_prefetched_where_possible_and_numbers_are_rounded_where_they_are_used() {
    let layer = [gate_and_up(), blocks_of_gate()].concat();
    let down_ops = [product(9, 7, [1, 11008, 4096]), add(1, 7, 4096)];
    let parts = on(&[&layer[..], &down_ops[..]].concat(), 132).unwrap().parts;
    let [Part::Streamed(instructions)] = &parts[..] else { panic!("{parts:?}") };
    let [up, down]: [&operands::Streamed; 2] = [op(&instructions[0]), op(&instructions[1])];
    assert_eq!((instructions.len(), up.next, down.next), (2, 2, 0));
    // Down reads what gate and up have made, not its blocks.
    assert_eq!((down.input, down.keep), (5 << 32, keep::INTO));
    // A product of another type has its blocks, and all is left to the other kernel.
    let types = [id(Quant::Q8_0), id(Quant::Q8_0)];
    let (a, b, out) = (at(9), at(17), at(7));
    let other = Op::Work(Work::Matmul { a, b, out, shape: [1, 11008, 4096], types });
    let parts = on(&[&layer[..], &[other]].concat(), 132).unwrap().parts;
    let [Part::Instructions(instructions)] = &parts[..] else { panic!("{parts:?}") };
    assert_eq!(kinds(instructions), [kind::VECTOR; 2]);
    let gated: &operands::GatedVector = op(&instructions[0]);
    assert_eq!((gated.blocks, input(&instructions[1])), (9 << 32, 9 << 32));
    // A later product reads what was rounded to the same place in between, and rounds it itself.
    let later = [round(2, 9, 1, 4096), product(9, 5, [1, 4096, 64])];
    let parts = on(&[&layer[..], &down_ops[..], &later[..]].concat(), 132).unwrap().parts;
    let [Part::Streamed(_), Part::Streamed(instructions)] = &parts[..] else { panic!("{parts:?}") };
    let later_op: &operands::Streamed = op(&instructions[0]);
    let found = (instructions.len(), later_op.ready, later_op.input);
    assert_eq!(found, (1, operands::ready::ROUNDED, 2 << 32));
    // Two products of the same blocks have them rounded before, whatever comes between.
    let later = [&later[..], &[add(1, 5, 64), product(9, 7, [1, 4096, 64])]].concat();
    let parts = on(&[&layer[..], &down_ops[..], &later[..]].concat(), 132).unwrap().parts;
    let [Part::Streamed(_), Part::Instructions(instructions)] = &parts[..] else {
        panic!("{parts:?}")
    };
    assert_eq!(kinds(instructions), [kind::QUANTIZE, kind::VECTOR, kind::VECTOR]);
    let rounding: &operands::Quantize = op(&instructions[0]);
    assert_eq!((rounding.from, input(&instructions[1])), (2 << 32, 9 << 32));
    // So has one that writes what it is made of: other blocks may still read it.
    let onto_itself = [round(2, 9, 1, 4096), product(9, 2, [1, 4096, 4096])];
    let parts = on(&onto_itself, 132).unwrap().parts;
    let [Part::Instructions(instructions)] = &parts[..] else { panic!("{parts:?}") };
    assert_eq!(instructions[0].kind(), kind::QUANTIZE);
}

#[test]
fn a_layer_is_five_instructions_of_one_run() {
    let square = [1, 4096, 4096];
    let mut layer = vec![norm(1), round(3, 4, 1, 4096)];
    layer.extend([50, 51, 52].map(|out| product(4, out, square)));
    layer.extend(attention(1, 128));
    layer.extend([round(43, 44, 1, 4096), copy(44, 9, 4096 / 32 * 34)]);
    layer.extend([product(9, 45, square), copy(45, 46, 4096 * 4), add(1, 46, 4096)]);
    layer.extend([gate_and_up(), blocks_of_gate()].concat());
    layer.extend([product(9, 45, [1, 11008, 4096]), copy(45, 46, 4096 * 4), add(1, 46, 4096)]);
    let two: Vec<Op> = std::iter::repeat_n(layer, 2).flatten().collect();
    let parts = on(&two, 132).unwrap().parts;
    let [Part::Streamed(instructions)] = &parts[..] else { panic!("{parts:?}") };
    let (s, a) = (kind::STREAMED, kind::ATTEND);
    assert_eq!(kinds(instructions), [s, a, s, s, s].repeat(2));
    // Products read numbers, not blocks, in both layers.
    let inputs: Vec<u64> = instructions.iter().map(|one| input(one) >> 32).collect();
    assert_eq!(inputs, [1, 50, 43, 1, 5].repeat(2));
    let next = |one: &Instruction| one.get::<operands::Streamed>().map_or(0, |op| op.next);
    let next: Vec<u32> = instructions.iter().map(next).collect();
    assert_eq!(next, [3, 0, 4, 5, 6, 8, 0, 9, 10, 0]);
    // The other kernel has the same instructions, by blocks.
    let [Part::Instructions(instructions)] = &on(&two, 0).unwrap().parts[..] else {
        panic!("one run")
    };
    let inputs: Vec<u64> = instructions.iter().map(|one| input(one) >> 32).collect();
    assert_eq!(inputs, [1, 50, 9, 1, 9].repeat(2));
}

#[test]
fn a_program_that_would_be_cut_into_many_runs_is_left_to_one_kernel() {
    let other = |out| {
        let types = [id(Quant::Q8_0), id(Quant::Q8_0)];
        let shape = [1, 4096, 64];
        Op::Work(Work::Matmul { a: at(4), b: at(10 + out), out: at(out), shape, types })
    };
    let one = [norm(1), round(3, 4, 1, 4096), product(4, 5, [1, 4096, 64]), norm(1), other(6)];
    let [Part::Streamed(_), Part::Instructions(_)] = &on(&one, 132).unwrap().parts[..] else {
        panic!("two runs")
    };
    let many: Vec<Op> = std::iter::repeat_n(one, 3).flatten().collect();
    let [Part::Instructions(instructions)] = &on(&many, 132).unwrap().parts[..] else {
        panic!("one run")
    };
    assert!(instructions.iter().all(|instruction| instruction.kind() != kind::STREAMED));
}

#[test]
fn numbers_that_are_not_rounded_have_no_blocks() {
    let (from, into, quant) = (at(5), at(8), id(Quant::F32));
    let plain = Work::Quantize { from, into, rows: 1, width: 11008, quant };
    let program = [gate_and_up(), vec![Op::Work(plain)]].concat();
    assert_eq!(kinds(&instructions(&program)), [kind::VECTOR, kind::QUANTIZE]);
}

#[test]
fn many_rows_have_an_instruction_for_each_operator() {
    let program = [norm(3), round(3, 4, 3, 4096), product(4, 5, [3, 4096, 64])];
    assert_eq!(kinds(&instructions(&program)), [kind::NORM, kind::QUANTIZE, kind::MATMUL]);
}

#[test]
fn products_of_the_same_rows_share_inputs_for_tensor_cores_until_something_else_is_done() {
    let shape = [64, 4096, 512];
    let program = [
        round(3, 4, 64, 4096),
        product(4, 5, shape),
        product(4, 6, shape),
        add(1, 5, 64),
        product(4, 7, shape),
        product(8, 9, shape),
    ];
    let all = instructions(&program);
    let (p, m) = (kind::PACK, kind::MATMUL);
    assert_eq!(kinds(&all), [kind::QUANTIZE, p, m, m, kind::ADD, p, m, p, m]);
    let pack: &operands::Pack = op(&all[1]);
    assert_eq!((pack.from, pack.into, pack.rows, pack.is_interleaved), (4 << 32, 77, 64, 1));
    let found = |at: usize| op::<operands::Matmul>(&all[at]).packed;
    assert_eq!([2, 3, 6, 8].map(found), [77; 4]);
    // Without space for them, and of other types, blocks are multiplied as they are.
    let wide = [64, 32768, 512];
    assert_eq!(kinds(&instructions(&[product(4, 5, wide)])), [m]);
    let types = [id(Quant::Q8_0), id(Quant::Q5_0)];
    let other = Op::Work(Work::Matmul { a: at(4), b: at(6), out: at(5), shape, types });
    assert_eq!(kinds(&instructions(&[other])), [m]);
    // Operators are those that they were before.
    let parts = translated(&program).unwrap();
    assert_eq!(parts.ops, [0..1, 1..2, 1..2, 2..3, 3..4, 4..5, 4..5, 5..6, 5..6]);
}

#[test]
fn tiles_fit_the_terms_that_a_block_keeps() {
    for (rows, each) in
        [(1, 132), (4096, 132), (12288, 132), (11008, 264), (32000, 132), (7, 20000)]
    {
        let tile = tile(rows, each, 264);
        assert!(tile >= 1 && (tile == 1 || tile * each <= TERMS), "{rows} rows of {each}: {tile}");
    }
}

#[test]
fn rows_of_several_have_keys_and_values_stored_before_they_attend_to_them() {
    let all = instructions(&attention(3, 64));
    assert_eq!(kinds(&all), [kind::ROTATE, kind::ROTATE, kind::KEEP_KV, kind::ATTEND]);
    let rotate: &operands::Rotate = op(&all[0]);
    assert_eq!((rotate.at, rotate.positions), (42 << 32, 512));
    let keep: &operands::KeepKv = op(&all[2]);
    let attend: &operands::Attend = op(&all[3]);
    let tables = (42 << 32) + 48;
    assert_eq!((keep.cache, keep.at, keep.tables), (41 << 32, 42 << 32, tables));
    assert_eq!((attend.cache, attend.at, attend.tables), (41 << 32, 42 << 32, tables));
    assert_eq!((attend.rows, attend.is_fresh, attend.quant), (3, 0, id(Quant::F16)));
    // One row has all of it in one instruction.
    let all = instructions(&attention(1, 64));
    let attend: &operands::Attend = op(&all[0]);
    assert_eq!((all.len(), attend.is_fresh, attend.new_keys), (1, 1, 51 << 32));
}

#[test]
fn tables_of_a_step_are_no_part_of_its_instructions() {
    let data = Op::Data { into: at(42), length: 16 };
    let program = [vec![data], attention(1, 64).to_vec()].concat();
    let parts = translated(&program).unwrap();
    assert_eq!(parts.ops, std::slice::from_ref(&(1..5)));
    let longer = Op::Data { into: at(42), length: 4096 };
    let program = [vec![longer], attention(1, 64).to_vec()].concat();
    assert_eq!(translated(&program).unwrap(), parts);
}

#[test]
fn what_a_gpu_has_no_instruction_for_is_refused_by_name() {
    let best = Work::Best { from: at(1), into: at(2), count: 9, k: 1, first: 0 };
    let fold = Fold { dtype: DType::F32.code(), op: 0 };
    let (collective, data) = (spanker_collective::Collective::AllReduce, at(1));
    let scheduled = Op::Collective { collective, fold, elements: 4, data };
    for (program, name) in [(Op::Work(best), "Best"), (scheduled, "AllReduce")] {
        let said = translated(&[program]).unwrap_err().to_string();
        assert!(said.contains(name), "{said}");
    }
}

#[test]
fn keys_of_a_type_that_no_cache_has_are_refused() {
    let mut program = attention(3, 48);
    let Op::Work(Work::AttendBlocks { cache, .. }) = &mut program[3] else { panic!("attention") };
    for (quant, named) in [(Quant::Q8_0, "heads of 48"), (Quant::Q4_0, "q4_0")] {
        cache.quant = id(quant);
        let attend = Op::Work(Work::AttendBlocks {
            queries: at(1),
            cache: *cache,
            into: at(2),
            rows: 1,
            heads: 32,
            group: 1,
            offset: 0,
            scores: Scores::plain(0),
        });
        let said = translated(&[attend]).unwrap_err().to_string();
        assert!(said.contains(named), "{said}");
    }
}

#[test]
fn heads_that_no_block_can_have_are_refused_with_their_size() {
    let attend = |head_size| attention(1, head_size)[3].clone();
    assert!(translated(&[attend(64)]).is_ok());
    for size in [20, 272] {
        let said = translated(&[attend(size)]).unwrap_err().to_string();
        assert!(said.contains(&size.to_string()), "{said}");
    }
}

#[test]
fn every_operator_belongs_to_an_instruction_or_an_exchange() {
    let mark = Op::Mark { activity: spanker_plan::Activity::Up, layer: 0 };
    let program = [vec![mark], gate_and_up(), blocks_of_gate(), vec![norm(2)]].concat();
    let parts = translated(&program).unwrap();
    // The mark is nobody's; the pair with its blocks is one instruction, the norm of two rows another.
    assert_eq!(parts.ops, [1..8, 8..9]);
}

#[test]
fn rounding_that_is_left_to_a_product_belongs_to_its_instruction() {
    let down = [product(9, 15, [1, 11008, 4096]), copy(15, 16, 4096 * 4), add(17, 16, 4096)];
    let program = [gate_and_up(), blocks_of_gate(), down.to_vec()].concat();
    let streamed = on(&program, 132).unwrap();
    assert!(matches!(streamed.parts[..], [Part::Streamed(_)]), "{streamed:?}");
    assert_eq!(streamed.ops, [0..5, 5..10]);
    // With grid barriers the pair rounds its own results.
    assert_eq!(translated(&program).unwrap().ops, [0..7, 7..10]);
}

#[test]
fn cards_of_a_group_have_the_same_instructions_around_what_they_exchange() {
    let halves: std::sync::Arc<[Range<u64>]> = vec![0..5848, 5848..11696].into();
    let gather = Op::Gather { parts: halves, rows: 1, from: at(8), into: at(9) };
    let program = [gate_and_up(), vec![round(5, 8, 1, 11008), gather.clone()]].concat();
    let address = |place: Place| place.buffer.0 << 32 | place.offset;
    let setting = Setting {
        address: &address,
        blocks: 264,
        counters: 1,
        counted: 8192,
        packed: (77, 1 << 20),
        tile_rows: 32,
        streams: 0,
    };
    let parts = translate(&program, false, &setting).unwrap();
    assert_eq!(parts.ops, [0..6, 6..7]);
    match &parts.parts[..] {
        [Part::Instructions(instructions), Part::Exchange(exchange)] => {
            assert_eq!((instructions.len(), exchange), (1, &gather));
            // Its blocks are where the exchange reads them.
            assert_eq!(op::<operands::GatedVector>(&instructions[0]).blocks, 8 << 32);
        }
        other => panic!("{other:?}"),
    }
}
