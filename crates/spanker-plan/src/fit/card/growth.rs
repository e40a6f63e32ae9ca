// SPDX-License-Identifier: Apache-2.0
//! How the time of exchanges grows with the number of cards, and the terms of a token's time.

use super::load::Load;

/// The unit of the bytes' column.
pub(super) const GIGA: f64 = 1e9;

/// How what the cards of a group exchange grows with their number n. All are 0 on one card and 1 on two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    /// n - 1: a ring's steps, or all parts over one shared medium.
    Linear,
    /// log2 n: a tree's steps.
    Log,
    /// 2 (n - 1) / n: the bytes of a ring.
    Share,
    /// n (n - 1) / 2: every pair of cards gets in the way of every other.
    Pairs,
}

impl Growth {
    /// Every growth, in the order of preference between equals.
    pub(super) const ALL: [Growth; 4] = [Growth::Linear, Growth::Log, Growth::Share, Growth::Pairs];

    /// Those that a whole time can show. A share, 2 - 2 / n, is a fixed cost less a part of what shrinks with n,
    /// so the other two terms have it already.
    pub(super) const OF_A_WHOLE: [Growth; 3] = [Growth::Linear, Growth::Log, Growth::Pairs];

    /// The name that files use.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Growth::Linear => "linear",
            Growth::Log => "log",
            Growth::Share => "share",
            Growth::Pairs => "pairs",
        }
    }

    /// The growth of a name.
    pub(super) fn named(name: &str) -> Option<Growth> {
        Growth::ALL.into_iter().find(|growth| growth.name() == name)
    }

    /// The formula, for people.
    pub(super) const fn formula(self) -> &'static str {
        match self {
            Growth::Linear => "n - 1",
            Growth::Log => "log2 n",
            Growth::Share => "2 (n - 1) / n",
            Growth::Pairs => "n (n - 1) / 2",
        }
    }

    /// How many times what two cards take.
    pub(super) fn of(self, cards: f64) -> f64 {
        match self {
            Growth::Linear => cards - 1.0,
            Growth::Log => cards.log2(),
            Growth::Share => 2.0 * (cards - 1.0) / cards,
            Growth::Pairs => cards * (cards - 1.0) / 2.0,
        }
    }
}

/// What cards exchange for a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Exchange {
    pub(super) growth: Growth,
    /// What the exchanges of a layer take on two cards.
    pub(super) per_layer_ms: f64,
    /// The scale of its own residuals, where exchanges were measured apart from the rest.
    pub(super) scale: Option<f64>,
}

impl Exchange {
    pub(super) fn ms(&self, load: Load) -> f64 {
        self.per_layer_ms * load.layers * self.growth.of(load.cards)
    }
}

/// One account of where a token's time goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Terms {
    /// Milliseconds to read a gigabyte. It is 0 where more bytes took no longer.
    pub(super) per_gigabyte_ms: f64,
    pub(super) per_layer_ms: f64,
    pub(super) exchange: Option<Exchange>,
}

impl Terms {
    pub(super) fn memory_ms(&self, load: Load) -> f64 {
        self.per_gigabyte_ms * load.bytes / GIGA
    }

    pub(super) fn fixed_ms(&self, load: Load) -> f64 {
        self.per_layer_ms * load.layers
    }

    pub(super) fn exchange_ms(&self, load: Load) -> f64 {
        self.exchange.map_or(0.0, |exchange| exchange.ms(load))
    }

    /// The whole time.
    pub(super) fn ms(&self, load: Load) -> f64 {
        self.memory_ms(load) + self.fixed_ms(load) + self.exchange_ms(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_growth_is_nothing_on_one_card_and_one_on_two_and_has_its_name() {
        for growth in Growth::ALL {
            assert_eq!((growth.of(1.0), growth.of(2.0)), (0.0, 1.0), "{growth:?}");
            assert_eq!(Growth::named(growth.name()), Some(growth));
        }
        let on_six = Growth::ALL.map(|growth| growth.of(6.0));
        assert!((on_six[1] - 2.585).abs() < 1e-3);
        assert_eq!((on_six[0], on_six[2], on_six[3]), (5.0, 10.0 / 6.0, 15.0));
        assert_eq!(Growth::named("cubic"), None);
    }
}
