// SPDX-License-Identifier: Apache-2.0
//! Attention on the emulated kernels has the bits that `ggml-spanker` defines, over more blocks than a block of the kernel
//! has warps, for heads of any size, groups, and types of keys and values.

use ggml_spanker::ops::{self, AttendScratch, KvView, Pairs, Queries};
use spanker_model::{KV_BLOCK, KvShape, Quant};
use spanker_plan::{GpuStaging, KvCache, Op};
use spanker_runtime::{BufferId, Place, Scores, Work};

use super::super::device::Memory;
use super::super::device_context::DeviceContext;
use super::super::instructions::{Part, Setting, translate};
use super::super::machine::KERNEL_KV_TYPES;
use super::super::operands::Attend;
use super::{Emulated, is_possible};

/// Rows of queries over a cache.
struct Case {
    kv: Quant,
    heads: u64,
    kv_heads: u64,
    size: u64,
    dims: u64,
    /// Positions of the rows; those of one sequence share their blocks.
    positions: Vec<u32>,
    pairs: u32,
}

/// Numbers from a seed, between -1 and 1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn floats(&mut self, count: u64) -> Vec<f32> {
        (0..count).map(|_| (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// What memory has, in the order of its buffers.
struct Given {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    cache: Vec<u8>,
    rows: Vec<u32>,
    tables: Vec<u32>,
    turns: Vec<f32>,
}

impl Case {
    fn shape(&self) -> KvShape {
        KvShape { heads: self.kv_heads, head_size: self.size, quant: self.kv }
    }

    fn rows(&self) -> u64 {
        self.positions.len() as u64
    }

    /// Every row has a sequence of its own, whose blocks are scattered.
    fn given(&self, seed: u64) -> Given {
        let (mut numbers, shape) = (Numbers(seed), self.shape());
        let (width, kv) = (self.heads * self.size, self.kv_heads * self.size);
        let (mut rows, mut tables) = (Vec::new(), Vec::new());
        let needed: Vec<u64> =
            self.positions.iter().map(|&at| KvShape::blocks_for(u64::from(at) + 1)).collect();
        let blocks: u64 = needed.iter().sum();
        for (&position, needed) in self.positions.iter().zip(needed) {
            rows.extend([position, tables.len() as u32]);
            let first = tables.len() as u64;
            // From the last block to the first.
            tables.extend((first..first + needed).map(|at| (blocks - 1 - at) as u32));
        }
        let mut cache = vec![0; (blocks * shape.block_bytes()) as usize];
        for block in cache.chunks_exact_mut(shape.block_bytes() as usize) {
            for position in 0..KV_BLOCK as usize {
                let (keys, values) = (numbers.floats(kv), numbers.floats(kv));
                ops::keep(shape, position, &keys, &values, block);
            }
        }
        let most = self.positions.iter().max().map_or(0, |&most| u64::from(most) + 1);
        let rows_of = self.rows();
        Given {
            queries: numbers.floats(rows_of * width),
            keys: numbers.floats(rows_of * kv),
            values: numbers.floats(rows_of * kv),
            turns: numbers.floats(most * self.dims),
            cache,
            rows,
            tables,
        }
    }

    /// What ggml-spanker makes of it: results and the cache.
    fn expected(&self, mut given: Given) -> (Vec<f32>, Vec<u8>) {
        let shape = self.shape();
        let (width, kv) = ((self.heads * self.size) as usize, (self.kv_heads * self.size) as usize);
        let pairs = if self.pairs == 0 { Pairs::Adjacent } else { Pairs::Halves };
        let block_bytes = shape.block_bytes() as usize;
        let table =
            |given: &Given, row: usize| given.tables[given.rows[2 * row + 1] as usize..].to_vec();
        for (row, &position) in self.positions.iter().enumerate() {
            let at = position as usize * self.dims as usize;
            let turns = given.turns[at..at + self.dims as usize].to_vec();
            let (queries, keys) =
                (&mut given.queries[row * width..][..width], &mut given.keys[row * kv..][..kv]);
            ops::rotate(queries, self.size as usize, &turns, pairs);
            ops::rotate(keys, self.size as usize, &turns, pairs);
            let (keys, values) = (keys.to_vec(), given.values[row * kv..][..kv].to_vec());
            let block = table(&given, row)[position as usize / KV_BLOCK as usize] as usize;
            let block = &mut given.cache[block * block_bytes..][..block_bytes];
            ops::keep(shape, position as usize, &keys, &values, block);
        }
        let mut out = vec![0.0; given.queries.len()];
        for (row, &position) in self.positions.iter().enumerate() {
            let table = table(&given, row);
            for head in 0..self.heads as usize {
                let at = row * width + head * self.size as usize;
                let rows = &given.queries[at..at + self.size as usize];
                let queries = Queries::plain(rows, 1, position as usize, 0.3);
                let head = head / (self.heads / self.kv_heads) as usize;
                let view = KvView { cache: &given.cache, table: &table, shape, head };
                let out = &mut out[at..at + self.size as usize];
                ops::attend(queries, view, &mut AttendScratch::default(), out);
            }
        }
        (out, given.cache)
    }

    /// The program: rotary embeddings, the store to the cache, and attention.
    fn program(&self, count: u64) -> Vec<Op> {
        let at = |buffer| Place { buffer: BufferId(buffer), offset: 0 };
        let (rows, heads, head_size, dims) = (self.rows(), self.heads, self.size, self.dims);
        let cache = KvCache {
            blocks: at(3),
            count,
            rows: at(4),
            tables: at(5),
            entries: 0,
            heads: self.kv_heads,
            head_size,
            quant: self.kv.ggml_id().expect("a type"),
        };
        let rotate = |data, heads| Work::RotateRows {
            data: at(data),
            table: at(6),
            positions: 1 << 20,
            at: at(4),
            rows,
            heads,
            head_size,
            dims,
            pairs: self.pairs,
        };
        let attend = Work::AttendBlocks {
            queries: at(0),
            cache,
            into: at(7),
            rows,
            heads,
            group: heads / self.kv_heads,
            offset: 0,
            scores: Scores::plain(0.3f32.to_bits()),
        };
        let keep = Work::Keep { keys: at(1), values: at(2), cache, rows };
        [rotate(0, heads), rotate(1, self.kv_heads), keep, attend].map(Op::Work).to_vec()
    }

    /// What the emulated kernels make of it.
    fn found(&self, given: &Given, streams: bool) -> (Vec<f32>, Vec<u8>) {
        let (emulated, _) = Emulated::new(3);
        let mut device = DeviceContext::new(Box::new(emulated));
        device.knows(Quant::Q4_0);
        let bytes: [&[u8]; 7] = [
            bytemuck::cast_slice(&given.queries),
            bytemuck::cast_slice(&given.keys),
            bytemuck::cast_slice(&given.values),
            &given.cache,
            bytemuck::cast_slice(&given.rows),
            bytemuck::cast_slice(&given.tables),
            bytemuck::cast_slice(&given.turns),
        ];
        let mut buffers: Vec<Memory> = Vec::new();
        for bytes in bytes {
            let mut buffer = device.allocate(bytes.len(), "a test").unwrap();
            device.write(&mut buffer, 0, bytes).unwrap();
            buffers.push(buffer);
        }
        buffers.push(device.allocate(given.queries.len() * 4, "results").unwrap());
        let staging = GpuStaging { instructions: 8, parts: 1, slots: 1 << 16, inputs: 0 };
        let mut work = device.workspace(&staging).unwrap();
        let bases: Vec<u64> = buffers.iter().map(Memory::base).collect();
        let address = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let streams = if streams { device.streams(0).unwrap() } else { 0 };
        let setting = Setting {
            address: &address,
            blocks: 3,
            counters: work.counters(),
            counted: 1,
            packed: work.packed(),
            tile_rows: device.tile_rows(),
            streams: 0,
        };
        let parts = translate(&self.program(9), true, &setting).unwrap();
        let [Part::Instructions(instructions)] = &parts.parts[..] else { panic!("{parts:?}") };
        let mut instructions = instructions.clone();
        if let Some(op) =
            instructions[0].get_mut::<Attend>().filter(|op| streams > 0 && op.near > 64)
        {
            op.near = 256;
        }
        assert!(device.blocks(parts.shared).unwrap() >= 3);
        let loaded = match streams {
            0 => device.load(&mut work, &instructions, parts.shared, 3).unwrap(),
            _ => {
                device.load_streamed(&mut work, &instructions, parts.streamed + (34 << 10)).unwrap()
            }
        };
        device.run(&mut work, &loaded.expect("room")).unwrap();
        let mut out = vec![0; given.queries.len() * 4];
        device.read(&buffers[7], 0, &mut out).unwrap();
        let mut cache = vec![0; given.cache.len()];
        device.read(&buffers[3], 0, &mut cache).unwrap();
        (floats(&out), cache)
    }

    fn check(&self, streams: bool) {
        let what = format!(
            "{} of {}/{} heads of {} at {:?}",
            self.kv, self.heads, self.kv_heads, self.size, self.positions
        );
        let given = self.given(77);
        let found = self.found(&given, streams);
        let (expected, cache) = self.expected(given);
        assert!(found.1 == cache, "{what}: the cache");
        let bits = |all: &[f32]| all.iter().map(|one| one.to_bits()).collect::<Vec<_>>();
        let wrong = bits(&found.0).iter().zip(bits(&expected)).position(|(a, b)| *a != b);
        let at = wrong.map(|at| (at, found.0[at], expected[at]));
        assert_eq!(at, None, "{what}, streams: {streams}");
    }
}

#[test]
fn rows_of_several_sequences_have_the_hosts_bits_after_any_number_of_positions() {
    if !is_possible() {
        return;
    }
    for kv in KERNEL_KV_TYPES {
        for (heads, kv_heads, size, dims, pairs) in
            [(4, 2, 64, 64, 0), (3, 1, 32, 16, 1), (2, 2, 128, 128, 1), (2, 1, 256, 64, 0)]
        {
            let positions = vec![0, 63, 64, 130, 700];
            Case { kv, heads, kv_heads, size, dims, positions, pairs }.check(false);
        }
    }
    let (kv, positions) = (Quant::F16, vec![3, 127, 128]);
    Case { kv, heads: 2, kv_heads: 1, size: 48, dims: 48, positions, pairs: 0 }.check(false);
}

#[test]
fn a_row_with_a_new_position_has_the_hosts_bits_on_either_kernel() {
    if !is_possible() {
        return;
    }
    for kv in KERNEL_KV_TYPES {
        for position in [0, 1, 62, 63, 64, 65, 255, 256, 600, 1023, 1024, 1100, 2050] {
            let (heads, kv_heads, size, dims) = (4, 2, 64, 64);
            let positions = vec![position];
            let case = Case { kv, heads, kv_heads, size, dims, positions, pairs: position % 2 };
            case.check(false);
            case.check(true);
        }
        for (size, dims) in [(128, 128), (256, 128), (32, 32)] {
            let (heads, kv_heads, positions, pairs) = (2, 1, vec![400], 1);
            let case = Case { kv, heads, kv_heads, size, dims, positions, pairs };
            case.check(false);
            case.check(true);
        }
    }
}
