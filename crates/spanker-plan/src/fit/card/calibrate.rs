// SPDX-License-Identifier: Apache-2.0
//! From a fitted card to profiles and clusters that a planner prices alike.
//!
//! A fitted token time is all that a token took: arithmetic, memory, fixed costs, the host. So a profile that
//! is calibrated with it must not add arithmetic or latencies of its own. What decoding times say nothing
//! about stays as the profile has it, and is listed.

use spanker_collective::Collective;
use spanker_topology::{
    BytesPerSecond, Cluster, MacsPerSecond, OperatorKind, OperatorRate, Profile, Provenance,
    Seconds, Value,
};

use super::CardModel;
use crate::{cheapest, prices};

/// Multiply-accumulates on a byte, at most, when one token is decoded. Weights have at most 4: none is stored
/// in less than a quarter of a byte. Attention has more where query heads share a key head, 16 if 16 share one of
/// a byte each.
const DECODE_MACS_PER_BYTE: f64 = 16.0;
/// The operators of a layer that are charged: queries with keys and values, attention, output, gate with up, down.
pub(super) const CHARGED: f64 = 5.0;
/// Units in a second of operators that take no time of their own.
const NO_TIME: f64 = 1e18;
/// Exchanges of a layer whose matrices are all split by rows: before and after the products of both halves.
const EXCHANGES_PER_LAYER: f64 = 4.0;
/// Links that take no time for bytes: all of an exchange is latency, which is how it was fitted.
const NO_BYTES: BytesPerSecond = BytesPerSecond(1_000_000_000_000_000);
/// A message small enough that [`NO_BYTES`] holds.
const SMALL: f64 = 1024.0;

fn fitted<T>(value: &mut Value<T>, number: T, source: &str) {
    *value = value.replaced(number, Provenance::Fitted, source);
}

impl CardModel {
    /// The profile with everything replaced that this fit stands for, and in sentences what is left assumed.
    ///
    /// A planner that charges products and attention a fixed cost and the longer of their memory traffic and
    /// their arithmetic, and all other operators nothing, then prices a token at short context as [`predict`](CardModel::predict) does, exchanges apart. Arithmetic is made fast enough never
    /// to be the longer one at decode.
    #[must_use]
    pub fn calibrate(&self, profile: &Profile) -> (Profile, Vec<String>) {
        let mut card = profile.clone();
        let rate = self.memory_bandwidth();
        fitted(
            &mut card.memory.bandwidth,
            rate,
            "fitted to decoding times; the arithmetic of decoding is inside",
        );
        // What a layer does between products is inside the fitted costs: it is given no time of its own.
        card.compute.operators = OperatorKind::ALL
            .into_iter()
            .filter(|kind| {
                use OperatorKind::{Attention, ManyAttention, Product};
                !matches!(kind, Product | Attention | ManyAttention)
            })
            .map(|kind| {
                let (weights, rows, overhead) = (None, 1, Seconds::ZERO);
                OperatorRate { kind, weights, rows, overhead, rate: NO_TIME }
            })
            .collect();
        let operator =
            "fitted to decoding times: an operator's part of what a layer takes at any share";
        fitted(&mut card.compute.per_operator, self.per_operator(), operator);
        let inside = "inside the fitted costs of operators and memory";
        fitted(&mut card.compute.per_token, Seconds::ZERO, inside);
        fitted(&mut card.host.latency, Seconds::ZERO, inside);
        let least = MacsPerSecond(DECODE_MACS_PER_BYTE * rate.0 as f64);
        let kept = profile.compute.rate.value >= least;
        if !kept {
            let source = "the least that never binds at decode, whose arithmetic is inside the fitted rate of the \
                          memory; prompt speed is not known from decoding times";
            fitted(&mut card.compute.rate, least, source);
        }
        let name = &profile.name;
        let arithmetic = format!("{:.3e} MAC/s", card.compute.rate.value.0);
        let arithmetic = match kept {
            true => format!("{arithmetic}, as in profile {name}"),
            false => {
                format!("{arithmetic}, the least with which decoding keeps pace with the memory")
            }
        };
        let assumed = vec![
            format!(
                "prompts and batches (ttft): arithmetic at {arithmetic}; decoding times do not tell it"
            ),
            format!("memory capacity: {}, as in profile {name}", profile.memory.capacity.value),
            format!(
                "host link: {}, as in profile {name}; its latency is inside the fitted time of a token",
                profile.host.bandwidth.value
            ),
        ];
        (card, assumed)
    }

    /// The cluster with all cards [calibrated](CardModel::calibrate), and in sentences what is left assumed.
    ///
    /// Where the samples show exchanges, the links are given the latency with which a layer split by rows over
    /// all cards exchanges for as long as the fit says. `links` says that links are known from elsewhere: then
    /// they stay as they are.
    #[must_use]
    pub fn calibrate_cluster(&self, cluster: &Cluster, links: bool) -> (Cluster, Vec<String>) {
        let mut assumed: Vec<String> = Vec::new();
        let mut calibrated = cluster.with_profiles(|card| {
            let (profile, left) = self.calibrate(card);
            *card = profile;
            for text in left {
                if !assumed.contains(&text) {
                    assumed.push(text);
                }
            }
        });
        if links || cluster.cards() < 2 {
            return (calibrated, assumed);
        }
        let cards = cluster.cards();
        match self.exchange_per_layer(cards).and_then(|time| exchanging(&calibrated, time)) {
            Some(linked) => {
                calibrated = linked;
                assumed.push(format!(
                    "links: latency alone, so that {cards} cards exchange for as long as was fitted; what \
                     fewer cards, other splits and prompts exchange is derived from that"
                ));
            }
            None => {
                let text =
                    "links between cards: as the profile has them; --link link.toml replaces them";
                assumed.push(text.to_owned());
            }
        }
        (calibrated, assumed)
    }
}

/// The cluster with links on which the exchanges of a layer over all cards take `time`; nothing where links
/// have no latency to set.
fn exchanging(cluster: &Cluster, time: Seconds) -> Option<Cluster> {
    let unit = Seconds::from_micros(1.0);
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let priced = prices(&latency_alone(cluster, unit), Collective::AllGather, &cards);
    let (_, steps) = cheapest(&priced, SMALL);
    let latency = time.0 / EXCHANGES_PER_LAYER * (unit.0 / steps.0);
    latency.is_finite().then(|| latency_alone(cluster, Seconds(latency)))
}

/// The cluster with links on which a message takes `latency` whatever its size.
fn latency_alone(cluster: &Cluster, latency: Seconds) -> Cluster {
    let wired = cluster.with_changed_wires(|wire| {
        wire.bandwidth = NO_BYTES;
        if wire.latency > Seconds::ZERO {
            wire.latency = latency;
        }
    });
    let wired = wired.with_changed_shared(|shared, _| shared.bandwidth = NO_BYTES);
    let source = "fitted to decoding times on several numbers of cards";
    wired.with_profiles(|card| {
        if let Some(link) = &mut card.link {
            link.framing = None;
            link.fabric = None;
            fitted(&mut link.bandwidth, NO_BYTES, source);
            fitted(&mut link.latency, latency, source);
            fitted(&mut link.base, Seconds::ZERO, source);
        }
    })
}
