// SPDX-License-Identifier: Apache-2.0
//! The time of a token by the fits of cards and of links together.

use spanker_model::Model;

use super::{Band, CardModel, LinkModel};

/// The time of a token, in milliseconds, and its parts.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeTime {
    /// All of it.
    pub time: Band,
    /// Reading weights.
    pub memory_ms: f64,
    /// What does not shrink with more cards.
    pub fixed_ms: f64,
    /// Exchanges between cards.
    pub communication_ms: f64,
    /// What the fits do not know, in sentences.
    pub notes: Vec<String>,
}

/// The time of a token of a model that `cards` cards share. A model of the links stands for what the fit of cards knows
/// about exchanges: two all-reduces in each layer, of one token's activations in f32.
#[must_use]
pub fn decode_time(
    card: &CardModel,
    link: Option<&LinkModel>,
    model: &Model,
    cards: usize,
) -> DecodeTime {
    let bare = card.without_exchange();
    let work = if link.is_some() { &bare } else { card };
    let mut notes = work.caveats();
    if link.is_some() && card.exchange_per_layer(cards).is_some() {
        notes.push("the card's fit has exchanges, too: --link takes their place".to_owned());
    }
    notes.extend(link.iter().flat_map(|link| link.caveats()));
    let work = work.predict(model, cards);
    let calls = 2.0 * model.layers.len() as f64;
    let exchanges =
        link.map_or(Band::ZERO, |link| link.predict(cards, model.hidden * 4) * (calls / 1e3));
    DecodeTime {
        time: work.time + exchanges,
        memory_ms: work.memory_ms,
        fixed_ms: work.fixed_ms,
        communication_ms: exchanges.value + work.exchange_ms,
        notes,
    }
}
