// SPDX-License-Identifier: Apache-2.0
//! Collectives between GPUs by NCCL, one rank for each GPU, by the host's clock.

use std::time::Instant;

use spanker_cuda::{CudaError, CudaSlice, Gpu, Nccl};
use spanker_scheduler::{Collective, chunk};

use super::{REPEATS, TURNS, refused};
use crate::collective::{BenchTarget, Case, Method};
use crate::element::{BenchElement, count_wrong, fill};
use crate::error::Result;
use crate::row::{Beside, Measured};
use crate::turns::{Turn, take_turns};

/// A rank for each GPU.
#[derive(Debug)]
pub struct NcclRanks {
    group: Nccl,
    library: String,
}

impl NcclRanks {
    /// The first GPUs.
    ///
    /// # Errors
    /// What a GPU or NCCL fails with.
    pub fn open(ranks: usize) -> Result<NcclRanks> {
        let gpus = (0..ranks).map(Gpu::open).collect::<Result<Vec<Gpu>, CudaError>>()?;
        let group = Nccl::new(gpus)?;
        let library = format!("NCCL {}", group.version()?);
        Ok(NcclRanks { group, library })
    }

    /// NCCL and its version.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Whether a collective is there.
    #[must_use]
    pub fn has(collective: Collective) -> bool {
        matches!(
            collective,
            Collective::AllReduce
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Broadcast { .. }
        )
    }
}

impl BenchTarget for NcclRanks {
    fn measure<T: BenchElement>(&mut self, case: &Case, elements: usize) -> Result<Measured> {
        let (ranks, group) = (case.ranks, &mut self.group);
        // NCCL's parts are all of one length.
        let len = (elements / ranks).max(1) * ranks;
        let bytes = len * size_of::<T>();
        let mut wholes = Vec::with_capacity(ranks);
        let mut parts = Vec::with_capacity(ranks);
        let mut data = vec![T::default(); len];
        for (rank, gpu) in group.gpus().iter().enumerate() {
            fill(case, rank, 0, &mut data);
            let mut whole = gpu.allocate(bytes, "a rank's buffer")?;
            let mut part = gpu.allocate(bytes / ranks, "a rank's part")?;
            let input = bytemuck::cast_slice::<T, u8>(&data);
            gpu.stream().memcpy_htod(input, &mut whole).map_err(refused)?;
            let mine = bytemuck::cast_slice::<T, u8>(&data[chunk(len, ranks, rank)]);
            gpu.stream().memcpy_htod(mine, &mut part).map_err(refused)?;
            gpu.synchronize()?;
            wholes.push(whole);
            parts.push(part);
        }
        call(group, case, &mut wholes, &mut parts)?;
        settle(group)?;
        let mut wrong = 0;
        for (rank, gpu) in group.gpus().iter().enumerate() {
            let (from, range) = match case.collective {
                Collective::ReduceScatter => (&parts[rank], chunk(len, ranks, rank)),
                _ => (&wholes[rank], 0..len),
            };
            let place = bytemuck::cast_slice_mut::<T, u8>(&mut data[range]);
            gpu.stream().memcpy_dtoh(from, place).map_err(refused)?;
            gpu.synchronize()?;
            wrong += count_wrong(case, len, rank, &data);
        }
        let mut subject = |count: usize| {
            let start = Instant::now();
            for _ in 0..count {
                call(group, case, &mut wholes, &mut parts)?;
            }
            settle(group)?;
            Ok(start.elapsed())
        };
        let medians = take_turns(TURNS, &mut [Turn::new(&mut subject, REPEATS)])?;
        Ok(Measured {
            method: Method::Native,
            elements: len,
            seconds: medians[0],
            repeats: TURNS * REPEATS,
            wrong,
            predicted: None,
            beside: Beside::Nccl { gpus: ranks, library: self.library.clone() },
        })
    }
}

fn settle(group: &Nccl) -> Result<(), CudaError> {
    group.gpus().iter().try_for_each(Gpu::synchronize)
}

fn call(
    group: &mut Nccl,
    case: &Case,
    wholes: &mut [CudaSlice<u8>],
    parts: &mut [CudaSlice<u8>],
) -> Result<(), CudaError> {
    let Case { collective, dtype, op, .. } = *case;
    match collective {
        Collective::AllGather => {
            let from: Vec<_> = parts.iter().map(CudaSlice::as_view).collect();
            let mut to: Vec<_> = wholes.iter_mut().map(CudaSlice::as_view_mut).collect();
            group.all_gather(&from, &mut to)
        }
        Collective::ReduceScatter => {
            let from: Vec<_> = wholes.iter().map(CudaSlice::as_view).collect();
            let mut to: Vec<_> = parts.iter_mut().map(CudaSlice::as_view_mut).collect();
            group.reduce_scatter(&from, &mut to, dtype, op)
        }
        _ => {
            let mut all: Vec<_> = wholes.iter_mut().map(CudaSlice::as_view_mut).collect();
            match collective {
                Collective::Broadcast { root } => group.broadcast(&mut all, root),
                _ => group.all_reduce(&mut all, dtype, op),
            }
        }
    }
}
