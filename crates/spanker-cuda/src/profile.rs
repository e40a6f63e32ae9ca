// SPDX-License-Identifier: Apache-2.0
//! A graphics processor's profile for the planner: by what is published of it, and with what a probe has measured.

use spanker_topology::{
    Bytes, BytesPerSecond, Compute, Confidence, ExchangeKind, HostProfile, Kernels, LinkProfile,
    MacsPerSecond, Memory, Profile, Provenance, Seconds, Shape, Value,
};

use crate::discover::CudaCard;
use crate::nvml::NvLink;
use crate::probe::{Figure, GpuProbe};

pub(crate) fn value<T>(
    value: T,
    provenance: Provenance,
    confidence: Confidence,
    source: &str,
) -> Value<T> {
    let source = source.to_owned();
    Value { value, low: None, high: None, provenance, confidence, source }
}

fn assumed<T>(number: T, source: &str) -> Value<T> {
    value(number, Provenance::Assumed, Confidence::Low, source)
}

/// The profile of a card of which nothing was measured.
pub(crate) fn published(card: &CudaCard, shape: Shape) -> Profile {
    let share = card.shared_by() as u64;
    let (name, summary) = names(card);
    let peak = card.peak_memory_rate().max(1);
    let capacity = card.memory_bytes / share;
    let shared = if share > 1 { format!(", shared by {share} cards") } else { String::new() };
    let derived = |source: String| (Provenance::Derived, Confidence::Medium, source);
    let rate = |rate: u64, (provenance, confidence, source): (_, _, String)| {
        value(BytesPerSecond(rate.max(1)), provenance, confidence, &source)
    };
    let slot = card.pcie.map_or(16_000_000_000, |slot| slot.rate());
    Profile {
        name,
        summary,
        topology: shape,
        memory: Memory {
            capacity: value(
                Bytes(capacity),
                Provenance::Published,
                Confidence::High,
                &format!("the driver{shared}"),
            ),
            reserved: assumed(Bytes(capacity / 32), "driver context and library workspaces"),
            bandwidth: rate(
                peak / 100 * 85 / share,
                derived(format!("85 % of the memory's clock times its bus{shared}")),
            ),
        },
        compute: Compute {
            rate: value(
                MacsPerSecond(macs(card) / share as f64),
                Provenance::Derived,
                Confidence::Low,
                &format!("70 % of what its matrix units do in 16 bits at full clock{shared}"),
            ),
            per_operator: assumed(Seconds::from_micros(3.0), "one kernel, its ramp and its tail"),
            per_token: assumed(Seconds::from_micros(30.0), "sampling and a launch"),
            first_use: None,
            operators: Vec::new(),
        },
        link: link(card),
        host: HostProfile {
            bandwidth: rate(
                slot / 100 * 85 / share,
                derived(format!("85 % of what its slot carries{shared}")),
            ),
            latency: assumed(Seconds::from_micros(10.0), "a small copy"),
        },
        kernels: Kernels::Gpu { multiprocessors: card.multiprocessors },
        power_watts: card.power_watts.map(|watts| {
            let each = watts / share as f64;
            value(each, Provenance::Published, Confidence::High, "the limit that NVML reports")
        }),
    }
}

/// The name that flags use, and a sentence.
fn names(card: &CudaCard) -> (String, String) {
    let mut name = String::new();
    for letter in card.name.to_lowercase().chars() {
        match letter.is_ascii_alphanumeric() {
            true => name.push(letter),
            false if !name.ends_with('-') => name.push('-'),
            false => {}
        }
    }
    let name = match name.trim_matches('-') {
        "" => "gpu".to_owned(),
        name => name.to_owned(),
    };
    match card.shared_by() {
        1 => (name, format!("{}, as it describes itself", card.name)),
        of => (
            format!("{name}-shared-by-{of}"),
            format!("one of {of} logical cards that share one {}", card.name),
        ),
    }
}

/// Multiply-accumulates a second in 16 bits with sums in 32.
fn macs(card: &CudaCard) -> f64 {
    let each = match card.capability {
        (10.., _) => 4096.0,
        (9, _) => 2048.0,
        (8, 0) => 1024.0,
        (7.., _) => 512.0,
        _ => 128.0,
    };
    let clock = f64::from(card.clock_khz.max(1)) * 1e3;
    0.7 * each * f64::from(card.multiprocessors.max(1)) * clock
}

/// The link to other cards: NVLinks, or the memory itself between logical cards.
fn link(card: &CudaCard) -> Option<LinkProfile> {
    let nvlinks: u64 = card.nvlinks.iter().map(NvLink::rate).sum();
    let slot = card.pcie.map(|slot| slot.rate());
    let (rate, fabric, source) = match (card.logical, nvlinks, slot) {
        (Some(_), _, _) => {
            let copy = BytesPerSecond((card.peak_memory_rate() / 100 * 85 / 2).max(1));
            let source = "a copy in the memory that the cards share: half of 85 % of its rate";
            let fabric = value(copy, Provenance::Derived, Confidence::Medium, source);
            (copy.0, Some(fabric), source)
        }
        (None, 1.., _) => (nvlinks / 100 * 80, None, "80 % of what its NVLinks carry"),
        (None, 0, Some(slot)) => (slot / 100 * 80, None, "80 % of what its slot carries"),
        (None, 0, None) => return None,
    };
    let lanes = u32::try_from(card.nvlinks.len().max(1)).unwrap_or(1);
    let known =
        |number: u32, source: &str| value(number, Provenance::Published, Confidence::High, source);
    let bandwidth =
        value(BytesPerSecond(rate.max(1)), Provenance::Derived, Confidence::Medium, source);
    Some(LinkProfile {
        bandwidth,
        framing: None,
        fabric,
        bit_error_rate: assumed(0.0, "links replay by themselves"),
        lanes: known(lanes, "links that are up"),
        ports: known(lanes, "links that are up"),
        latency: assumed(Seconds::from_micros(1.5), "a small copy between processors"),
        base: assumed(Seconds::from_micros(8.0), "a collective of nothing"),
        round_trip: assumed(Seconds::from_micros(3.0), "twice the latency"),
        training: assumed(Seconds(1.0), "at boot"),
        exchange: ExchangeKind::default(),
    })
}

/// The same profile with what a probe has measured.
#[must_use]
pub fn measured(card: &CudaCard, shape: Shape, probe: &GpuProbe) -> Profile {
    let mut profile = published(card, shape);
    let share = card.shared_by() as u64;
    let shared = if share > 1 { format!(", shared by {share} cards") } else { String::new() };
    profile.summary = match card.logical {
        None => format!("{}, measured by 'spanker probe'", card.name),
        Some(_) => format!("{}, measured by 'spanker probe'", profile.summary),
    };
    let rate = |figure: &Figure, over: u64, what: &str| Value {
        low: Some(BytesPerSecond(figure.low.max(1) / over)),
        high: Some(BytesPerSecond(figure.high.max(1) / over)),
        ..value(
            BytesPerSecond((figure.bytes_per_second / over).max(1)),
            Provenance::Measured,
            Confidence::High,
            &format!("spanker probe: {what}, median of {} runs{shared}", figure.runs),
        )
    };
    let time = |seconds: f64, what: &str| {
        let source = format!("spanker probe: {what}, median");
        value(Seconds(seconds), Provenance::Measured, Confidence::High, &source)
    };
    profile.memory.bandwidth = rate(&probe.read, share, "a stream of reads");
    profile.compute.per_operator = time(probe.launch_seconds, "one of many kernels in a row");
    profile.compute.per_token = time(probe.round_trip_seconds, "one kernel and the wait for it");
    let slower = match probe.to_device.bytes_per_second <= probe.from_device.bytes_per_second {
        true => (&probe.to_device, "pinned host memory to the device"),
        false => (&probe.from_device, "the device to pinned host memory"),
    };
    profile.host.bandwidth = rate(slower.0, share, slower.1);
    profile.host.latency =
        time(probe.host_latency_seconds, "a copy of 64 bytes and the wait for it");
    if let (Some(link), Some(_)) = (&mut profile.link, card.logical) {
        // A copy reads and writes the same memory, so a message has half of what a copy moves.
        let copy = rate(&probe.copy, 2, "half of what copies in the shared memory move");
        link.fabric = Some(copy.clone());
        link.bandwidth = copy;
        link.latency = time(probe.launch_seconds, "one of many kernels in a row");
        link.base = time(probe.round_trip_seconds, "one kernel and the wait for it");
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Logical;
    use crate::discover::tests::h200;

    fn figure(bytes_per_second: u64) -> Figure {
        let (low, high) = (bytes_per_second - 1000, bytes_per_second + 1000);
        Figure { bytes_per_second, low, high, bytes: 1 << 30, runs: 15 }
    }

    fn probe() -> GpuProbe {
        GpuProbe {
            gpu: 0,
            name: "NVIDIA H200".into(),
            copy: figure(4_000_000_000_000),
            read: figure(4_400_000_000_000),
            write: figure(4_200_000_000_000),
            to_device: figure(55_000_000_000),
            from_device: figure(54_000_000_000),
            launch_seconds: 2.1e-6,
            round_trip_seconds: 8.5e-6,
            host_latency_seconds: 7.5e-6,
        }
    }

    #[test]
    fn a_measured_profile_is_a_file_that_is_read_back() {
        let profile = measured(&h200(0, Vec::new()), Shape::Switch, &probe());
        assert_eq!(profile.name, "nvidia-h200");
        let read = Profile::from_toml(&profile.to_toml()).unwrap();
        assert_eq!(read, profile);
        assert_eq!(read.memory.bandwidth.value, BytesPerSecond(4_400_000_000_000));
        assert_eq!(read.memory.bandwidth.provenance, Provenance::Measured);
        assert_eq!(read.host.bandwidth.value, BytesPerSecond(54_000_000_000));
        assert!(read.memory.bandwidth.source.contains("spanker probe: a stream of reads"));
    }

    #[test]
    fn logical_cards_have_their_share_of_what_was_measured() {
        let logical = Some(Logical { index: 1, of: 4 });
        let card = CudaCard { logical, ..h200(0, Vec::new()) };
        let profile = measured(&card, Shape::Switch, &probe());
        assert_eq!(profile.name, "nvidia-h200-shared-by-4");
        assert_eq!(profile.memory.bandwidth.value, BytesPerSecond(1_100_000_000_000));
        let link = profile.link.as_ref().unwrap();
        assert_eq!(link.bandwidth.value, BytesPerSecond(2_000_000_000_000));
        assert_eq!(link.fabric.as_ref().unwrap().value, link.bandwidth.value);
        assert_eq!(Profile::from_toml(&profile.to_toml()).unwrap(), profile);
    }

    #[test]
    fn a_processor_of_which_little_is_known_still_has_a_sound_profile() {
        let mut card = h200(0, Vec::new());
        (card.clock_khz, card.memory_clock_khz, card.pcie, card.power_watts) = (0, 0, None, None);
        card.name = " ??? ".into();
        let profile = published(&card, Shape::Switch);
        assert_eq!(profile.link, None);
        assert!(Profile::from_toml(&profile.to_toml()).is_ok());
    }
}
