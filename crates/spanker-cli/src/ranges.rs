// SPDX-License-Identifier: Apache-2.0
//! Numbers from one to another, both ends included, as flags give them: `7`, `8..15` and `8..=15`.

use std::ops::RangeInclusive;
use std::str::FromStr;

/// Tokens of a run.
pub(crate) fn tokens(text: &str) -> Result<RangeInclusive<u32>, String> {
    range(text).ok_or_else(|| format!("'{text}': expected a token, or a range as in 8..15"))?
}

/// Numbers of cards.
pub(crate) fn cards(text: &str) -> Result<RangeInclusive<usize>, String> {
    let bad = || format!("'{text}': expected a number of cards, or a range as in 1..5");
    match range(text).ok_or_else(bad)?? {
        range if *range.start() > 0 && *range.end() <= 64 => Ok(range),
        _ => Err(format!("'{text}': expected 1 to 64 cards")),
    }
}

/// Nothing for what is no range.
fn range<T: FromStr + Copy + PartialOrd>(text: &str) -> Option<Result<RangeInclusive<T>, String>> {
    let number = |text: &str| text.trim().parse::<T>().ok();
    let (low, high) = match text.split_once("..") {
        None => (number(text)?, number(text)?),
        Some((low, high)) => (number(low)?, number(high.strip_prefix('=').unwrap_or(high))?),
    };
    Some(match low <= high {
        true => Ok(low..=high),
        false => Err(format!("range '{text}' runs backwards")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_a_number_or_with_both_ends() {
        assert_eq!([tokens("7"), tokens("8..15")], [Ok(7..=7), Ok(8..=15)]);
        assert_eq!(cards("1..=64"), Ok(1..=64));
        for bad in ["", "..", "8..", "15..8", "-1", "8...9", "a..b", "99999999999"] {
            assert!(tokens(bad).is_err(), "{bad}");
        }
        for bad in ["0", "0..3", "1..65", "3..2"] {
            assert!(cards(bad).is_err(), "{bad}");
        }
    }
}
