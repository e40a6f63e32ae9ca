// SPDX-License-Identifier: Apache-2.0
//! What is made to go wrong with a job, as text: `emul1@0.5s`, `emul1@0.5s+2s`, `emul1*4@0.5s`; and which items cost more.
//! Nothing runs here.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use spanker_steal::{Fault, Trouble};
use spanker_topology::Seconds;

/// A backend's name, and what goes wrong with it.
pub type Named = (String, Fault);
/// A part of the job, and how many times as much its items cost.
pub type Hot = (Range<f64>, f64);

/// How many times as long things may take.
const FACTORS: RangeInclusive<f64> = 1.0..=1e6;
/// The factor of a backend that is slow, unless there is another.
const SLOW: f64 = 4.0;

/// A backend that dies: `emul1` and `emul1@0.5s`.
///
/// # Errors
/// What was expected instead.
pub fn kill(text: &str) -> Result<Named, String> {
    let (backend, at) = named(text, "emul1 or emul1@0.5s")?;
    Ok((backend, Fault { at, trouble: Trouble::Kill }))
}

/// The same for a backend that computes wrong bytes.
///
/// # Errors
/// What was expected instead.
pub fn corrupt(text: &str) -> Result<Named, String> {
    let (backend, fault) = kill(text)?;
    Ok((backend, Fault { trouble: Trouble::Corrupt, ..fault }))
}

/// A backend that hangs: `emul1`, `emul1@0.5s` and `emul1@0.5s+2s`.
///
/// # Errors
/// What was expected instead.
pub fn hang(text: &str) -> Result<Named, String> {
    let (text, lasts) = cut(text, &['+']);
    let trouble = Trouble::Hang(lasts.map(time).transpose()?);
    let (backend, at) = named(text, "emul1, emul1@0.5s or emul1@0.5s+2s")?;
    Ok((backend, Fault { at, trouble }))
}

/// A backend that slows down: `emul1`, `emul1*4`, `emul1@0.5s`, `emul1*4@0.5s`, `emul1@0.5s*4` and `emul1@0.5s:4x`.
///
/// # Errors
/// What was expected instead.
pub fn slow(text: &str) -> Result<Named, String> {
    let (before, after) = cut(text, &['@']);
    let (name, first) = cut(before, &['*', ':']);
    let (at, second) = after.map_or(("0", None), |after| cut(after, &['*', ':']));
    if first.is_some() && second.is_some() {
        return Err(format!("'{text}' has two factors"));
    }
    let (backend, _) = named(name, "emul1@0.5s or emul1*4@0.5s")?;
    let trouble = Trouble::Slow(first.or(second).map_or(Ok(SLOW), factor)?);
    Ok((backend, Fault { at: time(at)?, trouble }))
}

/// What is before the first of these characters, and what is after it.
fn cut<'t>(text: &'t str, characters: &[char]) -> (&'t str, Option<&'t str>) {
    text.split_once(characters).map_or((text, None), |(before, after)| (before, Some(after)))
}

/// A backend's name and the time after `@`, or the start.
fn named(text: &str, like: &str) -> Result<(String, Duration), String> {
    let (name, at) = cut(text, &['@']);
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(format!("'{text}' is not like {like}"));
    }
    Ok((name.to_owned(), at.map_or(Ok(Duration::ZERO), time)?))
}

/// A time that may be any.
///
/// # Errors
/// What was expected instead.
pub fn time(text: &str) -> Result<Duration, String> {
    let seconds: Seconds = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from_secs_f64(seconds.0).map_err(|_| format!("'{text}' is no time"))
}

fn factor(text: &str) -> Result<f64, String> {
    match text.strip_suffix('x').unwrap_or(text).parse() {
        Ok(factor) if FACTORS.contains(&factor) => Ok(factor),
        _ => {
            Err(format!("'{text}': expected a factor of {} to {}", FACTORS.start(), FACTORS.end()))
        }
    }
}

/// A part of the items that cost more: `0.9..1.0*10`.
///
/// # Errors
/// What was expected instead.
pub fn hot(text: &str) -> Result<Hot, String> {
    let bad = || format!("'{text}' is not like 0.9..1.0*10, with parts of the job from 0 to 1");
    let (part, word) = text.split_once('*').ok_or_else(bad)?;
    let (start, end) = part.split_once("..").ok_or_else(bad)?;
    let end_of = |text: &str| text.trim().parse::<f64>().map_err(|_| bad());
    let part = end_of(start)?..end_of(end)?;
    if part.start >= 0.0 && part.start < part.end && part.end <= 1.0 {
        Ok((part, factor(word)?))
    } else {
        Err(bad())
    }
}

/// A number of items: `1000000`, `1_000_000` and `1M`.
///
/// # Errors
/// What was expected instead.
pub fn items(text: &str) -> Result<usize, String> {
    let bad = || format!("'{text}': expected a number of items above zero, as in 1000000 or 1M");
    let units = [("k", 1000), ("M", 1_000_000), ("G", 1_000_000_000)];
    let unit = units.into_iter().find(|(unit, _)| text.ends_with(unit));
    let digits = unit.map_or(text, |(unit, _)| text.trim_end_matches(unit)).replace('_', "");
    let count = digits.parse::<usize>().map_err(|_| bad())?;
    count.checked_mul(unit.map_or(1, |(_, unit)| unit)).filter(|count| *count > 0).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(named: Result<Named, String>) -> (String, f64, Trouble) {
        let (backend, fault) = named.unwrap();
        (backend, fault.at.as_secs_f64(), fault.trouble)
    }

    #[test]
    fn faults_are_read_with_and_without_times() {
        assert_eq!(of(kill("emul1@500ms")), ("emul1".into(), 0.5, Trouble::Kill));
        assert_eq!(of(corrupt("cpu0")), ("cpu0".into(), 0.0, Trouble::Corrupt));
        assert_eq!(of(hang("emul1@0.5s")), ("emul1".into(), 0.5, Trouble::Hang(None)));
        let two = Trouble::Hang(Some(Duration::from_secs(2)));
        assert_eq!(of(hang("emul1@0.5s+2s")), ("emul1".into(), 0.5, two));
    }

    #[test]
    fn slow_backends_may_have_their_factor_in_several_places() {
        for (text, at, factor) in [
            ("emul1", 0.0, 4.0),
            ("emul1*2", 0.0, 2.0),
            ("emul1@0.5s", 0.5, 4.0),
            ("emul1*2@0.5s", 0.5, 2.0),
            ("emul1@0.5s*2.5", 0.5, 2.5),
            ("emul1@0.5s:3x", 0.5, 3.0),
        ] {
            assert_eq!(of(slow(text)), ("emul1".into(), at, Trouble::Slow(factor)), "{text}");
        }
    }

    #[test]
    fn faults_that_make_no_sense_are_refused() {
        for bad in ["", "@1s", "emul1@", "emul1@-1s", "emul1@nan", "emul1@1s@2s", "a b@1s"] {
            assert!(kill(bad).is_err(), "{bad}");
        }
        for bad in ["emul1@1s+", "emul1@1s+x", "emul1+"] {
            assert!(hang(bad).is_err(), "{bad}");
        }
        for bad in ["emul1*0.5", "emul1*nan", "emul1*2@1s*3", "emul1*", "emul1*1e9", "*4@1s"] {
            assert!(slow(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn hot_parts_are_read_with_their_factor() {
        assert_eq!(hot("0.9..1.0*10"), Ok((0.9..1.0, 10.0)));
        assert_eq!(hot("0..1*2x"), Ok((0.0..1.0, 2.0)));
        for bad in ["", "0.9..1.0", "1..0*2", "-1..1*2", "0..2*2", "nan..1*2", "0..1*0", "0..1*nan"]
        {
            assert!(hot(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn items_are_read_with_and_without_units() {
        assert_eq!(items("1000000"), Ok(1_000_000));
        assert_eq!(items("1_000"), Ok(1000));
        assert_eq!((items("3k"), items("2M")), (Ok(3000), Ok(2_000_000)));
        for bad in
            ["", "0", "0M", "-1", "1.5", "M", "nan", "99999999999999999999", "99999999999999G"]
        {
            assert!(items(bad).is_err(), "{bad}");
        }
    }
}
