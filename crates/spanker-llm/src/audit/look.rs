// SPDX-License-Identifier: Apache-2.0
//! What is looked at in a step of a machine: results of a few runs of operators, bytes that an exchange leaves, and cells of
//! the KV cache. Chosen by chance that follows from the step, compared once their bytes are here.

use std::ops::Range;

use spanker_collective::{DType, ReduceOp};
use spanker_model::Quant;
use spanker_plan::{
    Activity, Buffer, CachedCell, Dice, Fold, Label, Op, Place, Programs, Step, Work,
};

pub(crate) use super::evaluate::Rows;
use super::evaluate::{Content, Evaluate, Outside, Pick, after, results, written};
use super::{Auditor, Member, part_of};
use crate::LlmError;
use crate::machine::{Capture, Region, Role};

/// Elements of a row of results that are compared.
const SAMPLES: u64 = 16;
/// Bytes of a run of bytes that is compared.
const RUN: u64 = 256;

/// Results of a run that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Results {
    Numbers(usize, Pick),
    Blocks(usize, Place, Quant),
    Bytes(usize, Place, u64),
    /// A key or value of a head of a row.
    Cell(usize, u64, u64, bool),
}

/// What is compared.
#[derive(Debug, Clone, PartialEq)]
enum Subject {
    Results(Results),
    Cached(CachedCell),
    /// What the ranks of a stage give each other: each rank's own bytes, and what it has afterwards.
    Exchange(Vec<[Option<Region>; 2]>, Option<Fold>),
}

/// Something that is looked at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Look {
    member: usize,
    ops: Range<usize>,
    label: Label,
    subject: Subject,
    /// What is captured on each member that has a part in it.
    regions: Vec<(usize, Vec<Region>)>,
}

impl Look {
    /// What the machine has to capture for it.
    pub(crate) fn captures(&self) -> impl Iterator<Item = Capture> + '_ {
        let capture = |(member, regions): &(usize, Vec<Region>)| {
            let (member, ops, regions) = (*member, self.ops.clone(), regions.clone());
            Capture { member, ops, regions }
        };
        self.regions.iter().map(capture)
    }
}

/// What things are chosen from.
pub(crate) struct Looking<'l> {
    pub(crate) layout: &'l Programs,
    pub(crate) programs: &'l [Vec<Op>],
    pub(crate) labels: &'l [Vec<Label>],
    /// Of each member: the runs of operators that its card does in one go.
    pub(crate) runs: &'l [Vec<Range<usize>>],
    pub(crate) step: &'l Step<'l>,
    pub(crate) rows: &'l Rows,
    /// Another number gives another choice; any but 0 looks at as much as there is room for.
    pub(crate) salt: u64,
}

impl Looking<'_> {
    /// What is looked at, and the bytes of it on each member. `members` are where each has its weights.
    pub(crate) fn choose(
        &self,
        auditor: &Auditor<'_>,
        members: &[Member<'_>],
    ) -> Result<(Vec<Look>, Vec<u64>), LlmError> {
        let seed = Dice::seed(self.step);
        let (mut looks, mut used) = (Vec::new(), vec![0; members.len()]);
        for group in self.layout.groups().iter().filter(|group| group.len() > 1) {
            // All ranks of a stage look at the same bytes of the same exchange.
            let mut dice = Dice::new(&[seed, self.rows.len(), group.start as u64, self.salt, 1]);
            looks.extend(self.exchange(group, &mut dice, &mut used));
        }
        for &member in members {
            let mut dice = Dice::new(&[seed, self.rows.len(), member.at as u64, self.salt]);
            let mut cells = Vec::new();
            let cached = self.layout.cached_cells(member.at, self.step, &mut dice);
            for cell in cached {
                let look = self.cached(member.at, cell);
                let bytes: u64 =
                    look.regions.iter().flat_map(|(_, all)| all).map(Region::bytes).sum();
                cells.push((look, bytes.next_multiple_of(Region::ALIGNMENT)));
            }
            let room: u64 = cells.iter().map(|(_, bytes)| bytes).sum();
            let most = self.layout.audit_bytes(member.at).saturating_sub(room);
            self.results(auditor, member, (most, &mut dice), &mut looks, &mut used[member.at])?;
            for (mut look, bytes) in cells {
                if used[member.at] + bytes <= self.layout.audit_bytes(member.at) {
                    look.regions.iter_mut().flat_map(|(_, all)| all).for_each(|region| {
                        region.at = used[member.at];
                    });
                    used[member.at] += bytes;
                    looks.push(look);
                }
            }
        }
        Ok((looks, used))
    }

    /// Results of some runs of a member.
    fn results(
        &self,
        auditor: &Auditor<'_>,
        member: Member<'_>,
        (most, dice): (u64, &mut Dice),
        looks: &mut Vec<Look>,
        used: &mut u64,
    ) -> Result<(), LlmError> {
        let runs = &self.runs[member.at];
        let wanted = match self.salt {
            0 => self.layout.space().audit.count(runs.len() as u64) as usize,
            _ => runs.len(),
        };
        let [large, largest] = self.layout.audit_limits();
        let mut chosen: Vec<usize> = Vec::new();
        // Some that are chosen are too large; there are as many tries as it takes for one at least.
        for _ in 0..16.max(2 * wanted) {
            if chosen.len() >= wanted || runs.is_empty() {
                break;
            }
            let at = dice.below(runs.len() as u64) as usize;
            if chosen.contains(&at) {
                continue;
            }
            let ops = runs[at].clone();
            let own = &self.programs[member.at][ops.clone()];
            let outside = Outside::Wanted(Vec::new());
            let mut evaluate =
                Evaluate { auditor, member, ops: own, rows: self.rows, outside, used: *used };
            let Some(results) = choose(&evaluate, dice)? else { continue };
            compute(&mut evaluate, results)?;
            let (end, bytes) = (evaluate.used, evaluate.used - *used);
            let often = bytes <= large || dice.below(bytes) < large;
            if bytes > largest || !often || end > most {
                continue;
            }
            let Outside::Wanted(regions) = evaluate.outside else { continue };
            *used = end;
            chosen.push(at);
            let label = self.label(member.at, ops.end - 1);
            let subject = Subject::Results(results);
            let regions = vec![(member.at, regions)];
            looks.push(Look { member: member.at, ops, label, subject, regions });
        }
        Ok(())
    }

    fn label(&self, member: usize, op: usize) -> Label {
        let outside = Label { activity: Activity::Host, layer: 0, token: 0 };
        self.labels[member].get(op).copied().unwrap_or(outside)
    }

    /// A cell of the KV cache, after everything.
    fn cached(&self, member: usize, cell: CachedCell) -> Look {
        let numbers = cell.numbers;
        let from = after(self.layout.members()[member].place(Buffer::Kv), numbers.offset);
        let (rows, length, stride) = (numbers.rows, numbers.length, numbers.stride);
        let region = Region { from, rows, length, stride, role: Role::Written, at: 0 };
        let end = self.programs[member].len();
        let layer = cell.layer as u32;
        let label = Label { activity: Activity::Attention, layer, token: 0 };
        let (subject, regions) = (Subject::Cached(cell), vec![(member, vec![region])]);
        Look { member, ops: end..end, label, subject, regions }
    }

    /// Some bytes of what the ranks of a stage have after one of their exchanges, and of what each had before.
    fn exchange(&self, group: &Range<usize>, dice: &mut Dice, used: &mut [u64]) -> Option<Look> {
        let exchanges = |member: usize| {
            let program = &self.programs[member];
            (0..program.len()).filter(|&at| program[at].is_exchange()).collect::<Vec<usize>>()
        };
        let all: Vec<Vec<usize>> = group.clone().map(exchanges).collect();
        let which = dice.below(all[0].len() as u64) as usize;
        let first = *all[0].get(which)?;
        let region = |from: Place, length: u64, role: Role| Region {
            from,
            rows: 1,
            length,
            stride: length,
            role,
            at: 0,
        };
        let length = match &self.programs[group.start][first] {
            Op::Gather { parts, .. } => parts.last()?.end,
            Op::Fold { elements, .. } => elements * 4,
            _ => return None,
        };
        let bytes = length.min(RUN);
        let start = dice.below((length - bytes) / 4 + 1) * 4;
        let of_row = dice.below(u64::MAX);
        let (mut parts, mut folds) = (Vec::new(), None);
        for (rank, member) in group.clone().enumerate() {
            parts.push(match &self.programs[member][*all[rank].get(which)?] {
                Op::Gather { parts, rows, from, into } => {
                    let (part, row) = (&parts[rank], of_row % rows.max(&1));
                    let (begin, end) = (part.start.max(start), part.end.min(start + bytes));
                    let from = after(*from, row * (part.end - part.start));
                    let own = (begin < end)
                        .then(|| region(after(from, begin - part.start), end - begin, Role::Read));
                    let into = after(*into, row * length + start);
                    [own, Some(region(into, bytes, Role::Written))]
                }
                Op::Fold { data, fold, .. } => {
                    folds = Some(*fold);
                    let place = after(*data, start);
                    [Role::Overwritten, Role::Written].map(|role| Some(region(place, bytes, role)))
                }
                _ => return None,
            });
        }
        let mut regions = Vec::new();
        for (member, own) in group.clone().zip(&mut parts) {
            let mut kept = Vec::new();
            for region in own.iter_mut().flatten() {
                region.at = used[member];
                used[member] = (used[member] + region.bytes()).next_multiple_of(Region::ALIGNMENT);
                kept.push(*region);
            }
            regions.push((member, kept));
        }
        let (ops, label) = (first..first + 1, self.label(group.start, first));
        let subject = Subject::Exchange(parts, folds);
        Some(Look { member: group.start, ops, label, subject, regions })
    }
}

/// Chooses results of a run. Nothing if it has none.
fn choose(run: &Evaluate<'_, '_>, dice: &mut Dice) -> Result<Option<Results>, LlmError> {
    let all = results(run.ops);
    let Some(&at) = all.get(dice.below(all.len() as u64) as usize) else { return Ok(None) };
    if let Op::Work(Work::Keep { cache, rows, .. }) = &run.ops[at] {
        let (row, head) = (dice.below(*rows), dice.below(cache.heads));
        return Ok(Some(Results::Cell(at, row, head, dice.below(2) == 0)));
    }
    let Some(span) = written(&run.ops[at]).filter(|span| span.bytes > 0) else { return Ok(None) };
    Ok(Some(match run.content(at)? {
        Content::Blocks(quant) => {
            let block = quant.block_bytes();
            Results::Blocks(at, after(span.at, dice.below(span.bytes / block) * block), quant)
        }
        Content::Bytes => {
            let bytes = span.bytes.min(RUN);
            let start = dice.below((span.bytes - bytes) / 2 + 1) * 2;
            Results::Bytes(at, after(span.at, start), bytes)
        }
        Content::Numbers => {
            let (width, is_head) = row_of(&run.ops[at], span.bytes / 4);
            let row = after(span.at, dice.below(span.bytes / 4 / width) * width * 4);
            let count = if is_head { width } else { SAMPLES.min(width) };
            let stride = width / count;
            let first = dice.below(width - (count - 1) * stride);
            Results::Numbers(at, Pick { at: after(row, first * 4), count, stride })
        }
    }))
}

/// Numbers of a row of an operator's results, and whether they are a head, which is compared as a whole.
fn row_of(op: &Op, all: u64) -> (u64, bool) {
    let (width, is_head) = match op {
        Op::Work(work) => match *work {
            Work::Matmul { shape: [_, _, outs], .. } => (outs, false),
            Work::Norm { width, .. } | Work::Embed { width, .. } | Work::AddRow { width, .. } => {
                (width, false)
            }
            Work::RotateRows { head_size, .. } => (head_size, true),
            Work::AttendBlocks { ref cache, .. } => (cache.head_size, true),
            _ => (all, false),
        },
        _ => (all, false),
    };
    (width.max(1), is_head)
}

/// Computes results of a run, and has them captured as the machine has them, or gives what was.
fn compute(run: &mut Evaluate<'_, '_>, results: Results) -> Result<(Vec<u8>, Vec<u8>), LlmError> {
    let own = |from: Place, rows: u64, length: u64, stride: u64| Region {
        from,
        rows,
        length,
        stride,
        role: Role::Written,
        at: 0,
    };
    let (regions, right) = match results {
        Results::Numbers(at, pick) => {
            let Pick { at: from, count, stride } = pick;
            let numbers = run.numbers(at + 1, pick)?;
            let region = match stride {
                1 => own(from, 1, count * 4, count * 4),
                stride => own(from, count, 4, stride * 4),
            };
            (vec![region], numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
        }
        Results::Blocks(at, from, quant) => {
            let bytes = quant.block_bytes();
            (vec![own(from, 1, bytes, bytes)], run.packed(at + 1, from, (quant, quant.block()))?)
        }
        Results::Bytes(at, from, bytes) => {
            (vec![own(from, 1, bytes, bytes)], run.moved(at + 1, from, bytes)?)
        }
        Results::Cell(keep, row, head, is_key) => run.cell(keep, (row, head, is_key))?,
    };
    let mut found = Vec::with_capacity(right.len());
    for region in regions {
        found.extend(run.captured(region)?);
    }
    Ok((found, right))
}

impl Auditor<'_> {
    /// Compares what was looked at in a step with what this host makes of it. The first member that is wrong, and why.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for weights that the file does not have, and for something that was not captured.
    pub(crate) fn compare(
        &mut self,
        looks: &[Look],
        programs: &[Vec<Op>],
        members: &[Member<'_>],
        rows: &Rows,
        captured: &[Vec<u8>],
    ) -> Result<Option<(usize, String)>, LlmError> {
        self.log.count(looks.len() as u64);
        for look in looks {
            let differs = match &look.subject {
                Subject::Results(results) => {
                    let at = look.member;
                    let regions = look.regions.first().map_or(&[][..], |(_, own)| own);
                    let outside = Outside::Captured(regions, &captured[at]);
                    let (ops, member) = (&programs[at][look.ops.clone()], members[at]);
                    let mut run = Evaluate { auditor: self, member, ops, rows, outside, used: 0 };
                    let (found, right) = compute(&mut run, *results)?;
                    difference(&run, *results, &found, &right)?.map(|what| (at, what))
                }
                Subject::Cached(cell) => {
                    let at = look.member;
                    let region = look.regions.first().and_then(|(_, own)| own.first());
                    let now = region.map_or(&[][..], |region| region.of(&captured[at]));
                    let (place, seen) = ((cell.block, cell.slot), (cell.position, cell.fresh));
                    self.cell(at, place, seen, now).map(|what| (at, what))
                }
                Subject::Exchange(parts, fold) => exchanged(look.member, parts, *fold, captured),
            };
            if let Some((member, what)) = differs {
                let place = part_of(look.label.activity, look.label.layer);
                return Ok(Some((member, format!("{place}: {what}"))));
            }
        }
        Ok(None)
    }
}

/// What differs in the results of a run, in words.
fn difference(
    run: &Evaluate<'_, '_>,
    results: Results,
    found: &[u8],
    right: &[u8],
) -> Result<Option<String>, LlmError> {
    if found == right {
        return Ok(None);
    }
    let product = run.ops.iter().rev().find_map(|op| match op {
        Op::Work(Work::Matmul { b, shape: [_, width, _], types, .. }) => {
            Some((*b, *width, types[1]))
        }
        _ => None,
    });
    let name = match product {
        Some((place, width, id)) => {
            let row = Quant::from_ggml_id(id).map_or(0, |quant| quant.row_bytes(width));
            let (_, name) = run.auditor.weights(run.member, place, row)?;
            format!("product with {name}")
        }
        None => run.ops.iter().rev().find_map(kind).unwrap_or("a result").to_owned(),
    };
    let pairs = found.as_chunks::<4>().0.iter().zip(right.as_chunks::<4>().0);
    let numbers = pairs.map(|(found, right)| [*found, *right].map(f32::from_le_bytes));
    let first = numbers.enumerate().find(|(_, [a, b])| a.to_bits() != b.to_bits());
    Ok(Some(match (results, first) {
        (Results::Numbers(by, pick), Some((at, [found, right]))) => {
            let first = written(&run.ops[by]).map_or(0, |span| pick.index(span.at));
            let element = first + at as u64 * pick.stride;
            format!("{name}: element {element} is {found} where {right} is right")
        }
        (Results::Cell(..), _) => "a key or value is rounded wrongly".into(),
        (Results::Blocks(_, _, quant), _) => format!("{name}: rounded wrongly to {quant}"),
        _ => format!("{name}: other bytes than what was moved"),
    }))
}

/// What an operator is called.
fn kind(op: &Op) -> Option<&'static str> {
    Some(match op {
        Op::Gather { .. } => "a copy",
        Op::Work(work) => match work {
            Work::Embed { .. } => "row of the embedding table",
            Work::Norm { .. } => "norm",
            Work::Quantize { .. } => "rounding",
            Work::RotateRows { .. } => "rotary embedding",
            Work::AttendBlocks { .. } => "attention",
            Work::Gate { .. } => "gate",
            Work::Scale { .. } => "scaled numbers",
            Work::Reduce { .. } | Work::AddRow { .. } => "a sum",
            Work::Copy { .. } => "a copy",
            _ => return None,
        },
        _ => return None,
    })
}

/// The first rank of a stage that has other bytes after an exchange than what the ranks gave.
fn exchanged(
    first: usize,
    parts: &[[Option<Region>; 2]],
    fold: Option<Fold>,
    captured: &[Vec<u8>],
) -> Option<(usize, String)> {
    let bytes = |rank: usize, region: &Option<Region>| {
        region.map_or(&[][..], |region| region.of(&captured[first + rank]))
    };
    let given = parts.iter().enumerate().map(|(rank, [own, _])| bytes(rank, own));
    let right: Vec<u8> = match fold {
        None => given.flatten().copied().collect(),
        Some(fold) => folded(fold, given),
    };
    let wrong = |(rank, [_, has]): &(usize, &[Option<Region>; 2])| bytes(*rank, has) != right;
    let (rank, _) = parts.iter().enumerate().find(wrong)?;
    Some((first + rank, "after an exchange it has other bytes than what the cards gave".into()))
}

/// Words of all ranks, folded in their order.
fn folded<'b>(fold: Fold, mut given: impl Iterator<Item = &'b [u8]>) -> Vec<u8> {
    let is_sum = fold.dtype == DType::F32.code() && Some(fold.op) == ReduceOp::Sum.code();
    let add = |a: u32, b: u32| match is_sum {
        true => (f32::from_bits(a) + f32::from_bits(b)).to_bits(),
        false => a | b,
    };
    let mut sum = given.next().unwrap_or_default().to_vec();
    for more in given {
        let pairs = sum.as_chunks_mut::<4>().0.iter_mut().zip(more.as_chunks::<4>().0);
        for (sum, more) in pairs {
            *sum = add(u32::from_le_bytes(*sum), u32::from_le_bytes(*more)).to_le_bytes();
        }
    }
    sum
}
