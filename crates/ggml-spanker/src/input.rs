// SPDX-License-Identifier: Apache-2.0
//! What weights are multiplied with: rows of activations, as 8-bit blocks or plain.

use half::f16;
use spanker_model::Quant;

use crate::decode::half_at;
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
        self.begin(input, bytes, (rows, rows), width)?;
        self.take(input, bytes, 0..rows);
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
        self.take(input, bytes, which.iter().copied());
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

    fn take(&mut self, input: Quant, bytes: &[u8], which: impl Iterator<Item = usize>) {
        match input {
            Quant::Q8_0 => self.load_short(bytes.as_chunks().0, which),
            Quant::Q8K => self.load_long(bytes.as_chunks().0, which),
            _ => {
                let words = bytes.as_chunks().0;
                for row in which {
                    let words = words[row * self.width..][..self.width].iter();
                    self.plain.extend(words.map(|&word| f32::from_le_bytes(word)));
                }
            }
        }
    }

    /// Blocks of Q8_0.
    fn load_short(&mut self, blocks: &[[u8; 34]], which: impl Iterator<Item = usize>) {
        let along = self.width / 32;
        let count = self.rows * along;
        self.runs.resize(count, Run([0; 8]));
        self.scales.resize(count, 0.0);
        self.sums.resize(count, 0);
        for (row, from) in which.enumerate() {
            for (at, block) in blocks[from * along..][..along].iter().enumerate() {
                let to = at * self.rows + row;
                let (head, quants) = block.split_at(2);
                self.scales[to] = half_at(head, 0);
                self.runs[to] = run(quants);
                self.sums[to] = quants.iter().map(|&byte| i32::from(byte as i8)).sum();
            }
        }
    }

    /// Blocks of Q8_K. The sums that they carry are not believed.
    fn load_long(&mut self, blocks: &[[u8; 292]], which: impl Iterator<Item = usize>) {
        let along = self.width / 256;
        let count = self.rows * along;
        self.runs.resize(count * 8, Run([0; 8]));
        self.scales.resize(count, 0.0);
        self.parts.resize(count, [0; 16]);
        for (row, from) in which.enumerate() {
            for (at, block) in blocks[from * along..][..along].iter().enumerate() {
                let to = at * self.rows + row;
                self.scales[to] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                let quants = &block[4..260];
                for (part, quants) in quants.chunks_exact(32).enumerate() {
                    self.runs[(at * 8 + part) * self.rows + row] = run(quants);
                }
                for (sum, part) in self.parts[to].iter_mut().zip(quants.as_chunks::<16>().0) {
                    *sum = part.iter().map(|&byte| i16::from(byte as i8)).sum();
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
