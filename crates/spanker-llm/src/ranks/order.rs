// SPDX-License-Identifier: Apache-2.0
//! What rank 0 tells the others to do, as bytes. Whoever reads an order believes nothing of it unseen.

use spanker_plan::Want;

use crate::runner::Step;

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
        /// The rank of each of the plan's cards.
        ranks: Vec<u32>,
        /// The algorithms of its exchanges: the bytes of an `ExchangeTable`.
        exchanges: Vec<u8>,
        /// The plan as JSON.
        json: String,
    },
    /// Run a step.
    Step {
        /// Tokens before it.
        past: u64,
        /// What it gives back.
        want: Want,
        /// Its tokens.
        tokens: Vec<u32>,
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

const NOTHING: u64 = 0;
const LOGITS: u64 = u64::MAX;

impl Order {
    /// A step through some layers, or all if there are none.
    pub(super) fn step(step: &Step<'_>, layers: &[u32], salt: u64) -> Order {
        let (past, tokens) = (step.past as u64, step.tokens.to_vec());
        Order::Step { past, want: step.want, tokens, layers: layers.to_vec(), salt }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = |kind: u8, words: &[u64]| {
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            std::iter::once(kind).chain(words).collect::<Vec<u8>>()
        };
        match self {
            Order::Heartbeat { zeros } => vec![HEARTBEAT; 1 + zeros],
            Order::Over => vec![OVER],
            Order::Plan { network, context, batch, filled, ranks, exchanges, json } => {
                let count = ranks.len() as u64;
                let head = [*network, *context, *batch, u64::from(*filled), count];
                let mut bytes = words(PLAN, &head);
                bytes.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
                bytes.extend((exchanges.len() as u64).to_le_bytes());
                bytes.extend_from_slice(exchanges);
                bytes.extend_from_slice(json.as_bytes());
                bytes
            }
            Order::Step { past, want, tokens, layers, salt } => {
                let want = match want {
                    Want::Nothing => NOTHING,
                    Want::Best(k) => u64::from(*k),
                    Want::Logits => LOGITS,
                };
                let mut bytes = words(STEP, &[*past, want, *salt, layers.len() as u64]);
                bytes.extend(layers.iter().chain(tokens).flat_map(|number| number.to_le_bytes()));
                bytes
            }
            Order::Clock { rank } => words(CLOCK, &[*rank]),
            Order::Record => vec![RECORD],
            Order::Collect => vec![COLLECT],
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
                let (filled, rest) = word(rest)?;
                let (ranks, rest) = numbers(rest)?;
                let (length, rest) = word(rest)?;
                let (exchanges, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
                let (exchanges, json) =
                    (exchanges.to_vec(), std::str::from_utf8(rest).ok()?.to_owned());
                let filled = [false, true].get(usize::try_from(filled).ok()?).copied()?;
                Some(Order::Plan { network, context, batch, filled, ranks, exchanges, json })
            }
            STEP => {
                let (past, rest) = word(rest)?;
                let (want, rest) = word(rest)?;
                let (salt, rest) = word(rest)?;
                let (layers, rest) = numbers(rest)?;
                let want = match want {
                    NOTHING => Want::Nothing,
                    LOGITS => Want::Logits,
                    k => Want::Best(u32::try_from(k).ok()?),
                };
                let (tokens, odd) = rest.as_chunks();
                let tokens = tokens.iter().map(|&token| u32::from_le_bytes(token)).collect();
                odd.is_empty().then_some(Order::Step { past, want, tokens, layers, salt })
            }
            CLOCK => {
                let (rank, rest) = word(rest)?;
                rest.is_empty().then_some(Order::Clock { rank })
            }
            RECORD => rest.is_empty().then_some(Order::Record),
            COLLECT => rest.is_empty().then_some(Order::Collect),
            _ => None,
        }
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

    fn orders() -> impl Strategy<Value = Order> {
        let want = prop_oneof![
            Just(Want::Nothing),
            Just(Want::Logits),
            (1..=1024u32).prop_map(Want::Best)
        ];
        prop_oneof![
            (0..40usize).prop_map(|zeros| Order::Heartbeat { zeros }),
            Just(Order::Over),
            (any::<[u64; 3]>(), any::<bool>(), numbers(), any::<Vec<u8>>(), ".*").prop_map(
                |([network, context, batch], filled, ranks, exchanges, json)| Order::Plan {
                    network,
                    context,
                    batch,
                    filled,
                    ranks,
                    exchanges,
                    json
                }
            ),
            (any::<[u64; 2]>(), want, numbers(), numbers()).prop_map(
                |([past, salt], want, tokens, layers)| Order::Step {
                    past,
                    want,
                    tokens,
                    layers,
                    salt
                }
            ),
            any::<u64>().prop_map(|rank| Order::Clock { rank }),
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
