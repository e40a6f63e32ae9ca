// SPDX-License-Identifier: Apache-2.0
//! What a token makes each card read, by the sizes of the model and the number of cards alone.

use spanker_model::{Layer, Model};

/// What a token asks of each card of a group that shares every matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Load {
    /// Bytes of weights that the card with the largest share reads.
    pub(super) bytes: f64,
    /// Layers, at least 1.
    pub(super) layers: f64,
    /// Cards, at least 1.
    pub(super) cards: f64,
}

impl Load {
    pub(super) fn of(model: &Model, cards: usize) -> Load {
        let cards = cards.max(1);
        let layers = model.layers.len().max(1) as f64;
        Load { bytes: bytes_per_card(model, cards), layers, cards: cards as f64 }
    }

    /// Bytes of a layer on each card.
    pub(super) fn layer_bytes(&self) -> f64 {
        self.bytes / self.layers
    }
}

/// The bytes of weights that the card with the largest share reads for a token.
///
/// Attention is split by whole heads, so three cards that share 32 heads wait for the one with 11, and
/// no share of keys and values is smaller than one head's; norms, biases and routers are whole on every card. Of a
/// mixture, a token reads the experts that it meets.
fn bytes_per_card(model: &Model, cards: usize) -> f64 {
    let share = 1.0 / cards as f64;
    let (head_share, kv_share) = head_shares(model, cards as u64);
    let layer = |layer: &Layer| {
        let used = model.mixture.map_or(1, |own| own.used);
        // Whatever is neither attention's nor whole on every card is shared out.
        let attention = [&layer.q, &layer.k, &layer.v].iter().map(|matrix| matrix.bytes()).sum();
        let shared = layer.experts.and_then(|own| own.shared);
        let routers = layer.experts.map_or(0, |own| own.router.bytes())
            + shared.map_or(0, |own| own.router.bytes());
        let whole = layer.other_bytes + routers;
        let rest: u64 = layer.read_bytes(used).saturating_sub(whole);
        let split = rest.saturating_sub(attention) as f64;
        let kv = (layer.k.bytes() as f64) + (layer.v.bytes() as f64);
        let q = layer.q.bytes() as f64;
        split * share + q * head_share + kv * kv_share + whole as f64
    };
    let layers: f64 = model.layers.iter().map(layer).sum();
    layers + model.head.bytes() as f64 * share + model.other_bytes as f64
}

/// The largest share of the query heads that a card has, and of the key and value heads that those need.
fn head_shares(model: &Model, cards: u64) -> (f64, f64) {
    let (heads, kv_heads) = (model.heads.max(1), model.kv_heads.max(1));
    let (each, more) = (heads / cards, heads % cards);
    let sharing = (heads / kv_heads).max(1);
    // The first `more` cards have one head more than the others.
    let run = |card: u64| (each * card + card.min(more), each + u64::from(card < more));
    let needed = |(start, count): (u64, u64)| match count {
        0 => 0,
        _ => (start + count).div_ceil(sharing) - start / sharing,
    };
    let most_kv = (0..cards.min(heads)).map(|card| needed(run(card))).max().unwrap_or(1);
    let part = |count: u64, of: u64| count as f64 / of as f64;
    (part(heads.div_ceil(cards), heads), part(most_kv.min(kv_heads), kv_heads))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_model::{Quant, builtin};

    #[test]
    fn shares_of_heads_are_those_of_the_card_with_the_most() {
        let seven = builtin("llama-2-7b", Quant::Q4_0).unwrap();
        let eight = builtin("llama-3-8b", Quant::Q4_0).unwrap();
        for (model, cards, expected) in [
            (&seven, 1, (1.0, 1.0)),
            (&seven, 2, (0.5, 0.5)),
            (&seven, 3, (11.0 / 32.0, 11.0 / 32.0)),
            (&seven, 64, (1.0 / 32.0, 1.0 / 32.0)),
            // 32 heads in fours: eleven of them, from 11 on, touch four groups.
            (&eight, 3, (11.0 / 32.0, 4.0 / 8.0)),
            (&eight, 8, (1.0 / 8.0, 1.0 / 8.0)),
            (&eight, 16, (1.0 / 16.0, 1.0 / 8.0)),
        ] {
            assert_eq!(head_shares(model, cards), expected, "{} on {cards}", model.name);
        }
    }
}
