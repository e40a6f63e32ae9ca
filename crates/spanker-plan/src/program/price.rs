// SPDX-License-Identifier: Apache-2.0
//! What an operator costs on a card. Chooser, predictor, simulator and emulated card all ask here.
//!
//! An operator takes the longer of its arithmetic and its memory traffic, and a fixed cost; where a profile
//! has measured a kind of operator, it takes what was measured.

use serde::{Deserialize, Serialize};
use spanker_model::{Quant, distinct_experts};
use spanker_topology::{OperatorKind, OperatorRate, Profile, Seconds, operator_time};

use crate::work::{PICK_BYTES, Place, ROW_BYTES, Work};

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

/// How far back the rows of a step look: what attention counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach {
    /// Positions whose keys and values are read, of every sequence once.
    pub read: u64,
    /// Positions that are seen by rows which are alone in their sequence.
    pub by_single: u64,
    /// Positions that are seen by all other rows.
    pub by_several: u64,
    /// The most rows of one sequence.
    pub longest: u64,
    /// Rows that are alone in their sequence.
    pub singles: u64,
    /// Sequences of more rows, and their rows.
    pub several: [u64; 2],
}

impl Reach {
    /// Of sequences by their rows and the positions before them.
    ///
    /// ```
    /// use spanker_plan::Reach;
    /// let reach = Reach::of([(1, 9), (3, 4)]);
    /// assert_eq!((reach.read, reach.by_single, reach.by_several), (10 + 7, 10, 5 + 6 + 7));
    /// ```
    #[must_use]
    pub fn of(sequences: impl IntoIterator<Item = (u64, u64)>) -> Reach {
        let mut reach = Reach::default();
        for (rows, past) in sequences {
            let seen = rows.saturating_mul(past).saturating_add(rows * (rows + 1) / 2);
            reach.read = reach.read.saturating_add(past.saturating_add(rows));
            let by = if rows == 1 { &mut reach.by_single } else { &mut reach.by_several };
            *by = by.saturating_add(seen);
            reach.longest = reach.longest.max(rows);
            match rows {
                1 => reach.singles += 1,
                _ => reach.several = [reach.several[0] + 1, reach.several[1].saturating_add(rows)],
            }
        }
        reach
    }

    /// The same where rows see the last `window` positions only, 0 for all: as if sequences of one row looked equally far
    /// back, and those of more rows, too.
    ///
    /// ```
    /// use spanker_plan::Reach;
    /// let reach = Reach::of([(3, 4)]).within(6);
    /// assert_eq!((reach.read, reach.by_several), (7, 5 + 6 + 6));
    /// assert_eq!(Reach::of([(1, 99), (1, 99)]).within(6), Reach { read: 12, by_single: 12, ..Reach::of([(1, 99), (1, 99)]) });
    /// ```
    #[must_use]
    pub fn within(self, window: u64) -> Reach {
        if window == 0 {
            return self;
        }
        let alone = self.by_single.checked_div(self.singles).unwrap_or(0).min(window);
        let by_single = alone.saturating_mul(self.singles);
        let [sequences, all] = self.several;
        let rows = all.checked_div(sequences).unwrap_or(0);
        let of_one = self.by_several.checked_div(sequences).unwrap_or(0);
        let past = of_one.saturating_sub(rows.saturating_mul(rows.saturating_add(1)) / 2);
        let past = past.checked_div(rows).unwrap_or(0);
        // So many rows see everything before them.
        let below = window.saturating_sub(past).min(rows);
        let own = below.saturating_mul(below.saturating_add(1)) / 2;
        let seen = below.saturating_mul(past).saturating_add(own);
        let seen = seen.saturating_add((rows - below).saturating_mul(window));
        let read = past.saturating_add(rows).min((window - 1).saturating_add(rows));
        Reach {
            read: by_single.saturating_add(read.saturating_mul(sequences)).min(self.read),
            by_single,
            by_several: seen.saturating_mul(sequences).min(self.by_several),
            ..self
        }
    }

    /// Of rows by their positions and block tables, as they lie in a card's memory: rows of the same table that follow
    /// each other are of one sequence.
    #[must_use]
    pub fn of_rows(rows: &[[u32; 2]]) -> Reach {
        let sequences = rows.chunk_by(|one, next| one[1] == next[1]);
        Reach::of(sequences.map(|rows| (rows.len() as u64, u64::from(rows[0][0]))))
    }

    /// Positions that are seen by all rows.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.by_single.saturating_add(self.by_several)
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
    /// Of these, those of attention of sequences of one row, beside others of more rows.
    pub single_units: u64,
    /// Such sequences.
    pub singles: u64,
    /// Whether it takes the fixed time of an operator.
    pub starts: bool,
}

impl Load {
    /// What storing the tables of a step counts for.
    #[must_use]
    pub fn data(bytes: u64) -> Load {
        Load::new(OperatorKind::Copy, 1, bytes, true)
    }

    #[inline(always)]
    fn new(kind: OperatorKind, rows: u64, bytes: u64, starts: bool) -> Load {
        let (units, single_units, singles) = (bytes, 0, 0);
        Load { kind, weights: None, rows, bytes, macs: 0, units, single_units, singles, starts }
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
///
/// `reach` is that of the step's rows.
#[must_use]
pub fn load(work: &Work, before: Option<&Work>, reach: &Reach) -> Option<Load> {
    let inputs = inputs(work);
    load_of(work, inputs.is_some() && before.and_then(self::inputs) == inputs, reach)
}

/// What the operators of a program count for, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    before: Option<Inputs>,
}

impl Loads {
    /// What the next operator counts for. Where the operator is known, little of this is left after inlining.
    #[inline(always)]
    pub(crate) fn next(&mut self, work: &Work, reach: &Reach) -> Option<Load> {
        let inputs = inputs(work);
        let follows = inputs.is_some() && inputs == self.before;
        self.before = inputs;
        load_of(work, follows, reach)
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
        Work::MatmulExperts { a, shape: [rows, width, _], types: [kind, _], .. } => {
            Some((a, rows, width, kind))
        }
        _ => None,
    }
}

/// What an operator counts for; `follows` says whether it is a product behind another one of the same inputs.
#[inline(always)]
fn load_of(work: &Work, follows: bool, reach: &Reach) -> Option<Load> {
    use OperatorKind as Kind;
    Some(match *work {
        Work::Copy { length, .. } => Load::new(Kind::Copy, 1, 2 * length, true),
        Work::Fill { length, .. } => Load::new(Kind::Copy, 1, length, true),
        Work::Reduce { ref sources, elements, fold, .. } => {
            Load::new(Kind::Add, 1, (sources.len() as u64 + 1) * elements * fold.size(), true)
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
        Work::Write { ref bytes, .. } => Load::data(bytes.len() as u64),
        Work::AddRow { rows, width, .. } => {
            Load::new(Kind::Add, rows, (2 * rows + 1) * width * 4, true)
        }
        Work::RotateRows { rows, heads, head_size, dims, .. } => {
            let bytes = rows * ((2 * heads * head_size + dims) * 4 + ROW_BYTES);
            Load::new(Kind::Rotate, rows, bytes, false)
        }
        Work::Keep { rows, cache, .. } => {
            let each =
                2 * cache.heads * (cache.head_size * 4 + row_bytes(cache.quant, cache.head_size));
            Load::new(Kind::Cache, rows, rows * (each + ROW_BYTES), false)
        }
        Work::AttendBlocks { rows, heads, group, offset, cache, ref scores, .. } => {
            let (first, behind) = shared_heads(heads, group, offset);
            let kept = 2 * (behind - first) * row_bytes(cache.quant, cache.head_size);
            let each = 2 * heads * cache.head_size;
            attention(rows, [kept, each], &reach.within(scores.window))
        }
        Work::Gate { elements, .. } => Load::new(Kind::Gate, 1, 12 * elements, false),
        Work::Scale { elements, .. } => Load::new(Kind::Gate, 1, 8 * elements, false),
        Work::Rows { rows, length, .. } => Load::new(Kind::Copy, rows, 2 * rows * length, false),
        Work::Best { count, k, .. } => {
            Load::new(Kind::Best, 1, 4 * count + 8 * u64::from(k), false)
        }
        ref other => return load_of_experts(other, follows),
    })
}

/// What attention counts for that reads so many bytes of each position, and multiplies so often for each that a row sees.
#[inline(always)]
fn attention(rows: u64, [kept, each]: [u64; 2], reach: &Reach) -> Load {
    let bytes = reach.read.saturating_mul(kept);
    let [macs, single_units] =
        [reach.seen(), reach.by_single].map(|seen| seen.saturating_mul(each));
    let load = Load::new(OperatorKind::Attention, rows, bytes, true);
    let load = Load { macs, units: macs, ..load };
    match (reach.several[0], reach.singles) {
        (0, 2..) => Load { kind: OperatorKind::ManyAttention, rows: reach.singles, ..load },
        (_, singles) => Load { rows: reach.longest, single_units, singles, ..load },
    }
}

/// The same of mixtures of experts.
#[inline(always)]
fn load_of_experts(work: &Work, follows: bool) -> Option<Load> {
    use OperatorKind as Kind;
    Some(match *work {
        Work::MatmulExperts { picks, shape: [m, k, n], types: [a, b], apart, .. } => {
            let made = m * picks.used;
            let given = if apart { made } else { m };
            let inputs = if follows { 0 } else { given * row_bytes(a, k) };
            // Which experts rows meet is not known before: as many as a draw comes to.
            let met = distinct_experts(picks.experts, picks.used, m).max(1);
            let weights = met * n * row_bytes(b, k);
            let bytes = inputs + weights + made * (n * 4 + PICK_BYTES);
            let load = Load::new(Kind::Product, made.div_ceil(met), bytes, !follows);
            Load { weights: by_id(b), macs: made * n * k, units: weights, ..load }
        }
        Work::Route { rows, picks, .. } => {
            let bytes = rows * (picks.experts * 4 + picks.used * PICK_BYTES);
            Load::new(Kind::Gate, rows, bytes, false)
        }
        Work::Combine { rows, width, picks, add, .. } => {
            let read = picks.used + u64::from(add);
            let bytes = rows * ((read + 1) * width * 4 + picks.used * PICK_BYTES);
            Load::new(Kind::Add, rows, bytes, true)
        }
        Work::AddPicked { rows, width, picks, weighed, .. } => {
            // Rows of the table are read; what they are added to is read and written.
            let (read, sums) = (picks.used, if weighed { 2 } else { 2 * picks.used });
            let bytes = rows * ((read + sums) * width * 4 + picks.used * PICK_BYTES);
            Load::new(Kind::Add, rows, bytes, true)
        }
        _ => return None,
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

    fn entries(&self, kind: OperatorKind, weights: Option<Quant>) -> Option<&[OperatorRate]> {
        let key = (kind, weights);
        let found = self.measured.iter().find(|(known, _)| *known == key)?;
        Some(&found.1)
    }

    #[inline(never)]
    fn by_measurement(&self, load: &Load) -> Option<Terms> {
        let many = self.entries(OperatorKind::ManyAttention, None);
        if load.kind == OperatorKind::ManyAttention && many.is_none() {
            // Of one sequence it was measured.
            let (kind, rows, single_units) = (OperatorKind::Attention, 1, load.units);
            return self.by_measurement(&Load { kind, rows, single_units, ..*load });
        }
        let entries = self.entries(load.kind, load.weights);
        let entries = entries.or_else(|| self.entries(load.kind, None))?;
        let units = load.units as f64;
        let empty = operator_time(entries, load.rows, 0.0)?;
        let alone = match (load.single_units as f64, many.filter(|_| load.singles > 1)) {
            (0.0, _) => 0.0,
            (units, Some(many)) => operator_time(many, load.singles, units)?,
            (units, None) => operator_time(entries, 1, units)? - operator_time(entries, 1, 0.0)?,
        };
        let together = units - load.single_units as f64;
        let whole = operator_time(entries, load.rows, together)? + alone;
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
