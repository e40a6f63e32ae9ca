// SPDX-License-Identifier: Apache-2.0
//! A machine that does what programs say, one operator after the other and as plainly as can be, gives the bits of
//! cards that are threads: so that whoever writes another machine knows what it is asked for.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ggml_spanker::ops::{self, AttendScratch, KvView, Pairs, Queries};
use ggml_spanker::{Inputs, decode, multiply, quantize};
use spanker_llm::{
    AuditLog, Captures, LlmError, Machine, Network, OnMachine, Recorder, Role, Runner, Spent, Want,
    run_logits,
};
use spanker_model::{Model, Quant};
use spanker_plan::{Activity, GpuStaging, KvCache, Label, Op, Plan, Reach, Split};
use spanker_runtime::{BufferId, Place, Work};
use spanker_test_support::Recipe;
use spanker_topology::Kernels;

use splits::{CONTEXT, Open, STEPS};
use splits::{assert_same, mixed, one_by_one, plan, prompt, run, threads, together};

/// Which operators are wrong.
type IsWrong = fn(&Op) -> bool;

/// Cards that are byte vectors.
#[derive(Debug, Default)]
struct Plain {
    members: Vec<Vec<Vec<u8>>>,
    /// How often programs were made ready.
    prepared: usize,
    /// Programs that are ready, and how many may be.
    ready: usize,
    room: Option<usize>,
    /// Multiprocessors, if it is a graphics processor, and bytes that its kernel keeps besides what was planned.
    multiprocessors: Option<u32>,
    more: u64,
    /// Where captures of members go.
    captures: Vec<Place>,
    /// Operators whose results it spoils, of which member.
    wrong: Option<(usize, IsWrong)>,
}

/// Programs of all members, and who is in a group.
type Programs = (Vec<Vec<Op>>, Vec<Range<usize>>);

fn quant(id: u32) -> Quant {
    Quant::from_ggml_id(id).expect("a type")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Plain {
    fn get(&self, member: usize, place: Place, length: u64) -> Vec<u8> {
        let start = place.offset as usize;
        self.members[member][place.buffer.0 as usize][start..start + length as usize].to_vec()
    }

    fn put(&mut self, member: usize, place: Place, bytes: &[u8]) {
        let start = place.offset as usize;
        self.members[member][place.buffer.0 as usize][start..start + bytes.len()]
            .copy_from_slice(bytes);
    }

    fn numbers(&self, member: usize, place: Place, count: u64) -> Vec<f32> {
        floats(&self.get(member, place, count * 4))
    }

    fn words(&self, member: usize, place: Place, count: u64) -> Vec<u32> {
        let bytes = self.get(member, place, count * 4);
        bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }

    /// A row's position, and the block that it is in with all before.
    fn row(&self, member: usize, cache: &KvCache, row: u64) -> (usize, Vec<u32>) {
        let at = Place { offset: cache.rows.offset + row * 8, ..cache.rows };
        let [position, first] = self.words(member, at, 2)[..] else { panic!("two words") };
        let tables = Place { offset: cache.tables.offset + u64::from(first) * 4, ..cache.tables };
        (position as usize, self.words(member, tables, u64::from(position) / 64 + 1))
    }

    /// Copies what is captured of some operators before them, or after them.
    fn capture(&mut self, captures: &Captures, member: usize, ops: &Range<usize>, is_over: bool) {
        let own = captures.list.iter().filter(|one| one.member == member && one.ops == *ops);
        for region in own.flat_map(|capture| &capture.regions) {
            // What is only read may be copied at either time.
            if (region.role == Role::Overwritten) == is_over {
                continue;
            }
            let into = captures.into[member].0;
            for row in 0..region.rows {
                let from =
                    Place { offset: region.from.offset + row * region.stride, ..region.from };
                let bytes = self.get(member, from, region.length);
                let offset = into.offset + region.at + row * region.length;
                self.put(member, Place { offset, ..into }, &bytes);
            }
        }
    }

    /// Changes the first byte of what an operator has written, if it is one of those.
    fn spoil(&mut self, member: usize, op: &Op) {
        if !self.wrong.is_some_and(|(of, is_wrong)| of == member && is_wrong(op)) {
            return;
        }
        let (place, bytes) = match op {
            Op::Work(Work::Matmul { out, shape: [rows, _, outs], .. }) => (*out, rows * outs * 4),
            Op::Work(Work::Norm { into, rows, width, .. }) => (*into, rows * width * 4),
            Op::Work(Work::Quantize { into, width, .. }) => (*into, width / 32 * 34),
            Op::Work(Work::Gate { into, elements, .. })
            | Op::Work(Work::Reduce { into, elements, .. }) => (*into, elements * 4),
            Op::Work(Work::RotateRows { data, rows, heads, head_size, .. }) => {
                (*data, rows * heads * head_size * 4)
            }
            Op::Work(Work::Embed { into, rows, width, .. }) => (*into, rows * width * 4),
            Op::Work(Work::AttendBlocks { into, rows, heads, cache, .. }) => {
                (*into, rows * heads * cache.head_size * 4)
            }
            Op::Work(Work::Keep { cache, .. }) => {
                let shape = cache.shape().expect("a type");
                (cache.blocks, cache.count * shape.block_bytes())
            }
            Op::Gather { parts, rows, into, .. } => {
                (*into, parts.last().map_or(0, |part| part.end) * rows)
            }
            Op::Fold { data, elements, .. } => (*data, elements * 4),
            other => panic!("{other:?} is not spoiled"),
        };
        let spoiled: Vec<u8> = self.get(member, place, bytes).iter().map(|byte| byte ^ 1).collect();
        self.put(member, place, &spoiled);
    }

    fn work(&mut self, member: usize, work: &Work) {
        match *work {
            Work::Fill { into, length, pattern } => {
                self.put(member, into, &pattern.to_le_bytes().repeat(length as usize / 4));
            }
            Work::Embed { .. } => self.embed(member, work),
            Work::Norm { from, weight, into, rows, width, epsilon } => {
                let weight = self.numbers(member, weight, width);
                let mut all = self.numbers(member, from, rows * width);
                for row in all.chunks_exact_mut(width as usize) {
                    let before = row.to_vec();
                    ops::norm(&before, &weight, f32::from_bits(epsilon), row);
                }
                self.put(member, into, &bytes(&all));
            }
            Work::Quantize { from, into, rows, width, quant: id } => {
                let mut out = vec![0; (rows * quant(id).row_bytes(width)) as usize];
                let values = self.numbers(member, from, rows * width);
                quantize(quant(id), &values, &mut out).expect("whole blocks");
                self.put(member, into, &out);
            }
            Work::Matmul { a, b, out, shape: [rows, width, outs], types: [input, weights] } => {
                let mut inputs = Inputs::new();
                let from = self.get(member, a, rows * quant(input).row_bytes(width));
                inputs.load(quant(input), &from, rows as usize, width as usize).expect("rows");
                let weights_bytes = self.get(member, b, outs * quant(weights).row_bytes(width));
                let mut product = vec![0.0; (rows * outs) as usize];
                multiply(quant(weights), &weights_bytes, outs as usize, &inputs, &mut product)
                    .expect("a product");
                self.put(member, out, &bytes(&product));
            }
            Work::RotateRows { data, table, at, rows, heads, head_size, dims, pairs, .. } => {
                let pairs = if pairs == 0 { Pairs::Adjacent } else { Pairs::Halves };
                let width = heads * head_size;
                let positions = self.words(member, at, 2 * rows);
                let mut all = self.numbers(member, data, rows * width);
                for (row, at) in all.chunks_exact_mut(width as usize).zip(positions.chunks(2)) {
                    let offset = table.offset + u64::from(at[0]) * dims * 4;
                    let turns = self.numbers(member, Place { offset, ..table }, dims);
                    ops::rotate(row, head_size as usize, &turns, pairs);
                }
                self.put(member, data, &bytes(&all));
            }
            Work::AddRow { into, row, rows, width } => {
                let more = self.numbers(member, row, width);
                let mut all = self.numbers(member, into, rows * width);
                all.chunks_exact_mut(width as usize).for_each(|row| ops::add(row, &more));
                self.put(member, into, &bytes(&all));
            }
            Work::Keep { .. } => self.keep(member, work),
            Work::Gate { gate, up, into, elements, activation } => {
                let mut out = vec![0.0; elements as usize];
                let (gate, up) =
                    (self.numbers(member, gate, elements), self.numbers(member, up, elements));
                ops::gate(activation, &gate, &up, &mut out);
                self.put(member, into, &bytes(&out));
            }
            Work::Reduce { into, ref sources, elements, .. } => {
                let mut sum = self.numbers(member, sources[0], elements);
                ops::add(&mut sum, &self.numbers(member, sources[1], elements));
                self.put(member, into, &bytes(&sum));
            }
            Work::AttendBlocks { .. } => self.attend(member, work),
            ref other => panic!("programs do not have {other:?}"),
        }
    }

    fn keep(&mut self, member: usize, work: &Work) {
        let Work::Keep { keys, values, ref cache, rows } = *work else { return };
        let (shape, width) = (cache.shape().expect("a type"), cache.heads * cache.head_size);
        let size = shape.block_bytes();
        for row in 0..rows {
            let (position, table) = self.row(member, cache, row);
            let block = u64::from(*table.last().expect("a block")) * size;
            let place = Place { offset: cache.blocks.offset + block, ..cache.blocks };
            let of = |from: Place| Place { offset: from.offset + row * width * 4, ..from };
            let (keys, values) =
                (self.numbers(member, of(keys), width), self.numbers(member, of(values), width));
            let mut bytes = self.get(member, place, size);
            ops::keep(shape, position, &keys, &values, &mut bytes);
            self.put(member, place, &bytes);
        }
    }

    fn embed(&mut self, member: usize, work: &Work) {
        let Work::Embed { table, ids, into, rows, width, quant: id, first, count } = *work else {
            return;
        };
        let row = quant(id).row_bytes(width);
        for (at, token) in self.words(member, ids, rows).into_iter().enumerate() {
            let Some(token) = token.checked_sub(first).filter(|token| *token < count) else {
                continue;
            };
            let from = Place { offset: table.offset + u64::from(token) * row, ..table };
            let mut out = vec![0.0; width as usize];
            decode(quant(id), &self.get(member, from, row), &mut out).expect("a row");
            let into = Place { offset: into.offset + at as u64 * width * 4, ..into };
            self.put(member, into, &bytes(&out));
        }
    }

    fn attend(&mut self, member: usize, work: &Work) {
        let Work::AttendBlocks { queries, ref cache, into, rows, heads, group, offset, scores } =
            *work
        else {
            return;
        };
        let (shape, size) = (cache.shape().expect("a type"), cache.head_size);
        let blocks = self.get(member, cache.blocks, cache.count * shape.block_bytes());
        let asked = self.numbers(member, queries, rows * heads * size);
        let mut out = vec![0.0; asked.len()];
        let units = asked.chunks_exact(size as usize).zip(out.chunks_exact_mut(size as usize));
        for (unit, (query, out)) in units.enumerate() {
            let (row, head) = (unit as u64 / heads, unit as u64 % heads);
            let (first, table) = self.row(member, cache, row);
            let head = ((offset + head) / group) as usize;
            let view = KvView { cache: &blocks, table: &table, shape, head };
            let query = Queries::plain(query, 1, first, f32::from_bits(scores.scale));
            ops::attend(query, view, &mut AttendScratch::default(), out);
        }
        self.put(member, into, &bytes(&out));
    }

    /// What the ranks of a group give each other.
    fn exchange(&mut self, group: &Range<usize>, ops: &[Op]) {
        match &ops[0] {
            Op::Gather { parts, rows, .. } => {
                let row = parts.last().map_or(0, |part| part.end) as usize;
                let mut whole = vec![0; row * *rows as usize];
                for ((member, op), part) in group.clone().zip(ops).zip(parts.iter()) {
                    let Op::Gather { from, .. } = op else { panic!("{op:?}") };
                    let width = part.end - part.start;
                    let own = self.get(member, *from, width * rows);
                    for (at, whole) in whole.chunks_exact_mut(row).enumerate() {
                        whole[part.start as usize..part.end as usize]
                            .copy_from_slice(&own[at * width as usize..][..width as usize]);
                    }
                }
                for (member, op) in group.clone().zip(ops) {
                    let Op::Gather { into, .. } = op else { panic!("{op:?}") };
                    self.put(member, *into, &whole);
                }
            }
            Op::Fold { data, elements, fold } => {
                let adds = fold.dtype == 0;
                let mut sum = self.words(group.start, *data, *elements);
                for (member, op) in group.clone().zip(ops).skip(1) {
                    let Op::Fold { data, .. } = op else { panic!("{op:?}") };
                    for (sum, word) in sum.iter_mut().zip(self.words(member, *data, *elements)) {
                        let added = f32::from_bits(*sum) + f32::from_bits(word);
                        *sum = if adds { added.to_bits() } else { *sum | word };
                    }
                }
                let sum: Vec<u8> = sum.into_iter().flat_map(u32::to_le_bytes).collect();
                for (member, op) in group.clone().zip(ops) {
                    let Op::Fold { data, .. } = op else { panic!("{op:?}") };
                    self.put(member, *data, &sum);
                }
            }
            other => panic!("no exchange of a group: {other:?}"),
        }
    }
}

impl Machine for Plain {
    type Program = Programs;

    fn check(&self, _: &Model, _: u64) -> Result<(), LlmError> {
        Ok(())
    }

    fn allocate(&mut self, member: usize, _: &str, bytes: u64) -> Result<BufferId, LlmError> {
        let count = self.members.len().max(member + 1);
        self.members.resize_with(count, Vec::new);
        self.members[member].push(vec![0; bytes as usize]);
        Ok(BufferId(self.members[member].len() as u64 - 1))
    }

    fn hold(
        &mut self,
        member: usize,
        place: Place,
        _: Quant,
        bytes: &[u8],
    ) -> Result<(), LlmError> {
        self.write(member, place, bytes)
    }

    fn write(&mut self, member: usize, place: Place, bytes: &[u8]) -> Result<(), LlmError> {
        self.put(member, place, bytes);
        Ok(())
    }

    fn read(&mut self, member: usize, place: Place, out: &mut [u8]) -> Result<(), LlmError> {
        out.copy_from_slice(&self.get(member, place, out.len() as u64));
        Ok(())
    }

    fn copy(
        &mut self,
        member: usize,
        from: Place,
        into: Place,
        length: u64,
    ) -> Result<(), LlmError> {
        let bytes = self.get(member, from, length);
        self.write(member, into, &bytes)
    }

    fn prepare(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Programs>, LlmError> {
        if self.room.is_some_and(|room| self.ready >= room) {
            return Ok(None);
        }
        self.prepared += 1;
        self.ready += 1;
        Ok(Some((programs.to_vec(), groups.to_vec())))
    }

    fn forget(&mut self) {
        self.ready = 0;
    }

    fn kernels(&self) -> Kernels {
        let gpu = |multiprocessors| Kernels::Gpu { multiprocessors };
        self.multiprocessors.map_or(Kernels::Card, gpu)
    }

    fn keep(&mut self, _: usize, staging: &GpuStaging) -> Result<u64, LlmError> {
        Ok(staging.places().end + self.more)
    }

    fn runs(&self, (programs, _): &Programs, member: usize) -> Vec<Range<usize>> {
        let is_work = |at: &usize| matches!(programs[member][*at], Op::Work(_));
        let all = (0..programs[member].len()).filter(is_work);
        all.map(|at| at..at + 1).collect()
    }

    fn captured(&mut self, member: usize, bytes: u64) -> Result<Vec<u8>, LlmError> {
        Ok(self.get(member, self.captures[member], bytes))
    }

    fn run(
        &mut self,
        program: &Programs,
        tables: &[u8],
        _: &Reach,
        captures: &Captures,
    ) -> Result<u64, LlmError> {
        self.captures = captures.into.iter().map(|(place, _)| *place).collect();
        let (programs, groups) = program;
        let mut at = vec![0; programs.len()];
        let mut handed: HashMap<(usize, usize), VecDeque<Vec<u8>>> = HashMap::new();
        while (0..programs.len()).any(|member| at[member] < programs[member].len()) {
            for member in 0..programs.len() {
                while let Some(op) = programs[member].get(at[member]) {
                    let now = at[member]..at[member] + 1;
                    match op {
                        Op::Work(work) => {
                            self.capture(captures, member, &now, false);
                            self.work(member, work);
                            self.spoil(member, op);
                            self.capture(captures, member, &now, true);
                        }
                        Op::Data { into, .. } => self.put(member, *into, tables),
                        Op::Mark { .. } => {}
                        Op::Send { to, from, length } => {
                            let given = self.get(member, *from, *length);
                            handed.entry((member, *to)).or_default().push_back(given);
                        }
                        Op::Receive { from, into, .. } => {
                            let waiting = handed.get_mut(&(*from, member));
                            let Some(given) = waiting.and_then(VecDeque::pop_front) else { break };
                            self.put(member, *into, &given);
                        }
                        _ => break,
                    }
                    at[member] += 1;
                }
            }
            for group in groups {
                let next: Option<Vec<Op>> =
                    group.clone().map(|member| programs[member].get(at[member]).cloned()).collect();
                if let Some(next) = next.filter(|next| next.iter().all(Op::is_exchange)) {
                    let around = |machine: &mut Plain, is_over: bool| {
                        for member in group.clone() {
                            let now = at[member]..at[member] + 1;
                            machine.capture(captures, member, &now, is_over);
                        }
                    };
                    around(self, false);
                    self.exchange(group, &next);
                    for (member, op) in group.clone().zip(&next) {
                        self.spoil(member, op);
                    }
                    around(self, true);
                    group.clone().for_each(|member| at[member] += 1);
                }
            }
        }
        for (member, program) in programs.iter().enumerate() {
            self.capture(captures, member, &(program.len()..program.len()), true);
        }
        Ok(0)
    }

    fn run_traced(
        &mut self,
        program: &Programs,
        tables: &[u8],
        reach: &Reach,
        captures: &Captures,
    ) -> Result<(u64, Vec<Spent>), LlmError> {
        self.run(program, tables, reach, captures)?;
        let spent = program.0.iter().enumerate().flat_map(|(member, list)| {
            let of = move |(at, op): (usize, &Op)| {
                let (start, end) = (at as f64, at as f64 + 1.0);
                Spent { member, ops: at..at + 1, start, end, exchange: op.is_exchange() }
            };
            list.iter().enumerate().map(of)
        });
        Ok((0, spent.collect()))
    }
}

#[test]
fn a_recorded_machine_says_what_operators_belong_to_and_leaves_most_tokens_alone() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let machine = Plain::default();
    let mut runner = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    let recorder = Recorder::new();
    runner.record(&recorder);
    runner.warm_up().expect("a warm machine");
    runner.step_alone(&[1, 2, 3], 0, Want::Nothing).unwrap();
    for past in 3..8 {
        let want = if past == 7 { Want::Best(1) } else { Want::Logits };
        runner.step_alone(&[4], past, want).unwrap();
    }
    let marks = recorder.marks();
    let mut tokens: Vec<u32> = marks.iter().map(|mark| mark.label.token).collect();
    tokens.dedup();
    assert_eq!(tokens, [0, 3, 7], "the prompt, the first token and the fifth");
    for card in [0, 1] {
        let own = marks.iter().filter(|mark| mark.card == card && mark.label.token == 3);
        let labels: Vec<Label> = own.clone().map(|mark| mark.label).collect();
        let is = |activity: Activity| labels.iter().any(|label| label.activity == activity);
        assert!(is(Activity::Attention) && is(Activity::Exchange) && is(Activity::Head));
        assert!(own.clone().enumerate().all(|(at, mark)| (mark.op as usize, mark.ops) == (at, 1)));
        // The choice among the logits is the host's, and an operator of the program all the same.
        let best = marks.iter().filter(|mark| mark.card == card && mark.label.token == 7);
        let last = best.clone().next_back().expect("a last operator");
        assert_eq!(best.count(), own.count() + 1);
        assert_eq!((last.op as usize, last.label.activity), (labels.len(), Activity::Head));
    }
}

#[test]
fn what_a_gpus_kernel_keeps_is_planned_and_allocated_like_any_other_buffer() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let used = |machine: Plain| {
        let runner = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
        runner.memory().iter().map(|used| (used.planned, used.allocated)).collect::<Vec<_>>()
    };
    let bare = used(Plain::default());
    let gpu = used(Plain { multiprocessors: Some(132), ..Plain::default() });
    for ((bare, same), (planned, allocated)) in bare.iter().zip(&gpu) {
        assert_eq!((bare, planned), (same, allocated));
        // Its counters alone are more than this.
        assert!(*planned >= bare + 8192 * 4, "{planned} and {bare}");
    }
    // A machine that keeps something else is found out.
    let wrong = used(Plain { multiprocessors: Some(132), more: 1 << 20, ..Plain::default() });
    assert!(wrong.iter().all(|(planned, allocated)| allocated - planned == 1 << 20), "{wrong:?}");
}

#[test]
fn mixtures_of_experts_are_refused_by_name_before_anything_is_allocated() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256).mixture("qwen3moe", [4, 2, 0]);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0]));
    let machine = Plain { room: Some(0), ..Plain::default() };
    let refused = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap_err();
    assert!(refused.to_string().contains("qwen3moe, a mixture of experts, on a GPU"), "{refused}");
}

#[test]
fn programs_that_have_no_room_beside_others_take_their_place() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let tokens = prompt(7, recipe.vocab);
    let machine = Plain { room: Some(1), ..Plain::default() };
    let mut machine = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    machine.warm_up().unwrap();
    let found = run_logits(Box::new(machine), &tokens, STEPS, None).unwrap();
    assert_same("room for one program", &found, &run(&network, &plan, &tokens));
    let machine = Plain { room: Some(0), ..Plain::default() };
    let mut machine = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    let refused = machine.warm_up().unwrap_err();
    assert!(refused.to_string().contains("no room for the programs of a step of 1 tokens"));
}

#[test]
fn programs_of_a_group_are_the_same_whoever_has_a_tokens_row() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let machine = Plain::default();
    let mut runner = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    runner.warm_up().unwrap();
    let made = runner.machine().prepared;
    let last = network.model().vocab as u32 - 1;
    for (past, token) in [1, last, 2, last - 1, 0].into_iter().enumerate() {
        runner.step_alone(&[token], past, Want::Logits).unwrap();
    }
    assert_eq!(runner.machine().prepared, made);
}

fn assert_like_threads(what: &str, recipe: &Recipe, network: &Arc<Network<Vec<u8>>>, plan: &Plan) {
    let tokens = prompt(7, recipe.vocab);
    let machine = OnMachine::load(network, plan, CONTEXT, 3, Plain::default(), &|_| ()).unwrap();
    let found = run_logits(Box::new(machine), &tokens, STEPS, None).unwrap();
    assert_same(what, &found, &run(network, plan, &tokens));
}

#[test]
fn a_machine_has_the_bits_of_threads_for_every_split_and_number() {
    let recipe = Recipe { layers: 5, ..Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352) };
    let network = Arc::new(recipe.network());
    for cards in 1..=4 {
        let mut layouts = vec![
            (Split::Gather, together(&vec![1.0; cards])),
            (Split::Reduce, together(&vec![1.0; cards])),
            (Split::Gather, one_by_one(cards)),
        ];
        if cards > 2 {
            layouts.push((Split::Gather, mixed(cards)));
        }
        for (split, groups) in layouts {
            let what = format!("{cards} cards, {split:?} {groups:?}");
            assert_like_threads(&what, &recipe, &network, &plan(&network, split, &groups));
        }
    }
}

#[test]
fn programs_of_one_card_are_made_ready_once_for_each_number_of_rows() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let plan = plan(&network, Split::Gather, &together(&[1.0]));
    let machine = Plain::default();
    let mut runner = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    let mut expected = threads(&network, &plan, 3, 1);
    let steps: [(&[u32], Want); 5] = [
        (&[1, 2, 3], Want::Nothing),
        (&[4, 5], Want::Best(4)),
        (&[6], Want::Best(4)),
        (&[7], Want::Best(2)),
        (&[8], Want::Logits),
    ];
    let mut past = 0;
    for (tokens, want) in steps {
        let found = runner.step_alone(tokens, past, want).unwrap();
        let expected = expected.step_alone(tokens, past, want).unwrap();
        assert_eq!(found.outputs, expected.outputs, "{tokens:?}");
        past += tokens.len();
    }
    assert_eq!(runner.machine().prepared, 3, "three rows without a head, two rows, one row");
}

/// Runs a prompt and some tokens with nearly all of the work checked: what was found, and how much was checked.
fn audited(split: Split, wrong: Option<(usize, IsWrong)>, part: f64) -> (Option<usize>, u64) {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256);
    let network = Arc::new(recipe.network());
    let mut plan = plan(&network, split, &together(&[1.0, 1.0]));
    plan.request.audit = part;
    let machine = Plain { wrong, ..Plain::default() };
    let mut runner = OnMachine::load(&network, &plan, CONTEXT, 3, machine, &|_| ()).unwrap();
    let memory = runner.memory().iter().map(|used| (used.planned, used.allocated));
    memory.for_each(|(planned, allocated)| assert_eq!(planned, allocated));
    let log = AuditLog::new(part);
    runner.audit(&network, &[7, 9], &log);
    runner.warm_up().expect("a warm machine, even of a card that is wrong");
    assert_eq!((log.checked(), log.found().len()), (0, 0), "a warm-up does not count");
    let mut steps = vec![runner.step_alone(&[1, 2, 3], 0, Want::Nothing)];
    for past in 3..12 {
        steps.push(runner.step_alone(&[past as u32], past, Want::Best(2)));
    }
    let errors: Vec<LlmError> = steps.into_iter().filter_map(Result::err).collect();
    let found = log.found();
    assert_eq!(errors.len(), found.len());
    if let Some((found, error)) = found.first().zip(errors.first()) {
        assert!(error.to_string().contains(&format!("card {}", found.card)), "{error}");
    }
    (found.first().map(|found| found.card), log.checked())
}

#[test]
fn a_machine_is_checked_step_by_step_and_the_card_that_is_wrong_is_named() {
    for split in [Split::Gather, Split::Reduce] {
        let (found, checked) = audited(split, None, 0.99);
        assert!(found.is_none() && checked > 200, "{checked}");
        // Of each card one run of operators and two cells of the KV cache, one before there is an older position, and one
        // exchange of both. The last token's would be compared while the next is computed.
        let (found, checked) = audited(split, None, 0.01);
        assert_eq!((found, checked), (None, 5 + 8 * 7));
        let kinds: [(&str, IsWrong); 10] = [
            ("product", |op| matches!(op, Op::Work(Work::Matmul { .. }))),
            ("norm", |op| matches!(op, Op::Work(Work::Norm { .. }))),
            ("rounding", |op| matches!(op, Op::Work(Work::Quantize { .. }))),
            ("gate", |op| matches!(op, Op::Work(Work::Gate { .. }))),
            ("sum", |op| matches!(op, Op::Work(Work::Reduce { .. }))),
            ("turn", |op| matches!(op, Op::Work(Work::RotateRows { .. }))),
            ("row", |op| matches!(op, Op::Work(Work::Embed { .. }))),
            ("attention", |op| matches!(op, Op::Work(Work::AttendBlocks { .. }))),
            ("cache", |op| matches!(op, Op::Work(Work::Keep { .. }))),
            ("exchange", Op::is_exchange),
        ];
        for (what, is_wrong) in kinds {
            for member in 0..2 {
                let wrong = Some((member, is_wrong));
                let (found, _) = audited(split, wrong, 0.99);
                assert_eq!(found, Some([7, 9][member]), "{split:?}: {what} of member {member}");
                let (found, checked) = audited(split, wrong, 0.0);
                assert_eq!((found, checked), (None, 0), "nobody looks");
            }
        }
    }
}
