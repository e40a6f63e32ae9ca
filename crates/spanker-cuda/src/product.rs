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

use crate::model::{Line, Station, Workspace, address, kind, many_rows};
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

/// A stream of its own, with room for one task.
struct Lane {
    station: Station,
    work: Workspace,
    right: CudaSlice<u8>,
    left: CudaSlice<u8>,
    inputs: CudaSlice<u8>,
    out: CudaSlice<u8>,
}

impl GpuProduct {
    /// Brings the right operand onto a processor and makes room for tasks.
    ///
    /// # Errors
    /// [`CudaError::Missing`], [`CudaError::NoDevice`], [`CudaError::Memory`], and whatever else it says.
    pub fn new(product: Arc<Product>, gpu: usize) -> Result<GpuProduct, CudaError> {
        let [rows, width, outs] = product.dims();
        let most = (TASK_BYTES / (outs * 4) / GRAIN * GRAIN).max(GRAIN).min(rows.max(1));
        let lane = || -> Result<Mutex<Lane>, CudaError> {
            // A handle has one stream.
            let gpu = Arc::new(Gpu::open(gpu)?);
            let mut station = Station::new(Arc::clone(&gpu), 16)?;
            station.knows(Quant::Q4K);
            // Two lines, again and again.
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
            station.write(&mut copy, 0, right)?;
            let inputs = most * Quant::Q8K.row_bytes(width as u64) as usize;
            Ok(Mutex::new(Lane {
                right: copy,
                left: gpu.allocate(most * product.row_bytes(), "rows of the left operand")?,
                inputs: gpu.allocate(inputs, "rounded rows")?,
                out: gpu.allocate(most * outs * 4, "results")?,
                work: Workspace::new(&gpu, &staging)?,
                station,
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
        let gpu = Arc::clone(self.station.gpu());
        self.station.write(&mut self.left, 0, left)?;
        let at = |memory: &CudaSlice<u8>| address(memory, &gpu);
        let small = |number: usize| {
            u32::try_from(number)
                .map_err(|_| CudaError::Unsupported(format!("a product of {number} values")))
        };
        let mut round = Line { kind: kind::ROUND_Q4_K, ..Line::default() };
        round.n[0] = small(rows * width / 256)?;
        round.p[..2].copy_from_slice(&[at(&self.left), at(&self.inputs)]);
        let id = |quant: Quant| quant.ggml_id().unwrap_or_default();
        let mut product = Line { kind: kind::MATMUL, ..Line::default() };
        let n = [small(rows)?, small(width)?, small(outs)?, id(Quant::Q8K), id(Quant::Q4K)];
        product.n[..5].copy_from_slice(&n);
        product.p[..3].copy_from_slice(&[at(&self.inputs), at(&self.right), at(&self.out)]);
        let shared = many_rows(Quant::Q4K, small(width)?, self.station.tile_rows());
        let blocks = self.station.blocks(shared)?;
        // The last task's results were read, so its lines are done with.
        self.work.forget();
        let loaded = self.station.load(&mut self.work, &[round, product], shared, blocks)?;
        let full = || CudaError::Unsupported("no room for two lines".into());
        self.station.run(&mut self.work, &loaded.ok_or_else(full)?, 0, 0)?;
        self.station.read(&self.out, 0, out)
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
