// SPDX-License-Identifier: Apache-2.0
//! One operator again, from what a card kept of it.

use ggml_spanker::ops::{self, AttendScratch, KvView, Pairs, Queries};
use ggml_spanker::{Inputs, decode, multiply, quantize};
use spanker_model::{Gating, KV_BLOCK, KvShape, Quant, Strided};
use spanker_plan::{Addend, Check, PICK_BYTES, Place, Samples, Scores};

use super::{Auditor, Member};
use crate::LlmError;

/// What a card kept.
#[derive(Clone, Copy)]
struct Kept<'k>(&'k [u8]);

impl<'k> Kept<'k> {
    fn bytes(self, at: u64, length: u64) -> &'k [u8] {
        &self.0[at as usize..(at + length) as usize]
    }

    fn floats(self, at: u64, count: u64) -> Vec<f32> {
        floats(self.bytes(at, count * 4))
    }

    /// Whether numbers are these, bit by bit.
    fn are(self, at: u64, expected: &[f32], what: &str) -> Option<String> {
        let found = self.floats(at, expected.len() as u64);
        let differ = |(found, expected): (&f32, &f32)| found.to_bits() != expected.to_bits();
        let first = found.iter().zip(expected).position(differ)?;
        Some(format!("{what}: {} where {} is right", found[first], expected[first]))
    }

    fn samples(self, samples: &Samples, row: &[f32], what: &str) -> Option<String> {
        samples.iter().find_map(|&(element, at)| {
            let (found, right) = (self.floats(at, 1)[0], row[element as usize]);
            let differs = found.to_bits() != right.to_bits();
            differs.then(|| format!("{what}: element {element} is {found} where {right} is right"))
        })
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

pub(super) fn known(id: u32) -> Result<Quant, LlmError> {
    Quant::from_ggml_id(id).ok_or_else(|| LlmError::plan(format!("type {id} is unknown")))
}

pub(super) fn refused(name: &str) -> impl Fn(ggml_spanker::Error) -> LlmError {
    move |error| LlmError::unsupported(format!("{name}: {error}"))
}

/// Numbers as blocks of a type.
pub(super) fn rounded(quant: Quant, numbers: &[f32]) -> Result<Vec<u8>, LlmError> {
    let mut blocks = vec![0; quant.row_bytes(numbers.len() as u64) as usize];
    quantize(quant, numbers, &mut blocks).map_err(refused("rounding"))?;
    Ok(blocks)
}

/// A row of a product's inputs.
pub(super) fn inputs_of(quant: Quant, row: &[u8], width: u64) -> Result<Inputs, LlmError> {
    let mut inputs = Inputs::new();
    inputs.load(quant, row, 1, width as usize).map_err(refused("product"))?;
    Ok(inputs)
}

/// One head over the positions up to one: `cache` has the blocks of its keys and values end to end.
pub(super) fn attended(
    (shape, position, scores): (KvShape, u64, Scores),
    query: &[f32],
    sinks: &[f32],
    cache: &[u8],
) -> Vec<f32> {
    let table: Vec<u32> = (0..=(position / KV_BLOCK) as u32).collect();
    let queries = Queries {
        cap: f32::from_bits(scores.cap),
        window: scores.window as usize,
        sinks,
        ..Queries::plain(query, 1, position as usize, f32::from_bits(scores.scale))
    };
    let view = KvView { cache, table: &table, shape, head: 0 };
    let mut out = vec![0.0; query.len()];
    ops::attend(queries, view, &mut AttendScratch::default(), &mut out);
    out
}

impl Auditor<'_> {
    /// What differs, in words.
    pub(super) fn operator(
        &self,
        member: Member<'_>,
        check: &Check,
        captured: &[u8],
    ) -> Result<Option<String>, LlmError> {
        let kept = Kept(captured);
        Ok(match *check {
            Check::Product { .. } | Check::Norm { .. } | Check::Embed { .. } => {
                return self.row(member, check, kept);
            }
            Check::Expert { .. } => return self.expert(member, check, kept),
            Check::Route { .. } => routed(check, kept)?,
            Check::Combine { .. } => combined(check, kept),
            Check::Picked { .. } => return self.added(member, check, kept),
            Check::Add { elements, first, ref second, into } => {
                let mut sum = kept.floats(first, elements);
                let (more, what) = match second {
                    Addend::Captured(at) => (kept.floats(*at, elements), "a sum".to_owned()),
                    Addend::Weights(place) => {
                        let (bytes, name) = self.weights(member, *place, elements * 4)?;
                        (floats(&bytes), name)
                    }
                };
                ops::add(&mut sum, &more);
                kept.are(into, &sum, &what)
            }
            Check::Quantize { quant, elements, from, into } => {
                let quant = known(quant)?;
                let right = rounded(quant, &kept.floats(from, elements))?;
                let differs = kept.bytes(into, right.len() as u64) != right;
                differs.then(|| format!("activations are rounded wrongly to {quant}"))
            }
            Check::Rotate { position, local, head_size, pairs, from, into } => {
                let mut head = kept.floats(from, head_size);
                let pairs = if pairs == 0 { Pairs::Adjacent } else { Pairs::Halves };
                let turns = self.turns(position, local);
                ops::rotate(&mut head, head_size as usize, &turns, pairs);
                kept.are(into, &head, "rotary embedding")
            }
            Check::Keep { .. } => kept_rightly(check, kept),
            Check::Attend { .. } => return self.attention(member, check, kept),
            Check::Gate { elements, activation, gate, up, into } => {
                let mut out = vec![0.0; elements as usize];
                let (gate, up) = (kept.floats(gate, elements), kept.floats(up, elements));
                ops::gate(activation, &gate, &up, &mut out);
                kept.are(into, &out, "gate")
            }
            Check::Scale { elements, factor, cap, from, into } => {
                let mut numbers = kept.floats(from, elements);
                ops::scale(&mut numbers, f32::from_bits(factor), f32::from_bits(cap));
                kept.are(into, &numbers, "scaled numbers")
            }
            Check::Fill { pattern, bytes, into } => {
                let words = kept.bytes(into, bytes).as_chunks().0.iter();
                let differs = words.copied().any(|word| u32::from_le_bytes(word) != pattern);
                differs.then(|| format!("words that should be {pattern}"))
            }
            Check::Stored { weights, bytes, at } => {
                let (right, name) = self.weights(member, weights, bytes)?;
                let differs = kept.bytes(at, bytes) != right;
                differs.then(|| format!("{name} is not what the file has"))
            }
            Check::Copied { bytes, from, into } => {
                let differs = kept.bytes(from, bytes) != kept.bytes(into, bytes);
                differs.then(|| "a copy".into())
            }
            Check::Best { count, k, first, from, into } => {
                best(kept, [from, into], count, k, first)
            }
            ref other => {
                return Err(LlmError::plan(format!("{other:?} cannot be computed again")));
            }
        })
    }

    /// Elements of a row of a product with an expert.
    fn expert(
        &self,
        member: Member<'_>,
        check: &Check,
        kept: Kept<'_>,
    ) -> Result<Option<String>, LlmError> {
        let Check::Expert { weights, stride, experts, width, types, pick, input, samples } = check
        else {
            return Ok(None);
        };
        let (expert, _) = picks_of(kept, *pick, 1)[0];
        if u64::from(expert) >= *experts {
            return Ok(Some(format!("expert {expert} of {experts}")));
        }
        let mut weights = *weights;
        weights.offset += u64::from(expert) * stride;
        let (width, types, samples) = (*width, *types, samples.clone());
        let product = Check::Product { weights, width, types, input: *input, samples };
        let differs = self.row(member, &product, kept)?;
        Ok(differs.map(|what| format!("expert {expert}: {what}")))
    }

    /// Numbers of rows of a table that picks add.
    fn added(
        &self,
        member: Member<'_>,
        check: &Check,
        kept: Kept<'_>,
    ) -> Result<Option<String>, LlmError> {
        let &Check::Picked { elements, used, experts, table, stride, weighed, .. } = check else {
            return Ok(None);
        };
        let &Check::Picked { picks, from, into, .. } = check else { return Ok(None) };
        let mut rows = Vec::with_capacity(used as usize);
        for (expert, _) in picks_of(kept, picks, used) {
            if u64::from(expert) >= experts {
                return Ok(Some(format!("expert {expert} of {experts}")));
            }
            let place = Place { offset: table.offset + u64::from(expert) * stride, ..table };
            rows.push((expert, self.weights(member, place, elements * 4)?));
        }
        let mut sum = kept.floats(from, elements);
        let row = |expert: u64| {
            let known = rows.iter().find(|(known, _)| u64::from(*known) == expert);
            known.map(|(_, (bytes, _))| floats(bytes))
        };
        ops::add_picked(kept.bytes(picks, used * PICK_BYTES), row, weighed, &mut sum);
        let name = rows.first().map_or("biases", |(_, (_, name))| name);
        Ok(kept.are(into, &sum, name))
    }

    /// Elements of a row.
    fn row(
        &self,
        member: Member<'_>,
        check: &Check,
        kept: Kept<'_>,
    ) -> Result<Option<String>, LlmError> {
        match check {
            Check::Product { weights, width, types: [input, quant], input: at, samples } => {
                let (input, quant) = (known(*input)?, known(*quant)?);
                let (row, each) = (input.row_bytes(*width), quant.row_bytes(*width));
                let inputs = inputs_of(input, kept.bytes(*at, row), *width)?;
                for &(element, at) in samples {
                    let mut place = *weights;
                    place.offset += element * each;
                    let (bytes, name) = self.weights(member, place, each)?;
                    let mut out = [0.0];
                    multiply(quant, &bytes, 1, &inputs, &mut out).map_err(refused(&name))?;
                    let what = format!("product with {name}, element {element}");
                    if let Some(differs) = kept.are(at, &out, &what) {
                        return Ok(Some(differs));
                    }
                }
                Ok(None)
            }
            Check::Norm { weight, width, epsilon, from, samples } => {
                let (bytes, name) = self.weights(member, *weight, width * 4)?;
                let mut out = vec![0.0; *width as usize];
                let from = kept.floats(*from, *width);
                ops::norm(&from, &floats(&bytes), f32::from_bits(*epsilon), &mut out);
                Ok(kept.samples(samples, &out, &format!("norm with {name}")))
            }
            Check::Embed { row, width, quant, samples } => {
                let quant = known(*quant)?;
                let (bytes, name) = self.weights(member, *row, quant.row_bytes(*width))?;
                let mut out = vec![0.0; *width as usize];
                decode(quant, &bytes, &mut out).map_err(refused(&name))?;
                Ok(kept.samples(samples, &out, &format!("row of {name}")))
            }
            other => Err(LlmError::plan(format!("{other:?} has no rows"))),
        }
    }

    /// One head of one row.
    fn attention(
        &self,
        member: Member<'_>,
        check: &Check,
        kept: Kept<'_>,
    ) -> Result<Option<String>, LlmError> {
        let &Check::Attend { shape, position, scores, query, into, .. } = check else {
            return Ok(None);
        };
        let sinks = match scores.sinks {
            None => Vec::new(),
            Some(place) => floats(&self.weights(member, place, 4)?.0),
        };
        // Blocks in front of those that are seen change nothing, so positions count from the first that is.
        let unseen = scores.first_seen(position) / KV_BLOCK * KV_BLOCK;
        let query = kept.floats(query, shape.head_size);
        let place = (shape, position - unseen, scores);
        let out = attended(place, &query, &sinks, &seen_blocks(check, kept));
        Ok(kept.are(into, &out, "attention"))
    }
}

/// The picks of a row, as numbers of experts and bits of weights.
fn picks_of(kept: Kept<'_>, at: u64, used: u64) -> Vec<(u32, u32)> {
    let words = kept.bytes(at, used * PICK_BYTES).as_chunks::<8>().0.iter();
    let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    words.map(|pick| (word(&pick[..4]), word(&pick[4..]))).collect()
}

/// Which experts a row meets.
fn routed(check: &Check, kept: Kept<'_>) -> Result<Option<String>, LlmError> {
    let &Check::Route { experts, used, gating, logits, picks } = check else { return Ok(None) };
    let unknown = || LlmError::plan(format!("gating {gating} is unknown"));
    let gating = Gating::from_code(gating).ok_or_else(unknown)?;
    let mut right = vec![(0, 0.0); used as usize];
    ops::route(&kept.floats(logits, experts), gating, &mut right);
    let found = picks_of(kept, picks, used);
    let differ = |(found, right): (&(u32, u32), &(u32, f32))| {
        found.0 != right.0 || found.1 != right.1.to_bits()
    };
    let first = found.iter().zip(&right).position(differ);
    Ok(first.map(|at| {
        let ((expert, weight), (own, right)) = (found[at], right[at]);
        let weight = f32::from_bits(weight);
        format!("router: expert {expert} with weight {weight} where {own} with {right} is right")
    }))
}

/// A weighed sum.
fn combined(check: &Check, kept: Kept<'_>) -> Option<String> {
    let &Check::Combine { elements, used, from, picks, added, into } = check else { return None };
    let mut out = match added {
        Some(at) => kept.floats(at, elements),
        None => vec![0.0; elements as usize],
    };
    let rows = kept.floats(from, used * elements);
    let weights = picks_of(kept, picks, used);
    let weights = weights.into_iter().map(|(_, weight)| f32::from_bits(weight));
    ops::combine(&rows, weights, added.is_some(), &mut out);
    kept.are(into, &out, "sum of experts")
}

/// One head of a key or value as the KV cache has it.
fn kept_rightly(check: &Check, kept: Kept<'_>) -> Option<String> {
    let &Check::Keep { shape, is_key, from, numbers, scales } = check else { return None };
    let shape = KvShape { heads: 1, ..shape };
    let row = kept.floats(from, shape.head_size);
    let mut block = vec![0; shape.block_bytes() as usize];
    ops::keep(shape, 0, &row, &row, &mut block);
    let differs = |place: Strided, at: u64| {
        let pieces = (0..place.rows).flat_map(|row| {
            let start = (place.offset + row * place.stride) as usize;
            &block[start..start + place.length as usize]
        });
        pieces.ne(kept.bytes(at, place.rows * place.length))
    };
    let wrong = differs(shape.numbers(0, is_key, 0), numbers)
        || shape.scale_bytes(0, is_key, 0).is_some_and(|place| differs(place, scales));
    wrong.then(|| "a key or value is rounded wrongly".into())
}

/// The blocks of which one head of one row sees something.
fn seen_blocks(check: &Check, kept: Kept<'_>) -> Vec<u8> {
    let &Check::Attend { shape, position, scores, blocks, .. } = check else { return Vec::new() };
    let first = scores.first_seen(position) / KV_BLOCK;
    let (last, slots) = (position / KV_BLOCK - first, position % KV_BLOCK + 1);
    let block = shape.block_bytes();
    let mut cache = kept.bytes(blocks, last * block).to_vec();
    cache.resize(((last + 1) * block) as usize, 0);
    let mut at = blocks + last * block;
    for place in shape.first_slots(0, slots) {
        let pieces = kept.bytes(at, place.rows * place.length).chunks(place.length as usize);
        for (row, piece) in (0..).zip(pieces) {
            let start = (last * block + place.offset + row * place.stride) as usize;
            cache[start..start + piece.len()].copy_from_slice(piece);
        }
        at = (at + place.rows * place.length).next_multiple_of(8);
    }
    cache
}

/// The largest of numbers.
fn best(kept: Kept<'_>, [from, into]: [u64; 2], count: u64, k: u32, first: u32) -> Option<String> {
    let right = ops::best(&kept.floats(from, count), k as usize);
    let fill = (u32::MAX, f32::NEG_INFINITY);
    let right = right.into_iter().map(|(place, value)| (place + first, value));
    let right = right.chain(std::iter::repeat(fill)).take(k as usize);
    let mut found = kept.bytes(into, u64::from(k) * 8).as_chunks::<4>().0.iter();
    for (token, value) in right {
        let mut next = || found.next().map_or(0, |&word| u32::from_le_bytes(word));
        let (a, b) = (next(), next());
        if (a, b) != (token, value.to_bits()) {
            return Some(format!("candidate {a} where {token} is right"));
        }
    }
    None
}
