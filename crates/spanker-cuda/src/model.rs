// SPDX-License-Identifier: Apache-2.0
//! A model on graphics processors: programs of `spanker-llm` as lists of instructions that one kernel goes through.

mod captures;
mod device;
mod device_context;
#[cfg(test)]
mod emulation;
mod exchange;
mod instructions;
mod machine;
mod operands;
mod planes;
mod programs;
mod schedule;
mod slots;
mod speeds;
mod streams;

pub use machine::Processors;
pub use programs::Programs;
pub use speeds::{Speeds, Subject};

pub(crate) use device::{Device, Memory, Processor};
pub(crate) use device_context::{DeviceContext, Workspace, on_gpu};
pub(crate) use instructions::many_rows;
pub(crate) use operands::{Instruction, Matmul, RoundQ4K};
