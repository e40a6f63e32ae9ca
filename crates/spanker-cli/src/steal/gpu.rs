// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as backends.

use std::sync::Arc;

use spanker_jobs::Product;
use spanker_steal::Backend;

/// A product on a processor.
#[cfg(feature = "cuda")]
pub(super) fn product(product: &Arc<Product>, index: usize) -> anyhow::Result<Arc<dyn Backend>> {
    let gpu = spanker_cuda::GpuProduct::new(Arc::clone(product), index);
    Ok(Arc::new(gpu.map_err(|error| anyhow::anyhow!("gpu:{index}: {error}"))?))
}

/// This build has none.
#[cfg(not(feature = "cuda"))]
pub(super) fn product(_: &Arc<Product>, index: usize) -> anyhow::Result<Arc<dyn Backend>> {
    anyhow::bail!("gpu:{index}: this spanker was built without CUDA")
}
