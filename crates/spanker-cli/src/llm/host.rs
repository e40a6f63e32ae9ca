// SPDX-License-Identifier: Apache-2.0
//! What this machine can do, measured for a moment on the model's own weights, as a card's profile: so that
//! a run on threads has a prediction, too.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ggml_spanker::{GgufFile, Inputs, multiply};
use spanker_llm::Network;
use spanker_reduce::Team;
use spanker_topology::{Cluster, Profile, Shape};

/// How long one look at a speed takes.
const TIME: Duration = Duration::from_millis(12);
/// Looks at each speed, of which the best counts: what others do on this machine only slows it down.
const LOOKS: usize = 8;
/// Rows of weights in a unit.
const ROWS: usize = 64;

/// The most bytes of a file that are touched before it is measured how fast they are read: as many as are read.
const TOUCHED: usize = 2 << 30;

/// What is between cards.
#[derive(Debug, Clone)]
pub(crate) struct Wires {
    /// Bytes per second.
    pub(crate) bandwidth: f64,
    /// Seconds until a short message is there.
    pub(crate) latency: f64,
    /// Who says so: provenance, confidence and source, as profiles have them.
    said: &'static str,
}

impl Wires {
    /// Between threads, where nobody measures.
    const THREADS: Wires = Wires { bandwidth: 5e9, latency: 1e-6, said: ASSUMED };

    /// As measured between processes.
    pub(crate) fn measured(bandwidth: f64, latency: f64) -> Wires {
        Wires { bandwidth, latency, said: PINGED }
    }
}

/// A cluster of `cards` that are threads of this process, `threads` in all. Arithmetic is measured with products
/// of `rows` rows, as a prompt has them.
pub(crate) fn cluster(
    network: &Network<GgufFile>,
    cards: usize,
    threads: usize,
    rows: usize,
) -> anyhow::Result<Cluster> {
    let profile = profile(network, cards, threads, rows, &Wires::THREADS)?;
    Ok(Cluster::uniform(profile, cards, Shape::Switch)?)
}

/// A card that is the `cards`th part of this machine.
pub(crate) fn profile(
    network: &Network<GgufFile>,
    cards: usize,
    threads: usize,
    rows: usize,
    wires: &Wires,
) -> anyhow::Result<Profile> {
    let team = Team::new(threads.min(std::thread::available_parallelism().map_or(1, usize::from)));
    // Pages of a mapped file cost most when they are first touched, which happens once.
    let touched = &network.bytes()[..network.bytes().len().min(TOUCHED)];
    std::hint::black_box(touched.iter().step_by(4096).fold(0u8, |sum, byte| sum ^ byte));
    let streamed = speed(network, &team, 1);
    let multiplied = speed(network, &team, rows.clamp(2, 128));
    let start = started(&team);
    let each = |total: f64| (total / cards as f64).max(1.0);
    let text = format!(
        "name = 'this-machine'
summary = 'a part of this machine, as {cards} cards'
topology = 'switch'
memory.capacity = {{ value = '1 TB', {ASSUMED} }}
memory.reserved = {{ value = '0 B', {ASSUMED} }}
memory.bandwidth = {{ value = '{:.0} B/s', {MEASURED} }}
compute.rate = {{ value = '{:.0} MAC/s', {MEASURED} }}
compute.per_operator = {{ value = '{:.3} us', {MEASURED} }}
compute.per_token = {{ value = '30 us', {ASSUMED} }}
host.bandwidth = {{ value = '10 GB/s', {ASSUMED} }}
host.latency = {{ value = '5 us', {ASSUMED} }}
[link]
bandwidth = {{ value = '{:.0} B/s', {said} }}
bit_error_rate = {{ value = 0.0, {ASSUMED} }}
lanes = {{ value = 1, {ASSUMED} }}
ports = {{ value = 1, {ASSUMED} }}
latency = {{ value = '{:.3} us', {said} }}
base = {{ value = '0 us', {ASSUMED} }}
round_trip = {{ value = '{:.3} us', {said} }}
training = {{ value = '0 us', {ASSUMED} }}
",
        each(streamed.0),
        each(multiplied.1),
        start * 1e6,
        wires.bandwidth.max(1.0),
        wires.latency * 1e6,
        wires.latency * 1e6,
        said = wires.said,
    );
    Ok(Profile::from_toml(&text)?)
}

const MEASURED: &str =
    "provenance = 'measured', confidence = 'medium', source = 'this process, just now'";
const PINGED: &str = "provenance = 'measured', confidence = 'medium', source = 'messages between the ranks, just now'";
const ASSUMED: &str =
    "provenance = 'assumed', confidence = 'low', source = 'threads of one process'";

/// Bytes and multiplications per second of products of the layers' weights with `rows` rows.
fn speed(network: &Network<GgufFile>, team: &Team, rows: usize) -> (f64, f64) {
    let mut units = Vec::new();
    let mut inputs: Vec<Inputs> = Vec::new();
    let mut kinds = Vec::new();
    for tensor in network.header().tensors().values().filter(|tensor| tensor.dims.len() == 2) {
        let (width, height) = (tensor.dims[0] as usize, tensor.dims[1] as usize);
        let start = (network.header().data_offset() + tensor.offset) as usize;
        let row = tensor.quant.row_bytes(width as u64) as usize;
        let input = tensor.quant.input();
        let kept = kinds.iter().position(|known| *known == (input, width));
        let input = kept.unwrap_or_else(|| {
            let bytes = vec![1u8; rows * input.row_bytes(width as u64) as usize];
            let mut one = Inputs::new();
            one.load(input, &bytes, rows, width).expect("whole rows");
            inputs.push(one);
            kinds.push((input, width));
            inputs.len() - 1
        });
        for first in (0..height).step_by(ROWS) {
            let count = ROWS.min(height - first);
            units.push((tensor.quant, start + first * row, row, count, width, input));
        }
    }
    let (mut next, mut best) = (0, (0.0f64, 0.0f64));
    for _ in 0..LOOKS {
        let (bytes, macs) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = Instant::now();
        // Units are taken in the order of the file, and a few at a time, so that time can end it.
        while begun.elapsed() < TIME && !units.is_empty() {
            let from = next % units.len();
            let some = &units[from..units.len().min(from + 64)];
            next = (from + some.len()) % units.len();
            team.run(team.threads(), some.len(), &|at| {
                let (quant, start, row, count, width, input) = some[at];
                let weights = &network.bytes()[start..start + row * count];
                let mut out = vec![0.0; rows * count];
                multiply(quant, weights, count, &inputs[input], &mut out).expect("whole rows");
                bytes.fetch_add(row * count, Ordering::Relaxed);
                macs.fetch_add(rows * count * width, Ordering::Relaxed);
            });
        }
        let seconds = begun.elapsed().as_secs_f64();
        best.0 = best.0.max(bytes.into_inner() as f64 / seconds);
        best.1 = best.1.max(macs.into_inner() as f64 / seconds);
    }
    best
}

/// Seconds that it takes a team to start and end an operator.
fn started(team: &Team) -> f64 {
    let units = 2 * team.threads();
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < TIME {
        team.run(team.threads(), units, &|_| ());
        count += 1;
    }
    begun.elapsed().as_secs_f64() / f64::from(count)
}
