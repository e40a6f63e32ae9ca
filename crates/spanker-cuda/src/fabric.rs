// SPDX-License-Identifier: Apache-2.0
//! The fabric whose messages are in the memory of graphics processors: ranks are threads, each with a stream and memory of its
//! own, on one processor or several.
//!
//! A rank puts a message into its processor's memory once, whoever receives it. Receivers hear where it lies, and copy it
//! into memory of their own: within a processor, or from one to another, which the driver does directly where it can and
//! through the host otherwise. What ranks tell each other besides (where messages lie, what they belong to, who has died)
//! goes through queues of the process, so deadlines and faults are those of [`inproc`].
//!
//! Not here: folds, which the caller of a schedule does on the host; for buffers on a processor there is
//! [`all_reduce`](crate::all_reduce), and models exchange in their own programs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use spanker_collective::Rank;
use spanker_fabric::inproc::{self, Inproc};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};

use crate::model::{Device, Memory, Processor};
use crate::{CudaError, Gpu};

/// Bytes of a rank's smallest piece of memory.
const LEAST: usize = 4096;
/// Bytes that say where a message lies: its number, and how long it is.
const NOTE: usize = 16;

/// One rank's end of a group on graphics processors.
pub struct CudaFabric {
    control: Inproc,
    device: Box<dyn Device>,
    /// Memory of messages that this rank has sent. Who receives one holds it until it is copied.
    sent: Vec<Arc<Memory>>,
    /// Where messages arrive.
    arrived: Option<Memory>,
    parcels: Arc<Parcels>,
    notes: Pool,
    messages: Pool,
}

/// Messages on their way: each lies in the memory of the rank that sent it.
#[derive(Default)]
struct Parcels {
    next: AtomicU64,
    lying: Mutex<HashMap<u64, Arc<Memory>>>,
}

impl Parcels {
    fn lying(&self) -> MutexGuard<'_, HashMap<u64, Arc<Memory>>> {
        self.lying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a message for one receiver, and returns its number.
    fn leave(&self, memory: &Arc<Memory>) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lying().insert(number, Arc::clone(memory));
        number
    }

    fn take(&self, number: u64) -> Option<Arc<Memory>> {
        self.lying().remove(&number)
    }
}

impl std::fmt::Debug for CudaFabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaFabric").field("control", &self.control).finish_non_exhaustive()
    }
}

impl CudaFabric {
    /// A group of so many ranks, in rank order. Rank `i` is on the `i`th of these processors, and where there are fewer
    /// processors, they are gone round again. Each end goes to a thread of its own.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`] without processors, and those of [`Gpu::open`].
    pub fn group(gpus: &[usize], ranks: usize) -> Result<Vec<CudaFabric>, CudaError> {
        if gpus.is_empty() {
            return Err(CudaError::NoDevice);
        }
        // A handle has one stream, so every rank has a handle of its own.
        let device = |rank: usize| -> Result<Box<dyn Device>, CudaError> {
            let gpu = Gpu::open(gpus[rank % gpus.len()])?;
            Ok(Box::new(Processor::new(Arc::new(gpu))?))
        };
        Ok(CudaFabric::of((0..ranks).map(device).collect::<Result<_, _>>()?))
    }

    /// A group on any devices, one for each rank.
    pub(crate) fn of(devices: Vec<Box<dyn Device>>) -> Vec<CudaFabric> {
        let parcels = Arc::new(Parcels::default());
        let end = |(control, device): (Inproc, Box<dyn Device>)| CudaFabric {
            control,
            device,
            sent: Vec::new(),
            arrived: None,
            parcels: Arc::clone(&parcels),
            notes: Pool::default(),
            messages: Pool::default(),
        };
        inproc::group(devices.len()).into_iter().zip(devices).map(end).collect()
    }

    /// Puts bytes into the device's memory.
    fn put(&mut self, bytes: &[u8]) -> Result<Arc<Memory>, CudaError> {
        let fits = |memory: &mut Arc<Memory>| {
            memory.size() >= bytes.len() && Arc::get_mut(memory).is_some()
        };
        let mut memory = match self.sent.iter_mut().position(fits) {
            Some(free) => self.sent.swap_remove(free),
            None => {
                let size = bytes.len().next_power_of_two().max(LEAST);
                Arc::new(self.device.allocate(size, "a message")?)
            }
        };
        let own = Arc::get_mut(&mut memory)
            .ok_or_else(|| CudaError::Unsupported("memory that others still read".into()))?;
        self.device.write(own, 0, bytes)?;
        self.sent.push(Arc::clone(&memory));
        Ok(memory)
    }

    /// Puts messages into the device's memory, and says for each receiver where its message lies.
    fn post(&mut self, sends: &[(Rank, Message)]) -> Result<Vec<(Rank, Message)>, CudaError> {
        let mut put: Vec<(&[u8], Arc<Memory>)> = Vec::new();
        let mut notes = Vec::with_capacity(sends.len());
        for (to, message) in sends {
            let bytes = message.bytes();
            // Who sends one message to several has it there once.
            let known = put.iter().find(|(other, _)| std::ptr::eq(*other, bytes));
            let memory = match known.map(|(_, memory)| Arc::clone(memory)) {
                Some(memory) => memory,
                None => {
                    let memory = self.put(bytes)?;
                    put.push((bytes, Arc::clone(&memory)));
                    memory
                }
            };
            let number = self.parcels.leave(&memory);
            let note = self.notes.write(NOTE, |out| {
                out[..8].copy_from_slice(&number.to_le_bytes());
                out[8..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            });
            notes.push((*to, note));
        }
        // Other streams read it from here on.
        self.device.synchronize()?;
        Ok(notes)
    }

    /// Brings a message to this rank's device, and from there to the host.
    fn fetch(&mut self, note: &[u8]) -> Result<Message, CudaError> {
        let lost = || CudaError::Unsupported("a message that lies nowhere".into());
        let (words, []) = note.as_chunks::<8>() else { return Err(lost()) };
        let [number, size] = words else { return Err(lost()) };
        let memory = self.parcels.take(u64::from_le_bytes(*number)).ok_or_else(lost)?;
        let size = usize::try_from(u64::from_le_bytes(*size)).map_err(|_| lost())?;
        if size > memory.size() {
            return Err(lost());
        }
        if self.arrived.as_ref().is_none_or(|arrived| arrived.size() < size) {
            let room = size.next_power_of_two().max(LEAST);
            self.arrived = Some(self.device.allocate(room, "messages that arrive")?);
        }
        let arrived = self.arrived.as_mut().ok_or_else(lost)?;
        let mut buffer = self.messages.receive_buffer(size);
        if size > 0 {
            self.device.copy_from(&memory, arrived, size)?;
            self.device.read(arrived, 0, buffer.bytes_mut())?;
        }
        Ok(self.messages.freeze(buffer))
    }

    /// Gives the group up because of a device.
    fn failed(&mut self, error: &CudaError) -> FabricError {
        let (rank, reason) = (self.control.rank(), error.to_string());
        self.control.abort(FabricError::Failed { rank, reason })
    }
}

impl Fabric for CudaFabric {
    fn rank(&self) -> Rank {
        self.control.rank()
    }

    fn ranks(&self) -> usize {
        self.control.ranks()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let posted = match self.post(sends) {
            Ok(posted) => posted,
            Err(error) => return Err(self.failed(&error)),
        };
        let notes = self.control.exchange(call, &posted, receives, deadline)?;
        let fetched = notes.iter().map(|note| self.fetch(note.bytes())).collect::<Result<_, _>>();
        fetched.map_err(|error| self.failed(&error))
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.control.commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.control.abort(error)
    }
}
