// SPDX-License-Identifier: Apache-2.0
//! Rows times a quantised matrix that lies in a graphics processor's memory: while it multiplies one call's rows, another's
//! come or go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spanker_model::Quant;
use spanker_plan::GpuStaging;

use crate::model::{
    DeviceContext, Instruction, Matmul, Memory, RoundQ4K, Workspace, many_rows, on_gpu,
};
use crate::{CudaError, Gpu};

/// Calls at a time: one is computed, another's rows come or its results go.
const LANES: usize = 2;
/// Bytes of a call's results at most.
const CALL_BYTES: usize = 32 << 20;
/// Rows that are given out together.
const GRAIN: usize = 16;

/// A Q4_K matrix on one processor. Rows are rounded and multiplied as on the host, with the same bits.
///
/// ```no_run
/// use spanker_cuda::GpuMatmul;
///
/// // One row of 256 weights is a block of 144 bytes.
/// let gpu = GpuMatmul::new(&[0; 3 * 144], [2, 256, 3], 0)?;
/// let mut out = [0; 2 * 3 * 4];
/// gpu.multiply(&[0; 2 * 144], &mut out)?;
/// # Ok::<(), spanker_cuda::CudaError>(())
/// ```
pub struct GpuMatmul {
    lanes: Vec<Mutex<Lane>>,
    width: usize,
    outs: usize,
    most_rows: usize,
}

impl std::fmt::Debug for GpuMatmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let GpuMatmul { width, outs, .. } = self;
        f.debug_struct("GpuMatmul")
            .field("width", width)
            .field("outs", outs)
            .finish_non_exhaustive()
    }
}

/// A stream of its own, with memory for one call.
struct Lane {
    device: DeviceContext,
    work: Workspace,
    right: Memory,
    left: Memory,
    inputs: Memory,
    out: Memory,
}

impl GpuMatmul {
    /// Brings a matrix onto a processor and allocates memory for calls. `dims`: rows that are multiplied in all, values of a
    /// row, rows of the matrix.
    ///
    /// # Errors
    /// [`CudaError::Missing`], [`CudaError::NoDevice`], [`CudaError::Memory`], [`CudaError::Unsupported`] for a matrix of
    /// another size, and whatever else it says.
    pub fn new(right: &[u8], dims: [usize; 3], gpu: usize) -> Result<GpuMatmul, CudaError> {
        let [rows, width, outs] = dims;
        if outs == 0 || width == 0 || right.len() != outs * row_bytes(width) {
            let what = format!("{} bytes for {outs} rows of {width} weights", right.len());
            return Err(CudaError::Unsupported(what));
        }
        let most_rows = (CALL_BYTES / (outs * 4) / GRAIN * GRAIN).max(GRAIN).min(rows.max(1));
        let lane = || -> Result<Mutex<Lane>, CudaError> {
            // A handle has one stream.
            let mut device = on_gpu(Arc::new(Gpu::open(gpu)?))?;
            device.knows(Quant::Q4K);
            // Two instructions, again and again.
            let staging = GpuStaging { instructions: 2, parts: 1, slots: 0, inputs: 0 };
            let mut copy = device.allocate(right.len(), "the right operand")?;
            device.write(&mut copy, 0, right)?;
            let rounded = most_rows * Quant::Q8K.row_bytes(width as u64) as usize;
            Ok(Mutex::new(Lane {
                right: copy,
                left: device.allocate(most_rows * row_bytes(width), "rows of the left operand")?,
                inputs: device.allocate(rounded, "rounded rows")?,
                out: device.allocate(most_rows * outs * 4, "results")?,
                work: device.workspace(&staging)?,
                device,
            }))
        };
        let lanes = (0..LANES).map(|_| lane()).collect::<Result<_, _>>()?;
        Ok(GpuMatmul { lanes, width, outs, most_rows })
    }

    /// Calls that overlap.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Rows that there is memory for in one call.
    #[must_use]
    pub fn most_rows(&self) -> usize {
        self.most_rows
    }

    /// Multiplies rows in Q4_K, at most [`most_rows`](Self::most_rows), into f32.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for other sizes, and whatever else the processor says.
    pub fn multiply(&self, left: &[u8], out: &mut [u8]) -> Result<(), CudaError> {
        let rows = left.len() / row_bytes(self.width);
        let fits = rows * row_bytes(self.width) == left.len() && rows * self.outs * 4 == out.len();
        if !fits || rows > self.most_rows {
            let what = format!("{} bytes of rows into {} bytes", left.len(), out.len());
            return Err(CudaError::Unsupported(what));
        }
        self.lane().multiply(left, [rows, self.width, self.outs], out)
    }

    /// A lane that nobody uses, or the first that will be free.
    fn lane(&self) -> MutexGuard<'_, Lane> {
        let free = self.lanes.iter().find_map(|lane| lane.try_lock().ok());
        free.unwrap_or_else(|| self.lanes[0].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Bytes of a row of weights.
fn row_bytes(width: usize) -> usize {
    Quant::Q4K.row_bytes(width as u64) as usize
}

impl Lane {
    fn multiply(&mut self, left: &[u8], dims: [usize; 3], out: &mut [u8]) -> Result<(), CudaError> {
        let [rows, width, outs] = dims;
        self.device.write(&mut self.left, 0, left)?;
        let at = Memory::base;
        let small = |number: usize| {
            u32::try_from(number)
                .map_err(|_| CudaError::Unsupported(format!("a product of {number} values")))
        };
        let round = RoundQ4K {
            blocks: small(rows * width / 256)?,
            from: at(&self.left),
            into: at(&self.inputs),
            ..Default::default()
        };
        let id = |quant: Quant| quant.ggml_id().unwrap_or_default();
        let product = Matmul {
            rows: small(rows)?,
            width: small(width)?,
            outs: small(outs)?,
            input_quant: id(Quant::Q8K),
            weight_quant: id(Quant::Q4K),
            inputs: at(&self.inputs),
            weights: at(&self.right),
            out: at(&self.out),
            ..Default::default()
        };
        let program = [Instruction::new(round), Instruction::new(product)];
        let shared = many_rows(Quant::Q4K, small(width)?, self.device.tile_rows());
        let blocks = self.device.blocks(shared)?;
        // The last call's results were read, so its instructions are no longer used.
        self.work.forget();
        let loaded = self.device.load(&mut self.work, &program, shared, blocks)?;
        let full = || CudaError::Unsupported("no memory for two instructions".into());
        self.device.run(&mut self.work, &loaded.ok_or_else(full)?)?;
        self.device.read(&self.out, 0, out)
    }
}
