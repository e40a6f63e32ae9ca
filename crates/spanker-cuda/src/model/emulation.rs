// SPDX-License-Identifier: Apache-2.0
//! A device for tests that emulates the kernel on the host: its own source, compiled by the host's C++ compiler with
//! `emulation/device.h` in place of `device.cu`. What a graphics processor takes for it, and whether it orders memory as
//! the kernel expects, cannot be seen here.

use std::collections::HashMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;

use super::device::{Device, KERNEL, Kind, Launch, Memory, Piece};
use super::operands::{self, Instruction, Step};
use crate::CudaError;

/// What is compiled.
const DEVICE: &str = include_str!("emulation/device.h");
const LAUNCH: &str = include_str!("emulation/launch.h");
/// Shared memory of a block, as of an H200.
const SHARED: u32 = 227 << 10;
/// Blocks of a kernel on a multiprocessor at most.
const MOST_BLOCKS: u32 = 2;

/// The kernel as a function of the host: instructions, their number, the step, blocks, and whether threads take turns
/// downwards.
type Emulate = unsafe extern "C" fn(*const Instruction, u32, *const Step, u32, u32);

/// What a device was told to do.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Launches of either kernel.
    pub(super) launches: [AtomicU64; 2],
    /// Copies within memory.
    pub(super) copies: AtomicU64,
    /// Times that pieces of memory were gathered.
    pub(super) gathers: AtomicU64,
    /// Memory that was allocated: for what, where, and how many bytes.
    pub(super) allocated: Mutex<Vec<(String, u64, usize)>>,
    /// What it does wrong.
    pub(super) fault: Mutex<Option<Fault>>,
    /// Everything that the host and the device had to do with each other, in order.
    pub(super) events: Mutex<Vec<Event>>,
    /// Whether bytes of other devices get lost.
    pub(super) loses: AtomicBool,
    /// What is done to instructions before they are gone through.
    pub(super) change: Mutex<Option<Change>>,
}

/// Something that a device was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Launch,
    Read,
    Write,
}

/// Changes instructions for the worse.
pub(super) type Change = fn(&mut [Instruction]);

/// Something that a device does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Instructions of a kind leave results of which each number has another last bit.
    Results(u32),
    /// What the host writes to the memory that was allocated for something arrives with other bits.
    Written(&'static str),
}

impl Told {
    fn note(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// What there was since this was last asked.
    pub(super) fn taken(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes a bit of every `step`th byte of what was allocated for something.
    pub(super) fn spoil(&self, what: &str, first: usize, step: usize) {
        let allocated = self.allocated.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, base, bytes) = allocated.iter().find(|(of, ..)| of == what).expect("such memory");
        for at in (first..*bytes).step_by(step) {
            let byte: *mut u8 = std::ptr::with_exposed_provenance_mut(*base as usize + at);
            // SAFETY: the byte is of memory that lives as long as the device, and no kernel runs.
            unsafe { *byte ^= 1 };
        }
    }

    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}

/// Changes the last bit of so many numbers.
fn garble(address: u64, numbers: u64) {
    for at in 0..numbers {
        let number: *mut u32 = std::ptr::with_exposed_provenance_mut((address + 4 * at) as usize);
        // SAFETY: an instruction has just written it, and no kernel runs.
        unsafe { *number ^= 1 };
    }
}

/// A device on the host.
pub(super) struct Emulated {
    multiprocessors: u32,
    kernels: [Option<Arc<Library>>; 2],
    told: Arc<Told>,
    fetches: HashMap<usize, Vec<u8>>,
}

/// 128 bytes, aligned as a graphics processor's memory is.
#[derive(Clone, Copy)]
#[repr(align(128))]
struct Line(#[allow(dead_code, reason = "reached by its address")] [u8; 128]);

/// Kernels that were compiled for other tests.
static COMPILED: Mutex<Option<HashMap<Vec<String>, Arc<Library>>>> = Mutex::new(None);

/// Whether kernels can be emulated here; says aloud if not.
pub(super) fn is_possible() -> bool {
    let version = Command::new(compiler()).arg("--version").output();
    let possible = cfg!(target_arch = "x86_64") && version.is_ok_and(|ran| ran.status.success());
    if !possible {
        assert!(std::env::var_os("REQUIRE_EMULATION").is_none(), "no {} on x86-64", compiler());
        eprintln!("skipped: kernels are emulated on x86-64 with {} (or $CXX)", compiler());
    }
    possible
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".into())
}

/// The kernel with options of NVIDIA's compiler, of which the host's needs the definitions.
fn compiled(options: &[String]) -> Arc<Library> {
    // One kernel that knows all types of weights is for all tests.
    let is_needed = |option: &&String| option.starts_with("-D") && !option.starts_with("-DTYPES");
    let defined: Vec<String> = options.iter().filter(is_needed).cloned().collect();
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = compiled.get_or_insert_default();
    if let Some(library) = known.get(&defined) {
        return Arc::clone(library);
    }
    let name = format!("spanker-emulated-{}-{}", std::process::id(), known.len());
    let [source, object] =
        ["cpp", "so"].map(|ending| std::env::temp_dir().join(format!("{name}.{ending}")));
    std::fs::write(&source, [DEVICE, KERNEL, LAUNCH].concat()).expect("a file for the source");
    let ran = Command::new(compiler())
        .args(["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off"])
        .args(["-fPIC", "-shared", "-pthread", "-o"])
        .arg(&object)
        .args(&defined)
        .arg(&source)
        .output()
        .expect("a compiler that runs");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "the kernel for {defined:?}: {said}");
    // SAFETY: the library was made from the source above, which does nothing when it is loaded.
    let library = unsafe { Library::new(&object) }.expect("the kernel as a library");
    for file in [&source, &object] {
        std::fs::remove_file(file).expect("files that are no longer needed");
    }
    let library = Arc::new(library);
    known.insert(defined, Arc::clone(&library));
    library
}

impl Emulated {
    /// A device with so many multiprocessors.
    pub(super) fn new(multiprocessors: u32) -> (Emulated, Arc<Told>) {
        let told = Arc::new(Told::default());
        let (kernels, fetches) = ([None, None], HashMap::new());
        (Emulated { multiprocessors, kernels, told: Arc::clone(&told), fetches }, told)
    }

    /// Bytes of memory from an offset on.
    fn bytes(memory: &Memory, offset: usize, length: usize) -> *mut u8 {
        assert!(offset.checked_add(length).is_some_and(|end| end <= memory.bytes));
        std::ptr::with_exposed_provenance_mut(memory.base as usize + offset)
    }
}

impl Device for Emulated {
    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn most_shared(&self) -> u32 {
        SHARED
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Memory, CudaError> {
        let mut lines = vec![Line([0; 128]); bytes.div_ceil(128)];
        let base = lines.as_mut_ptr().expose_provenance() as u64;
        let mut allocated = self.told.allocated.lock().unwrap_or_else(PoisonError::into_inner);
        allocated.push((what.to_owned(), base, bytes));
        Ok(Memory { base, bytes, owner: Box::new(lines) })
    }

    fn read(&mut self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<(), CudaError> {
        self.told.note(Event::Read);
        let bytes = Emulated::bytes(from, offset, out.len());
        // SAFETY: the bytes are the memory's, and no kernel runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write(&mut self, into: &mut Memory, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.told.note(Event::Write);
        let out = Emulated::bytes(into, offset, bytes.len());
        // SAFETY: the bytes are the memory's, and no kernel runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out, bytes.len()) };
        let fault = *self.told.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let is_for = |what: &str| {
            let allocated = self.told.allocated.lock().unwrap_or_else(PoisonError::into_inner);
            allocated.iter().any(|(of, base, _)| of == what && *base == into.base)
        };
        if let Some(Fault::Written(what)) = fault.filter(|_| bytes.len() >= 4)
            && is_for(what)
        {
            garble(out.expose_provenance() as u64, bytes.len() as u64 / 4);
        }
        Ok(())
    }

    fn copy(
        &mut self,
        memory: &mut Memory,
        from: usize,
        into: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        self.told.copies.fetch_add(1, Ordering::Relaxed);
        assert!(from.abs_diff(into) >= length, "a copy onto itself");
        let [from, into] = [from, into].map(|at| Emulated::bytes(memory, at, length));
        // SAFETY: both are the memory's and do not overlap, and no kernel runs.
        unsafe { std::ptr::copy_nonoverlapping(from, into, length) };
        Ok(())
    }

    fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        self.told.gathers.fetch_add(1, Ordering::Relaxed);
        for piece in pieces {
            for row in 0..u64::from(piece.rows) {
                let from = (piece.from + row * piece.stride) as usize;
                let into = (piece.into + row * u64::from(piece.length)) as usize;
                let from: *const u8 = std::ptr::with_exposed_provenance(from);
                let into: *mut u8 = std::ptr::with_exposed_provenance_mut(into);
                // SAFETY: both are within memory of this device and do not overlap, and no kernel runs.
                unsafe { std::ptr::copy_nonoverlapping(from, into, piece.length as usize) };
            }
        }
        Ok(())
    }

    fn copy_from(
        &mut self,
        from: &Memory,
        into: &mut Memory,
        length: usize,
    ) -> Result<(), CudaError> {
        let [from, into] = [from, into].map(|of| Emulated::bytes(of, 0, length));
        if !self.told.loses.load(Ordering::Relaxed) {
            // SAFETY: each is its memory's, these are two, and who sent it does not write there until it is fetched.
            unsafe { std::ptr::copy_nonoverlapping(from, into, length) };
        }
        Ok(())
    }

    fn fetch(
        &mut self,
        number: usize,
        from: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        let mut bytes = vec![0; length];
        self.read(from, offset, &mut bytes)?;
        self.fetches.insert(number, bytes);
        Ok(())
    }

    fn fetched(&mut self, number: usize, out: &mut [u8]) -> Result<(), CudaError> {
        out.copy_from_slice(&self.fetches.remove(&number).expect("a read that has begun"));
        Ok(())
    }

    fn forget(&mut self) {
        self.kernels = [None, None];
    }

    fn fit(&mut self, kind: Kind, options: &[String], shared: u32) -> Result<u32, CudaError> {
        let kernel = &mut self.kernels[kind as usize];
        kernel.get_or_insert_with(|| compiled(options));
        Ok((SHARED / shared.max(1)).min(MOST_BLOCKS))
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), CudaError> {
        let before = self.told.launches[launch.kind as usize].fetch_add(1, Ordering::Relaxed);
        let library = self.kernels[launch.kind as usize].as_ref().ok_or(CudaError::NoDevice)?;
        assert!(launch.shared <= SHARED);
        // Either order of threads in turn.
        let backwards = (before % 2) as u32;
        self.told.note(Event::Launch);
        let mut instructions: *const Instruction =
            std::ptr::with_exposed_provenance(launch.instructions as usize);
        let change = *self.told.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spoilt;
        if let Some(change) = change {
            // SAFETY: the workspace has so many instructions there.
            spoilt =
                unsafe { std::slice::from_raw_parts(instructions, launch.count as usize) }.to_vec();
            change(&mut spoilt);
            instructions = spoilt.as_ptr();
        }
        let fault = *self.told.fault.lock().unwrap_or_else(PoisonError::into_inner);
        // Results are spoiled before others read them where instructions can run one by one.
        let alone = fault.is_some() && launch.kind == Kind::Plain && launch.step.times == 0;
        let each = if alone { 1 } else { launch.count };
        // SAFETY: the library has this function with these arguments. Instructions are in the card's workspace, and their
        // places in buffers of this device, which nobody else reaches in the meantime.
        unsafe {
            let emulate = library.get::<Emulate>(b"spanker_emulate").expect("its function");
            for first in (0..launch.count).step_by(each.max(1) as usize) {
                let from = instructions.add(first as usize);
                emulate(from, each, &raw const launch.step, launch.blocks, backwards);
                let done = std::slice::from_raw_parts(from, each as usize);
                done.iter().for_each(|one| spoil_results(one, fault));
            }
            if alone && launch.count > 1 {
                let all = std::slice::from_raw_parts(instructions, launch.count as usize - 1);
                let waits = all.iter().filter(|one| !one.is_joined()).count();
                let arrived = waits as u64 * u64::from(launch.blocks);
                let barrier: *mut u64 =
                    std::ptr::with_exposed_provenance_mut(launch.step.barrier as usize);
                *barrier += arrived;
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        Ok(())
    }
}

/// Changes what an instruction has written, if that is the fault.
fn spoil_results(one: &Instruction, fault: Option<Fault>) {
    if fault != Some(Fault::Results(one.kind())) {
        return;
    }
    if let Some(op) = one.get::<operands::Attend>() {
        garble(op.into, u64::from(op.rows * op.heads * op.head_size));
    } else if let Some(op) = one.get::<operands::Norm>() {
        garble(op.into, u64::from(op.rows * op.width));
    } else if let Some(op) = one.get::<operands::Matmul>() {
        garble(op.out, u64::from(op.rows * op.outs));
    } else if let Some(op) = one.get::<operands::Streamed>() {
        garble(op.outs[0], u64::from(op.rows[0]));
    } else if let Some(op) = one.get::<operands::Vector>() {
        garble(op.outs[0], u64::from(op.matrices[0].rows));
    }
}

mod attention;
mod audit;
mod exchanges;
mod fabric;
mod models;
mod speeds;
