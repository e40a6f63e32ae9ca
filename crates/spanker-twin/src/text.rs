// SPDX-License-Identifier: Apache-2.0
//! What is done to a twin, as text and in words: cards and links by their numbers, error rates, factors.

use std::fmt;
use std::str::FromStr;

use crate::control::{Request, Target};

/// The chance that a line bit flips: 0 up to 0.5.
///
/// # Errors
/// What was expected instead.
pub fn bit_error_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..0.5).contains(&rate) => Ok(rate),
        _ => Err("expected a number from 0 up to 0.5, as in 1e-6".into()),
    }
}

/// How many times as long a card takes: 1 to 1000000.
///
/// # Errors
/// What was expected instead.
pub fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (1.0..=1e6).contains(&factor) => Ok(factor),
        _ => Err("expected a number from 1 to 1000000".into()),
    }
}

/// The two cards of a link, as in 0-1.
///
/// # Errors
/// What was expected instead.
pub fn link(text: &str) -> Result<(u32, u32), String> {
    let ends = text.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match ends {
        Some((a, b)) if a != b => Ok((a, b)),
        _ => Err("expected the numbers of two cards, as in 0-1".into()),
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        match (text.parse(), link(text)) {
            (Ok(card), _) => Ok(Target::Card(card)),
            (_, Ok((a, b))) => Ok(Target::Link(a, b)),
            _ => Err("expected the number of a card, or a link as in 0-1".into()),
        }
    }
}

/// What is so once the request is met.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Status => f.write_str("every card and link"),
            Request::Kill(card) => write!(f, "card {card} is dead"),
            Request::Stop(card) => write!(f, "card {card} is stopped"),
            Request::Stick(card) => write!(f, "card {card} is stuck"),
            Request::Garble(card) => write!(f, "card {card} computes garbage"),
            Request::Slow(card, factor) => write!(f, "card {card} takes {factor} times as long"),
            Request::Cut(a, b) => write!(f, "link {a}-{b} is cut"),
            Request::Corrupt(a, b, rate) => {
                write!(f, "link {a}-{b} has a bit error rate of {rate:e}")
            }
            Request::Restore(Some(Target::Card(card))) => write!(f, "card {card} is well again"),
            Request::Restore(Some(Target::Link(a, b))) => write!(f, "link {a}-{b} is whole again"),
            Request::Restore(None) => f.write_str("everything is well again"),
            Request::Down => f.write_str("the twin is down"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_cards_or_links_and_nothing_else() {
        assert_eq!("3".parse(), Ok(Target::Card(3)));
        assert_eq!("3-0".parse(), Ok(Target::Link(3, 0)));
        for bad in ["", "-", "x", "1-", "-1", "1-1", "1-2-3", "99999999999", " 1"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_and_factors_that_mean_nothing_are_refused() {
        for bad in ["-1", "0.5", "1", "nan", "inf", "", "x"] {
            assert!(bit_error_rate(bad).is_err(), "{bad}");
        }
        for bad in ["0", "0.5", "-2", "nan", "inf", "1e7"] {
            assert!(factor(bad).is_err(), "{bad}");
        }
        assert_eq!((bit_error_rate("1e-6"), factor("4")), (Ok(1e-6), Ok(4.0)));
    }
}
