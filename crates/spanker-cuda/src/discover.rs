// SPDX-License-Identifier: Apache-2.0
//! Which graphics processors there are and how they are connected, by what the driver and the management library say.
//! Nothing is measured here: that is `probe.rs`.

use std::ffi::c_char;

use cudarc::driver::result::device;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute};
use serde::Serialize;
use spanker_topology::{BytesPerSecond, Cluster, Link, LinkState, Shape, TopologyError};

use crate::card::{driver_version, gpu_count};
use crate::error::version;
use crate::nvml::{Details, Management, NvLink, Pcie, short};
use crate::profile;
use crate::{CudaError, MOST_BUFFERS};

/// A graphics processor as a card, or one of the logical cards that share it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CudaCard {
    /// The processor's number, as the driver counts.
    pub gpu: usize,
    /// Which of several logical cards this is; nothing for a card that has the processor to itself.
    pub logical: Option<Logical>,
    /// The processor's name, as in `NVIDIA H200`.
    pub name: String,
    /// Its bus address.
    pub bus: String,
    /// Bytes of the processor's memory.
    pub memory_bytes: u64,
    /// The compute capability, as in (9, 0).
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The highest clock of the multiprocessors, in kHz.
    pub clock_khz: u32,
    /// The highest clock of the memory, in kHz.
    pub memory_clock_khz: u32,
    /// Bits of the bus to the memory.
    pub memory_bus_bits: u32,
    /// Bytes of the cache that all multiprocessors share.
    pub cache_bytes: u64,
    /// The slot, where the management library knows it.
    pub pcie: Option<Pcie>,
    /// The NVLinks that are up, where the management library knows them.
    pub nvlinks: Vec<NvLink>,
    /// The most power that it may draw, where the management library knows it.
    pub power_watts: Option<f64>,
}

/// A logical card's place on its processor. Logical cards share the memory and its bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Logical {
    /// Its number among them.
    pub index: usize,
    /// How many there are.
    pub of: usize,
}

impl CudaCard {
    /// What the memory's clock and bus allow: two transfers a clock.
    #[must_use]
    pub fn peak_memory_rate(&self) -> u64 {
        u64::from(self.memory_clock_khz) * 1000 * 2 * u64::from(self.memory_bus_bits) / 8
    }

    /// How many cards share the processor.
    #[must_use]
    pub fn shared_by(&self) -> usize {
        self.logical.map_or(1, |logical| logical.of)
    }

    /// How it is called in tables: `GPU 0 (NVIDIA H200)`, or `logical card 1 of 4 on GPU 0 (NVIDIA H200)`.
    #[must_use]
    pub fn title(&self) -> String {
        let gpu = format!("GPU {} ({})", self.gpu, self.name);
        match self.logical {
            None => gpu,
            Some(Logical { index, of }) => format!("logical card {index} of {of} on {gpu}"),
        }
    }
}

/// Graphics processors, and how they are connected.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovered {
    /// The version of CUDA that the driver speaks, as in 13.0.
    pub cuda: String,
    /// The driver's release, where the management library is there.
    pub driver: Option<String>,
    /// The cards, in order.
    pub cards: Vec<CudaCard>,
    /// Links between them, with the rates that their generations allow.
    pub links: Vec<Link>,
    /// Remarks for the user.
    pub notes: Vec<String>,
    shape: Shape,
}

/// The processors that the driver shows to this process.
///
/// # Errors
/// Those of [`gpu_count`], and [`CudaError::Call`] if a processor does not answer.
pub fn discover() -> Result<Discovered, CudaError> {
    let count = gpu_count()?;
    let management = Management::open();
    let mut devices = Vec::with_capacity(count);
    let mut cards = Vec::with_capacity(count);
    for gpu in 0..count {
        let refused = |error| CudaError::call(format!("ask about GPU {gpu}"), &error);
        let ordinal = i32::try_from(gpu).unwrap_or(i32::MAX);
        let handle = device::get(ordinal).map_err(refused)?;
        cards.push(card(gpu, handle, &management).map_err(refused)?);
        devices.push(handle);
    }
    let (links, shape) = connect(&cards, |from, to| reaches(devices[from], devices[to]));
    let mut notes = Vec::new();
    if let Some(why) = management.missing() {
        notes.push(format!(
            "NVML is not there ({why}): NVLinks, slots and power limits are not known"
        ));
    }
    let (cuda, driver) = (version(driver_version()?), management.driver());
    Ok(Discovered { cuda, driver, cards, links, notes, shape })
}

/// Logical cards that share processor `gpu`: one GPU emulates several.
///
/// # Errors
/// Those of [`discover`]; [`CudaError::Unsupported`] for a processor that is not there, none or too many cards.
pub fn discover_logical(gpu: usize, count: usize) -> Result<Discovered, CudaError> {
    if count == 0 || count > MOST_BUFFERS {
        let text = format!("{count} logical cards: a GPU can be shared by 1 to {MOST_BUFFERS}");
        return Err(CudaError::Unsupported(text));
    }
    let found = discover()?;
    let Some(card) = found.cards.get(gpu) else {
        let text = format!("no GPU {gpu}: the driver shows 0 to {}", found.cards.len() - 1);
        return Err(CudaError::Unsupported(text));
    };
    let (cards, links) = divide(card, count);
    let mut notes = found.notes.clone();
    notes.push(format!(
        "one GPU emulates {count}: logical cards share GPU {gpu}'s memory, bandwidth and multiprocessors"
    ));
    Ok(Discovered { cards, links, notes, shape: Shape::Switch, ..found })
}

impl Discovered {
    /// The cards as the planner sees them, by what their makers say of them.
    ///
    /// # Errors
    /// [`TopologyError`] for more cards than a cluster has.
    pub fn cluster(&self) -> Result<Cluster, TopologyError> {
        let profiles = self.cards.iter().map(|card| profile::published(card, self.shape));
        Cluster::new(profiles.collect(), self.shape)
    }

    /// How the cards are wired.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }
}

fn card(
    gpu: usize,
    handle: CUdevice,
    management: &Management,
) -> Result<CudaCard, cudarc::driver::DriverError> {
    let ask = |what: Attribute| {
        // SAFETY: the handle is one that the driver gave for a processor.
        let number = unsafe { device::get_attribute(handle, what) }?;
        Ok::<u32, cudarc::driver::DriverError>(u32::try_from(number).unwrap_or(0))
    };
    let bus = bus(handle)?;
    let Details { pcie, links, power_watts } = management.details(&bus);
    Ok(CudaCard {
        gpu,
        logical: None,
        name: device::get_name(handle)?,
        // SAFETY: as above.
        memory_bytes: unsafe { device::total_mem(handle) }? as u64,
        capability: (
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        clock_khz: ask(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        memory_clock_khz: ask(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
        memory_bus_bits: ask(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
        cache_bytes: u64::from(ask(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        bus,
        pcie,
        nvlinks: links,
        power_watts,
    })
}

/// The bus address, as in `0000:19:00.0`.
fn bus(handle: CUdevice) -> Result<String, cudarc::driver::DriverError> {
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the driver writes at most as many bytes as the length that is passed.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, handle) }.result()?;
    let bytes = text.iter().map(|&byte| byte.cast_unsigned()).take_while(|&byte| byte != 0);
    Ok(short(&String::from_utf8_lossy(&bytes.collect::<Vec<u8>>())))
}

/// Whether one processor can read and write another's memory.
fn reaches(from: CUdevice, to: CUdevice) -> bool {
    let mut can = 0;
    // SAFETY: the driver writes one number.
    let answer = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from, to) };
    answer.result().is_ok() && can != 0
}

/// How two processors are connected, at best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By NVLinks from one to the other.
    Direct(u64),
    /// By NVLinks into switches.
    Switched(u64),
    /// By their slots.
    Slot(u64),
    /// Only through the host's memory.
    Host,
}

fn way(cards: &[CudaCard], from: usize, to: usize, peer: bool) -> Way {
    if !peer {
        return Way::Host;
    }
    let (here, there) = (&cards[from], &cards[to]);
    let rate = |links: &mut dyn Iterator<Item = &NvLink>| links.map(NvLink::rate).sum::<u64>();
    let direct = rate(&mut here.nvlinks.iter().filter(|link| link.remote == there.bus));
    if direct > 0 {
        return Way::Direct(direct);
    }
    let switch = |link: &&NvLink| !cards.iter().any(|card| card.bus == link.remote);
    let into = |card: &CudaCard| rate(&mut card.nvlinks.iter().filter(switch));
    match into(here).min(into(there)) {
        0 => {
            let slot = |card: &CudaCard| card.pcie.map(|slot| slot.rate());
            Way::Slot(slot(here).zip(slot(there)).map_or(0, |(here, there)| here.min(there)))
        }
        switched => Way::Switched(switched),
    }
}

/// Links wherever one processor reaches another's memory, and the shape that they form.
fn connect(cards: &[CudaCard], peer: impl Fn(usize, usize) -> bool) -> (Vec<Link>, Shape) {
    let mut links = Vec::new();
    let mut ways = Vec::new();
    for from in 0..cards.len() {
        for to in (0..cards.len()).filter(|&to| to != from) {
            let way = way(cards, from, to, peer(from, to));
            ways.push(way);
            let rate = match way {
                Way::Host => continue,
                Way::Direct(rate) | Way::Switched(rate) | Way::Slot(rate) => rate,
            };
            let mut link = Link::new(from, to, LinkState::Up);
            link.bandwidth = (rate > 0).then_some(BytesPerSecond(rate));
            links.push(link);
        }
    }
    let shape = match () {
        () if ways.contains(&Way::Host) => Shape::Star,
        () if !ways.is_empty() && ways.iter().all(|way| matches!(way, Way::Direct(_))) => {
            Shape::Mesh
        }
        () => Shape::Switch,
    };
    (links, shape)
}

/// Logical cards on one processor. A message between two is a copy: it is read and written in the same memory.
fn divide(card: &CudaCard, count: usize) -> (Vec<CudaCard>, Vec<Link>) {
    let logical = |index| Some(Logical { index, of: count });
    let cards = (0..count).map(|index| CudaCard { logical: logical(index), ..card.clone() });
    let mut links = spanker_topology::mesh(count);
    let rate = card.peak_memory_rate() / 2;
    for link in &mut links {
        link.bandwidth = (rate > 0).then_some(BytesPerSecond(rate));
    }
    (cards.collect(), links)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An H200 as its driver describes it.
    pub(crate) fn h200(gpu: usize, nvlinks: Vec<NvLink>) -> CudaCard {
        CudaCard {
            gpu,
            logical: None,
            name: "NVIDIA H200".into(),
            bus: format!("0000:{gpu}9:00.0"),
            memory_bytes: 150_000_000_000,
            capability: (9, 0),
            multiprocessors: 132,
            clock_khz: 1_980_000,
            memory_clock_khz: 3_201_000,
            memory_bus_bits: 6144,
            cache_bytes: 62_914_560,
            pcie: Some(Pcie { generation: 5, width: 16, most_generation: 5, most_width: 16 }),
            nvlinks,
            power_watts: Some(700.0),
        }
    }

    fn links(count: u32, remote: &str) -> Vec<NvLink> {
        (0..count).map(|link| NvLink { link, version: 4, remote: remote.into() }).collect()
    }

    #[test]
    fn the_memory_of_an_h200_does_4_9_terabytes_a_second() {
        assert_eq!(h200(0, Vec::new()).peak_memory_rate(), 4_916_736_000_000);
    }

    #[test]
    fn processors_on_switches_form_a_switch_with_the_rate_of_all_links() {
        let cards: Vec<CudaCard> = (0..3).map(|gpu| h200(gpu, links(18, "0000:C0:00.0"))).collect();
        let (links, shape) = connect(&cards, |_, _| true);
        assert_eq!((links.len(), shape), (6, Shape::Switch));
        assert!(links.iter().all(|link| link.bandwidth == Some(BytesPerSecond(450_000_000_000))));
    }

    #[test]
    fn processors_with_links_of_their_own_form_a_mesh() {
        let other = |gpu: usize| format!("0000:{}9:00.0", 1 - gpu);
        let cards: Vec<CudaCard> = (0..2).map(|gpu| h200(gpu, links(4, &other(gpu)))).collect();
        let (links, shape) = connect(&cards, |_, _| true);
        assert_eq!((links.len(), shape), (2, Shape::Mesh));
        assert_eq!(links[0].bandwidth, Some(BytesPerSecond(100_000_000_000)));
    }

    #[test]
    fn processors_without_nvlinks_are_linked_by_their_slots_or_through_the_host() {
        let cards: Vec<CudaCard> = (0..2).map(|gpu| h200(gpu, Vec::new())).collect();
        let (slots, shape) = connect(&cards, |_, _| true);
        assert_eq!((slots.len(), shape), (2, Shape::Switch));
        assert_eq!(slots[0].bandwidth, Some(BytesPerSecond(63_008_000_000)));
        assert_eq!(connect(&cards, |_, _| false), (Vec::new(), Shape::Star));
    }

    #[test]
    fn logical_cards_say_what_they_share() {
        let (cards, links) = divide(&h200(0, Vec::new()), 3);
        assert_eq!(cards[1].title(), "logical card 1 of 3 on GPU 0 (NVIDIA H200)");
        assert_eq!((cards[2].shared_by(), links.len()), (3, 6));
        assert_eq!(links[0].bandwidth, Some(BytesPerSecond(2_458_368_000_000)));
    }

    #[test]
    fn clusters_of_real_and_logical_cards_are_ones_the_planner_takes() {
        let found = |cards: Vec<CudaCard>, shape| Discovered {
            cuda: "13.0".into(),
            driver: None,
            cards,
            links: Vec::new(),
            notes: Vec::new(),
            shape,
        };
        let (logical, _) = divide(&h200(0, Vec::new()), 4);
        let shared = found(logical, Shape::Switch).cluster().unwrap();
        assert_eq!((shared.cards(), shared.shared().len()), (4, 1));
        let one = found(vec![h200(0, Vec::new())], Shape::Switch).cluster().unwrap();
        assert_eq!(one.cards(), 1);
        let quarter = shared.profile(0).memory.bandwidth.value.0;
        assert_eq!(quarter, one.profile(0).memory.bandwidth.value.0 / 4);
    }

    #[test]
    fn impossible_numbers_of_logical_cards_are_refused() {
        for count in [0, MOST_BUFFERS + 1] {
            let error = discover_logical(0, count).unwrap_err().to_string();
            assert!(error.contains(&format!("{count} logical cards")), "{error}");
        }
    }
}
