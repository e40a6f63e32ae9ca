// SPDX-License-Identifier: Apache-2.0
//! Units as types: seconds, bytes, bytes per second, multiply-accumulates per second.
//!
//! Each is read as people write it (`"2 us"`, `"4 GiB"`, `"500 MB/s"`, `"3.6 GMAC/s"`) or as a plain
//! number in the base unit, and is never negative or infinite once it was read.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de};

/// A text that is not a quantity of the unit that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not {expected}")]
pub struct UnitError {
    text: String,
    expected: &'static str,
}

/// Splits `"2.5 GB/s"` into its number and its unit, and scales by the first suffix that matches.
fn parse(text: &str, units: &[(&str, f64)], expected: &'static str) -> Result<f64, UnitError> {
    let error = || UnitError { text: text.trim().to_owned(), expected };
    let trimmed = text.trim();
    // A number may be written as 2e9, so a letter e that digits follow belongs to it.
    let end = trimmed
        .char_indices()
        .find(|&(at, c)| {
            let exponent = matches!(c, 'e' | 'E')
                && trimmed[at + 1..].starts_with(|c: char| c.is_ascii_digit() || c == '-');
            !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | '_') || exponent)
        })
        .map_or(trimmed.len(), |(at, _)| at);
    let number: f64 = trimmed[..end].replace('_', "").parse().map_err(|_| error())?;
    let unit = trimmed[end..].trim();
    let scale = units.iter().find(|(name, _)| *name == unit);
    let value = number * scale.ok_or_else(error)?.1;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(error()) }
}

/// Three significant digits, without zeros that say nothing.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Reads a quantity that a file gives as text or as a number.
macro_rules! quantity {
    ($type:ident, $number:ty) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum Written {
                    Whole(i64),
                    Number(f64),
                    Text(String),
                }
                let text = match Written::deserialize(deserializer)? {
                    Written::Whole(number) => number.to_string(),
                    Written::Number(number) => number.to_string(),
                    Written::Text(text) => text,
                };
                text.parse().map_err(de::Error::custom)
            }
        }

        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.0.serialize(serializer)
            }
        }
    };
}

quantity!(Seconds, f64);
quantity!(Bytes, u64);
quantity!(BytesPerSecond, u64);
quantity!(MacsPerSecond, f64);

/// A time.
///
/// ```
/// use spanker_topology::Seconds;
/// let step: Seconds = "2 us".parse()?;
/// assert_eq!((step * 411.0).to_string(), "822 us");
/// assert!("-1 ms".parse::<Seconds>().is_err());
/// # Ok::<(), spanker_topology::UnitError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Seconds(pub f64);

impl Seconds {
    /// No time at all.
    pub const ZERO: Seconds = Seconds(0.0);

    /// A time in microseconds.
    #[must_use]
    pub const fn from_micros(micros: f64) -> Seconds {
        Seconds(micros / 1e6)
    }

    /// The time in milliseconds.
    #[must_use]
    pub const fn millis(self) -> f64 {
        self.0 * 1e3
    }

    /// The time in microseconds.
    #[must_use]
    pub const fn micros(self) -> f64 {
        self.0 * 1e6
    }

    /// The longer of two times.
    #[must_use]
    pub const fn max(self, other: Seconds) -> Seconds {
        Seconds(self.0.max(other.0))
    }

    /// The shorter of two times.
    #[must_use]
    pub const fn min(self, other: Seconds) -> Seconds {
        Seconds(self.0.min(other.0))
    }
}

impl FromStr for Seconds {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let units = [("", 1.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("ns", 1e-9)];
        let expected = "a time such as 2 us, 1.5 ms or 3 s";
        let value = parse(text, &units, expected)?;
        // More than this is no time that anything here takes, and sums of it could overflow.
        if value <= 1e9 {
            Ok(Seconds(value))
        } else {
            Err(UnitError { text: text.trim().to_owned(), expected })
        }
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let magnitude = self.0.abs();
        let (scale, unit) = match magnitude {
            m if m >= 1.0 => (1.0, "s"),
            m if m >= 1e-3 => (1e3, "ms"),
            m if m >= 1e-6 => (1e6, "us"),
            m if m > 0.0 => (1e9, "ns"),
            _ => (1.0, "s"),
        };
        f.pad(&format!("{} {unit}", short(self.0 * scale)))
    }
}

impl Add for Seconds {
    type Output = Seconds;
    fn add(self, other: Seconds) -> Seconds {
        Seconds(self.0 + other.0)
    }
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.0 += other.0;
    }
}

impl Sub for Seconds {
    type Output = Seconds;
    fn sub(self, other: Seconds) -> Seconds {
        Seconds(self.0 - other.0)
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;
    fn mul(self, times: f64) -> Seconds {
        Seconds(self.0 * times)
    }
}

impl Div<f64> for Seconds {
    type Output = Seconds;
    fn div(self, by: f64) -> Seconds {
        Seconds(self.0 / by)
    }
}

impl Sum for Seconds {
    fn sum<I: Iterator<Item = Seconds>>(times: I) -> Seconds {
        times.fold(Seconds::ZERO, Add::add)
    }
}

/// A number of bytes.
///
/// ```
/// use spanker_topology::Bytes;
/// assert_eq!("4 GiB".parse::<Bytes>()?, Bytes(4 << 30));
/// assert_eq!(Bytes(3_875_000_000).to_string(), "3.88 GB");
/// # Ok::<(), spanker_topology::UnitError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let units = [
            ("", 1.0),
            ("B", 1.0),
            ("kB", 1e3),
            ("KB", 1e3),
            ("MB", 1e6),
            ("GB", 1e9),
            ("TB", 1e12),
            ("KiB", 1024.0),
            ("MiB", 1_048_576.0),
            ("GiB", 1_073_741_824.0),
            ("TiB", 1_099_511_627_776.0),
        ];
        let expected = "a size such as 4 GiB or 512 MB";
        let value = parse(text, &units, expected)?;
        // More than this is no memory of any card, and sums of it could overflow.
        if value < 1e18 {
            Ok(Bytes(value.round() as u64))
        } else {
            Err(UnitError { text: text.trim().to_owned(), expected })
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&scaled(self.0, "B"))
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes(0), Add::add)
    }
}

/// Bytes per second.
///
/// ```
/// use spanker_topology::{Bytes, BytesPerSecond};
/// assert_eq!(BytesPerSecond(500_000_000).to_string(), "500 MB/s");
/// assert_eq!(BytesPerSecond(2_000_000_000).to_string(), "2 GB/s");
/// assert_eq!("1 Gb/s".parse::<BytesPerSecond>()?, BytesPerSecond(125_000_000)); // bits
/// assert_eq!(BytesPerSecond(500_000_000).time(Bytes(1_000_000)).to_string(), "2 ms");
/// # Ok::<(), spanker_topology::UnitError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BytesPerSecond(pub u64);

impl BytesPerSecond {
    /// How long `size` takes at this rate; infinitely long at a rate of zero.
    #[must_use]
    pub fn time(self, size: Bytes) -> Seconds {
        Seconds(size.0 as f64 / self.0 as f64)
    }
}

impl FromStr for BytesPerSecond {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let units = [
            ("", 1.0),
            ("B/s", 1.0),
            ("kB/s", 1e3),
            ("MB/s", 1e6),
            ("GB/s", 1e9),
            ("TB/s", 1e12),
            ("Mb/s", 0.125e6),
            ("Gb/s", 0.125e9),
            ("Mbit/s", 0.125e6),
            ("Gbit/s", 0.125e9),
        ];
        let expected = "a rate above zero such as 500 MB/s or 2 GB/s";
        let value = parse(text, &units, expected)?.round();
        if (1.0..1e18).contains(&value) {
            Ok(BytesPerSecond(value as u64))
        } else {
            Err(UnitError { text: text.trim().to_owned(), expected })
        }
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&scaled(self.0, "B/s"))
    }
}

fn scaled(value: u64, unit: &str) -> String {
    let (scale, prefix) = match value {
        0..1_000 => (1.0, ""),
        1_000..1_000_000 => (1e3, "k"),
        1_000_000..1_000_000_000 => (1e6, "M"),
        1_000_000_000..1_000_000_000_000 => (1e9, "G"),
        _ => (1e12, "T"),
    };
    format!("{} {prefix}{unit}", short(value as f64 / scale))
}

/// Multiply-accumulates of parameters per second: half of what is often counted as operations.
///
/// ```
/// use spanker_topology::MacsPerSecond;
/// assert_eq!("3.6 GMAC/s".parse::<MacsPerSecond>()?.to_string(), "3.6 GMAC/s");
/// # Ok::<(), spanker_topology::UnitError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct MacsPerSecond(pub f64);

impl FromStr for MacsPerSecond {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let units = [
            ("", 1.0),
            ("MAC/s", 1.0),
            ("MMAC/s", 1e6),
            ("GMAC/s", 1e9),
            ("TMAC/s", 1e12),
            ("GFLOP/s", 0.5e9),
            ("TFLOP/s", 0.5e12),
        ];
        let expected = "a rate above zero such as 3.6 GMAC/s or 100 TFLOP/s";
        let value = parse(text, &units, expected)?;
        if (1.0..1e24).contains(&value) {
            Ok(MacsPerSecond(value))
        } else {
            Err(UnitError { text: text.trim().to_owned(), expected })
        }
    }
}

impl fmt::Display for MacsPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scale, prefix) = match self.0 {
            v if v >= 1e12 => (1e12, "T"),
            v if v >= 1e9 => (1e9, "G"),
            _ => (1e6, "M"),
        };
        f.pad(&format!("{} {prefix}MAC/s", short(self.0 / scale)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_people_write_them() {
        assert_eq!("2 us".parse(), Ok(Seconds(2e-6)));
        assert_eq!("1e-3".parse(), Ok(Seconds(1e-3)));
        assert_eq!("2e9".parse(), Ok(BytesPerSecond(2_000_000_000)));
        assert_eq!("1.5GB/s".parse(), Ok(BytesPerSecond(1_500_000_000)));
        assert_eq!("1_000 kB".parse(), Ok(Bytes(1_000_000)));
        assert_eq!("989 TFLOP/s".parse(), Ok(MacsPerSecond(494.5e12)));
    }

    #[test]
    fn quantities_that_make_no_sense_are_named() {
        for bad in ["-2 GB/s", "0 GB/s", "fast", "", "2 parsecs", "inf", "1e400 B/s", "nan"] {
            let error = bad.parse::<BytesPerSecond>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")), "{error}");
        }
        assert!("-4 GiB".parse::<Bytes>().is_err());
        assert!("1e30".parse::<Bytes>().is_err());
        assert!("0".parse::<MacsPerSecond>().is_err());
        assert!("-1 s".parse::<Seconds>().is_err());
    }

    #[test]
    fn times_are_shown_in_the_unit_that_fits() {
        let shown = [0.0, 2.5e-9, 8.22e-4, 0.0744, 1.5, 1234.0].map(|s| Seconds(s).to_string());
        assert_eq!(shown, ["0 s", "2.5 ns", "822 us", "74.4 ms", "1.5 s", "1234 s"]);
    }
}
