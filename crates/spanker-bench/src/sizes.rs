// SPDX-License-Identifier: Apache-2.0
//! Sizes as people write them: `4K`, `64M`, `4K..64M`, `4K,1M`.

use std::str::FromStr;

/// A list of sizes in bytes, never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes(pub Vec<usize>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for part in text.split(',') {
            match part.split_once("..") {
                None => sizes.push(bytes(part)?),
                Some((first, last)) => {
                    let (first, last) = (bytes(first)?, bytes(last)?);
                    if first > last {
                        return Err(format!("range '{part}' runs backwards"));
                    }
                    let doubled = std::iter::successors(Some(first), |size| size.checked_mul(2));
                    sizes.extend(doubled.take_while(|&size| size <= last));
                }
            }
        }
        Ok(Sizes(sizes))
    }
}

/// A number of bytes with an optional binary suffix.
///
/// # Errors
/// What is wrong with the text, which it names.
pub fn bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = text[digits.len()..].to_ascii_uppercase();
    let shift = match suffix.trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err(format!("size '{text}' has an unknown unit (expected K, M or G)")),
    };
    let number: usize = digits
        .parse()
        .map_err(|_| format!("size '{text}' is not a number of bytes, as in 4K or 64M"))?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err(format!("size '{text}' is zero")),
        Some(size) if size <= 1 << 40 => Ok(size),
        _ => Err(format!("size '{text}' is more than 1024G")),
    }
}

/// A size as tables show it: the largest binary unit that divides it.
#[must_use]
pub fn human(bytes: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit =
        units.iter().find(|(shift, _)| bytes >= 1 << shift && bytes.is_multiple_of(1 << shift));
    match unit {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<usize>, String> {
        text.parse::<Sizes>().map(|sizes| sizes.0)
    }

    #[test]
    fn sizes_and_ranges_are_read_as_people_write_them() {
        assert_eq!(parsed("4096"), Ok(vec![4096]));
        assert_eq!(parsed("4K,1MiB,2gb"), Ok(vec![4096, 1 << 20, 2 << 30]));
        assert_eq!(parsed("4K..32K"), Ok(vec![4096, 8192, 16384, 32768]));
        assert_eq!(parsed("3K..8K"), Ok(vec![3072, 6144]));
        assert_eq!(parsed("1..1"), Ok(vec![1]));
    }

    #[test]
    fn bad_sizes_are_named() {
        for bad in ["", "K", "0", "4X", "4K..", "-4", "1.5M", "99999999999999999999", "2000G"] {
            let error = parsed(bad).unwrap_err();
            let named = bad.split("..").last().unwrap();
            assert!(error.contains(&format!("'{named}'")), "{bad}: {error}");
        }
        assert_eq!(parsed("8K..4K"), Err("range '8K..4K' runs backwards".to_owned()));
    }

    #[test]
    fn sizes_are_shown_in_the_unit_they_were_written_in() {
        assert_eq!([human(4096), human(1 << 20), human(1000)], ["4K", "1M", "1000"]);
    }
}
