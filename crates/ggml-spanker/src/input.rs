// SPDX-License-Identifier: Apache-2.0
//! What weights are multiplied with: rows of activations, as 8-bit blocks or plain.

use std::sync::{Mutex, PoisonError};

use half::f16;
use spanker_model::Quant;

use crate::error::{Error, Result};
use crate::path::Path;
use crate::simd::{Lanes, Work, run_on};

/// Turns rows of f32 into blocks of `input`, end to end: [`Quant::Q8_0`], [`Quant::Q8K`] or, unchanged,
/// [`Quant::F32`].
///
/// In a block, the scale is the largest magnitude over 127, and every value becomes the nearest multiple of
/// it, ties to even. Q8_0 keeps the scale as f16, Q8_K as f32 with the sums of each 16 values. A block with
/// a value that is not finite becomes zeros with a scale that is not a number, so that it is noticed.
///
/// ```
/// use ggml_spanker::{Quant, quantize};
/// let mut block = [0; 34];
/// quantize(Quant::Q8_0, &[127.0; 32], &mut block)?;
/// assert_eq!((&block[..2], block[2] as i8), (&[0x00, 0x3C][..], 127));
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
///
/// # Errors
/// [`Error::Type`] for another type, [`Error::PartialBlock`] for values that are not whole blocks,
/// [`Error::OutputTooSmall`] if `out` has not exactly the bytes of the blocks.
pub fn quantize(input: Quant, values: &[f32], out: &mut [u8]) -> Result<()> {
    if !matches!(input, Quant::F32 | Quant::Q8_0 | Quant::Q8K) {
        return Err(Error::Type { quant: input });
    }
    let (block, bytes) = (input.block() as usize, input.block_bytes() as usize);
    if !values.len().is_multiple_of(block) {
        return Err(Error::PartialBlock { len: size_of_val(values), block: block * 4 });
    }
    let need = values.len() / block * bytes;
    if out.len() != need {
        return Err(Error::OutputTooSmall { have: out.len(), need });
    }
    run_on(Path::best(), Quantize { input, values, out });
    Ok(())
}

/// What [`quantize`] does once lengths are known to belong together.
struct Quantize<'a> {
    input: Quant,
    values: &'a [f32],
    out: &'a mut [u8],
}

impl Work for Quantize<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        match self.input {
            Quant::Q8_0 => {
                let out = self.out.as_chunks_mut::<34>().0;
                for (values, out) in self.values.as_chunks::<32>().0.iter().zip(out) {
                    let (d, quants) = out.split_at_mut(2);
                    let scale = round_block(values, quants);
                    d.copy_from_slice(&f16::from_f32_const(scale).to_le_bytes());
                }
            }
            Quant::Q8K => {
                let out = self.out.as_chunks_mut::<292>().0;
                for (values, out) in self.values.as_chunks::<256>().0.iter().zip(out) {
                    let (d, rest) = out.split_at_mut(4);
                    let (quants, sums) = rest.split_at_mut(256);
                    d.copy_from_slice(&round_block(values, quants).to_le_bytes());
                    for (sum, part) in sums.chunks_exact_mut(2).zip(quants.as_chunks::<16>().0) {
                        let total: i16 = part.iter().map(|&q| i16::from(q as i8)).sum();
                        sum.copy_from_slice(&total.to_le_bytes());
                    }
                }
            }
            _ => {
                for (out, value) in self.out.as_chunks_mut().0.iter_mut().zip(self.values) {
                    *out = value.to_le_bytes();
                }
            }
        }
    }
}

/// Rounds the values of a block to bytes and returns their scale.
#[inline(always)]
pub(crate) fn round_block<const N: usize>(values: &[f32; N], out: &mut [u8]) -> f32 {
    // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even, and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Magnitudes are in the order of their bits; what is not finite comes after all numbers.
    let largest = values.iter().fold(0, |most: u32, value| most.max(value.abs().to_bits()));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() || largest == 0.0 {
        out.fill(0);
        return if largest == 0.0 { 0.0 } else { f32::NAN };
    }
    let inverse = 127.0 / largest;
    for (out, value) in out.iter_mut().zip(values) {
        let exact = (value * inverse).clamp(-127.0, 127.0);
        // Zero times an inverse that is infinite.
        let exact = if exact.is_nan() { 0.0 } else { exact };
        *out = (exact + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as u8;
    }
    largest / 127.0
}

/// 32 activations: four to a word, the first in its lowest byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(align(32))]
pub(crate) struct Run(pub(crate) [i32; 8]);

impl Run {
    /// The activations one by one.
    pub(crate) fn values(&self) -> impl Iterator<Item = i8> + '_ {
        self.0.iter().flat_map(|word| word.to_le_bytes()).map(|byte| byte as i8)
    }
}

/// Rows of activations, unpacked for the kernels.
///
/// Blocks are interleaved as kernels read them: first the first block of every row, then the second.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    pub(crate) input: Option<Quant>,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Runs of 32: for each run of a row, that of every row.
    pub(crate) runs: Vec<Run>,
    /// For each block of a row, the scale of that of every row.
    pub(crate) scales: Vec<f32>,
    /// Q8_0 only: for each block of a row, the sum of that of every row.
    pub(crate) sums: Vec<i32>,
    /// Q8_K only: for each block of a row, the sums of each 16 values of that of every row.
    pub(crate) parts: Vec<[i16; 16]>,
    /// Plain rows, one after the other, after some zeros.
    plain: Vec<f32>,
    /// How many zeros: rows begin with a cache line.
    lead: usize,
}

/// The most zeros before plain rows.
const LEAD: usize = 15;

impl Inputs {
    /// No rows.
    #[must_use]
    pub fn new() -> Inputs {
        Inputs::default()
    }

    /// No rows, with memory for so many values as Q8_0, as Q8_K or as f32: loading no more than that of any of them
    /// allocates nothing.
    #[must_use]
    pub fn with_capacity([short, long, plain]: [usize; 3]) -> Inputs {
        let (short, long) = (short / 32, long / 256);
        Inputs {
            runs: Vec::with_capacity(short.max(8 * long)),
            scales: Vec::with_capacity(short.max(long)),
            sums: Vec::with_capacity(short),
            parts: Vec::with_capacity(long),
            plain: Vec::with_capacity(plain + LEAD),
            ..Inputs::default()
        }
    }

    /// Bytes of memory that it has for values, used or not.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        let plain = self.plain.capacity().saturating_sub(LEAD);
        let words = self.scales.capacity() + self.sums.capacity() + plain;
        self.runs.capacity() * size_of::<Run>()
            + words * 4
            + self.parts.capacity() * size_of::<[i16; 16]>()
    }

    /// Plain rows, one after the other.
    pub(crate) fn plain(&self) -> &[f32] {
        &self.plain[self.lead..]
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Loads `rows` rows of `width` values from blocks of the type `input`. The memory of earlier rows is
    /// used again.
    ///
    /// # Errors
    /// [`Error::Type`] for a type that activations do not have, [`Error::BadDims`] if `bytes` are not so
    /// many rows.
    pub fn load(&mut self, input: Quant, bytes: &[u8], rows: usize, width: usize) -> Result<()> {
        self.load_shared(input, bytes, (rows, width), |units, work| (0..units).for_each(work))
    }

    /// [`load`](Inputs::load) in units that several threads can share: `share` gets their number and what is to be
    /// called once for each of them.
    ///
    /// ```
    /// use ggml_spanker::{Inputs, Quant};
    /// let (mut one, mut two) = (Inputs::new(), Inputs::new());
    /// one.load(Quant::Q8_0, &[1; 34 * 6], 2, 96)?;
    /// two.load_shared(Quant::Q8_0, &[1; 34 * 6], (2, 96), |units, work| {
    ///     (0..units).rev().for_each(work);
    /// })?;
    /// # Ok::<(), ggml_spanker::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`load`](Inputs::load).
    pub fn load_shared(
        &mut self,
        input: Quant,
        bytes: &[u8],
        (rows, width): (usize, usize),
        share: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
    ) -> Result<()> {
        self.begin(input, bytes, (rows, rows), width)?;
        self.take(input, bytes, |row| row, share);
        Ok(())
    }

    /// Loads some of `rows` rows, in the order of `which`.
    ///
    /// # Errors
    /// Those of [`load`](Inputs::load), and [`Error::BadDims`] for a row that is not there.
    pub fn load_some(
        &mut self,
        input: Quant,
        bytes: &[u8],
        (rows, which): (usize, &[usize]),
        width: usize,
    ) -> Result<()> {
        if which.iter().any(|&row| row >= rows) {
            return Err(Error::BadDims { m: rows, k: width, n: 0, qk: input.block() as usize });
        }
        self.begin(input, bytes, (rows, which.len()), width)?;
        let share = |units, work: &(dyn Fn(usize) + Sync)| (0..units).for_each(work);
        self.take(input, bytes, |row| which[row], share);
        Ok(())
    }

    /// Checks that `bytes` are so many rows, and makes room for some of them.
    fn begin(
        &mut self,
        input: Quant,
        bytes: &[u8],
        (rows, some): (usize, usize),
        width: usize,
    ) -> Result<()> {
        if !matches!(input, Quant::F32 | Quant::Q8_0 | Quant::Q8K) {
            return Err(Error::Type { quant: input });
        }
        let (block, size) = (input.block() as usize, input.block_bytes() as usize);
        let expected = rows.checked_mul(width / block).and_then(|blocks| blocks.checked_mul(size));
        if width == 0 || !width.is_multiple_of(block) || expected != Some(bytes.len()) {
            return Err(Error::BadDims { m: rows, k: width, n: 0, qk: block });
        }
        (self.input, self.rows, self.width) = (Some(input), some, width);
        self.runs.clear();
        self.scales.clear();
        self.sums.clear();
        self.parts.clear();
        self.plain.clear();
        self.lead = 0;
        if input == Quant::F32 {
            self.plain.reserve(some.saturating_mul(width) + LEAD);
            self.lead = self.plain.as_ptr().align_offset(64).min(LEAD);
            self.plain.resize(self.lead, 0.0);
        }
        Ok(())
    }

    /// Takes row `from(0)` of the blocks first, then `from(1)` and so on.
    fn take(
        &mut self,
        input: Quant,
        bytes: &[u8],
        from: impl Fn(usize) -> usize + Copy + Send + Sync,
        share: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
    ) {
        let (rows, width) = (self.rows, self.width);
        if !matches!(input, Quant::Q8_0 | Quant::Q8K) {
            let words = bytes.as_chunks().0;
            for row in 0..rows {
                let words = words[from(row) * width..][..width].iter();
                self.plain.extend(words.map(|&word| f32::from_le_bytes(word)));
            }
            return;
        }
        let long = input == Quant::Q8K;
        let along = width / input.block() as usize;
        let count = rows * along;
        self.runs.resize(if long { 8 * count } else { count }, Run([0; 8]));
        self.scales.resize(count, 0.0);
        self.sums.resize(if long { 0 } else { count }, 0);
        self.parts.resize(if long { count } else { 0 }, [0; 16]);
        if count == 0 {
            return;
        }
        // A unit is some blocks of every row.
        let each = (UNIT / rows).max(1);
        let runs = self.runs.chunks_mut(each * rows * if long { 8 } else { 1 });
        let scales = self.scales.chunks_mut(each * rows);
        let path = Path::best();
        if long {
            let blocks = bytes.as_chunks().0;
            let units = runs.zip(scales).zip(self.parts.chunks_mut(each * rows));
            let units = units.enumerate().map(|(unit, ((runs, scales), parts))| {
                Mutex::new(Some(Long {
                    blocks,
                    along,
                    rows,
                    from,
                    first: unit * each,
                    runs,
                    scales,
                    parts,
                }))
            });
            let units: Vec<_> = units.collect();
            share(units.len(), &|unit| run_once(path, &units[unit]));
        } else {
            let blocks = bytes.as_chunks().0;
            let units = runs.zip(scales).zip(self.sums.chunks_mut(each * rows));
            let units = units.enumerate().map(|(unit, ((runs, scales), sums))| {
                Mutex::new(Some(Short {
                    blocks,
                    along,
                    rows,
                    from,
                    first: unit * each,
                    runs,
                    scales,
                    sums,
                }))
            });
            let units: Vec<_> = units.collect();
            share(units.len(), &|unit| run_once(path, &units[unit]));
        }
    }
}

/// Blocks of a unit, in all rows together.
const UNIT: usize = 256;

/// Does work that nobody has done.
fn run_once<W: Work<Out = ()>>(path: Path, work: &Mutex<Option<W>>) {
    if let Some(work) = work.lock().unwrap_or_else(PoisonError::into_inner).take() {
        run_on(path, work);
    }
}

/// Some blocks of Q8_0 of every row, from number `first` on.
struct Short<'a, F> {
    blocks: &'a [[u8; 34]],
    /// Blocks of a row.
    along: usize,
    rows: usize,
    from: F,
    first: usize,
    runs: &'a mut [Run],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
}

impl<F: Fn(usize) -> usize> Work for Short<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Short { blocks, along, rows, from, first, runs, scales, sums } = self;
        let each = runs.chunks_mut(rows).zip(scales.chunks_mut(rows)).zip(sums.chunks_mut(rows));
        for (at, ((runs, scales), sums)) in each.enumerate() {
            for start in (0..rows).step_by(16) {
                let mut halves = [0; 32];
                for row in start..rows.min(start + 16) {
                    let (head, quants) = blocks[from(row) * along + first + at].split_at(2);
                    halves[2 * (row - start)..2 * (row - start) + 2].copy_from_slice(head);
                    runs[row] = run(quants);
                    let mut sum = 0;
                    for &quant in quants {
                        sum += i32::from(quant as i8);
                    }
                    sums[row] = sum;
                }
                let wide = l.wide_values(l.wide_f16(&halves));
                let scales = &mut scales[start..rows.min(start + 16)];
                scales.copy_from_slice(&wide[..scales.len()]);
            }
        }
    }
}

/// Some blocks of Q8_K of every row, from number `first` on. The sums that they carry are not believed.
struct Long<'a, F> {
    blocks: &'a [[u8; 292]],
    /// Blocks of a row.
    along: usize,
    rows: usize,
    from: F,
    first: usize,
    runs: &'a mut [Run],
    scales: &'a mut [f32],
    parts: &'a mut [[i16; 16]],
}

impl<F: Fn(usize) -> usize> Work for Long<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let Long { blocks, along, rows, from, first, runs, scales, parts } = self;
        let each =
            runs.chunks_mut(8 * rows).zip(scales.chunks_mut(rows)).zip(parts.chunks_mut(rows));
        for (at, ((runs, scales), parts)) in each.enumerate() {
            for row in 0..rows {
                let block = &blocks[from(row) * along + first + at];
                scales[row] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                let quants = &block[4..260];
                for (part, quants) in quants.as_chunks::<32>().0.iter().enumerate() {
                    runs[part * rows + row] = run(quants);
                }
                for (sum, part) in parts[row].iter_mut().zip(quants.as_chunks::<16>().0) {
                    let mut total = 0;
                    for &quant in part {
                        total += i16::from(quant as i8);
                    }
                    *sum = total;
                }
            }
        }
    }
}

/// 32 bytes as words.
fn run(quants: &[u8]) -> Run {
    let words = quants.as_chunks::<4>().0;
    Run(std::array::from_fn(|at| i32::from_le_bytes(words[at])))
}
