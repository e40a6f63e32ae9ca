// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as cards of a plan: their memory, their programs, and what passes between them.

use std::ops::Range;
use std::sync::Arc;

use spanker_llm::{Captures, LlmError, Machine, Spent};
use spanker_model::{Activation, Layer, Model, Quant, Turning};
use spanker_plan::{GpuStaging, Op, Reach};
use spanker_runtime::{BufferId, Place};
use spanker_topology::Kernels;

use super::device::{Device, Memory, Processor};
use super::device_context::{DeviceContext, Workspace};
use super::planes::in_planes;
use super::programs::{Programs, Span, Watch};
use crate::{CudaError, Gpu};

/// Cards of a plan that are graphics processors, or logical cards that share one.
///
/// Cards that share a processor are in one list of instructions, exchanges included. What cards of several processors
/// exchange goes through the host's memory.
pub struct Processors {
    pub(super) devices: Vec<DeviceContext>,
    pub(super) slots: Vec<DeviceSlot>,
    planes: Vec<u8>,
}

/// A device slot: a card of the plan, and the device that runs it.
pub(super) struct DeviceSlot {
    card: usize,
    pub(super) device: usize,
    pub(super) buffers: Vec<Memory>,
    /// The kernel's memory for it.
    pub(super) work: Option<Workspace>,
}

impl DeviceSlot {
    pub(super) fn work(&mut self) -> Result<&mut Workspace, CudaError> {
        let none = || CudaError::Unsupported("a card without a workspace".into());
        self.work.as_mut().ok_or_else(none)
    }
}

impl std::fmt::Debug for Processors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Processors")
            .field("gpus", &self.devices.len())
            .field("cards", &self.slots.len())
            .finish_non_exhaustive()
    }
}

/// The types of keys and values that the kernels keep.
pub(super) const KERNEL_KV_TYPES: [Quant; 2] = [Quant::F16, Quant::Q8_0];

/// The types of weights that the kernels compute with.
pub(super) const KERNEL_TYPES: [Quant; 11] = [
    Quant::F32,
    Quant::F16,
    Quant::Bf16,
    Quant::Q4_0,
    Quant::Q4_1,
    Quant::Q5_0,
    Quant::Q5_1,
    Quant::Q8_0,
    Quant::Q4K,
    Quant::Q5K,
    Quant::Q6K,
];

impl Processors {
    /// Cards on devices: `cards` has, for each slot of a plan, the card's number in it. Card `i` is on
    /// processor `i`, and where there are fewer processors, they are gone round again.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] without processors; [`CudaError::Memory`].
    pub fn new(gpus: &[Arc<Gpu>], cards: &[usize]) -> Result<Processors, CudaError> {
        let device = |gpu: &Arc<Gpu>| -> Result<Box<dyn Device>, CudaError> {
            Ok(Box::new(Processor::new(Arc::clone(gpu))?))
        };
        Processors::of(gpus.iter().map(device).collect::<Result<_, _>>()?, cards)
    }

    /// The same on any devices.
    pub(super) fn of(
        devices: Vec<Box<dyn Device>>,
        cards: &[usize],
    ) -> Result<Processors, CudaError> {
        if devices.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let devices: Vec<DeviceContext> = devices.into_iter().map(DeviceContext::new).collect();
        let slot = |&card: &usize| {
            let (device, buffers, work) = (card % devices.len(), Vec::new(), None);
            DeviceSlot { card, device, buffers, work }
        };
        let slots = cards.iter().map(slot).collect();
        Ok(Processors { devices, slots, planes: Vec::new() })
    }

    /// Has the kernels know the types of a model's weights, if they compute with them.
    pub(super) fn know(&mut self, types: &[Quant]) -> Result<(), CudaError> {
        if let Some(quant) = types.iter().find(|quant| !KERNEL_TYPES.contains(quant)) {
            return Err(CudaError::Unsupported(format!("weights of type {quant} on a GPU")));
        }
        for device in &mut self.devices {
            types.iter().for_each(|&quant| device.knows(quant));
        }
        Ok(())
    }

    /// The processor of a slot.
    pub(super) fn gpu_of(&self, slot: usize) -> usize {
        self.slots[slot].device
    }

    /// Waits for all processors.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.devices.iter().try_for_each(DeviceContext::synchronize)
    }

    /// Attributes an error to the card of a slot.
    pub(super) fn of_card<T>(
        &self,
        slot: usize,
        outcome: Result<T, CudaError>,
    ) -> Result<T, LlmError> {
        let card = self.slots[slot].card;
        outcome.map_err(|error| match error {
            CudaError::Unsupported(what) => LlmError::Unsupported { what },
            error => LlmError::Card { card, what: error.to_string() },
        })
    }

    pub(super) fn get(
        &mut self,
        slot: usize,
        place: Place,
        out: &mut [u8],
    ) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &self.slots[slot];
        self.devices[*device].read(&buffers[place.buffer.0 as usize], place.offset as usize, out)
    }

    pub(super) fn put(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &mut self.slots[slot];
        let memory = &mut buffers[place.buffer.0 as usize];
        self.devices[*device].write(memory, place.offset as usize, bytes)
    }

    fn copied(
        &mut self,
        slot: usize,
        from: Place,
        into: Place,
        length: u64,
    ) -> Result<(), CudaError> {
        let DeviceSlot { device, buffers, .. } = &mut self.slots[slot];
        if from.buffer != into.buffer || from.offset.abs_diff(into.offset) < length {
            let what = format!("a copy of {length} bytes from {from:?} to {into:?}");
            return Err(CudaError::Unsupported(what));
        }
        let [from, start, length] = [from.offset, into.offset, length].map(|at| at as usize);
        let memory = &mut buffers[into.buffer.0 as usize];
        self.devices[*device].copy(memory, from, start, length)
    }
}

impl Machine for Processors {
    type Program = Programs;

    fn kernels(&self) -> Kernels {
        let each = self.devices.iter().map(DeviceContext::multiprocessors);
        Kernels::Gpu { multiprocessors: each.max().unwrap_or(1) }
    }

    fn computes(&self, quant: Quant) -> bool {
        KERNEL_TYPES.contains(&quant)
    }

    fn check(&self, model: &Model, context: u64) -> Result<(), LlmError> {
        match unknown(model, context) {
            Some(what) => {
                let architecture = &model.architecture;
                Err(LlmError::unsupported(format!("{architecture} on a GPU: no kernel has {what}")))
            }
            None => Ok(()),
        }
    }

    fn keep(&mut self, slot: usize, staging: &GpuStaging) -> Result<u64, LlmError> {
        let device = &self.devices[self.slots[slot].device];
        let work = self.of_card(slot, device.workspace(staging))?;
        let bytes = work.bytes();
        self.slots[slot].work = Some(work);
        Ok(bytes)
    }

    fn allocate(&mut self, slot: usize, what: &str, bytes: u64) -> Result<BufferId, LlmError> {
        let device = &self.devices[self.slots[slot].device];
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let buffer = self.of_card(slot, device.allocate(size, what))?;
        let buffers = &mut self.slots[slot].buffers;
        buffers.push(buffer);
        Ok(BufferId(buffers.len() as u64 - 1))
    }

    fn hold(
        &mut self,
        slot: usize,
        place: Place,
        quant: Quant,
        bytes: &[u8],
    ) -> Result<(), LlmError> {
        self.devices[self.slots[slot].device].knows(quant);
        let mut planes = std::mem::take(&mut self.planes);
        planes.clear();
        in_planes(quant, bytes, &mut planes);
        let written = self.put(slot, place, &planes);
        self.planes = planes;
        self.of_card(slot, written)
    }

    fn write(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), LlmError> {
        let written = self.put(slot, place, bytes);
        self.of_card(slot, written)
    }

    fn read(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), LlmError> {
        let read = self.get(slot, place, out);
        self.of_card(slot, read)
    }

    fn copy(&mut self, slot: usize, from: Place, into: Place, length: u64) -> Result<(), LlmError> {
        let copied = self.copied(slot, from, into, length);
        self.of_card(slot, copied)
    }

    fn prepare(
        &mut self,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
    ) -> Result<Option<Programs>, LlmError> {
        let ready = self.ready(programs, groups);
        self.of_card(0, ready)
    }

    fn forget(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.work.as_mut()).for_each(Workspace::forget);
    }

    fn runs(&self, program: &Programs, slot: usize) -> Vec<Range<usize>> {
        program.runs(slot)
    }

    fn run(
        &mut self,
        program: &Programs,
        tables: &[u8],
        _: &Reach,
        captures: &Captures,
    ) -> Result<u64, LlmError> {
        self.watched(program, tables, Watch::Nothing, captures).map(|(sent, _)| sent)
    }

    fn captured(&mut self, slot: usize, bytes: u64) -> Result<Vec<u8>, LlmError> {
        let mut out = vec![0; bytes as usize];
        let device = self.slots[slot].device;
        let read = match bytes {
            0 => Ok(()),
            _ => self.devices[device].fetched(slot, &mut out),
        };
        self.of_card(slot, read)?;
        Ok(out)
    }

    fn run_traced(
        &mut self,
        program: &Programs,
        tables: &[u8],
        _: &Reach,
        captures: &Captures,
    ) -> Result<(u64, Vec<Spent>), LlmError> {
        let (sent, spans) = self.watched(program, tables, Watch::Instructions, captures)?;
        let spent = spans.into_iter().map(|span| {
            let Span { slot, ops, start, end, exchanged, .. } = span;
            Spent { member: slot, ops, start, end, exchange: exchanged.is_some() }
        });
        Ok((sent, spent.collect()))
    }
}

/// What of a model no kernel can do.
fn unknown(model: &Model, context: u64) -> Option<String> {
    let variant = &model.variant;
    let layer = |layer: &Layer| match (layer.window, layer.turning) {
        (Some(window), _) if window < context => Some(format!("windows of {window} positions")),
        (_, Turning::Global) => None,
        (_, Turning::Local) => Some("angles of single layers".into()),
        (_, Turning::None) => Some("layers without positions".into()),
    };
    [
        (variant.activation != Activation::Silu, "gates that are not SiLU"),
        (variant.post_norms, "norms behind attention and the feed-forward network"),
        (variant.output_bias, "biases of attention's output"),
        (variant.sinks, "attention sinks"),
        (variant.row_norms, "norms of whole rows of queries and keys"),
        (variant.expert_biases, "biases of experts"),
        (variant.embedding_scale.is_some(), "scaled embeddings"),
        (variant.residual_scale.is_some(), "scaled residual sums"),
        (variant.logit_scale.is_some(), "scaled logits"),
        (variant.attention_cap.is_some(), "capped scores"),
        (variant.logit_cap.is_some(), "capped logits"),
    ]
    .into_iter()
    .find(|(has, _)| *has)
    .map(|(_, what)| what.to_owned())
    .or_else(|| model.layers.iter().find_map(layer))
}
