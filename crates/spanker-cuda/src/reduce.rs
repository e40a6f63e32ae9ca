// SPDX-License-Identifier: Apache-2.0
//! Reductions over buffers on one graphics processor, one buffer for each of its logical cards: every buffer is read
//! once and written once, and each element gets the bits of the serial fold in card order. The kernels are in
//! `reduce.cu`. Not here: buffers on several processors (`nccl.rs`).

use cudarc::driver::{CudaViewMut, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg};
use spanker_collective::{DType, ReduceOp};

use crate::{CudaError, Gpu};

const SOURCE: &str = include_str!("reduce.cu");

/// The most buffers of one reduction.
pub const MOST_BUFFERS: usize = 256;

/// Numbers of buffers from 2 to this have kernels of their own.
const MOST_FIXED: usize = 8;

/// How the kernels are laid out. The default follows from bytes under way and registers, not from measurements.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Pieces of 16 bytes that a thread has under way, over all buffers.
    pub pieces: u32,
    /// Whether loads and stores bypass the caches, because nothing is used twice.
    pub streaming: bool,
    /// Blocks for each multiprocessor, or 0 for as many as the buffers need.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { pieces: 8, streaming: true, blocks: 0, threads: 256 }
    }
}

impl Tuning {
    /// Reads `pieces=8,streaming=1,blocks=0,threads=256`; what is not named is as usual.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] that names what is not understood.
    pub fn parse(text: &str) -> Result<Tuning, CudaError> {
        let mut tuning = Tuning::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let bad = || CudaError::Unsupported(format!("'{part}' is no setting of a reduction"));
            let (name, value) = part.split_once('=').ok_or_else(bad)?;
            let value: u32 = value.parse().map_err(|_| bad())?;
            match (name, value) {
                ("pieces", 1..=32) => tuning.pieces = value,
                ("streaming", 0..=1) => tuning.streaming = value == 1,
                ("blocks", 0..=64) => tuning.blocks = value,
                ("threads", 32..=1024) if value.is_multiple_of(32) => tuning.threads = value,
                _ => return Err(bad()),
            }
        }
        Ok(tuning)
    }
}

/// The addresses of the buffers, as the kernels declare them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Cards([u64; MOST_BUFFERS]);

/// Which elements there are, as the kernels declare it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    head: u64,
    packs: u64,
    total: u64,
    root: i32,
    count: u32,
}

// SAFETY: these are plain numbers, laid out as the structs of the same names in `reduce.cu`. A kernel for fewer
// buffers takes as many of the addresses as it has buffers.
unsafe impl DeviceRepr for Cards {}
// SAFETY: as above.
unsafe impl DeviceRepr for Extent {}

/// Folds the buffers in order and writes the result to all of them.
///
/// The work is put on the processor's stream; nobody waits for it. Sums, products, averages, maxima, minima and the
/// bitwise operations have the bits of `spanker_reduce::all_reduce`, any NaN being as good as another. A logsumexp
/// can differ by 2 units in the last place for each fold, because the exponential and the logarithm are CUDA's.
///
/// # Errors
/// [`CudaError::Unsupported`] for an operation that the type has not, buffers of different lengths, lengths that are
/// not whole elements, addresses that are no element's, none or too many buffers; those of [`Gpu::compile`].
pub fn all_reduce(
    gpu: &Gpu,
    buffers: &mut [CudaViewMut<'_, u8>],
    dtype: DType,
    op: ReduceOp,
) -> Result<(), CudaError> {
    run(gpu, buffers, dtype, op, None, Tuning::default())
}

/// Folds the buffers in order and writes the result to buffer `root` alone; otherwise as [`all_reduce`].
///
/// # Errors
/// As [`all_reduce`], and for a root that is no buffer.
pub fn reduce(
    gpu: &Gpu,
    buffers: &mut [CudaViewMut<'_, u8>],
    dtype: DType,
    op: ReduceOp,
    root: usize,
) -> Result<(), CudaError> {
    run(gpu, buffers, dtype, op, Some(root), Tuning::default())
}

/// As [`all_reduce`], with kernels that are laid out differently.
#[doc(hidden)]
pub fn all_reduce_tuned(
    gpu: &Gpu,
    buffers: &mut [CudaViewMut<'_, u8>],
    dtype: DType,
    op: ReduceOp,
    tuning: Tuning,
) -> Result<(), CudaError> {
    run(gpu, buffers, dtype, op, None, tuning)
}

fn run(
    gpu: &Gpu,
    buffers: &mut [CudaViewMut<'_, u8>],
    dtype: DType,
    op: ReduceOp,
    root: Option<usize>,
    tuning: Tuning,
) -> Result<(), CudaError> {
    let lengths: Vec<usize> = buffers.iter().map(CudaViewMut::len).collect();
    let bytes = check(&lengths, dtype, op, root)?;
    if bytes == 0 {
        return Ok(());
    }
    let stream = gpu.stream();
    let mut cards = Cards([0; MOST_BUFFERS]);
    for (address, buffer) in cards.0.iter_mut().zip(buffers.iter_mut()) {
        *address = buffer.device_ptr_mut(stream).0;
    }
    let count = lengths.len();
    let extent = extent(&cards.0[..count], bytes, dtype, root)?;
    let fixed = fixed(count, op);
    let name = format!("reduce-{dtype}-{op}");
    let options = options(dtype, op, fixed, tuning);
    let kernel = gpu.kernel(&name, SOURCE, &options, "fold_cards")?;
    let config = LaunchConfig {
        grid_dim: (blocks(&extent, fixed, tuning, gpu.multiprocessors()), 1, 1),
        block_dim: (tuning.threads, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&cards).arg(&extent);
    // SAFETY: the arguments are the kernel's, and it stays inside the extent of each buffer, which is borrowed
    // until the launch is on the stream that orders everything that this processor does with it.
    unsafe { launch.launch(config) }
        .map_err(|error| CudaError::call(format!("start the kernel {name}"), &error))?;
    Ok(())
}

/// Bytes of each buffer, if the reduction is one.
fn check(
    lengths: &[usize],
    dtype: DType,
    op: ReduceOp,
    root: Option<usize>,
) -> Result<usize, CudaError> {
    let refuse = |text: String| Err(CudaError::Unsupported(text));
    let (count, bytes) = (lengths.len(), lengths.first().copied().unwrap_or(0));
    if count == 0 || count > MOST_BUFFERS {
        return refuse(format!("{count} buffers: a reduction on a GPU has 1 to {MOST_BUFFERS}"));
    }
    if !op.is_defined_for(dtype) {
        return refuse(format!("{op} is not defined for {dtype}"));
    }
    if let Some(other) = lengths.iter().position(|&length| length != bytes) {
        let length = lengths[other];
        return refuse(format!("buffer {other} has {length} bytes and buffer 0 has {bytes}"));
    }
    if !bytes.is_multiple_of(dtype.size()) {
        return refuse(format!("{bytes} bytes are not whole elements of {dtype}"));
    }
    match root {
        Some(root) if root >= count => refuse(format!("root {root}: there are {count} buffers")),
        _ => Ok(bytes),
    }
}

/// Which elements go in pieces of 16 bytes: those after the first address that is a multiple of 16 in every buffer,
/// if there is one.
fn extent(
    addresses: &[u64],
    bytes: usize,
    dtype: DType,
    root: Option<usize>,
) -> Result<Extent, CudaError> {
    let size = dtype.size() as u64;
    if let Some(odd) = addresses.iter().position(|address| !address.is_multiple_of(size)) {
        let text =
            format!("buffer {odd} begins at {:#x}, not at an element of {dtype}", addresses[odd]);
        return Err(CudaError::Unsupported(text));
    }
    let total = bytes as u64 / size;
    let lead = addresses[0].wrapping_neg() % 16;
    let alike = addresses.iter().all(|address| address.wrapping_neg() % 16 == lead);
    let (head, packs) = match alike {
        true => {
            let head = (lead / size).min(total);
            (head, (total - head) * size / 16)
        }
        false => (0, 0),
    };
    let root = root.map_or(-1, |root| i32::try_from(root).unwrap_or(-1));
    let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    Ok(Extent { head, packs, total, root, count })
}

/// The number of buffers that a kernel is compiled for, or 0 for one that takes any number.
fn fixed(count: usize, op: ReduceOp) -> u32 {
    match (count, op) {
        (_, ReduceOp::LogSumExp) => 0,
        (2..=MOST_FIXED, _) => count as u32,
        _ => 0,
    }
}

/// Blocks of a launch.
fn blocks(extent: &Extent, fixed: u32, tuning: Tuning, multiprocessors: u32) -> u32 {
    let each = match fixed {
        0 => 1,
        count => u64::from(tuning.pieces.div_ceil(count)),
    };
    let threads = u64::from(tuning.threads);
    // Without pieces every element is one's own.
    let work = if extent.packs == 0 { extent.total } else { extent.packs.div_ceil(each) };
    let most = match tuning.blocks {
        0 => u64::from(u32::MAX >> 1),
        blocks => u64::from(blocks * multiprocessors),
    };
    u32::try_from(work.div_ceil(threads).clamp(1, most)).unwrap_or(u32::MAX >> 1)
}

fn options(dtype: DType, op: ReduceOp, fixed: u32, tuning: Tuning) -> Vec<String> {
    let Tuning { pieces, streaming, threads, .. } = tuning;
    vec![
        format!("-DTYPE_{}", dtype.name().to_uppercase()),
        format!("-DOP_{}", op.name().to_uppercase()),
        format!("-DCARDS={fixed}"),
        format!("-DPIECES={pieces}"),
        format!("-DSTREAMING={}", u32::from(streaming)),
        format!("-DTHREADS={threads}"),
        format!("-DMOST_CARDS={MOST_BUFFERS}"),
        "--std=c++17".to_owned(),
        // Nothing is contracted, flushed or approximated: the bits are those of the serial fold.
        "--fmad=false".to_owned(),
        "--ftz=false".to_owned(),
        "--prec-div=true".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::assert_compiles;

    #[test]
    fn every_type_and_operation_compiles() {
        let mut pairs = 0;
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
                let options = options(dtype, op, fixed(2, op), Tuning::default());
                assert_compiles(&format!("reduce-{dtype}-{op}"), SOURCE, &options);
                pairs += 1;
            }
        }
        assert_eq!(pairs, 4 * 6 + 4 * 8);
    }

    #[test]
    fn every_number_of_buffers_compiles() {
        for count in 1..=MOST_FIXED + 1 {
            let (dtype, op) = (DType::Bf16, ReduceOp::Avg);
            let options = options(dtype, op, fixed(count, op), Tuning::default());
            assert_compiles(&format!("reduce-{count}"), SOURCE, &options);
        }
        assert_eq!([fixed(1, ReduceOp::Sum), fixed(8, ReduceOp::Sum)], [0, 8]);
        assert_eq!([fixed(9, ReduceOp::Sum), fixed(4, ReduceOp::LogSumExp)], [0, 0]);
    }

    /// Lengths, type, operation and root of what is no reduction, and what is said of it.
    type Refused = (&'static [usize], DType, ReduceOp, Option<usize>, &'static str);

    #[test]
    fn buffers_that_make_no_reduction_are_refused_by_name() {
        let (f32, sum) = (DType::F32, ReduceOp::Sum);
        let cases: [Refused; 6] = [
            (&[], f32, sum, None, "0 buffers"),
            (&[4; MOST_BUFFERS + 1], f32, sum, None, "257 buffers"),
            (&[8, 8, 4], f32, sum, None, "buffer 2 has 4 bytes"),
            (&[6, 6], f32, sum, None, "6 bytes are not whole elements of f32"),
            (&[8, 8], f32, ReduceOp::BitwiseOr, None, "or is not defined for f32"),
            (&[8, 8], f32, sum, Some(2), "root 2"),
        ];
        for (lengths, dtype, op, root, named) in cases {
            let error = check(lengths, dtype, op, root).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        assert_eq!(check(&[8, 8], f32, sum, Some(1)), Ok(8));
    }

    #[test]
    fn every_element_is_covered_once_whatever_the_alignment() {
        for dtype in DType::ALL {
            let size = dtype.size() as u64;
            for shift in (0..32).step_by(dtype.size()) {
                for elements in 0..70 {
                    let bytes = elements * dtype.size();
                    let alike = [256 + shift, 4096 + shift];
                    let extent = extent(&alike, bytes, dtype, None).unwrap();
                    let covered = extent.head + extent.packs * (16 / size);
                    assert!(covered <= extent.total, "{extent:?}");
                    let first = 256 + shift + extent.head * size;
                    assert!(extent.packs == 0 || first.is_multiple_of(16), "{extent:?}");
                    assert!(extent.total - covered < 16 / size, "{extent:?}");
                }
            }
        }
    }

    #[test]
    fn buffers_that_are_aligned_differently_go_element_by_element() {
        let extent = extent(&[256, 264], 64, DType::F32, Some(1)).unwrap();
        assert_eq!(extent, Extent { head: 0, packs: 0, total: 16, root: 1, count: 2 });
        let error = super::extent(&[256, 257], 64, DType::F32, None).unwrap_err().to_string();
        assert!(error.contains("buffer 1 begins at 0x101"), "{error}");
    }

    #[test]
    fn blocks_cover_all_pieces_once_unless_they_are_limited() {
        let extent = Extent { head: 0, packs: 4096, total: 4096 * 4, root: -1, count: 2 };
        let tuning = Tuning { pieces: 8, streaming: true, blocks: 0, threads: 256 };
        assert_eq!(blocks(&extent, 2, tuning, 132), 4);
        assert_eq!(blocks(&extent, 8, tuning, 132), 16);
        assert_eq!(blocks(&extent, 0, tuning, 132), 16);
        assert_eq!(blocks(&extent, 0, Tuning { blocks: 2, ..tuning }, 4), 8);
    }

    #[test]
    fn settings_are_read_and_nonsense_is_named() {
        let read = Tuning::parse("pieces=4,streaming=0,blocks=8,threads=512").unwrap();
        assert_eq!(read, Tuning { pieces: 4, streaming: false, blocks: 8, threads: 512 });
        assert_eq!(Tuning::parse(""), Ok(Tuning::default()));
        for bad in ["pieces", "pieces=0", "threads=100", "speed=1", "streaming=x"] {
            assert!(Tuning::parse(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }
}
