// SPDX-License-Identifier: Apache-2.0
//! What a processor does with weights like a model's, measured for a moment: as numbers of a card's profile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaSlice;
use spanker_model::{Model, Quant};
use spanker_plan::OPERATORS_PER_LAYER;
use spanker_plan::Op;
use spanker_runtime::{BufferId, Place, Work};
use spanker_topology::{BytesPerSecond, Confidence, Profile, Provenance, Seconds};

use super::lines::{Line, Part, Setting, kind, translate};
use super::station::{COUNTERS, Loaded, Station, address};
use crate::profile::value;
use crate::{CudaError, Gpu};

/// Lines of a layer that has one row of inputs: projections, attention, output, gate with up, down.
const LINES_PER_LAYER: f64 = 5.0;
/// Bytes of weights that are read: several times what caches hold.
const BYTES: u64 = 512 << 20;
/// Looks at each figure, of which the median counts.
const LOOKS: usize = 9;
/// How long work goes on before it is timed.
const WARM_UP: Duration = Duration::from_millis(150);
/// Rows of a prompt.
const ROWS: u64 = 128;
/// A byte that weights of any type may consist of: none of their numbers is zero or very large.
const SOME_WEIGHTS: u8 = 0x11;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speeds {
    /// Bytes of weights that products of one row read in a second, without what a line costs.
    pub bytes_per_second: f64,
    /// Multiplications with additions in a second, of products of many rows.
    pub macs_per_second: f64,
    /// Seconds that a line of the kernel costs besides.
    pub line_seconds: f64,
    /// Seconds to start the kernel, wait for it and read the logits.
    pub token_seconds: f64,
}

impl Speeds {
    /// Measures a processor with weights of the model's type and width.
    ///
    /// # Errors
    /// [`CudaError::Memory`], and whatever goes wrong on the processor.
    pub fn measure(gpu: &Arc<Gpu>, model: &Model) -> Result<Speeds, CudaError> {
        let quant = model.layers.first().map_or(Quant::Q4_0, |layer| layer.gate.quant);
        // Where little is free, less is read.
        let bytes = BYTES.min(gpu.memory()?.free / 8);
        let mut bench = Bench::new(gpu, quant, bytes, model.hidden, model.vocab)?;
        // The same bytes in many lines and in a quarter as many.
        let rows = (model.hidden.max(1024)).next_multiple_of(64);
        let count = (bytes / (rows * quant.row_bytes(model.hidden))).max(16) / 4 * 4;
        let many = bench.vectors(rows, count)?;
        let few = bench.vectors(4 * rows, count / 4)?;
        let bytes = (rows * count * quant.row_bytes(model.hidden)) as f64;
        let saved = (count - count / 4) as f64;
        let line_seconds = ((many - few) / saved).max(1e-8);
        let streaming = (few - line_seconds * (count / 4) as f64).max(few / 2.0);
        let macs_per_second = bench.macs()?;
        let token_seconds = bench.token()?;
        let bytes_per_second = bytes / streaming;
        Ok(Speeds { bytes_per_second, macs_per_second, line_seconds, token_seconds })
    }

    /// A profile with these numbers, for one of `share` cards that share the processor.
    #[must_use]
    pub fn profile(&self, of: &Profile, share: usize) -> Profile {
        let mut profile = of.clone();
        let source = "the model's kernel, just now";
        let seconds = |seconds: f64| {
            value(Seconds(seconds), Provenance::Measured, Confidence::Medium, source)
        };
        let share = share.max(1) as f64;
        let rate = BytesPerSecond(((self.bytes_per_second / share) as u64).max(1));
        profile.memory.bandwidth = value(rate, Provenance::Measured, Confidence::Medium, source);
        profile.compute.rate.value.0 = self.macs_per_second / share;
        profile.compute.rate.provenance = Provenance::Measured;
        profile.compute.rate.source = source.into();
        profile.compute.per_operator =
            seconds(self.line_seconds * LINES_PER_LAYER / f64::from(OPERATORS_PER_LAYER));
        profile.compute.per_token = seconds(self.token_seconds);
        profile
    }
}

/// Products of one row with `count` matrices of so many rows, in places of three buffers: weights, inputs and results.
#[derive(Clone, Copy)]
struct Chain {
    quant: Quant,
    width: u64,
    rows: u64,
    count: u64,
    /// Matrices that there are.
    matrices: u64,
}

impl Chain {
    /// Each product takes what the one before has made, as in a model, and norms it: all of them, or every second.
    fn program(self, all_normed: bool) -> Vec<Op> {
        let Chain { quant, width, rows, count, matrices } = self;
        let size = rows * quant.row_bytes(width);
        let id = |quant: Quant| quant.ggml_id().unwrap_or_default();
        let at = |buffer: u64, offset: u64| Place { buffer: BufferId(buffer), offset };
        let input = quant.input();
        let (normed, rounded) = (at(1, width * 4), at(1, width * 8));
        // Two places take turns.
        let turn = |line: u64| at(2, line % 2 * rows * 4);
        let link = |line: u64| {
            let epsilon = 1e-5f32.to_bits();
            let before = if line == 0 { at(1, 0) } else { turn(line - 1) };
            let is_normed = all_normed || line.is_multiple_of(2);
            let (from, weight, into) = (before, at(1, 0), normed);
            let norm = Work::Norm { from, weight, into, rows: 1, width, epsilon };
            let from = if is_normed { normed } else { before };
            let round = Work::Quantize { from, into: rounded, rows: 1, width, quant: id(input) };
            let a = if input == Quant::F32 { from } else { rounded };
            let (b, shape) = (at(0, line % matrices * size), [1, width, rows]);
            let types = [id(input), id(quant)];
            let product = Work::Matmul { a, b, out: turn(line), shape, types };
            let works =
                [is_normed.then_some(norm), (input != Quant::F32).then_some(round), Some(product)];
            works.into_iter().flatten().map(Op::Work)
        };
        (0..count).flat_map(link).collect()
    }
}

struct Bench {
    station: Station,
    quant: Quant,
    width: u64,
    /// Weights, inputs and results.
    buffers: [CudaSlice<u8>; 3],
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Bench {
    fn new(
        gpu: &Arc<Gpu>,
        quant: Quant,
        bytes: u64,
        width: u64,
        vocab: u64,
    ) -> Result<Bench, CudaError> {
        let mut station = Station::new(Arc::clone(gpu), 16, 1)?;
        station.knows(quant);
        let row = quant.row_bytes(width);
        let weights = bytes.max(4 * width.max(1024).next_multiple_of(64) * row);
        let mut weights = gpu.allocate(weights as usize, "a measurement")?;
        let mut inputs = gpu.allocate((ROWS * width * 8) as usize, "a measurement")?;
        // Zeros are a rare case, which is slower.
        let filled = |to: &mut CudaSlice<u8>, with: &[u8]| {
            for at in (0..to.len()).step_by(with.len()) {
                let end = to.len().min(at + with.len());
                let copied =
                    gpu.stream().memcpy_htod(&with[..end - at], &mut to.slice_mut(at..end));
                copied.map_err(|error| CudaError::call("write what is measured with", &error))?;
            }
            Ok::<(), CudaError>(())
        };
        filled(&mut weights, &vec![SOME_WEIGHTS; 16 << 20])?;
        filled(&mut inputs, bytemuck::cast_slice(&vec![1.0f32; width as usize]))?;
        let out = (ROWS * width.max(4096) * 4).max(vocab * 4);
        let out = gpu.allocate(out as usize, "a measurement")?;
        Ok(Bench { station, quant, width, buffers: [weights, inputs, out] })
    }

    fn place(&self, buffer: usize) -> u64 {
        address(&self.buffers[buffer], self.station.gpu())
    }

    /// Seconds for lines, by the processor's clock.
    fn time(&mut self, loaded: &Loaded) -> Result<f64, CudaError> {
        let gpu = Arc::clone(self.station.gpu());
        // A processor that had nothing to do takes a while to be fast.
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            gpu.timed(|_| self.station.run(loaded, 0, 0))?;
        }
        let times = (0..LOOKS).map(|_| gpu.timed(|_| self.station.run(loaded, 0, 0)));
        Ok(median(times.collect::<Result<_, _>>()?))
    }

    /// Seconds for products of one row with `count` matrices of so many rows.
    fn vectors(&mut self, rows: u64, count: u64) -> Result<f64, CudaError> {
        let (quant, width) = (self.quant, self.width);
        let matrices = self.buffers[0].len() as u64 / (rows * quant.row_bytes(width));
        let chain = Chain { quant, width, rows, count, matrices };
        let bases = [0, 1, 2].map(|buffer| self.place(buffer));
        let address = |place: Place| bases[place.buffer.0 as usize] + place.offset;
        let blocks = self.station.blocks(0)?;
        let (counters, scores) = (self.station.counters(), self.station.scores());
        let tile_rows = self.station.tile_rows();
        let on = |program: &[Op], streams| {
            let (address, counted) = (&address as &dyn Fn(Place) -> u64, COUNTERS);
            let setting =
                Setting { address, blocks, counters, counted, scores, tile_rows, streams };
            translate(program, true, &setting)
        };
        // Where weights come ahead of time, a line norms its inputs or rounds them: in a model as often the one as the
        // other. The other kernel's lines find blocks that were rounded by the line before, or norm.
        let streams = self.station.streams(0)?;
        let mut parts = on(&chain.program(false), streams)?;
        let is_streamed = matches!(&parts.parts[..], [Part::Streamed(_)]);
        if !is_streamed || self.station.streams(parts.streamed)? < streams {
            parts = on(&chain.program(true), 0)?;
        }
        let blocks = self.station.blocks(parts.shared)?.min(blocks);
        match &parts.parts[..] {
            [Part::Lines(lines)] => {
                let loaded = self.station.load(lines, parts.shared, blocks)?;
                self.time(&loaded)
            }
            [Part::Streamed(lines)] => {
                let loaded = self.station.load_streamed(lines, parts.streamed)?;
                self.time(&loaded)
            }
            _ => Err(CudaError::Unsupported("a measurement of nothing".into())),
        }
    }

    /// Multiplications a second of products of many rows.
    fn macs(&mut self) -> Result<f64, CudaError> {
        let outs = 4096.min(self.buffers[0].len() as u64 / self.quant.row_bytes(self.width));
        let mut line = Line { kind: kind::MATMUL, ..Line::default() };
        let id = |quant: Quant| quant.ggml_id().unwrap_or_default();
        line.n[..5].copy_from_slice(&[
            ROWS as u32,
            self.width as u32,
            outs as u32,
            id(self.quant.input()),
            id(self.quant),
        ]);
        line.p[..3].copy_from_slice(&[self.place(1), self.place(0), self.place(2)]);
        let shared =
            super::lines::many_rows(self.quant, self.width as u32, self.station.tile_rows());
        let blocks = self.station.blocks(shared)?;
        let loaded = self.station.load(&[line], shared, blocks)?;
        let seconds = self.time(&loaded)?;
        Ok((ROWS * self.width * outs) as f64 / seconds)
    }

    /// Seconds around a kernel that does nothing.
    fn token(&mut self) -> Result<f64, CudaError> {
        let mut line = Line { kind: kind::FILL, ..Line::default() };
        line.n[0] = 1;
        line.p[0] = self.place(2);
        let blocks = self.station.blocks(0)?;
        let loaded = self.station.load(&[line], 0, blocks)?;
        let mut logits = vec![0; 128 << 10];
        let mut times = Vec::with_capacity(LOOKS);
        for _ in 0..LOOKS {
            let begun = Instant::now();
            self.station.run(&loaded, 0, 0)?;
            self.station.read(&self.buffers[2], 0, &mut logits)?;
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok(median(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_line_of_a_chain_is_normed_where_weights_come_ahead_of_time() {
        let chain = Chain { quant: Quant::Q4_0, width: 4096, rows: 4096, count: 16, matrices: 4 };
        let address = |place: Place| (place.buffer.0 + 1) << 32 | place.offset;
        let setting = Setting {
            address: &address,
            blocks: 264,
            counters: 0,
            counted: COUNTERS,
            scores: 16,
            tile_rows: 32,
            streams: 132,
        };
        let parts = translate(&chain.program(false), true, &setting).unwrap().parts;
        let [Part::Streamed(lines)] = &parts[..] else { panic!("other parts") };
        assert!(lines.iter().all(|line| line.kind == kind::STREAMED));
        let ready: Vec<u32> = lines.iter().map(|line| line.n[2]).collect();
        assert_eq!(ready, [1, 2].repeat(8));
    }
}
