// SPDX-License-Identifier: Apache-2.0
//! What rank 0 tells the others to do, as bytes. Whoever reads an order believes nothing of it unseen.

use spanker_plan::Want;

use crate::runner::Step;

/// An order of rank 0.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Order {
    /// Nothing, but there is more to come: answer.
    Beat {
        /// Bytes of zeros that come with it, to see how long they take.
        zeros: usize,
    },
    /// There is nothing more to come.
    Over,
    /// Lay a plan out.
    Plan {
        /// The fingerprint of the network that it is for.
        network: u64,
        /// Tokens that there is room for.
        context: u64,
        /// Tokens that a step takes at most.
        batch: u64,
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
    },
}

const BEAT: u8 = 0;
const OVER: u8 = 1;
const PLAN: u8 = 2;
const STEP: u8 = 3;

const NOTHING: u64 = 0;
const LOGITS: u64 = u64::MAX;

impl Order {
    pub(super) fn step(step: &Step<'_>) -> Order {
        Order::Step { past: step.past as u64, want: step.want, tokens: step.tokens.to_vec() }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = |kind: u8, words: &[u64]| {
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            std::iter::once(kind).chain(words).collect::<Vec<u8>>()
        };
        match self {
            Order::Beat { zeros } => vec![BEAT; 1 + zeros],
            Order::Over => vec![OVER],
            Order::Plan { network, context, batch, json } => {
                let mut bytes = words(PLAN, &[*network, *context, *batch]);
                bytes.extend_from_slice(json.as_bytes());
                bytes
            }
            Order::Step { past, want, tokens } => {
                let want = match want {
                    Want::Nothing => NOTHING,
                    Want::Best(k) => u64::from(*k),
                    Want::Logits => LOGITS,
                };
                let mut bytes = words(STEP, &[*past, want]);
                bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                bytes
            }
        }
    }

    /// An order, or nothing if the bytes are none.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Order> {
        let (&kind, rest) = bytes.split_first()?;
        match kind {
            BEAT => rest.iter().all(|&byte| byte == 0).then_some(Order::Beat { zeros: rest.len() }),
            OVER => rest.is_empty().then_some(Order::Over),
            PLAN => {
                let (network, rest) = word(rest)?;
                let (context, rest) = word(rest)?;
                let (batch, rest) = word(rest)?;
                let json = std::str::from_utf8(rest).ok()?.to_owned();
                Some(Order::Plan { network, context, batch, json })
            }
            STEP => {
                let (past, rest) = word(rest)?;
                let (want, rest) = word(rest)?;
                let want = match want {
                    NOTHING => Want::Nothing,
                    LOGITS => Want::Logits,
                    k => Want::Best(u32::try_from(k).ok()?),
                };
                let (tokens, odd) = rest.as_chunks();
                let tokens = tokens.iter().map(|&token| u32::from_le_bytes(token)).collect();
                odd.is_empty().then_some(Order::Step { past, want, tokens })
            }
            _ => None,
        }
    }
}

fn word(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (word, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*word), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn orders() -> impl Strategy<Value = Order> {
        let want = prop_oneof![
            Just(Want::Nothing),
            Just(Want::Logits),
            (1..=1024u32).prop_map(Want::Best)
        ];
        prop_oneof![
            (0..40usize).prop_map(|zeros| Order::Beat { zeros }),
            Just(Order::Over),
            (any::<u64>(), any::<u64>(), any::<u64>(), ".*").prop_map(
                |(network, context, batch, json)| Order::Plan { network, context, batch, json }
            ),
            (any::<u64>(), want, prop::collection::vec(any::<u32>(), 0..40))
                .prop_map(|(past, want, tokens)| Order::Step { past, want, tokens }),
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
