// SPDX-License-Identifier: Apache-2.0
//! Profiles as files that [`Profile::from_toml`] reads. Numbers are written in their base units, so nothing is lost.

use std::fmt::Write;

use crate::{Bytes, BytesPerSecond, ExchangeKind, Kernels, MacsPerSecond, Profile, Seconds, Value};

/// A number as a file has it.
trait Number {
    fn written(&self) -> String;
}

macro_rules! number {
    ($type:ty, |$number:ident| $written:expr) => {
        impl Number for $type {
            fn written(&self) -> String {
                let $number = self;
                $written
            }
        }
    };
}

number!(Bytes, |n| n.0.to_string());
number!(BytesPerSecond, |n| n.0.to_string());
number!(Seconds, |n| format!("{:?}", n.0));
number!(MacsPerSecond, |n| format!("{:?}", n.0));
number!(f64, |n| format!("{n:?}"));
number!(u32, |n| n.to_string());

/// A text in quotation marks.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            character if character.is_control() => {
                // Writing to a string cannot fail.
                let _ = write!(quoted, "\\u{:04x}", u32::from(character));
            }
            character => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

fn section<T: Number>(file: &mut String, name: &str, value: &Value<T>) {
    let _ = writeln!(file, "\n[{name}]\nvalue = {}", value.value.written());
    for (end, bound) in [("low", &value.low), ("high", &value.high)] {
        if let Some(bound) = bound {
            let _ = writeln!(file, "{end} = {}", bound.written());
        }
    }
    let _ = writeln!(file, "provenance = \"{}\"", value.provenance);
    let _ = writeln!(file, "confidence = \"{}\"", value.confidence);
    let _ = writeln!(file, "source = {}", quoted(&value.source));
}

impl Profile {
    /// The profile as a file that [`Profile::from_toml`] reads.
    ///
    /// ```
    /// use spanker_topology::Profile;
    /// let card = Profile::builtin("rev-a")?;
    /// assert_eq!(Profile::from_toml(&card.to_toml())?, card);
    /// # Ok::<(), spanker_topology::TopologyError>(())
    /// ```
    #[must_use]
    pub fn to_toml(&self) -> String {
        let (memory, compute, host) = (&self.memory, &self.compute, &self.host);
        let mut file = format!(
            "name = {}\nsummary = {}\ntopology = \"{}\"\n",
            quoted(&self.name),
            quoted(&self.summary),
            self.topology
        );
        section(&mut file, "memory.capacity", &memory.capacity);
        section(&mut file, "memory.reserved", &memory.reserved);
        section(&mut file, "memory.bandwidth", &memory.bandwidth);
        section(&mut file, "compute.rate", &compute.rate);
        section(&mut file, "compute.per_operator", &compute.per_operator);
        section(&mut file, "compute.per_token", &compute.per_token);
        if let Some(first_use) = &compute.first_use {
            section(&mut file, "compute.first_use", first_use);
        }
        for entry in &compute.operators {
            let _ = writeln!(
                file,
                "\n[[compute.operators]]\nkind = \"{}\"\nrows = {}\noverhead = {}\nrate = {:?}",
                entry.kind.name(),
                entry.rows,
                entry.overhead.written(),
                entry.rate
            );
            if let Some(weights) = &entry.weights {
                let _ = writeln!(file, "weights = {}", quoted(weights));
            }
        }
        if let Some(link) = &self.link {
            section(&mut file, "link.bandwidth", &link.bandwidth);
            if let Some(framing) = &link.framing {
                let _ = writeln!(
                    file,
                    "\n[link.framing]\npayload = {}\noverhead = {}\nack_bytes = {}\nack_every = {}\ncompensation = {:?}",
                    framing.payload,
                    framing.overhead,
                    framing.ack_bytes,
                    framing.ack_every,
                    framing.compensation
                );
            }
            if let Some(fabric) = &link.fabric {
                section(&mut file, "link.fabric", fabric);
            }
            section(&mut file, "link.bit_error_rate", &link.bit_error_rate);
            section(&mut file, "link.lanes", &link.lanes);
            section(&mut file, "link.ports", &link.ports);
            section(&mut file, "link.latency", &link.latency);
            section(&mut file, "link.base", &link.base);
            section(&mut file, "link.round_trip", &link.round_trip);
            section(&mut file, "link.training", &link.training);
            if link.exchange != ExchangeKind::default() {
                let _ = writeln!(file, "\n[link]\nexchange = \"{}\"", link.exchange.name());
            }
        }
        section(&mut file, "host.bandwidth", &host.bandwidth);
        section(&mut file, "host.latency", &host.latency);
        let _ = write!(file, "{}", kernels_section(self.kernels));
        if let Some(power) = &self.power_watts {
            section(&mut file, "power_watts", power);
        }
        file
    }
}

/// The section that says where kernels run; nothing for cards behind the ABI.
fn kernels_section(kernels: Kernels) -> String {
    match kernels {
        Kernels::Card => String::new(),
        Kernels::Host { threads } => format!("\n[kernels.host]\nthreads = {threads}\n"),
        Kernels::Gpu { multiprocessors } => {
            format!("\n[kernels.gpu]\nmultiprocessors = {multiprocessors}\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builtin_profile_survives_being_written_and_read() {
        for name in Profile::builtin_names() {
            let profile = Profile::builtin(name).unwrap();
            assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile), "{name}");
        }
    }

    #[test]
    fn measured_operators_and_exchanges_survive_and_bad_ones_are_named() {
        let mut profile = Profile::builtin("rev-a").unwrap();
        profile.link.as_mut().unwrap().exchange = ExchangeKind::SharedMemory;
        profile.compute.first_use = Some(profile.compute.per_token.clone());
        for (at, kind) in crate::OperatorKind::ALL.into_iter().enumerate() {
            for rows in [1, 16] {
                let weights = (kind == crate::OperatorKind::Product).then(|| "q4_0".to_owned());
                let (overhead, rate) = (Seconds(1.3e-6), 1e9 / (at as f64 + 3.0));
                let entry = crate::OperatorRate { kind, weights, rows, overhead, rate };
                profile.compute.operators.push(entry);
            }
        }
        for kernels in [Kernels::Host { threads: 3 }, Kernels::Gpu { multiprocessors: 132 }] {
            let profile = Profile { kernels, ..profile.clone() };
            assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile));
        }
        assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile.clone()));
        profile.compute.operators.swap(0, 1);
        let error = Profile::from_toml(&profile.to_toml()).unwrap_err().to_string();
        assert!(error.contains("product: 1 rows out of order"), "{error}");
        profile.compute.operators.truncate(1);
        profile.compute.operators[0].rate = 0.0;
        let error = Profile::from_toml(&profile.to_toml()).unwrap_err().to_string();
        assert!(error.contains("0 is not a rate"), "{error}");
    }

    #[test]
    fn texts_with_quotation_marks_and_control_characters_survive() {
        let mut profile = Profile::builtin("rpi5-gbe").unwrap();
        profile.summary = "a \"card\" with \\ and \n and \u{7f}".into();
        assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile));
    }
}
