// SPDX-License-Identifier: Apache-2.0
//! What disturbs a simulation, as text: `card2@50ms`, `link0-1@20ms`, `card1*1.5@10ms`.

use std::str::FromStr;

use spanker_topology::Seconds;

use super::{Fault, Slow};

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let bad = || format!("'{text}' is not like card2@50ms or link0-1@20ms");
        let (what, when) = text.split_once('@').ok_or_else(bad)?;
        let at = when.parse::<Seconds>().map_err(|error| error.to_string())?;
        if let Some(card) = what.strip_prefix("card") {
            return Ok(Fault::Card { card: card.parse().map_err(|_| bad())?, at });
        }
        let (from, to) =
            what.strip_prefix("link").and_then(|l| l.split_once('-')).ok_or_else(bad)?;
        let end = |text: &str| text.parse().map_err(|_| bad());
        Ok(Fault::Link { from: end(from)?, to: end(to)?, at })
    }
}

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> Result<Slow, String> {
        let bad = || format!("'{text}' is not like card1*1.5 or card1*1.5@10ms");
        let (what, from) = match text.split_once('@') {
            None => (text, Seconds::ZERO),
            Some((what, from)) => (what, from.parse().map_err(|_| bad())?),
        };
        let (card, factor) =
            what.strip_prefix("card").and_then(|c| c.split_once('*')).ok_or_else(bad)?;
        let card = card.parse().map_err(|_| bad())?;
        Ok(Slow { card, factor: factor.parse().map_err(|_| bad())?, from })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_and_slow_cards_are_read_as_people_write_them() {
        assert_eq!("card2@50ms".parse(), Ok(Fault::Card { card: 2, at: Seconds(0.050) }));
        assert_eq!("link0-1@2s".parse(), Ok(Fault::Link { from: 0, to: 1, at: Seconds(2.0) }));
        let wanted = Slow { card: 1, factor: 1.5, from: Seconds(0.010) };
        assert_eq!("card1*1.5@10ms".parse(), Ok(wanted));
        for bad in ["card2", "card@1s", "disk1@1s", "link0@1s", "card1@soon", "card-1@1s"] {
            assert!(bad.parse::<Fault>().is_err(), "{bad}");
        }
        for bad in ["card1", "1*2", "card1*fast", "card1*2@never"] {
            assert!(bad.parse::<Slow>().is_err(), "{bad}");
        }
    }
}
