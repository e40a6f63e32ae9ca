// SPDX-License-Identifier: Apache-2.0
//! Profiles: a card's numbers, each with where it comes from and how far to trust it.
//!
//! A profile is a TOML file. The built-in ones are files like any other, compiled in; none of their
//! values is written in code.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, BytesPerSecond, Framing, MacsPerSecond, OperatorRate, Seconds};

/// How far a number can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Confidence {
    /// Would be a surprise if wrong.
    High,
    /// Probably right.
    Medium,
    /// The best guess there is.
    Low,
    /// Documents contradict each other.
    Open,
}

/// How a number was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Provenance {
    /// Somebody measured it, on this or the same hardware.
    Measured,
    /// A regression over measurements gave it.
    Fitted,
    /// A public document says so.
    Published,
    /// It follows from other numbers.
    Derived,
    /// Nobody knows yet: a working assumption.
    Assumed,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Provenance::Measured => "measured",
            Provenance::Fitted => "fitted",
            Provenance::Published => "published",
            Provenance::Derived => "derived",
            Provenance::Assumed => "assumed",
        })
    }
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Confidence::High => "high",
            Confidence::Medium => "medium",
            Confidence::Low => "low",
            Confidence::Open => "open",
        })
    }
}

/// A number with its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Value<T> {
    /// The number to work with.
    pub value: T,
    /// The least it could be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low: Option<T>,
    /// The most it could be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high: Option<T>,
    /// How it was come by.
    pub provenance: Provenance,
    /// How far to trust it.
    pub confidence: Confidence,
    /// Where it comes from, in words.
    pub source: String,
}

impl<T> Value<T> {
    /// The same source and trust for a number that replaces this one.
    #[must_use]
    pub fn replaced(&self, value: T, provenance: Provenance, source: &str) -> Value<T> {
        let (low, high) = (None, None);
        let confidence = Confidence::Medium;
        Value { value, low, high, provenance, confidence, source: source.to_owned() }
    }
}

/// Local memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// What there is.
    pub capacity: Value<Bytes>,
    /// What is never there for a model: firmware, descriptors, a runtime's own state.
    pub reserved: Value<Bytes>,
    /// What reading sustains.
    pub bandwidth: Value<BytesPerSecond>,
}

/// Arithmetic and what each operator costs before it begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Multiply-accumulates on parameters.
    pub rate: Value<MacsPerSecond>,
    /// The fixed cost of one operator: launch, norms, what does not shrink with the share.
    pub per_operator: Value<Seconds>,
    /// The fixed cost of one token: sampling and control on the card's side.
    pub per_token: Value<Seconds>,
    /// The extra time of the first step: code that is compiled or loaded when it is first used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_use: Option<Value<Seconds>>,
    /// What was measured kind by kind, in ascending order of rows. For a kind that is listed, these count
    /// instead of rate, fixed cost and memory bandwidth.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<OperatorRate>,
}

/// How cards of a kind exchange a model's activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ExchangeKind {
    /// As collectives, by the cheapest schedule, on buffers whose parts are padded to the longest.
    #[default]
    Schedules,
    /// Everybody sends to everybody, each part as long as it is.
    Direct,
    /// By the cheapest schedule, in messages between processes, each part as long as it is.
    Messages,
    /// In one memory: everybody leaves a part there and reads all others'.
    SharedMemory,
}

/// Where the kernels of a card run. It says what memory they need besides the buffers of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Kernels {
    /// On a card behind the ABI, whose firmware has all that it needs besides the buffers.
    #[default]
    Card,
    /// In a process of a host.
    Host {
        /// Threads that share a card's work at most.
        threads: u32,
    },
    /// On a graphics processor.
    Gpu {
        /// Its multiprocessors.
        multiprocessors: u32,
    },
}

impl Kernels {
    fn is_card(&self) -> bool {
        *self == Kernels::Card
    }
}

/// The link between cards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    /// What one direction carries on all lanes together. With `framing` this is the raw rate after line
    /// coding, without it the sustained payload rate.
    pub bandwidth: Value<BytesPerSecond>,
    /// Frames, if the sustained rate follows from them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub framing: Option<Framing>,
    /// What all links of the cluster carry together, where they cross one fabric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Value<BytesPerSecond>>,
    /// The probability that a bit on the wire flips.
    pub bit_error_rate: Value<f64>,
    /// Lanes that a card can divide between its neighbours.
    pub lanes: Value<u32>,
    /// Neighbours that can be plugged in as the card is drawn.
    pub ports: Value<u32>,
    /// The fixed cost of one step over one hop.
    pub latency: Value<Seconds>,
    /// The fixed cost of a collective before its first step.
    pub base: Value<Seconds>,
    /// A 64-byte message there and back at the MAC.
    pub round_trip: Value<Seconds>,
    /// From power-up or a fault to UP.
    pub training: Value<Seconds>,
    /// How a model's activations are exchanged.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub exchange: ExchangeKind,
}

impl ExchangeKind {
    /// The name that files use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ExchangeKind::Schedules => "schedules",
            ExchangeKind::Direct => "direct",
            ExchangeKind::Messages => "messages",
            ExchangeKind::SharedMemory => "shared-memory",
        }
    }
}

fn is_usual(kind: &ExchangeKind) -> bool {
    *kind == ExchangeKind::default()
}

impl LinkProfile {
    /// The payload rate of one direction when `lanes` of all lanes are used.
    #[must_use]
    pub fn sustained(&self, lanes: u32) -> BytesPerSecond {
        let raw = self.bandwidth.value;
        let part = f64::from(lanes) / f64::from(self.lanes.value.max(1));
        let whole = match self.framing {
            None => raw.0 as f64,
            Some(framing) => framing.goodput(raw, self.bit_error_rate.value, self.round_trip.value),
        };
        BytesPerSecond(((whole * part).round() as u64).max(1))
    }
}

/// The link to the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostProfile {
    /// What it sustains in one direction.
    pub bandwidth: Value<BytesPerSecond>,
    /// The one-way time of a small message.
    pub latency: Value<Seconds>,
}

/// A kind of card.
///
/// ```
/// use spanker_topology::Profile;
/// let card = Profile::builtin("rev-a")?;
/// assert_eq!(card.memory.bandwidth.value.to_string(), "2 GB/s");
/// assert_eq!(card.link.as_ref().unwrap().sustained(4).to_string(), "493 MB/s");
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The name that flags use.
    pub name: String,
    /// One sentence about the card.
    pub summary: String,
    /// How cards of this kind are wired unless someone says otherwise.
    pub topology: crate::Shape,
    /// Local memory.
    pub memory: Memory,
    /// Arithmetic.
    pub compute: Compute,
    /// The link to other cards; without one, cards talk through the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkProfile>,
    /// The link to the host.
    pub host: HostProfile,
    /// Where its kernels run.
    #[serde(default, skip_serializing_if = "Kernels::is_card")]
    pub kernels: Kernels,
    /// What the card draws, in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_watts: Option<Value<f64>>,
}

/// The built-in profiles: name and file.
const BUILTIN: [(&str, &str); 8] = [
    ("rev-a", include_str!("../profiles/rev-a.toml")),
    ("rev-a-x16", include_str!("../profiles/rev-a-x16.toml")),
    ("rev-a-3lane", include_str!("../profiles/rev-a-3lane.toml")),
    ("rev-a-gbe-only", include_str!("../profiles/rev-a-gbe-only.toml")),
    ("what-if-3g125", include_str!("../profiles/what-if-3g125.toml")),
    ("rpi5-gbe", include_str!("../profiles/rpi5-gbe.toml")),
    ("h200-nvlink", include_str!("../profiles/h200-nvlink.toml")),
    ("rtx-pro-6000-pcie", include_str!("../profiles/rtx-pro-6000-pcie.toml")),
];

impl Profile {
    /// The names of the built-in profiles.
    #[must_use]
    pub fn builtin_names() -> [&'static str; BUILTIN.len()] {
        BUILTIN.map(|(name, _)| name)
    }

    /// A built-in profile.
    ///
    /// # Errors
    /// [`crate::TopologyError`] that lists the names, if there is none of this name.
    pub fn builtin(name: &str) -> Result<Profile, crate::TopologyError> {
        let file = BUILTIN.iter().find(|(known, _)| *known == name);
        let (_, text) = file.ok_or_else(|| crate::TopologyError::UnknownProfile {
            name: name.to_owned(),
            known: Profile::builtin_names().join(", "),
        })?;
        Profile::from_toml(text)
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// [`crate::TopologyError::Toml`] with the line, for anything missing, unknown or out of range.
    pub fn from_toml(text: &str) -> Result<Profile, crate::TopologyError> {
        let toml = |message: String| crate::TopologyError::Toml { what: "profile", message };
        let profile: Profile =
            toml::from_str(text).map_err(|error| toml(error.to_string().trim().to_owned()))?;
        profile.check().map_err(toml)?;
        Ok(profile)
    }

    /// What parsing cannot see: relations between values.
    pub(crate) fn check(&self) -> Result<(), String> {
        let memory = &self.memory;
        if memory.reserved.value >= memory.capacity.value {
            return Err(format!(
                "memory.reserved: {} leaves nothing of memory.capacity {}",
                memory.reserved.value, memory.capacity.value
            ));
        }
        if let Some(power) = &self.power_watts
            && !(power.value.is_finite() && power.value >= 0.0)
        {
            return Err(format!("power_watts: {} is not a power", power.value));
        }
        let key = |entry: &OperatorRate| (entry.kind, entry.weights.clone());
        for (at, entry) in self.compute.operators.iter().enumerate() {
            entry.check()?;
            let before = self.compute.operators[..at].iter().rfind(|one| key(one) == key(entry));
            if before.is_some_and(|before| before.rows >= entry.rows) {
                let (kind, rows) = (entry.kind.name(), entry.rows);
                return Err(format!("compute.operators: {kind}: {rows} rows out of order"));
            }
        }
        let Some(link) = &self.link else { return Ok(()) };
        if !(0.0..0.5).contains(&link.bit_error_rate.value) {
            let value = link.bit_error_rate.value;
            return Err(format!("link.bit_error_rate: {value} is not between 0 and 0.5"));
        }
        if link.lanes.value == 0 || link.lanes.value > 1024 {
            return Err(format!("link.lanes: {} is not between 1 and 1024", link.lanes.value));
        }
        let Some(framing) = link.framing else { return Ok(()) };
        let sane = (1..=1 << 20).contains(&framing.payload)
            && framing.overhead <= 1 << 20
            && framing.ack_bytes <= 1 << 20
            && framing.ack_every > 0
            && (0.0..1.0).contains(&framing.compensation);
        if sane { Ok(()) } else { Err(format!("link.framing: {framing:?} is not a frame")) }
    }

    /// What a model can have of the memory.
    #[must_use]
    pub fn usable(&self) -> Bytes {
        Bytes(self.memory.capacity.value.0.saturating_sub(self.memory.reserved.value.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builtin_profile_is_read_and_carries_its_name() {
        for name in Profile::builtin_names() {
            let profile = Profile::builtin(name).unwrap();
            assert_eq!(profile.name, name);
            assert!(!profile.summary.is_empty());
            assert!(profile.memory.bandwidth.source.len() > 10, "{name} says where it comes from");
        }
    }

    #[test]
    fn rev_a_keeps_the_numbers_of_the_contract() {
        let card = Profile::builtin("rev-a").unwrap();
        let link = card.link.as_ref().unwrap();
        assert_eq!(card.memory.bandwidth.value.0, crate::LOCAL_DDR_BW_BYTES_PER_SEC);
        assert_eq!(card.host.bandwidth.value.0, crate::HOST_LINK_BW_BYTES_PER_SEC);
        assert_eq!(link.bandwidth.value.0, crate::INTERCARD_BW_BYTES_PER_SEC);
        assert_eq!(link.lanes.value as usize, crate::INTERCARD_LANES);
    }

    #[test]
    fn bad_values_are_named_with_their_line() {
        let good = include_str!("../profiles/rev-a.toml");
        let cases = [
            ("\"2 GB/s\"", "\"-2 GB/s\"", "'-2 GB/s'"),
            ("\"2 GB/s\"", "0", "'0' is not a rate"),
            ("\"4 GiB\"", "\"four\"", "'four'"),
            ("\"4 GiB\"", "\"1 kB\"", "leaves nothing"),
            ("confidence = \"high\"", "confidence = \"sure\"", "sure"),
            ("[memory.capacity]", "[memory.capacities]", "capacities"),
            ("value = 4\n", "value = 0\n", "link.lanes"),
        ];
        for (from, to, named) in cases {
            assert!(good.contains(from), "{from}");
            let error = Profile::from_toml(&good.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(named), "{from} -> {to}: {error}");
        }
    }
}
