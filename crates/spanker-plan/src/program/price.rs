// SPDX-License-Identifier: Apache-2.0
//! What an operator costs on a card. Chooser, predictor, simulator and emulated card all ask here.
//!
//! An operator takes the longer of its arithmetic and its memory traffic, and a fixed cost; where a profile
//! has measured a kind of operator, it takes what was measured.

use serde::{Deserialize, Serialize};
use spanker_collective::DType;
use spanker_model::Quant;
use spanker_topology::{OperatorKind, OperatorRate, Profile, Seconds, operator_time};

use crate::work::{Place, Work};

/// Operators of a layer on one card that have a fixed cost: a norm, queries with keys and values, attention, output, a
/// sum, a norm, gate with up, down, a sum. What a layer does between these is counted by its traffic alone.
pub const OPERATORS_PER_LAYER: u32 = 9;

/// Where a time goes. The parts add up to it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Terms {
    /// Reading and writing local memory.
    pub memory: Seconds,
    /// Arithmetic, as far as it takes longer than the memory traffic that it overlaps.
    pub compute: Seconds,
    /// Collectives and hand-offs between cards.
    pub communication: Seconds,
    /// Fixed costs of operators and tokens, the host's latency.
    pub fixed: Seconds,
}

impl Terms {
    /// The whole time.
    #[must_use]
    pub fn total(&self) -> Seconds {
        self.memory + self.compute + self.communication + self.fixed
    }

    pub(crate) fn plus(self, other: Terms) -> Terms {
        Terms {
            memory: self.memory + other.memory,
            compute: self.compute + other.compute,
            communication: self.communication + other.communication,
            fixed: self.fixed + other.fixed,
        }
    }

    pub(crate) fn times(self, factor: f64) -> Terms {
        Terms {
            memory: self.memory * factor,
            compute: self.compute * factor,
            communication: self.communication * factor,
            fixed: self.fixed * factor,
        }
    }

    pub(crate) fn later(self, other: Terms) -> Terms {
        if other.total().0 > self.total().0 { other } else { self }
    }

    /// Part way from one to the other.
    pub(crate) fn towards(self, other: Terms, part: f64) -> Terms {
        self.times(1.0 - part).plus(other.times(part))
    }
}

/// What an operator counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Its kind.
    pub kind: OperatorKind,
    /// The type of the weights of a product.
    pub weights: Option<Quant>,
    /// Rows of activations.
    pub rows: u64,
    /// Bytes read and written in the card's memory.
    pub bytes: u64,
    /// Multiply-accumulates.
    pub macs: u64,
    /// What measured rates of its kind count: see [`OperatorKind`].
    pub units: u64,
    /// Whether it takes the fixed time of an operator.
    pub starts: bool,
}

impl Load {
    #[inline(always)]
    fn new(kind: OperatorKind, rows: u64, bytes: u64, starts: bool) -> Load {
        Load { kind, weights: None, rows, bytes, macs: 0, units: bytes, starts }
    }
}

/// Types by GGML's numbers.
const BY_ID: [Option<Quant>; 64] = {
    let (mut table, mut at) = ([None; 64], 0);
    while at < Quant::ALL.len() {
        if let Some(id) = Quant::ALL[at].ggml_id() {
            table[id as usize] = Some(Quant::ALL[at]);
        }
        at += 1;
    }
    table
};

#[inline]
fn by_id(id: u32) -> Option<Quant> {
    BY_ID.get(id as usize).copied().flatten()
}

#[inline]
fn row_bytes(id: u32, width: u64) -> u64 {
    by_id(id).map_or(0, |quant| quant.row_bytes(width))
}

/// The heads of keys and values that heads of queries use: the first, and the one behind the last.
fn shared_heads(heads: u64, group: u64, offset: u64) -> (u64, u64) {
    let group = group.max(1);
    (offset / group, (offset + heads).div_ceil(group))
}

/// What an operator counts for that comes behind another one; nothing for transfers and fences.
///
/// Products that follow each other with the same inputs are one operator: queries with keys and values, gate
/// with up. What models do between products is not counted as operators either; its traffic is.
#[must_use]
pub fn load(work: &Work, before: Option<&Work>) -> Option<Load> {
    let inputs = inputs(work);
    load_of(work, inputs.is_some() && before.and_then(self::inputs) == inputs)
}

/// What the operators of a program count for, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    before: Option<Inputs>,
}

impl Loads {
    /// What the next operator counts for. Where the operator is known, little of this is left after inlining.
    #[inline(always)]
    pub(crate) fn next(&mut self, work: &Work) -> Option<Load> {
        let inputs = inputs(work);
        let follows = inputs.is_some() && inputs == self.before;
        self.before = inputs;
        load_of(work, follows)
    }

    /// Something comes between that is no operator.
    pub(crate) fn interrupt(&mut self) {
        self.before = None;
    }
}

/// The inputs of a product: where they are, rows, columns and type.
type Inputs = (Place, u64, u64, u32);

#[inline(always)]
fn inputs(work: &Work) -> Option<Inputs> {
    match *work {
        Work::Matmul { a, shape: [rows, width, _], types: [kind, _], .. } => {
            Some((a, rows, width, kind))
        }
        _ => None,
    }
}

/// What an operator counts for; `follows` says whether it is a product behind another one of the same inputs.
#[inline(always)]
fn load_of(work: &Work, follows: bool) -> Option<Load> {
    use OperatorKind as Kind;
    Some(match *work {
        Work::Copy { length, .. } => Load::new(Kind::Copy, 1, 2 * length, true),
        Work::Fill { length, .. } => Load::new(Kind::Copy, 1, length, true),
        Work::Reduce { ref sources, elements, fold, .. } => {
            let size = DType::from_code(fold.dtype).map_or(0, DType::size) as u64;
            Load::new(Kind::Add, 1, (sources.len() as u64 + 1) * elements * size, true)
        }
        Work::Matmul { shape: [m, k, n], types: [a, b], .. } => {
            let inputs = if follows { 0 } else { m * row_bytes(a, k) };
            let weights = n * row_bytes(b, k);
            let bytes = inputs + weights + m * n * 4;
            let load = Load::new(Kind::Product, m, bytes, !follows);
            Load { weights: by_id(b), macs: m * n * k, units: weights, ..load }
        }
        Work::Norm { rows, width, .. } => {
            Load::new(Kind::Norm, rows, (2 * rows + 1) * width * 4, true)
        }
        Work::Attend { rows, heads, head_size, group, offset, past, .. } => {
            let (first, behind) = shared_heads(heads, group, offset);
            let kept = (behind - first) * head_size * 2;
            let seen = rows * past + rows * (rows + 1) / 2;
            let macs = 2 * seen * heads * head_size;
            let load = Load::new(Kind::Attention, rows, 2 * (past + rows) * kept, true);
            Load { macs, units: macs, ..load }
        }
        Work::Embed { rows, width, quant, .. } => {
            let bytes = rows * (4 + row_bytes(quant, width) + width * 4);
            Load::new(Kind::Embed, rows, bytes, false)
        }
        Work::Quantize { rows, width, quant, .. } => {
            let bytes = rows * (width * 4 + row_bytes(quant, width));
            Load::new(Kind::Quantize, rows, bytes, false)
        }
        Work::Rotate { rows, heads, head_size, dims, .. } => {
            Load::new(Kind::Rotate, rows, rows * (2 * heads * head_size + dims) * 4, false)
        }
        Work::Halve { elements, .. } => Load::new(Kind::Cache, 1, 6 * elements, false),
        Work::Gate { elements, .. } => Load::new(Kind::Gate, 1, 12 * elements, false),
        Work::Rows { rows, length, .. } => Load::new(Kind::Copy, rows, 2 * rows * length, false),
        Work::Best { count, k, .. } => {
            Load::new(Kind::Best, 1, 4 * count + 8 * u64::from(k), false)
        }
        Work::Send { .. } | Work::Receive { .. } | Work::Fence { .. } => return None,
    })
}

/// A kind of operator and the type of its weights.
type Measured = (OperatorKind, Option<Quant>);

/// What operators cost on one card: its profile's numbers, ready for use.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    per_byte: f64,
    per_mac: f64,
    operator: f64,
    /// What a token takes besides, where its candidates are picked.
    per_token: f64,
    /// What was measured, by kind and type of weights.
    measured: Vec<(Measured, Vec<OperatorRate>)>,
}

impl Cost {
    /// The costs by a profile.
    #[must_use]
    pub fn of(profile: &Profile) -> Cost {
        let mut measured: Vec<(Measured, Vec<OperatorRate>)> = Vec::new();
        for entry in &profile.compute.operators {
            let quant = entry.weights.as_deref().and_then(|name| name.parse().ok());
            let key = (entry.kind, quant);
            match measured.iter_mut().find(|(known, _)| *known == key) {
                Some((_, entries)) => entries.push(entry.clone()),
                None => measured.push((key, vec![entry.clone()])),
            }
        }
        Cost {
            per_byte: 1.0 / profile.memory.bandwidth.value.0 as f64,
            per_mac: 1.0 / profile.compute.rate.value.0,
            operator: profile.compute.per_operator.value.0,
            per_token: profile.compute.per_token.value.0,
            measured,
        }
    }

    /// What an operator takes.
    #[must_use]
    #[inline(always)]
    pub fn operator(&self, load: &Load) -> Terms {
        let terms = match self.measured.is_empty() {
            true => None,
            false => self.by_measurement(load),
        };
        let mut terms = terms.unwrap_or_else(|| self.by_rates(load));
        if load.kind == OperatorKind::Best {
            terms.fixed += Seconds(self.per_token);
        }
        terms
    }

    fn by_rates(&self, load: &Load) -> Terms {
        let memory = load.bytes as f64 * self.per_byte;
        let compute = (load.macs as f64 * self.per_mac - memory).max(0.0);
        let fixed = if load.starts { self.operator } else { 0.0 };
        Terms {
            memory: Seconds(memory),
            compute: Seconds(compute),
            communication: Seconds::ZERO,
            fixed: Seconds(fixed),
        }
    }

    #[inline(never)]
    fn by_measurement(&self, load: &Load) -> Option<Terms> {
        let find = |weights: Option<Quant>| {
            let key = (load.kind, weights);
            self.measured.iter().find(|(known, _)| *known == key).map(|(_, entries)| entries)
        };
        let entries = find(load.weights).or_else(|| find(None))?;
        let units = load.units as f64;
        let whole = operator_time(entries, load.rows, units)?;
        let empty = operator_time(entries, load.rows, 0.0)?;
        // One of several that share their inputs adds its size and not its start.
        let fixed = if load.kind == OperatorKind::Product && !load.starts { 0.0 } else { empty };
        let one = entries.first().map_or(0.0, |first| units / first.rate);
        let memory = one.min(whole - empty);
        Some(Terms {
            memory: Seconds(memory),
            compute: Seconds(whole - empty - memory),
            communication: Seconds::ZERO,
            fixed: Seconds(fixed),
        })
    }

    /// What moving bytes to or from the card's memory takes.
    #[must_use]
    pub fn memory(&self, bytes: f64) -> f64 {
        bytes * self.per_byte
    }

    /// The fixed cost of an operator.
    #[must_use]
    pub fn fixed(&self) -> f64 {
        self.operator
    }
}
