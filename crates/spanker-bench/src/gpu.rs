// SPDX-License-Identifier: Apache-2.0
//! Reductions between logical cards that share one GPU, beside copies in the same memory and the prediction; between
//! GPUs with NCCL; the check against the host's bits; and GPUs as profiles.
//!
//! Copies and reductions take turns in one run, are timed by the GPU's own clock, and medians count.

mod check;
mod nccl;
mod profile;

use std::cell::RefCell;
use std::time::Duration;

use spanker_cuda::{
    CudaError, CudaSlice, CudaViewMut, Gpu, GpuProbe, MOST_BUFFERS, Tuning, all_reduce_tuned,
    probe, reduce,
};
use spanker_engine::EngineError;
use spanker_scheduler::{Collective, Team, Threads, host};

use crate::collective::{BenchTarget, Case, Method};
use crate::element::BenchElement;
use crate::error::Result;
use crate::row::{Beside, Measured};
use crate::turns::{Turn, take_turns};

use check::same;
pub use check::{Checked, check};
pub use nccl::NcclRanks;
pub use profile::{GpuReport, profile_gpus};

/// Turns of which the median counts.
const TURNS: usize = 15;
/// Copies, and reductions, in a turn.
const REPEATS: usize = 8;
/// Inputs repeat after this many elements, a prime, so that large ones are there at once.
const PERIOD: usize = 1_048_573;
/// Kernels laid out differently, to find the fastest.
const TUNING_VARIABLE: &str = "SPANKER_CUDA_REDUCE";
/// How many cards can share a GPU.
pub const MOST_CARDS: usize = MOST_BUFFERS;

/// Logical cards that share GPU 0.
#[derive(Debug)]
pub struct LogicalCards {
    gpu: Gpu,
    probe: GpuProbe,
    tuning: Tuning,
}

impl LogicalCards {
    /// Opens the GPU and measures its copies, from which predictions are made.
    ///
    /// # Errors
    /// What the GPU fails with.
    pub fn open() -> Result<LogicalCards> {
        let tuning = std::env::var(TUNING_VARIABLE).unwrap_or_default();
        let tuning =
            Tuning::parse(&tuning).map_err(|error| EngineError::request(error.to_string()))?;
        let gpu = Gpu::open(0)?;
        let probe = probe(&gpu)?;
        Ok(LogicalCards { gpu, probe, tuning })
    }

    /// What was measured of the GPU.
    #[must_use]
    pub fn probe(&self) -> &GpuProbe {
        &self.probe
    }

    fn reduce_once(
        &self,
        case: &Case,
        work: &mut CudaSlice<u8>,
        stride: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let mut places: Vec<CudaViewMut<'_, u8>> =
            work.as_view_mut().chunks_exact_mut(stride.max(1)).collect();
        let mut buffers: Vec<CudaViewMut<'_, u8>> =
            places.iter_mut().map(|place| place.slice_mut(0..bytes)).collect();
        match case.collective {
            Collective::Reduce { root } => {
                reduce(&self.gpu, &mut buffers, case.dtype, case.op, root)
            }
            _ => all_reduce_tuned(&self.gpu, &mut buffers, case.dtype, case.op, self.tuning),
        }
    }

    /// The cards' inputs in the GPU's memory, each on a boundary of its own as separate allocations would be.
    fn upload<T: BenchElement>(&self, inputs: &[Vec<T>], stride: usize) -> Result<CudaSlice<u8>> {
        let mut kept = self.gpu.allocate(stride * inputs.len(), "the cards' inputs")?;
        for (card, values) in inputs.iter().enumerate() {
            let values = bytemuck::cast_slice::<T, u8>(values);
            let mut place = kept.slice_mut(card * stride..card * stride + values.len());
            self.gpu.stream().memcpy_htod(values, &mut place).map_err(refused)?;
        }
        Ok(kept)
    }

    /// Wrong elements over all cards of a result.
    fn count_wrong<T: BenchElement>(
        &self,
        case: &Case,
        inputs: &[Vec<T>],
        work: &CudaSlice<u8>,
        stride: usize,
    ) -> Result<usize> {
        let mut expected = inputs[0].clone();
        host::reduce(Team::global(), Threads::Auto, inputs, &mut expected, case.op)?;
        let mut wrong = 0;
        let mut found = vec![T::default(); expected.len()];
        for (card, own) in inputs.iter().enumerate() {
            let into = bytemuck::cast_slice_mut::<T, u8>(&mut found);
            let place = work.slice(card * stride..card * stride + into.len());
            self.gpu.stream().memcpy_dtoh(&place, into).map_err(refused)?;
            self.gpu.synchronize()?;
            let right = match case.collective {
                Collective::Reduce { root } if root != card => own,
                _ => &expected,
            };
            let bad = |&(&a, &b): &(&T, &T)| !same(a, b, case.op, inputs.len() - 1);
            wrong += found.iter().zip(right).filter(bad).count();
        }
        Ok(wrong)
    }
}

impl BenchTarget for LogicalCards {
    fn measure<T: BenchElement>(&mut self, case: &Case, len: usize) -> Result<Measured> {
        let (gpu, cards) = (&self.gpu, case.ranks);
        let bytes = len * size_of::<T>();
        let stride = bytes.next_multiple_of(256);
        let inputs: Vec<Vec<T>> = (0..cards).map(|card| inputs(card, len)).collect();
        let kept = self.upload(&inputs, stride)?;
        let mut work = gpu.allocate(stride * cards, "the cards' buffers")?;
        gpu.stream().memcpy_dtod(&kept, &mut work).map_err(refused)?;
        self.reduce_once(case, &mut work, stride, bytes)?;
        gpu.synchronize()?;
        let wrong = self.count_wrong(case, &inputs, &work, stride)?;
        let work = RefCell::new(work);
        let mut copies = |count: usize| {
            let work = &mut *work.borrow_mut();
            let copy = |_| gpu.stream().memcpy_dtod(&kept, work).map_err(refused);
            Ok(Duration::from_secs_f64(gpu.timed(|_| (0..count).try_for_each(copy))?))
        };
        let mut folds = |count: usize| {
            let work = &mut *work.borrow_mut();
            let fold = |_| self.reduce_once(case, work, stride, bytes);
            Ok(Duration::from_secs_f64(gpu.timed(|_| (0..count).try_for_each(fold))?))
        };
        let mut turns = [Turn::new(&mut copies, REPEATS), Turn::new(&mut folds, REPEATS)];
        let medians = take_turns(TURNS, &mut turns)?;
        let (copy, seconds) = (medians[0], medians[1]);
        let copy_rate = (stride * cards * 2) as f64 / copy;
        // Every buffer is read; all are written, or one.
        let written = if matches!(case.collective, Collective::AllReduce) { cards } else { 1 };
        let moved = (bytes * (cards + written)) as f64;
        let probed = self.probe.copy.bytes_per_second.max(1) as f64;
        Ok(Measured {
            method: Method::Fused,
            elements: len,
            seconds,
            repeats: TURNS * REPEATS,
            wrong,
            // The bytes at the rate of copies that were measured first, and a launch.
            predicted: Some(Some(moved / probed + self.probe.launch_seconds)),
            beside: Beside::Logical {
                gpu: gpu.index(),
                name: self.probe.name.clone(),
                logical: true,
                cards,
                moved_gbps: moved / seconds / 1e9,
                copy_gbps: copy_rate / 1e9,
                of_copy: moved / seconds / copy_rate,
            },
        })
    }
}

/// A copy that the driver refused.
fn refused(error: impl std::fmt::Display) -> CudaError {
    CudaError::Call { what: "copy".into(), message: error.to_string() }
}

/// The inputs of one card: a period of drawn values, over and over.
fn inputs<T: BenchElement>(card: usize, len: usize) -> Vec<T> {
    let mut values: Vec<T> =
        (0..len.min(PERIOD)).map(|i| T::ordinary(check::draw(card, i))).collect();
    while values.len() < len {
        let more = PERIOD.min(len - values.len());
        values.extend_from_within(..more);
    }
    values
}
