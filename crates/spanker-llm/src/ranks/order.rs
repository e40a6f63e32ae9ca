// SPDX-License-Identifier: Apache-2.0
//! What rank 0 tells the others to do, as bytes. Whoever reads an order believes nothing of it unseen.

use spanker_plan::Want;

use crate::runner::{Part, Step};

/// An order of rank 0.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Order {
    /// Nothing, but there is more to come: answer.
    Heartbeat {
        /// Bytes of zeros that come with it, to see how long they take.
        zeros: usize,
    },
    /// There is nothing more to come.
    Over,
    /// Lay a plan out.
    Plan {
        /// The fingerprint of the network that it is for.
        network: u64,
        /// The context, in tokens.
        context: u64,
        /// Tokens that a step takes at most.
        batch: u64,
        /// Whether buffers are filled with numbers, as in the midst of a run, to measure steps.
        filled: bool,
        /// Whether ranks ask for what they lack of the file before they lay it out.
        supplied: bool,
        /// The rank of each of the plan's cards.
        ranks: Vec<u32>,
        /// The algorithms of its exchanges: the bytes of an `ExchangeTable`.
        exchanges: Vec<u8>,
        /// The plan as JSON.
        json: String,
    },
    /// Ask for what is missing of these bytes of the file: from, and to before which. They are for a plan to come.
    Fetch {
        /// Which.
        ranges: Vec<[u64; 2]>,
    },
    /// Run a step.
    Step {
        /// What it is.
        step: StepOrder,
        /// The layers that it goes through, to measure them; none stands for all.
        layers: Vec<u32>,
        /// Which operators are tapped: see `Programs::audited`.
        salt: u64,
    },
    /// One rank answers with the time by its clock; the others do nothing.
    Clock {
        /// Which.
        rank: u64,
    },
    /// Record from now on what the card does when.
    Record,
    /// Hand over what was recorded, and forget it.
    Collect,
}

const HEARTBEAT: u8 = 0;
const OVER: u8 = 1;
const PLAN: u8 = 2;
const STEP: u8 = 3;
const CLOCK: u8 = 4;
const RECORD: u8 = 5;
const COLLECT: u8 = 6;
const FETCH: u8 = 7;

const NOTHING: u64 = 0;
const LOGITS: u64 = u64::MAX;

impl Order {
    /// A step through some layers, or all if there are none.
    pub(super) fn step(step: &Step<'_>, layers: &[u32], salt: u64) -> Order {
        Order::Step { step: StepOrder::of(step), layers: layers.to_vec(), salt }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = |kind: u8, words: &[u64]| {
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            std::iter::once(kind).chain(words).collect::<Vec<u8>>()
        };
        match self {
            Order::Heartbeat { zeros } => vec![HEARTBEAT; 1 + zeros],
            Order::Over => vec![OVER],
            Order::Plan { network, context, batch, filled, supplied, ranks, exchanges, json } => {
                let count = ranks.len() as u64;
                let flags = u64::from(*filled) | u64::from(*supplied) << 1;
                let head = [*network, *context, *batch, flags, count];
                let mut bytes = words(PLAN, &head);
                bytes.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
                bytes.extend((exchanges.len() as u64).to_le_bytes());
                bytes.extend_from_slice(exchanges);
                bytes.extend_from_slice(json.as_bytes());
                bytes
            }
            Order::Step { step, layers, salt } => {
                let head = [*salt, layers.len() as u64];
                let mut bytes = words(STEP, &head);
                bytes.extend(layers.iter().flat_map(|number| number.to_le_bytes()));
                step.write(&mut bytes);
                bytes
            }
            Order::Clock { rank } => words(CLOCK, &[*rank]),
            Order::Record => vec![RECORD],
            Order::Collect => vec![COLLECT],
            Order::Fetch { ranges } => words(FETCH, ranges.as_flattened()),
        }
    }

    /// An order, or nothing if the bytes are none.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Order> {
        let (&kind, rest) = bytes.split_first()?;
        match kind {
            HEARTBEAT => {
                rest.iter().all(|&byte| byte == 0).then_some(Order::Heartbeat { zeros: rest.len() })
            }
            OVER => rest.is_empty().then_some(Order::Over),
            PLAN => {
                let (network, rest) = word(rest)?;
                let (context, rest) = word(rest)?;
                let (batch, rest) = word(rest)?;
                let (flags, rest) = word(rest)?;
                let (ranks, rest) = numbers(rest)?;
                let (length, rest) = word(rest)?;
                let (exchanges, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
                let (exchanges, json) =
                    (exchanges.to_vec(), std::str::from_utf8(rest).ok()?.to_owned());
                let (filled, supplied) = (flags & 1 != 0, flags & 2 != 0);
                (flags < 4).then_some(Order::Plan {
                    network,
                    context,
                    batch,
                    filled,
                    supplied,
                    ranks,
                    exchanges,
                    json,
                })
            }
            STEP => {
                let (salt, rest) = word(rest)?;
                let (layers, rest) = numbers(rest)?;
                let (step, rest) = StepOrder::read(rest)?;
                rest.is_empty().then_some(Order::Step { step, layers, salt })
            }
            CLOCK => {
                let (rank, rest) = word(rest)?;
                rest.is_empty().then_some(Order::Clock { rank })
            }
            RECORD => rest.is_empty().then_some(Order::Record),
            COLLECT => rest.is_empty().then_some(Order::Collect),
            FETCH => {
                let (words, odd) = rest.as_chunks();
                let words: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
                let (ranges, single) = words.as_chunks();
                let is_whole = odd.is_empty() && single.is_empty();
                is_whole.then(|| Order::Fetch { ranges: ranges.to_vec() })
            }
            _ => None,
        }
    }
}

/// A step with tokens and blocks of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepOrder {
    parts: Vec<PartOrder>,
    copies: Vec<[u32; 2]>,
    windowed_copies: Vec<[u32; 2]>,
    turn: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PartOrder {
    past: u64,
    want: Want,
    outputs: u64,
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    windowed: Vec<u32>,
}

impl StepOrder {
    fn of(step: &Step<'_>) -> StepOrder {
        let part = |part: &Part<'_>| PartOrder {
            past: part.past,
            want: part.want,
            outputs: part.outputs,
            tokens: part.tokens.to_vec(),
            blocks: part.blocks.to_vec(),
            windowed: part.windowed.to_vec(),
        };
        let parts = step.parts.iter().map(part).collect();
        let [copies, windowed_copies] = [step.copies, step.windowed_copies].map(<[_]>::to_vec);
        StepOrder { parts, copies, windowed_copies, turn: step.turn }
    }

    /// Calls `run` with the step.
    pub(super) fn with<R>(&self, run: impl FnOnce(&Step<'_>) -> R) -> R {
        let parts = self.parts.iter().map(|part| {
            let PartOrder { past, want, outputs, tokens, blocks, windowed } = part;
            Part { tokens, past: *past, blocks, windowed, want: *want, outputs: *outputs }
        });
        let parts: Vec<Part<'_>> = parts.collect();
        let StepOrder { copies, windowed_copies, turn, .. } = self;
        run(&Step { parts: &parts, copies, windowed_copies, turn: *turn })
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        let head = [self.turn, self.parts.len() as u64];
        bytes.extend(head.iter().flat_map(|word| word.to_le_bytes()));
        for copies in [&self.copies, &self.windowed_copies] {
            let copies = copies.as_flattened();
            bytes.extend((copies.len() as u64).to_le_bytes());
            bytes.extend(copies.iter().flat_map(|number| number.to_le_bytes()));
        }
        for part in &self.parts {
            let want = match part.want {
                Want::Nothing => NOTHING,
                Want::Best(k) => u64::from(k),
                Want::Logits => LOGITS,
            };
            for list in [&part.tokens, &part.blocks, &part.windowed] {
                bytes.extend((list.len() as u64).to_le_bytes());
                bytes.extend(list.iter().flat_map(|number| number.to_le_bytes()));
            }
            bytes.extend([part.past, want, part.outputs].iter().flat_map(|w| w.to_le_bytes()));
        }
    }

    fn read(bytes: &[u8]) -> Option<(StepOrder, &[u8])> {
        let (turn, rest) = word(bytes)?;
        let (count, rest) = word(rest)?;
        let (copies, rest) = numbers(rest)?;
        let (windowed_copies, mut rest) = numbers(rest)?;
        let [(copies, odd), (windowed_copies, other)] =
            [&copies, &windowed_copies].map(|numbers| numbers.as_chunks());
        let mut parts = Vec::new();
        for _ in 0..count {
            let (tokens, left) = numbers(rest)?;
            let (blocks, left) = numbers(left)?;
            let (windowed, left) = numbers(left)?;
            let (past, left) = word(left)?;
            let (want, left) = word(left)?;
            let (outputs, left) = word(left)?;
            rest = left;
            let want = match want {
                NOTHING => Want::Nothing,
                LOGITS => Want::Logits,
                k => Want::Best(u32::try_from(k).ok()?),
            };
            parts.push(PartOrder { past, want, outputs, tokens, blocks, windowed });
        }
        let [copies, windowed_copies] = [copies, windowed_copies].map(<[_]>::to_vec);
        let step = StepOrder { parts, copies, windowed_copies, turn };
        (odd.is_empty() && other.is_empty()).then_some((step, rest))
    }
}

fn word(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (word, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*word), rest))
}

/// A count and so many numbers.
fn numbers(bytes: &[u8]) -> Option<(Vec<u32>, &[u8])> {
    let (count, rest) = word(bytes)?;
    let bytes = usize::try_from(count).ok()?.checked_mul(4)?;
    let (list, rest) = rest.split_at_checked(bytes)?;
    Some((list.as_chunks().0.iter().map(|&number| u32::from_le_bytes(number)).collect(), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec(any::<u32>(), 0..40)
    }

    fn copies() -> impl Strategy<Value = Vec<[u32; 2]>> {
        prop::collection::vec(any::<[u32; 2]>(), 0..3)
    }

    fn orders() -> impl Strategy<Value = Order> {
        let want = prop_oneof![
            Just(Want::Nothing),
            Just(Want::Logits),
            (1..=1024u32).prop_map(Want::Best)
        ];
        let part = (any::<[u64; 2]>(), want, numbers(), numbers(), numbers()).prop_map(
            |([past, outputs], want, tokens, blocks, windowed)| PartOrder {
                past,
                want,
                outputs,
                tokens,
                blocks,
                windowed,
            },
        );
        let parts = prop::collection::vec(part, 0..4);
        prop_oneof![
            (0..40usize).prop_map(|zeros| Order::Heartbeat { zeros }),
            Just(Order::Over),
            (any::<[u64; 3]>(), any::<[bool; 2]>(), numbers(), any::<Vec<u8>>(), ".*").prop_map(
                |([network, context, batch], [filled, supplied], ranks, exchanges, json)| {
                    Order::Plan {
                        network,
                        context,
                        batch,
                        filled,
                        supplied,
                        ranks,
                        exchanges,
                        json,
                    }
                }
            ),
            (any::<[u64; 2]>(), numbers(), [copies(), copies()], parts).prop_map(
                |([salt, turn], layers, [copies, windowed_copies], parts)| {
                    let step = StepOrder { parts, copies, windowed_copies, turn };
                    Order::Step { step, layers, salt }
                }
            ),
            any::<u64>().prop_map(|rank| Order::Clock { rank }),
            prop::collection::vec(any::<[u64; 2]>(), 0..9)
                .prop_map(|ranges| Order::Fetch { ranges }),
            Just(Order::Record),
            Just(Order::Collect),
        ]
    }

    proptest! {
        #[test]
        fn order_as_bytes_is_read_as_it_was(order in orders()) {
            prop_assert_eq!(Order::from_bytes(&order.to_bytes()), Some(order));
        }

        #[test]
        fn bytes_that_are_no_order_are_none_or_say_the_same(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(order) = Order::from_bytes(&bytes) {
                prop_assert_eq!(order.to_bytes(), bytes);
            }
        }
    }
}
