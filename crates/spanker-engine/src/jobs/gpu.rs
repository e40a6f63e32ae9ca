// SPDX-License-Identifier: Apache-2.0
//! A product on a graphics processor as a backend.

use std::ops::Range;
use std::sync::Arc;

use spanker_cuda::{CudaError, GpuMatmul};
use spanker_steal::{Backend, Capabilities, Failure};

use super::Product;

/// A product on one processor, with the bits of the host.
#[derive(Debug)]
pub struct GpuProduct {
    product: Arc<Product>,
    gpu: GpuMatmul,
}

impl GpuProduct {
    /// Brings the right operand onto a processor and allocates memory for tasks.
    ///
    /// # Errors
    /// [`CudaError`], as [`GpuMatmul::new`].
    pub fn new(product: Arc<Product>, gpu: usize) -> Result<GpuProduct, CudaError> {
        let gpu = GpuMatmul::new(product.right(), product.dims(), gpu)?;
        Ok(GpuProduct { product, gpu })
    }
}

impl Backend for GpuProduct {
    fn id(&self) -> &'static str {
        "gpu"
    }

    fn capabilities(&self) -> Capabilities {
        let most_items = Some(self.gpu.most_rows());
        Capabilities { in_flight: self.gpu.lanes(), most_items, ..Capabilities::PLAIN }
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let all = self.product.left(&items, out.len())?;
        let (most, row) = (self.gpu.most_rows(), self.product.row_bytes());
        let mut first = items.start;
        for (left, out) in
            all.chunks(most * row).zip(out.chunks_mut(most * self.product.output_bytes()))
        {
            let end = first + left.len() / row;
            let lasting = |error| Failure::lasting(format!("rows {first}..{end}: {error}"));
            self.gpu.multiply(left, out).map_err(lasting)?;
            first = end;
        }
        Ok(())
    }
}
