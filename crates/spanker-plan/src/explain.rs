// SPDX-License-Identifier: Apache-2.0
//! Why a layout is the best one: what binds it, how far the others are, where that would change.

use std::rc::Rc;

use spanker_collective::Algorithm;
use spanker_model::{Model, Quant};
use spanker_topology::{Bytes, Cluster, MAX_CARDS, Profile, Seconds, Shape, Value, Wire};

use crate::choose::{holds, score};
use crate::cost::Pricer;
use crate::cost::exchange::PriceList;
use crate::plan::{Candidate, CardMemory, Layout, Strategy};
use crate::predict::predict;
use crate::{Choice, Objective, Request};

/// A resource of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resource {
    /// The rate of the cards' memory.
    MemoryBandwidth,
    /// The cards' arithmetic.
    Compute,
    /// The rate of the links.
    LinkBandwidth,
    /// The latency of the links.
    LinkLatency,
    /// The fixed cost of an operator.
    FixedCost,
    /// The latency of the host links.
    HostLatency,
    /// Memory and arithmetic at once: where they are balanced, more of one alone helps little.
    MemoryAndCompute,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Resource; 7] = [
        Resource::MemoryAndCompute,
        Resource::MemoryBandwidth,
        Resource::Compute,
        Resource::LinkBandwidth,
        Resource::LinkLatency,
        Resource::FixedCost,
        Resource::HostLatency,
    ];

    /// The name that explanations use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Resource::MemoryBandwidth => "memory bandwidth",
            Resource::Compute => "compute",
            Resource::LinkBandwidth => "link bandwidth",
            Resource::LinkLatency => "link latency",
            Resource::FixedCost => "fixed cost of an operator",
            Resource::HostLatency => "host latency",
            Resource::MemoryAndCompute => "memory bandwidth and compute together",
        }
    }
}

/// Where the best layout stops being better than another.
#[derive(Debug, Clone, PartialEq)]
pub struct BreakEven {
    /// The kind of the other layout.
    pub against: Strategy,
    /// How much longer the other takes now, as a factor.
    pub ahead: f64,
    /// The latency of one step over one link at which both take equally long; nothing if that is
    /// longer than ten seconds.
    pub latency: Option<Seconds>,
    /// The same if every exchange were a ring, whatever else would be faster.
    pub ring_latency: Option<Seconds>,
    /// Whether the best is ahead at every latency up to ten seconds.
    pub always: bool,
}

/// Why a layout is the best one.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What most of the time goes to, and which part of it.
    pub binds: (&'static str, f64),
    /// The next best kind of layout.
    pub runner_up: Option<Strategy>,
    /// How much longer it takes, as a factor.
    pub runner_up_behind: f64,
    /// Where the best stops being better than the best of another nature.
    pub break_even: Option<BreakEven>,
    /// What a tenth more (or a tenth less latency) of each resource would gain, in percent.
    pub sensitivity: Vec<(Resource, f64)>,
    /// The time of a token if every number of the profiles were at the good and at the bad end of its range.
    pub band: (Seconds, Seconds),
}

/// Explains the best of some candidates.
///
/// Nothing is explained where nothing fits: see [`remedies`].
#[must_use]
pub fn explain(
    model: &Model,
    cluster: &Cluster,
    request: &Request,
    choice: &Choice,
) -> Option<Explanation> {
    let best = choice.best()?;
    let price =
        |candidate: &Candidate| cost(request, score(request.objective, &candidate.prediction));
    let others: Vec<&Candidate> =
        choice.candidates.iter().skip(1).filter(|c| c.prediction.fits()).collect();
    let runner_up = others.first();
    let differs = |other: &&&Candidate| nature(other.strategy) != nature(best.strategy);
    // Whole layers on each card are what one would think of first; mixtures are in between.
    let plain = others.iter().filter(differs).find(|other| other.strategy == Strategy::Pipeline);
    let of_other_nature = plain.or_else(|| others.iter().find(differs));
    let now = price(best);
    // Some resources leave wires and memories alone, and with them what collectives cost.
    let same_exchanges = Rc::new(PriceList::default());
    let sensitivity = Resource::ALL.map(|resource| {
        let changed = changed(cluster, resource, 1.1);
        let mut pricer = Pricer::new(model, &changed, request).exactly();
        if matches!(resource, Resource::Compute | Resource::HostLatency) {
            pricer = pricer.with_prices(Rc::clone(&same_exchanges));
        }
        let better = cost(request, score(request.objective, &predict(&pricer, &best.layout)));
        (resource, 100.0 * (now / better - 1.0))
    });
    let token = |cluster: &Cluster| {
        predict(&Pricer::new(model, cluster, request).exactly(), &best.layout).token
    };
    Some(Explanation {
        binds: binds(request, best),
        runner_up: runner_up.map(|other| other.strategy),
        runner_up_behind: runner_up.map_or(1.0, |other| price(other) / now),
        break_even: of_other_nature.map(|other| {
            let layouts = [&best.layout, &other.layout];
            let (latency, always) = crossing(model, cluster, request, layouts, None);
            let ring = Some(Algorithm::Ring);
            let (ring_latency, _) = crossing(model, cluster, request, layouts, ring);
            let ahead = price(other) / now;
            BreakEven { against: other.strategy, ahead, latency, ring_latency, always }
        }),
        sensitivity: sensitivity.to_vec(),
        band: (token(&at_end(cluster, true)), token(&at_end(cluster, false))),
    })
}

/// A score as a time: throughput is scored by its negative.
fn cost(request: &Request, score: f64) -> f64 {
    match request.objective {
        Objective::Throughput => -1.0 / score,
        _ => score,
    }
}

/// Layouts that differ in more than a detail.
fn nature(strategy: Strategy) -> u8 {
    match strategy {
        Strategy::TensorGather | Strategy::TensorReduce => 0,
        Strategy::TensorPipeline => 1,
        Strategy::OneCard | Strategy::Pipeline => 2,
        Strategy::Replicas => 3,
    }
}

fn binds(request: &Request, best: &Candidate) -> (&'static str, f64) {
    let terms = match request.objective {
        Objective::Ttft => best.prediction.ttft_terms,
        _ => best.prediction.terms,
    };
    let parts = [
        ("memory bandwidth", terms.memory),
        ("compute", terms.compute),
        ("communication", terms.communication),
        ("fixed costs", terms.fixed),
    ];
    let (name, most) =
        parts.into_iter().max_by(|a, b| a.1.0.total_cmp(&b.1.0)).expect("there are four");
    (name, most.0 / terms.total().0)
}

/// The link latency above which the second of two layouts is faster, and whether the first always is.
///
/// Times are made of lines over the latency, so a straight line through the two nearest points leads there in
/// a few steps.
fn crossing(
    model: &Model,
    cluster: &Cluster,
    request: &Request,
    layouts: [&Layout; 2],
    only: Option<Algorithm>,
) -> (Option<Seconds>, bool) {
    let behind = |latency: f64| {
        let changed = cluster.with_changed_wires(|wire| {
            if wire.latency.0 > 0.0 {
                wire.latency = Seconds(latency);
            }
        });
        let mut pricer = Pricer::new(model, &changed, request);
        if let Some(algorithm) = only {
            pricer = pricer.with_prices(Rc::new(PriceList::only(algorithm)));
        }
        let [first, second] = layouts
            .map(|layout| cost(request, score(request.objective, &predict(&pricer, layout))));
        first - second
    };
    let (mut low, mut high) = ((1e-9, behind(1e-9)), (10.0, behind(10.0)));
    if low.1 >= 0.0 || high.1 <= 0.0 {
        return (None, low.1 < 0.0 && high.1 <= 0.0);
    }
    for _ in 0..30 {
        let straight = low.0 + (high.0 - low.0) * low.1 / (low.1 - high.1);
        let between = (straight, behind(straight));
        let before = if between.1 > 0.0 { high.0 } else { low.0 };
        if between.1 > 0.0 {
            high = between
        } else {
            low = between
        }
        if (before / straight - 1.0).abs() < 1e-4 {
            break;
        }
    }
    let straight = low.0 + (high.0 - low.0) * low.1 / (low.1 - high.1);
    (Some(Seconds(straight)), false)
}

/// The cluster with a resource that is `factor` times as good.
fn changed(cluster: &Cluster, resource: Resource, factor: f64) -> Cluster {
    let rate = |rate: &mut spanker_topology::BytesPerSecond| {
        rate.0 = (rate.0 as f64 * factor) as u64;
    };
    let latency = |latency: &mut Seconds| *latency = *latency / factor;
    match resource {
        Resource::MemoryBandwidth => {
            cluster.with_profiles(|card| rate(&mut card.memory.bandwidth.value))
        }
        Resource::Compute => cluster.with_profiles(|card| card.compute.rate.value.0 *= factor),
        Resource::MemoryAndCompute => {
            let memory = changed(cluster, Resource::MemoryBandwidth, factor);
            changed(&memory, Resource::Compute, factor)
        }
        Resource::FixedCost => {
            cluster.with_profiles(|card| latency(&mut card.compute.per_operator.value))
        }
        Resource::HostLatency => {
            cluster.with_profiles(|card| latency(&mut card.host.latency.value))
        }
        Resource::LinkBandwidth => {
            let wires = cluster.with_changed_wires(|wire| rate(&mut wire.bandwidth));
            wires.with_changed_shared(|shared, _| rate(&mut shared.bandwidth))
        }
        Resource::LinkLatency => cluster.with_changed_wires(|wire| latency(&mut wire.latency)),
    }
}

/// The cluster with every number at the good or the bad end of its range.
fn at_end(cluster: &Cluster, good: bool) -> Cluster {
    fn set<T: Copy>(value: &mut Value<T>, end: Option<T>) {
        if let Some(end) = end {
            value.value = end;
        }
    }
    let ratio = |wire: &Wire, of: fn(&Profile) -> Option<f64>| {
        let node = wire.from.min(wire.to).min(cluster.cards() - 1);
        let mut profile = cluster.profile(node).clone();
        // A star runs over the host links.
        if cluster.shape() == Shape::Star {
            profile.link = None;
        }
        of(&profile).unwrap_or(1.0)
    };
    let wires = cluster.with_changed_wires(|wire| {
        let (faster, sooner) = match good {
            true => (ratio(wire, best_rate), ratio(wire, least_latency)),
            false => (ratio(wire, worst_rate), ratio(wire, most_latency)),
        };
        wire.bandwidth.0 = ((wire.bandwidth.0 as f64 * faster) as u64).max(1);
        wire.latency = wire.latency * sooner;
    });
    let wires = wires.with_changed_shared(|shared, wire| {
        let faster = ratio(wire, if good { best_rate } else { worst_rate });
        shared.bandwidth.0 = ((shared.bandwidth.0 as f64 * faster) as u64).max(1);
    });
    wires.with_profiles(|card| {
        let memory = &mut card.memory.bandwidth;
        set(memory, if good { memory.high } else { memory.low });
        let compute = &mut card.compute;
        let rate = &mut compute.rate;
        set(rate, if good { rate.high } else { rate.low });
        for time in [&mut compute.per_operator, &mut compute.per_token, &mut card.host.latency] {
            set(time, if good { time.low } else { time.high });
        }
    })
}

fn best_rate(card: &Profile) -> Option<f64> {
    let rate = &card.link.as_ref()?.bandwidth;
    Some(rate.high?.0 as f64 / rate.value.0 as f64)
}

fn worst_rate(card: &Profile) -> Option<f64> {
    let rate = &card.link.as_ref()?.bandwidth;
    Some(rate.low?.0 as f64 / rate.value.0 as f64)
}

fn least_latency(card: &Profile) -> Option<f64> {
    let latency = card.link.as_ref().map_or(&card.host.latency, |link| &link.latency);
    Some(latency.low?.0 / latency.value.0).filter(|ratio| ratio.is_finite())
}

fn most_latency(card: &Profile) -> Option<f64> {
    let latency = card.link.as_ref().map_or(&card.host.latency, |link| &link.latency);
    Some(latency.high?.0 / latency.value.0).filter(|ratio| ratio.is_finite())
}

/// What would make a model fit that does not.
#[derive(Debug, Clone, PartialEq)]
pub struct Remedies {
    /// The fullest card of the layout that comes nearest.
    pub card: usize,
    /// By how much it is too full.
    pub over: Bytes,
    /// What all cards of that layout would need, and what they have for a model.
    pub total: (Bytes, Bytes),
    /// How many cards of the last card's kind, in all, would do.
    pub cards: Option<usize>,
    /// The longest context that fits on the cards that there are.
    pub context: Option<u64>,
    /// The largest quantisation below the present one that fits.
    pub quant: Option<Quant>,
}

/// Says by how much a model does not fit, and the smallest changes of each kind that would help.
#[must_use]
pub fn remedies(
    model: &Model,
    cluster: &Cluster,
    cards: &[usize],
    request: &Request,
    choice: &Choice,
) -> Option<Remedies> {
    if choice.best().is_some() {
        return None;
    }
    let over = |m: &CardMemory| m.used().0.saturating_sub(m.capacity.0);
    let fullest = |candidate: &&Candidate| candidate.prediction.memory.iter().map(over).max();
    let nearest = choice.candidates.iter().min_by_key(fullest)?;
    let worst = nearest.prediction.memory.iter().max_by_key(|m| over(m))?;
    let needed = nearest.prediction.memory.iter().map(|m| m.footprint.total()).sum();
    let usable = cards.iter().map(|&card| cluster.profile(card).usable()).sum();
    // Types that a run has products for: smaller ones could be planned and not run.
    let smaller = [Quant::Q8_0, Quant::Q6K, Quant::Q5K, Quant::Q4K, Quant::Q4_0];
    let now = model.weight_bytes();
    let quant = smaller.into_iter().find(|&quant| {
        let model = model.with_quant(quant);
        model.weight_bytes() < now && holds(&model, cluster, cards, request)
    });
    Some(Remedies {
        card: worst.card,
        over: Bytes(over(worst)),
        total: (needed, usable),
        cards: more_cards(cluster, cards, needed, |cluster, cards| {
            holds(model, cluster, cards, request)
        }),
        context: less_context(request, |request| holds(model, cluster, cards, request)),
        quant,
    })
}

/// The least number of cards, by adding some like the last one.
fn more_cards(
    cluster: &Cluster,
    cards: &[usize],
    needed: Bytes,
    fits: impl Fn(&Cluster, &[usize]) -> bool,
) -> Option<usize> {
    if cluster.shape() == Shape::Links || cards.len() != cluster.cards() {
        return None;
    }
    let present: Vec<Profile> = cards.iter().map(|&card| cluster.profile(card).clone()).collect();
    let last = present.last()?;
    let shape = match cluster.shape() {
        Shape::PointToPoint => Shape::Ring,
        shape => shape,
    };
    let enough = |count: usize| {
        let mut profiles = present.clone();
        profiles.resize(count, last.clone());
        let all: Vec<usize> = (0..count).collect();
        Cluster::new(profiles, shape).is_ok_and(|larger| fits(&larger, &all))
    };
    // Fewer cannot even hold the bytes, a little less than which several groups may share.
    let usable: u64 = present.iter().map(|card| card.usable().0).sum();
    let missing = (0.9 * needed.0 as f64 - usable as f64).max(0.0) / last.usable().0 as f64;
    let least = cards.len() + (missing.ceil() as usize).max(1);
    (least..=MAX_CARDS).find(|&count| enough(count))
}

/// The longest context that fits, if any does.
fn less_context(request: &Request, fits: impl Fn(&Request) -> bool) -> Option<u64> {
    let enough = |context: u64| {
        let prompt = request.prompt.min(context);
        let position = request.position.min(context - 1);
        fits(&Request { context, prompt, position, ..request.clone() })
    };
    let (mut low, mut high) = (1, request.context);
    if !enough(low) {
        return None;
    }
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if enough(middle) { low = middle } else { high = middle }
    }
    Some(low)
}
