// SPDX-License-Identifier: Apache-2.0
//! A profile's numbers one by one, as text: what each is, how far it could be off and where it comes from.

use std::fmt::Display;

use crate::{Profile, Value};

/// A number of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Number {
    /// What it says.
    pub name: &'static str,
    /// Its value and unit.
    pub value: String,
    /// The least and the most that it could be.
    pub range: String,
    /// How it was come by.
    pub provenance: String,
    /// How far to trust it.
    pub confidence: String,
    /// Where it comes from.
    pub source: String,
}

impl Number {
    fn of<T: Display>(name: &'static str, value: &Value<T>) -> Number {
        let end = |end: &Option<T>| end.as_ref().map_or_else(|| "?".into(), T::to_string);
        let range = match (&value.low, &value.high) {
            (None, None) => String::new(),
            (low, high) => format!("{} to {}", end(low), end(high)),
        };
        Number {
            name,
            value: value.value.to_string(),
            range,
            provenance: value.provenance.to_string(),
            confidence: value.confidence.to_string(),
            source: value.source.clone(),
        }
    }

    fn plain(name: &'static str, value: String, source: &str) -> Number {
        let [range, provenance, confidence] = Default::default();
        Number { name, value, range, provenance, confidence, source: source.into() }
    }
}

impl Profile {
    /// Every number of the profile but the rates of its operators.
    #[must_use]
    pub fn numbers(&self) -> Vec<Number> {
        let (memory, compute, host) = (&self.memory, &self.compute, &self.host);
        let mut numbers = vec![
            Number::of("memory capacity", &memory.capacity),
            Number::of("memory reserved", &memory.reserved),
            Number::of("memory bandwidth", &memory.bandwidth),
            Number::of("compute", &compute.rate),
            Number::of("fixed per operator", &compute.per_operator),
            Number::of("fixed per token", &compute.per_token),
        ];
        numbers.extend(compute.first_use.as_ref().map(|time| Number::of("first use", time)));
        if !compute.operators.is_empty() {
            let count = compute.operators.len().to_string();
            numbers.push(Number::plain("by operator", count, "rates: --toml lists them"));
        }
        if let Some(link) = &self.link {
            numbers.push(Number::of("link, one direction", &link.bandwidth));
            if link.framing.is_some() {
                let rate = link.sustained(link.lanes.value).to_string();
                numbers.push(Number::plain("link, sustained", rate, "after framing"));
            }
            numbers.extend(link.fabric.as_ref().map(|rate| Number::of("shared fabric", rate)));
            numbers.extend([
                Number::of("bit error rate", &link.bit_error_rate),
                Number::of("lanes", &link.lanes),
                Number::of("ports", &link.ports),
                Number::of("link latency", &link.latency),
                Number::of("collective base", &link.base),
                Number::of("link round trip", &link.round_trip),
                Number::of("link training", &link.training),
                Number::plain("exchanges", link.exchange.name().into(), ""),
            ]);
        }
        numbers.extend([
            Number::of("host bandwidth", &host.bandwidth),
            Number::of("host latency", &host.latency),
        ]);
        numbers.extend(self.power_watts.as_ref().map(|power| Number::of("power (W)", power)));
        numbers
    }
}
