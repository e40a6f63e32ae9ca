// SPDX-License-Identifier: Apache-2.0
//! Closed formulas for equal cards on equal links: what a collective, a token and a prompt take.
//!
//! They are for checking and for reading: `docs/link-model.md` and `docs/decision.md` print their
//! tables, and `python/spanker_link.py` computes the same figures. The planner does not use them. It
//! times schedules on the link graph ([`crate::prices`]) and adds compute, capacity, caches, fixed costs
//! and unequal cards ([`crate::choose`]), all of which are absent here.
//!
//! Sizes are bytes and rates are bytes per second, both as `f64`; nothing is checked, and a rate of
//! zero takes infinitely long.
//!
//! ```
//! use spanker_collective::Algorithm;
//! use spanker_plan::formula::{Link, all_reduce};
//! use spanker_topology::Profile;
//! let card = Profile::builtin("rev-a")?;
//! let link = Link::of(card.link.as_ref().unwrap());
//! let time = all_reduce(Algorithm::Ring, 4, 8192.0, link);
//! assert_eq!(time.to_string(), "36.9 us");
//! # Ok::<(), spanker_topology::TopologyError>(())
//! ```

use spanker_collective::Algorithm;
use spanker_topology::{BytesPerSecond, Framing, LinkProfile, Seconds};

/// Bytes of one exchanged activation: `f32`.
pub const ACTIVATION: f64 = 4.0;

/// What a message over one link takes: `alpha + bytes / rate`, and `base` before a collective begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// What a collective takes before its first step.
    pub base: Seconds,
    /// What one step over one hop takes besides the bytes.
    pub alpha: Seconds,
    /// Payload bytes per second of one direction.
    pub rate: f64,
}

impl Link {
    /// The link of a profile with all its lanes and full frames.
    #[must_use]
    pub fn of(profile: &LinkProfile) -> Link {
        let rate = profile.sustained(profile.lanes.value).0 as f64;
        Link { base: profile.base.value, alpha: profile.latency.value, rate }
    }

    /// The same with another step latency.
    #[must_use]
    pub fn with_alpha(self, alpha: Seconds) -> Link {
        Link { alpha, ..self }
    }

    /// One message to a neighbour.
    #[must_use]
    pub fn message(self, bytes: f64) -> Seconds {
        self.alpha + Seconds(bytes / self.rate)
    }
}

/// ceil(log2 n), for n of at least 1.
fn doublings(ranks: usize) -> f64 {
    f64::from(ranks.next_power_of_two().trailing_zeros())
}

/// An all-reduce of `bytes` on each of `ranks` ranks that reach each other directly, sharing nothing.
///
/// | algorithm | time, n ranks, S bytes |
/// |---|---|
/// | ring | base + 2(n-1) alpha + 2(n-1)/n S/rate |
/// | recursive doubling | base + r (alpha + S/rate), r = log2 n, or floor(log2 n) + 2 |
/// | halving-doubling | base + 2 ceil(log2 n) alpha + 2(n-1)/n S/rate |
/// | tree | base + 2 ceil(log2 n) (alpha + S/rate) |
/// | one-shot | base + alpha + (n-1) S/rate |
/// | two-shot | base + 2 alpha + 2(n-1)/n S/rate |
///
/// One rank needs no message and no time. The times are those of the simulated schedules, but for
/// recursive doubling and the tree on numbers of ranks that are no powers of two: there rounds overlap
/// and up to `ceil(log2 n)` latencies less pass. On a real ring only the ring's own time holds: the messages of
/// the others take more hops and share links.
#[must_use]
pub fn all_reduce(algorithm: Algorithm, ranks: usize, bytes: f64, link: Link) -> Seconds {
    if ranks < 2 {
        return Seconds::ZERO;
    }
    let n = ranks as f64;
    // Steps that pay the latency, and how often the whole buffer passes a rank's link.
    let (steps, buffers) = match algorithm {
        Algorithm::Ring => (2.0 * (n - 1.0), 2.0 * (n - 1.0) / n),
        Algorithm::RecursiveDoubling => {
            let extra = if ranks.is_power_of_two() { 0.0 } else { 2.0 };
            let rounds = f64::from(ranks.ilog2()) + extra;
            (rounds, rounds)
        }
        Algorithm::HalvingDoubling => (2.0 * doublings(ranks), 2.0 * (n - 1.0) / n),
        Algorithm::Tree => (2.0 * doublings(ranks), 2.0 * doublings(ranks)),
        Algorithm::OneShot => (1.0, n - 1.0),
        Algorithm::TwoShot => (2.0, 2.0 * (n - 1.0) / n),
        // The tests go through `Algorithm::ALL`: a new algorithm fails there first.
        other => unreachable!("no formula for an all-reduce by {other}"),
    };
    link.base + link.alpha * steps + Seconds(buffers * bytes / link.rate)
}

/// An all-reduce through one root whose link everyone shares: everything in, everything out again.
/// `base + 2 alpha + 2(n-1) S/rate`, with the root's rate.
#[must_use]
pub fn star_all_reduce(ranks: usize, bytes: f64, link: Link) -> Seconds {
    if ranks < 2 {
        return Seconds::ZERO;
    }
    let others = ranks as f64 - 1.0;
    link.base + link.alpha * 2.0 + Seconds(2.0 * others * bytes / link.rate)
}

/// An all-gather around a ring that leaves `bytes` on each rank: `base + (n-1) (alpha + S/n/rate)`.
#[must_use]
pub fn ring_all_gather(ranks: usize, bytes: f64, link: Link) -> Seconds {
    if ranks < 2 {
        return Seconds::ZERO;
    }
    let n = ranks as f64;
    link.base + link.alpha * (n - 1.0) + Seconds((n - 1.0) / n * bytes / link.rate)
}

/// What `bytes` take on a wire without errors, in as many frames as they need: the last one may be
/// short, and pays for its overhead and its acknowledgement like any other.
#[must_use]
pub fn framed_bytes(framing: Framing, raw: BytesPerSecond, bytes: f64) -> Seconds {
    let frames = (bytes / framing.payload as f64).ceil();
    let each = framing.overhead as f64 + framing.ack_bytes as f64 / framing.ack_every as f64;
    Seconds((bytes + frames * each) / (raw.0 as f64 * (1.0 - framing.compensation)))
}

/// A ring all-reduce in which every chunk pays for its own frames: `2(n-1) (alpha + framed(S/n))`.
///
/// Where chunks fill whole frames it equals [`all_reduce`]; small chunks take up to a few per cent more.
#[must_use]
pub fn framed_ring_all_reduce(
    ranks: usize,
    bytes: f64,
    framing: Framing,
    raw: BytesPerSecond,
    alpha: Seconds,
) -> Seconds {
    if ranks < 2 {
        return Seconds::ZERO;
    }
    let n = ranks as f64;
    (alpha + framed_bytes(framing, raw, bytes / n)) * (2.0 * (n - 1.0))
}

/// Decoding one token of a model on cards that only read memory: what both splits have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decode {
    /// Bytes of weights that one token reads.
    pub read: f64,
    /// Layers of the model.
    pub layers: u64,
    /// The width of the residual stream, in activations.
    pub hidden: u64,
    /// What one card's memory sustains, in bytes per second.
    pub memory_rate: f64,
}

impl Decode {
    /// Bytes of the activations of one token between two layers.
    fn activations(self) -> f64 {
        self.hidden as f64 * ACTIVATION
    }
}

/// One token with every matrix split over `cards`: `read/(N B) + 2L ring(hidden * 4)`.
#[must_use]
pub fn tensor_parallel_token(decode: Decode, cards: usize, link: Link) -> Seconds {
    let exchange = all_reduce(Algorithm::Ring, cards, decode.activations(), link);
    let read = Seconds(decode.read / (cards.max(1) as f64 * decode.memory_rate));
    read + exchange * (2.0 * decode.layers as f64)
}

/// One token of one stream with whole layers on each of `cards`, which work one after the other:
/// `read/B + (N-1) (alpha + hidden * 4 / rate)`.
#[must_use]
pub fn layer_split_token(decode: Decode, cards: usize, link: Link) -> Seconds {
    let hops = cards.saturating_sub(1) as f64;
    Seconds(decode.read / decode.memory_rate) + link.message(decode.activations()) * hops
}

/// One card's part of a token in a layer split, with the hand-off to it.
#[must_use]
pub fn layer_split_stage(decode: Decode, cards: usize, link: Link) -> Seconds {
    let read = Seconds(decode.read / (cards.max(1) as f64 * decode.memory_rate));
    let hop = if cards < 2 { Seconds::ZERO } else { link.message(decode.activations()) };
    read + hop
}

/// Tokens per second of all streams together in a layer split.
///
/// With fewer streams than cards each stream runs at its own pace; with as many or more, the
/// longest stage sets it: `min(streams / token, 1 / stage)`.
#[must_use]
pub fn layer_split_streams(decode: Decode, cards: usize, link: Link, streams: usize) -> f64 {
    let token = layer_split_token(decode, cards, link);
    let stage = layer_split_stage(decode, cards, link);
    if streams < cards { streams as f64 / token.0 } else { 1.0 / stage.0 }
}

/// The step latency at which both splits take equally long for one stream. Below it splitting every
/// matrix is faster.
///
/// The hand-offs of the layer split pay the same latency, so the two times are equal at this latency
/// exactly. It is negative where bytes alone make the layer split faster. There is none for a
/// single card or a model without layers.
#[must_use]
pub fn break_even_alpha(decode: Decode, cards: usize, link: Link) -> Option<Seconds> {
    if cards < 2 || decode.layers == 0 {
        return None;
    }
    let free = link.with_alpha(Seconds::ZERO);
    let tensor = tensor_parallel_token(decode, cards, free);
    let layers = layer_split_token(decode, cards, free);
    let hops = cards as f64 - 1.0;
    let steps = hops * (4.0 * decode.layers as f64 - 1.0);
    Some((layers - tensor) / steps)
}

/// A prompt in `pieces` equal pieces through a pipeline: the first piece passes every stage, then the
/// longest stage emits a piece each turn. `sum + (pieces - 1) max`.
///
/// `stages` are the times of one piece, each with the hand-off to it.
#[must_use]
pub fn pipeline_prefill(stages: &[Seconds], pieces: u64) -> Seconds {
    let longest = stages.iter().copied().fold(Seconds::ZERO, Seconds::max);
    stages.iter().copied().sum::<Seconds>() + longest * pieces.saturating_sub(1) as f64
}

/// The part of the time that equal stages stand idle: `(p-1) / (pieces + p - 1)`.
#[must_use]
pub fn pipeline_bubble(stages: usize, pieces: u64) -> f64 {
    let idle = stages.saturating_sub(1) as f64;
    idle / (pieces.max(1) as f64 + idle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prices;
    use spanker_collective::Collective;
    use spanker_topology::{Cluster, Profile, Shape};

    const RAW: BytesPerSecond = BytesPerSecond(500_000_000);
    const KIB: f64 = 1024.0;
    const MIB: f64 = 1024.0 * 1024.0;

    fn rev_a() -> Link {
        Link::of(Profile::builtin("rev-a").unwrap().link.as_ref().unwrap())
    }

    fn close(actual: f64, expected: f64, within: f64, what: &str) {
        let error = (actual / expected - 1.0).abs();
        assert!(error < within, "{what}: {actual} is not {expected} within {within}");
    }

    /// The documented weights per token, in bytes, for Q4_0.
    fn decode(model: &str) -> Decode {
        let (read, layers, hidden) = match model {
            "tinyllama" => (0.582e9, 22, 2048),
            "7b" => (3.716e9, 32, 4096),
            _ => (38.65e9, 80, 8192),
        };
        Decode { read, layers, hidden, memory_rate: 2e9 }
    }

    /// Documented microseconds of a ring all-reduce on 2, 4 and 8 cards.
    const DOCUMENTED: [(f64, [f64; 3]); 7] = [
        (4.0 * KIB, [12.3, 24.6, 43.1]),
        (8.0 * KIB, [20.6, 36.9, 57.5]),
        (16.0 * KIB, [37.3, 61.9, 86.2]),
        (MIB, [2132.0, 3205.0, 3753.0]),
        (4.0 * MIB, [8518.0, 12782.0, 14927.0]),
        (16.0 * MIB, [34058.0, 51093.0, 59623.0]),
        (64.0 * MIB, [136_220.0, 204_336.0, 238_406.0]),
    ];

    #[test]
    fn the_profile_gives_the_link_of_the_tables() {
        let link = rev_a();
        assert_eq!((link.base, link.alpha), (Seconds::ZERO, Seconds::from_micros(2.0)));
        close(link.rate, 492.66e6, 1e-5, "rate");
    }

    #[test]
    fn ring_all_reduce_with_the_frames_of_its_chunks_is_the_documented_one() {
        for (bytes, row) in DOCUMENTED {
            for (ranks, expected) in [2, 4, 8].into_iter().zip(row) {
                let alpha = rev_a().alpha;
                let time = framed_ring_all_reduce(ranks, bytes, Framing::SPANKER, RAW, alpha);
                close(time.micros(), expected, 0.005, &format!("{bytes} on {ranks}"));
            }
        }
    }

    #[test]
    fn ring_all_reduce_with_full_frames_differs_only_where_a_chunk_is_less_than_a_frame() {
        for (bytes, row) in DOCUMENTED {
            for (ranks, expected) in [2, 4, 8].into_iter().zip(row) {
                let time = all_reduce(Algorithm::Ring, ranks, bytes, rev_a()).micros();
                let fills_frames = bytes / ranks as f64 >= 2048.0;
                let within = if fills_frames { 0.003 } else { 0.013 };
                close(time, expected, within, &format!("{bytes} on {ranks}"));
            }
        }
    }

    #[test]
    fn framed_bytes_in_whole_frames_run_at_the_goodput() {
        let goodput = Framing::SPANKER.goodput(RAW, 0.0, Seconds::ZERO);
        let time = framed_bytes(Framing::SPANKER, RAW, 10.0 * 2048.0);
        close(time.0, 10.0 * 2048.0 / goodput, 1e-12, "ten frames");
        assert_eq!(framed_bytes(Framing::SPANKER, RAW, 0.0), Seconds::ZERO);
    }

    #[test]
    fn decision_table_is_the_documented_one() {
        let table = [
            ("tinyllama", 1, 290.9, 290.9, 3.4, 3.4),
            ("tinyllama", 2, 146.4, 291.0, 6.8, 6.9),
            ("tinyllama", 4, 74.4, 291.0, 13.4, 13.7),
            ("tinyllama", 8, 38.9, 291.0, 25.7, 27.5),
            ("7b", 8, 238.0, 1858.0, 4.2, 4.3),
            ("70b", 8, 2439.0, 19326.0, 0.41, 0.41),
        ];
        for (model, cards, tensor_ms, layers_ms, tensor_rate, streams_rate) in table {
            let (decode, link) = (decode(model), rev_a());
            let what = format!("{model} on {cards}");
            let tensor = tensor_parallel_token(decode, cards, link);
            close(tensor.millis(), tensor_ms, 0.01, &what);
            close(layer_split_token(decode, cards, link).millis(), layers_ms, 0.01, &what);
            // Two digits in the document: a rounding of up to 1.5 %.
            close(1.0 / tensor.0, tensor_rate, 0.015, &what);
            let streams = layer_split_streams(decode, cards, link, cards);
            close(streams, streams_rate, 0.015, &what);
        }
    }

    #[test]
    fn both_splits_take_equally_long_at_the_break_even_latency() {
        for model in ["tinyllama", "7b", "70b"] {
            for cards in [2, 3, 4, 8, 16] {
                let decode = decode(model);
                let link = Link { base: Seconds::from_micros(5.0), ..rev_a() };
                let alpha = break_even_alpha(decode, cards, link).unwrap();
                let at = link.with_alpha(alpha);
                let layers = layer_split_token(decode, cards, at).0;
                close(tensor_parallel_token(decode, cards, at).0, layers, 1e-12, model);
            }
        }
        assert_eq!(break_even_alpha(decode("7b"), 1, rev_a()), None);
        assert_eq!(break_even_alpha(Decode { layers: 0, ..decode("7b") }, 4, rev_a()), None);
    }

    #[test]
    fn break_even_latency_is_the_documented_one_but_for_the_hand_offs() {
        // The documented 411 us and 822 us let the layer split hand over for nothing.
        for (cards, documented) in [(8, 411.0), (4, 822.0)] {
            let decode = decode("tinyllama");
            let exact = break_even_alpha(decode, cards, rev_a()).unwrap().micros();
            close(exact, documented, 0.015, "with hand-offs");
            let free = rev_a().with_alpha(Seconds::ZERO);
            let read = Seconds(decode.read / decode.memory_rate);
            let spare = read - tensor_parallel_token(decode, cards, free);
            let steps = 4.0 * 22.0 * (cards as f64 - 1.0);
            close((spare / steps).micros(), documented, 0.001, "without hand-offs");
        }
    }

    #[test]
    fn formulas_equal_the_timed_schedules_where_only_the_links_take_time() {
        for ranks in 2..=9 {
            let profile = crate::cost::exchange::links_alone("rev-a");
            let cluster = Cluster::uniform(profile, ranks, Shape::Switch).unwrap();
            let cards: Vec<usize> = (0..ranks).collect();
            for price in prices(&cluster, Collective::AllReduce, &cards) {
                for bytes in [0.0, 4.0 * KIB, MIB] {
                    let (timed, algorithm) = (price.at(bytes), price.algorithm);
                    let formula = all_reduce(algorithm, ranks, bytes, rev_a());
                    let what = format!("{algorithm} on {ranks}, {bytes}");
                    let rounds_overlap = !ranks.is_power_of_two()
                        && matches!(algorithm, Algorithm::RecursiveDoubling | Algorithm::Tree);
                    if rounds_overlap {
                        let saved = (formula - timed).micros();
                        let rounds = f64::from(ranks.next_power_of_two().ilog2());
                        let most = rounds * rev_a().alpha.micros() + 0.01;
                        assert!((-0.01..most).contains(&saved), "{what}: {saved} us less");
                    } else {
                        close(timed.0, formula.0, 1e-6, &what);
                    }
                }
            }
            let gathers = prices(&cluster, Collective::AllGather, &cards);
            let ring = gathers.iter().find(|price| price.algorithm == Algorithm::Ring).unwrap();
            close(ring.at(MIB).0, ring_all_gather(ranks, MIB, rev_a()).0, 1e-6, "all-gather");
        }
    }

    #[test]
    fn one_rank_exchanges_nothing() {
        for algorithm in Algorithm::ALL {
            assert_eq!(all_reduce(algorithm, 1, MIB, rev_a()), Seconds::ZERO);
        }
        assert_eq!(star_all_reduce(1, MIB, rev_a()), Seconds::ZERO);
        assert_eq!(ring_all_gather(1, MIB, rev_a()), Seconds::ZERO);
        let alpha = rev_a().alpha;
        let framed = framed_ring_all_reduce(1, MIB, Framing::SPANKER, RAW, alpha);
        assert_eq!(framed, Seconds::ZERO);
    }

    #[test]
    fn star_moves_every_buffer_twice_over_the_root() {
        let time = star_all_reduce(4, MIB, rev_a());
        close(time.0, 4e-6 + 6.0 * MIB / rev_a().rate, 1e-12, "star");
    }

    #[test]
    fn streams_of_a_layer_split_fill_it_when_there_is_one_for_each_card() {
        let (decode, link) = (decode("tinyllama"), rev_a());
        let token = layer_split_token(decode, 4, link).0;
        close(layer_split_streams(decode, 4, link, 1), 1.0 / token, 1e-12, "one stream");
        let full = layer_split_streams(decode, 4, link, 4);
        assert!(full > 3.99 / token);
        assert_eq!(layer_split_streams(decode, 4, link, 9), full);
    }

    #[test]
    fn pipeline_of_equal_stages_idles_for_its_bubble() {
        let stages = [Seconds(0.25); 4];
        let time = pipeline_prefill(&stages, 16);
        assert_eq!(time, Seconds(0.25 * 19.0));
        let busy = 16.0 * 0.25 / time.0;
        close(1.0 - busy, pipeline_bubble(4, 16), 1e-12, "bubble");
        assert_eq!(pipeline_bubble(1, 16), 0.0);
        assert_eq!(pipeline_prefill(&[Seconds(1.0), Seconds(3.0)], 3), Seconds(10.0));
    }
}
