// SPDX-License-Identifier: Apache-2.0
//! What processors do with a model, measured for a moment: as numbers of a card's profile.
//!
//! A few layers of the model run with the same programs, instructions and kernels as in use, with weights of no meaning.
//! Every instruction is timed by the device's clock, at several numbers of rows and of positions, and so is every
//! exchange.

mod bench;
mod fit;

use std::sync::Arc;

use spanker_collective::{Algorithm, Collective};
use spanker_model::{Model, Quant};
use spanker_plan::{Split, price};
use spanker_topology::{
    BytesPerSecond, Cluster, Confidence, ExchangeKind, MacsPerSecond, OperatorKind, OperatorRate,
    Profile, Provenance, Seconds, TopologyError,
};

use super::machine::Processors;
use crate::profile::value;
use crate::{CudaError, Gpu};
use bench::Bench;

/// Numbers of rows that are measured, up to a batch, which is one too.
const ROWS: [u64; 8] = [1, 2, 8, 16, 32, 64, 128, 256];
/// Between these, tiles of products make steps: those are measured too, after no other tokens.
const EDGES: [u64; 11] = [15, 17, 33, 49, 65, 97, 129, 192, 193, 257, 384];
/// Positions after which attention is measured, as far as the context goes.
const POSITIONS: [u64; 3] = [16, 512, 2048];
/// Bytes with which a rate is measured.
const MANY: f64 = 1e9;
const SOURCE: &str = "the model's own programs on a few of its layers, just now";

/// After how many tokens a step of so many is measured, the fewest first.
fn positions(rows: u64, context: u64) -> Vec<u64> {
    let last = context.saturating_sub(rows);
    let mut positions: Vec<u64> = match rows {
        1 => POSITIONS.iter().map(|&past| past.min(last)).collect(),
        // A prompt's first batch, and its last.
        _ => vec![0, last.min(POSITIONS[2])],
    };
    positions.dedup();
    positions
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Speeds {
    /// The costs of kinds of operators where nobody else is on the device.
    pub operators: Vec<OperatorRate>,
    /// Seconds of an exchange as it is run, and of a byte of what everybody has afterwards.
    pub exchange: Option<(f64, f64)>,
    /// Seconds until the host knows a token, besides operators and exchanges.
    pub step_seconds: f64,
    /// Extra seconds of the first prompt of a length: its program is made and copied.
    pub first_use_seconds: f64,
    /// Multiplications with additions in a second, of products of a whole batch.
    macs_per_second: f64,
    /// How matrices are split, and the cards of each stage.
    split: Split,
    groups: Vec<Vec<usize>>,
    /// Cards of a stage that share a processor.
    share: usize,
}

/// What is measured: a model, how its matrices are split over which cards (with their shares), and for what steps.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The model.
    pub model: &'a Model,
    /// How matrices are split within a stage.
    pub split: Split,
    /// The cards of every stage, and their shares of its weights.
    pub groups: &'a [Vec<(usize, f64)>],
    /// Tokens of the context.
    pub context: usize,
    /// Tokens of a step at most.
    pub batch: usize,
    /// What keys and values are kept as.
    pub kv: Quant,
}

impl Speeds {
    /// Measures processors as cards of a cluster, whose profiles may be of no measurement yet.
    ///
    /// # Errors
    /// [`CudaError::Memory`], [`CudaError::Unsupported`] for a layout that cannot be run, and whatever goes wrong on a
    /// processor.
    pub fn measure(
        gpus: &[Arc<Gpu>],
        cluster: &Cluster,
        subject: &Subject<'_>,
    ) -> Result<Speeds, CudaError> {
        let gpu = gpus.first().ok_or(CudaError::NoDevice)?;
        let on = |cards: &[usize]| Processors::new(gpus, cards);
        Speeds::measured(&on, gpus.len(), gpu.memory()?.free / 8, cluster, subject)
    }

    /// The same on so many devices: processors for cards are made by `on`, with layers of at most so many bytes.
    pub(super) fn measured(
        on: &dyn Fn(&[usize]) -> Result<Processors, CudaError>,
        devices: usize,
        most: u64,
        cluster: &Cluster,
        subject: &Subject<'_>,
    ) -> Result<Speeds, CudaError> {
        let Subject { split, groups, context, batch, .. } = *subject;
        let mut bench = Bench::new(on, cluster, subject, most)?;
        let (context, batch) = (context as u64, batch as u64);
        let mut rows: Vec<u64> = ROWS.into_iter().filter(|&rows| rows < batch).collect();
        rows.push(batch.min(context).max(1));
        rows.dedup();
        let (mut instructions, mut exchanges, mut besides) = (Vec::new(), Vec::new(), Vec::new());
        for &rows in &rows {
            let mut first: Option<Vec<fit::Timed>> = None;
            for past in positions(rows, context) {
                let mut step = bench.step(rows, past)?;
                match &first {
                    Some(first) => fit::charge_attention(first, &mut step.instructions),
                    None => first = Some(step.instructions.clone()),
                }
                instructions.extend(step.instructions);
                exchanges.extend(step.exchanges);
                if rows == 1 {
                    besides.push(step.besides);
                }
            }
        }
        for rows in EDGES.into_iter().filter(|&rows| rows < batch.min(context)) {
            let step = bench.step(rows, 0)?;
            // The cost of attention for each of more positions cannot be seen here.
            instructions.extend(
                step.instructions.into_iter().filter(|instruction| !instruction.is_attention()),
            );
        }
        let exchange = (!exchanges.is_empty()).then(|| fit::exchange(&exchanges));
        let largest = groups.iter().map(Vec::len).max().unwrap_or(1);
        let macs = |instruction: &&fit::Timed| instruction.loads.iter().any(|load| load.macs > 0);
        let most = rows.last().copied().unwrap_or(1);
        let products: Vec<&fit::Timed> = instructions
            .iter()
            .filter(|instruction| instruction.rows == most)
            .filter(macs)
            .collect();
        let count: u64 =
            products.iter().flat_map(|instruction| &instruction.loads).map(|load| load.macs).sum();
        let seconds: f64 = products.iter().map(|instruction| instruction.seconds).sum();
        Ok(Speeds {
            operators: fit::operators(&instructions),
            exchange,
            // Where candidates of several cards are compared, prices count one more exchange.
            step_seconds: (bench::median(besides)
                - exchange.filter(|_| largest > 1).map_or(0.0, |(start, _)| start))
            .max(1e-6),
            first_use_seconds: bench.preparing * bench.left_out,
            macs_per_second: if seconds > 0.0 { count as f64 / seconds } else { 1e12 },
            split,
            groups: groups.iter().map(|group| group.iter().map(|one| one.0).collect()).collect(),
            share: if cluster.cards() > devices { largest.div_ceil(devices) } else { 1 },
        })
    }

    /// Copies the costs of products with other types of weights.
    pub fn with_products(&mut self, other: &Speeds) {
        let is_product = |entry: &&OperatorRate| entry.kind == OperatorKind::Product;
        let own: Vec<Option<String>> =
            self.operators.iter().filter(is_product).map(|entry| entry.weights.clone()).collect();
        let more = other.operators.iter().filter(is_product);
        self.operators.extend(more.filter(|entry| !own.contains(&entry.weights)).cloned());
    }

    /// A card's profile with these numbers.
    #[must_use]
    pub fn profile(&self, of: &Profile) -> Profile {
        let mut profile = of.clone();
        fn measured<T>(number: T) -> spanker_topology::Value<T> {
            value(number, Provenance::Measured, Confidence::Medium, SOURCE)
        }
        // Cards that share a processor take turns on it.
        let share = self.share as f64;
        let shared = |entry: &OperatorRate| OperatorRate {
            overhead: Seconds(entry.overhead.0 * share),
            rate: entry.rate / share,
            ..entry.clone()
        };
        profile.compute.operators = self.operators.iter().map(shared).collect();
        let products = profile.compute.operators.iter();
        let products =
            products.filter(|entry| entry.kind == OperatorKind::Product && entry.rows == 1);
        let (mut rate, mut start) = (0.0f64, 0.0f64);
        for entry in products {
            (rate, start) = (rate.max(entry.rate), start.max(entry.overhead.0));
        }
        if rate > 0.0 {
            profile.memory.bandwidth = measured(BytesPerSecond((rate as u64).max(1)));
        }
        profile.compute.rate = measured(MacsPerSecond(self.macs_per_second / share));
        profile.compute.per_operator = measured(Seconds(start));
        // A step begins and ends with a message; the rest is the token's.
        profile.host.latency = measured(Seconds(self.step_seconds / 4.0));
        profile.compute.per_token = measured(Seconds(self.step_seconds / 2.0));
        profile.compute.first_use = Some(measured(Seconds(self.first_use_seconds)));
        profile
    }

    /// The same cards with these numbers, and exchanges with their measured costs.
    ///
    /// # Errors
    /// [`TopologyError`] for cards that cannot be connected in this way.
    pub fn cluster(&self, of: &Cluster) -> Result<Cluster, TopologyError> {
        let profiles: Vec<Profile> =
            (0..of.cards()).map(|card| self.profile(of.profile(card))).collect();
        let shape = of.shape();
        let Some((start, byte)) = self.exchange else {
            return Cluster::new(profiles, shape);
        };
        let with = |latency: f64, base: f64, rate: f64| {
            let mut profiles = profiles.clone();
            for link in profiles.iter_mut().filter_map(|profile| profile.link.as_mut()) {
                let seconds = |seconds: f64| {
                    value(Seconds(seconds), Provenance::Measured, Confidence::Medium, SOURCE)
                };
                (link.latency, link.base) = (seconds(latency), seconds(base));
                link.round_trip = seconds(2.0 * latency);
                let rate = BytesPerSecond((rate as u64).max(1));
                link.bandwidth = value(rate, Provenance::Measured, Confidence::Medium, SOURCE);
                link.exchange = ExchangeKind::Direct;
                (link.fabric, link.framing) = (None, None);
            }
            Cluster::new(profiles, shape)
        };
        let group = self.groups.iter().max_by_key(|group| group.len());
        let group = group.filter(|group| group.len() > 1);
        let collective = match self.split {
            Split::Reduce => Collective::AllReduce,
            _ => Collective::AllGather,
        };
        let time = |cluster: &Cluster, bytes: f64| match (group, &self.groups[..]) {
            (Some(cards), _) => price(cluster, collective, Algorithm::OneShot, cards).at(bytes).0,
            (None, [one, two, ..]) => cluster.round(&[(one[0], two[0], bytes)]).0,
            _ => 0.0,
        };
        // Of an exchange of several, each has a copy in and a copy out.
        let latency = start / group.map_or(1, Vec::len) as f64;
        let trial = with(latency, 0.0, MANY)?;
        let (empty, full) = (time(&trial, 0.0), time(&trial, MANY));
        let latency = if empty > start { latency * start / empty } else { latency };
        let rate = (full - empty) / byte.max(1e-15);
        with(latency, (start - empty).max(0.0), rate.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_topology::Shape;

    fn speeds(groups: &[&[usize]]) -> Speeds {
        let entry = |rows: u64, rate: f64| OperatorRate {
            kind: OperatorKind::Product,
            weights: Some("q4_0".into()),
            rows,
            overhead: Seconds(2e-6),
            rate,
        };
        Speeds {
            operators: vec![entry(1, 4e12), entry(128, 4e10)],
            exchange: Some((8e-5, 2e-10)),
            step_seconds: 4e-5,
            first_use_seconds: 1e-3,
            macs_per_second: 1e13,
            split: Split::Gather,
            groups: groups.iter().map(|group| group.to_vec()).collect(),
            share: groups[0].len(),
        }
    }

    #[test]
    fn attention_is_measured_as_far_as_the_context_goes() {
        assert_eq!(positions(1, 4096), [16, 512, 2048]);
        assert_eq!(positions(1, 100), [16, 99]);
        assert_eq!(positions(128, 1024), [0, 896]);
        assert_eq!(positions(16, 16), [0]);
    }

    fn cards(count: usize) -> Cluster {
        Cluster::uniform(Profile::builtin("h200-nvlink").unwrap(), count, Shape::Switch).unwrap()
    }

    #[test]
    fn an_exchange_is_priced_as_it_was_measured() {
        let ways = [(Split::Gather, Collective::AllGather), (Split::Reduce, Collective::AllReduce)];
        for (count, (split, collective)) in [2usize, 3, 4].into_iter().zip(ways.iter().cycle()) {
            let group: Vec<usize> = (0..count).collect();
            let measured = Speeds { split: *split, ..speeds(&[&group]) };
            let cluster = measured.cluster(&cards(count)).unwrap();
            let prices = price(&cluster, *collective, Algorithm::OneShot, &group);
            for bytes in [2048.0, 16384.0, 1048576.0] {
                let (priced, measured) = (prices.at(bytes).0, 8e-5 + bytes * 2e-10);
                assert!((priced / measured - 1.0).abs() < 0.01, "{count} {bytes}: {priced}");
            }
        }
    }

    #[test]
    fn an_exchange_of_microseconds_is_priced_as_it_was_measured() {
        let ways = [(Split::Gather, Collective::AllGather), (Split::Reduce, Collective::AllReduce)];
        for (count, (split, collective)) in [2usize, 3, 4].into_iter().zip(ways.iter().cycle()) {
            let group: Vec<usize> = (0..count).collect();
            let (start, byte) = (1.9e-6, 4e-13);
            let exchange = Some((start, byte));
            let measured = Speeds { split: *split, exchange, ..speeds(&[&group]) };
            let cluster = measured.cluster(&cards(count)).unwrap();
            let prices = price(&cluster, *collective, Algorithm::OneShot, &group);
            for bytes in [2048.0, 16384.0, 1048576.0] {
                let (priced, measured) = (prices.at(bytes).0, start + bytes * byte);
                assert!((priced / measured - 1.0).abs() < 0.02, "{count} {bytes}: {priced}");
            }
        }
    }

    #[test]
    fn a_message_to_the_next_stage_is_priced_as_it_was_measured() {
        let cluster = speeds(&[&[0], &[1]]).cluster(&cards(2)).unwrap();
        for bytes in [16384.0, 2097152.0] {
            let (priced, measured) = (cluster.round(&[(0, 1, bytes)]).0, 8e-5 + bytes * 2e-10);
            assert!((priced / measured - 1.0).abs() < 0.01, "{bytes}: {priced} {measured}");
        }
    }

    #[test]
    fn cards_that_share_a_processor_take_as_many_times_as_long() {
        let one = speeds(&[&[0]]).profile(cards(1).profile(0));
        let two = speeds(&[&[0, 1]]).profile(cards(1).profile(0));
        let time = |profile: &Profile| profile.compute.operators[0].time(1e7);
        assert!((time(&two) / time(&one) - 2.0).abs() < 1e-9);
        let mut more = speeds(&[&[0]]);
        let mut other = more.clone();
        other.operators.iter_mut().for_each(|entry| entry.weights = Some("q8_0".into()));
        more.with_products(&other);
        more.with_products(&other);
        assert_eq!(more.operators.len(), 4);
        assert_eq!(two.compute.first_use.as_ref().unwrap().value, Seconds(1e-3));
        // What was written is read again.
        assert_eq!(Profile::from_toml(&two.to_toml()).unwrap(), two);
    }
}
