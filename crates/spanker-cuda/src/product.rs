// SPDX-License-Identifier: Apache-2.0
//! A product of quantised matrices on a graphics processor, as a backend of work stealing: the right operand lies in its
//! memory, and while it multiplies one task's rows, another's come or go.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaSlice;
use spanker_jobs::Product;
use spanker_model::Quant;
use spanker_plan::GpuStaging;
use spanker_steal::{Backend, Capabilities, Failure};

use crate::model::{DeviceContext, Instruction, Matmul, RoundQ4K, Workspace, address, many_rows};
use crate::{CudaError, Gpu};

/// Tasks at a time: one is computed, another's rows come or its results go.
const LANES: usize = 2;
/// Bytes of a task's results at most.
const TASK_BYTES: usize = 32 << 20;
/// Rows that are given out together.
const GRAIN: usize = 16;

/// A product on one processor. Rows are rounded and multiplied as on the host, with the same bits.
///
/// ```no_run
/// use std::sync::Arc;
/// use spanker_cuda::GpuProduct;
/// use spanker_jobs::{Product, on_threads};
/// use spanker_steal::WorkStealingScheduler;
///
/// let product = Arc::new(Product::synthetic(4096, 4096, 4096, 7)?);
/// let gpu = GpuProduct::new(Arc::clone(&product), 0)?;
/// let both = WorkStealingScheduler::new(vec![Arc::new(gpu), on_threads(Arc::clone(&product), 8)]);
/// let mut out = vec![0; 4096 * 4096 * 4];
/// both.run(&product.job(), &mut out)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct GpuProduct {
    product: Arc<Product>,
    lanes: Vec<Mutex<Lane>>,
    most_items: usize,
}

impl std::fmt::Debug for GpuProduct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuProduct").field("product", &self.product).finish_non_exhaustive()
    }
}

/// A stream of its own, with memory for one task.
struct Lane {
    device: DeviceContext,
    work: Workspace,
    right: CudaSlice<u8>,
    left: CudaSlice<u8>,
    inputs: CudaSlice<u8>,
    out: CudaSlice<u8>,
}

impl GpuProduct {
    /// Brings the right operand onto a processor and allocates memory for tasks.
    ///
    /// # Errors
    /// [`CudaError::Missing`], [`CudaError::NoDevice`], [`CudaError::Memory`], and whatever else it says.
    pub fn new(product: Arc<Product>, gpu: usize) -> Result<GpuProduct, CudaError> {
        let [rows, width, outs] = product.dims();
        let most = (TASK_BYTES / (outs * 4) / GRAIN * GRAIN).max(GRAIN).min(rows.max(1));
        let lane = || -> Result<Mutex<Lane>, CudaError> {
            // A handle has one stream.
            let gpu = Arc::new(Gpu::open(gpu)?);
            let mut device = DeviceContext::new(Arc::clone(&gpu), 16)?;
            device.knows(Quant::Q4K);
            // Two instructions, again and again.
            let staging = GpuStaging {
                context: 16,
                batch: 1,
                multiprocessors: u64::from(gpu.multiprocessors()),
                instructions: [2, 2],
                parts: 1,
                slots: 0,
            };
            let right = product.right();
            let mut copy = gpu.allocate(right.len(), "the right operand")?;
            device.write(&mut copy, 0, right)?;
            let inputs = most * Quant::Q8K.row_bytes(width as u64) as usize;
            Ok(Mutex::new(Lane {
                right: copy,
                left: gpu.allocate(most * product.row_bytes(), "rows of the left operand")?,
                inputs: gpu.allocate(inputs, "rounded rows")?,
                out: gpu.allocate(most * outs * 4, "results")?,
                work: Workspace::new(&gpu, &staging)?,
                device,
            }))
        };
        let lanes = (0..LANES).map(|_| lane()).collect::<Result<_, _>>()?;
        Ok(GpuProduct { product, lanes, most_items: most })
    }

    /// A lane that nobody uses, or the first that will be free.
    fn lane(&self) -> MutexGuard<'_, Lane> {
        let free = self.lanes.iter().find_map(|lane| lane.try_lock().ok());
        free.unwrap_or_else(|| self.lanes[0].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Lane {
    fn multiply(&mut self, left: &[u8], dims: [usize; 3], out: &mut [u8]) -> Result<(), CudaError> {
        let [rows, width, outs] = dims;
        let gpu = Arc::clone(self.device.gpu());
        self.device.write(&mut self.left, 0, left)?;
        let at = |memory: &CudaSlice<u8>| address(memory, &gpu);
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
        // The last task's results were read, so its instructions are no longer used.
        self.work.forget();
        let loaded = self.device.load(&mut self.work, &program, shared, blocks)?;
        let full = || CudaError::Unsupported("no memory for two instructions".into());
        self.device.run(&mut self.work, &loaded.ok_or_else(full)?, 0, 0)?;
        self.device.read(&self.out, 0, out)
    }
}

impl Backend for GpuProduct {
    fn id(&self) -> &'static str {
        "gpu"
    }

    fn capabilities(&self) -> Capabilities {
        let most_items = Some(self.most_items);
        Capabilities { in_flight: LANES, most_items, ..Capabilities::PLAIN }
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let [_, width, outs] = self.product.dims();
        let mut first = items.start;
        let all = self.product.left(&items, out.len())?;
        let row = self.product.row_bytes();
        for (left, out) in
            all.chunks(self.most_items * row).zip(out.chunks_mut(self.most_items * outs * 4))
        {
            let rows = left.len() / row;
            let lasting = |error: CudaError| {
                Failure::lasting(format!("rows {first}..{}: {error}", first + rows))
            };
            self.lane().multiply(left, [rows, width, outs], out).map_err(lasting)?;
            first += rows;
        }
        Ok(())
    }
}
