// SPDX-License-Identifier: Apache-2.0
//! One graphics processor at work: its context, one stream, its memory and the kernels that were compiled for it.
//! Which processors there are is in `discover.rs`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DriverError, result, sys,
};
use cudarc::nvrtc::Ptx;

use crate::compile::{self, Image};
use crate::{CudaError, Part, require};

/// The oldest driver whose functions are used here, as its library counts: CUDA 12.0.
const OLDEST_DRIVER: u32 = 12_000;

/// A graphics processor that this process works with.
///
/// Everything goes through one stream, in order, and nothing else orders accesses to its memory: what one handle
/// allocates is for kernels and copies of that handle.
///
/// ```no_run
/// use spanker_cuda::Gpu;
/// let gpu = Gpu::open(0)?;
/// let memory = gpu.allocate(1 << 20, "an example")?;
/// assert_eq!(gpu.stream().clone_dtoh(&memory).unwrap(), vec![0; 1 << 20]);
/// # Ok::<(), spanker_cuda::CudaError>(())
/// ```
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    capability: (u32, u32),
    multiprocessors: u32,
    modules: Mutex<HashMap<Source, Arc<CudaModule>>>,
    /// Where compiled kernels are kept.
    kernels: Option<PathBuf>,
}

/// What a module was made of.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Source {
    name: String,
    text: String,
    options: Vec<String>,
}

/// How much of a processor's memory is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that nobody has allocated.
    pub free: u64,
    /// Bytes that there are.
    pub total: u64,
}

/// How many processors the driver shows to this process.
///
/// # Errors
/// [`CudaError::Missing`] without a driver, [`CudaError::OldDriver`] for one that is too old,
/// [`CudaError::NoDevice`] if it shows none.
pub fn gpu_count() -> Result<usize, CudaError> {
    require(Part::Driver)?;
    let found = driver_version()?;
    if found < OLDEST_DRIVER {
        return Err(CudaError::OldDriver { found, needed: OLDEST_DRIVER });
    }
    match result::init() {
        Ok(()) => {}
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(CudaError::NoDevice),
        Err(error) => return Err(CudaError::call("start the CUDA driver", &error)),
    }
    let count =
        result::device::get_count().map_err(|error| CudaError::call("count the GPUs", &error))?;
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(CudaError::NoDevice),
    }
}

/// The version of CUDA that the driver speaks, as in 13000 for 13.0.
pub(crate) fn driver_version() -> Result<u32, CudaError> {
    let mut version = 0;
    // SAFETY: the library writes one number, and may do so before it is started.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(|error| CudaError::call("ask for the version of the CUDA driver", &error))?;
    Ok(u32::try_from(version).unwrap_or(0))
}

impl Gpu {
    /// The processor with this number, as the driver counts.
    ///
    /// # Errors
    /// As [`gpu_count`]; [`CudaError::Unsupported`] if there is none of this number; [`CudaError::Call`] if it
    /// does not answer.
    pub fn open(index: usize) -> Result<Gpu, CudaError> {
        let count = gpu_count()?;
        if index >= count {
            let text = format!("no GPU {index}: the driver shows 0 to {}", count - 1);
            return Err(CudaError::Unsupported(text));
        }
        let refused = |error: DriverError| CudaError::call(format!("open GPU {index}"), &error);
        let context = CudaContext::new(index).map_err(refused)?;
        // SAFETY: buffers need no events of their own, because a handle has one stream, and what it allocates
        // is used on that stream alone.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(refused)?;
        let positive = |number: i32| u32::try_from(number).unwrap_or(0);
        let (major, minor) = context.compute_capability().map_err(refused)?;
        let many = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = positive(context.attribute(many).map_err(refused)?).max(1);
        let (capability, modules) = ((positive(major), positive(minor)), Mutex::default());
        Ok(Gpu { context, stream, capability, multiprocessors, modules, kernels: None })
    }

    /// Keeps compiled kernels in a folder, where the next process finds them. Only what exactly this source, compiler and
    /// kind of processor gave is taken from there.
    #[must_use]
    pub fn keep_kernels(self, folder: Option<PathBuf>) -> Gpu {
        Gpu { kernels: folder, ..self }
    }

    /// Its number, as the driver counts.
    #[must_use]
    pub fn index(&self) -> usize {
        self.context.ordinal()
    }

    /// The driver's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream of everything that this handle does.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The compute capability: (9, 0) for an H200.
    #[must_use]
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// Multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// How much of its memory is free.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it does not answer.
    pub fn memory(&self) -> Result<MemoryInfo, CudaError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(|error| CudaError::call(format!("memory of GPU {}", self.index()), &error))?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Zeroed memory on the processor. `what` is said if there is not enough.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if it does not fit, [`CudaError::Call`] for anything else.
    pub fn allocate(&self, bytes: usize, what: &str) -> Result<CudaSlice<u8>, CudaError> {
        match self.stream.alloc_zeros(bytes) {
            Ok(memory) => Ok(memory),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let MemoryInfo { free, total } = self.memory()?;
                let (gpu, what, needed) = (self.index(), what.to_owned(), bytes as u64);
                Err(CudaError::Memory { gpu, what, needed, free, total })
            }
            Err(error) => {
                Err(CudaError::call(format!("allocate {bytes} bytes for {what}"), &error))
            }
        }
    }

    /// The kernels of a source, compiled for this processor and loaded; the second time they are at hand. The
    /// options are NVRTC's, without the architecture.
    ///
    /// # Errors
    /// [`CudaError::Missing`] without the compiler, [`CudaError::Compile`] with its log, [`CudaError::Call`] if
    /// the driver does not load the code.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        options: &[String],
    ) -> Result<Arc<CudaModule>, CudaError> {
        let (text, options) = (source.to_owned(), options.to_vec());
        let key = Source { name: name.to_owned(), text, options };
        // The lock is held while one compiles, so that nobody compiles the same again.
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&key) {
            return Ok(Arc::clone(module));
        }
        let folder = self.kernels.as_deref();
        let image = match compile::kept_image(folder, name, source, &key.options, self.capability)?
        {
            Image::Machine(code) => Ptx::from_binary(code),
            Image::Portable(code) => Ptx::from_src(code),
        };
        let module = self
            .context
            .load_module(image)
            .map_err(|error| CudaError::call(format!("load the kernel {name}"), &error))?;
        modules.insert(key, Arc::clone(&module));
        Ok(module)
    }

    /// One kernel of a source; as [`Gpu::compile`].
    ///
    /// # Errors
    /// As [`Gpu::compile`]; [`CudaError::Call`] if the source has no such kernel.
    pub fn kernel(
        &self,
        name: &str,
        source: &str,
        options: &[String],
        function: &str,
    ) -> Result<CudaFunction, CudaError> {
        let module = self.compile(name, source, options)?;
        module.load_function(function).map_err(|error| {
            CudaError::call(format!("find {function} in the kernel {name}"), &error)
        })
    }

    /// Waits for everything that was put on the stream.
    ///
    /// # Errors
    /// [`CudaError::Call`] with whatever went wrong there.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream
            .synchronize()
            .map_err(|error| CudaError::call(format!("work on GPU {}", self.index()), &error))
    }

    /// Seconds that the processor spent on what `work` puts on the stream, by its own clock.
    ///
    /// # Errors
    /// Those of `work`, and [`CudaError::Call`] if it fails on the processor.
    pub fn timed(
        &self,
        work: impl FnOnce(&Gpu) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let refused = |error: DriverError| CudaError::call("time work on the GPU", &error);
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = self.stream.record_event(flags).map_err(refused)?;
        work(self)?;
        let end = self.stream.record_event(flags).map_err(refused)?;
        end.synchronize().map_err(refused)?;
        start.elapsed_ms(&end).map(|elapsed| f64::from(elapsed) / 1e3).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_is_not_there_is_an_error_that_says_what_to_do() {
        // No machine has this many; most have none, or no driver.
        let error = Gpu::open(usize::MAX).unwrap_err();
        let said = error.to_string();
        match error {
            CudaError::Unsupported(_) => assert!(said.contains("the driver shows 0 to"), "{said}"),
            _ => assert!(said.contains("hint: "), "{said}"),
        }
    }

    #[test]
    fn an_old_driver_is_reported_with_both_versions() {
        let said = CudaError::OldDriver { found: 11_040, needed: OLDEST_DRIVER }.to_string();
        assert!(
            said.contains("11.4") && said.contains("12.0") && said.contains("hint: "),
            "{said}"
        );
    }
}
