// SPDX-License-Identifier: Apache-2.0
//! What a probe has found out about links, kept in a file beside the cards' devices.
//!
//! ```toml
//! [[links]]
//! from = { serial = "ca7d0000", port = 0 }
//! to = { serial = "ca7d0001", port = 1 }
//! bandwidth = "493 MB/s"       # or bytes per second
//! latency = "2 us"             # or seconds
//! fitted = 1760000000          # when, in seconds since 1970
//! ```

use std::fmt::Write;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use spanker_topology::{BytesPerSecond, Seconds};

use crate::{Error, Result};

/// The name of the file.
const FILE: &str = "links.toml";
/// Bytes that are read of it at most.
const MOST_BYTES: u64 = 1 << 20;
/// Links that it has at most.
const MOST_LINKS: usize = 4096;

/// One end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkEnd {
    /// The card's serial.
    pub serial: u64,
    /// Its port.
    pub port: u32,
}

/// What is known of one direction of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbedLink {
    /// The end that sends.
    pub from: LinkEnd,
    /// The end that receives.
    pub to: LinkEnd,
    /// What it sustains.
    pub bandwidth: BytesPerSecond,
    /// What a small message takes.
    pub latency: Seconds,
    /// When that was found out, in seconds since 1970.
    pub fitted: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    #[serde(default)]
    links: Vec<SavedLink>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedLink {
    from: SavedEnd,
    to: SavedEnd,
    bandwidth: BytesPerSecond,
    latency: Seconds,
    fitted: u64,
}

/// TOML's numbers are signed and serials are not, so a serial is written as text.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedEnd {
    serial: String,
    port: u32,
}

fn failed(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Links { path: path.to_path_buf(), reason: reason.to_string().trim().to_owned() }
}

/// Saves what is known of the links between the cards of a folder, in place of what was saved before.
///
/// # Errors
/// [`Error::Links`] names the file.
pub fn save_links(directory: &Path, links: &[ProbedLink]) -> Result<()> {
    let path = directory.join(FILE);
    let mut text = String::from("# What a probe has found out about the links.\n");
    for ProbedLink { from, to, bandwidth, latency, fitted } in links {
        let end = |LinkEnd { serial, port }: &LinkEnd| {
            format!("{{ serial = \"{serial:x}\", port = {port} }}")
        };
        let (from, to) = (end(from), end(to));
        // Rust writes the shortest digits that are read back as the same number.
        let (rate, latency) = (bandwidth.0, latency.0);
        let written = write!(
            text,
            "\n[[links]]\nfrom = {from}\nto = {to}\nbandwidth = {rate}\nlatency = {latency:?}\n\
             fitted = {fitted}\n"
        );
        written.map_err(|error| failed(&path, error))?;
    }
    // What would not be read back is not written.
    parse(&text).map_err(|reason| failed(&path, reason))?;
    // A reader sees the old file or the new one, never half of one.
    let fresh = directory.join(format!("{FILE}.{}.tmp", std::process::id()));
    let write = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, &path));
    write.map_err(|error| failed(&path, error))
}

/// What is known of the links between the cards of a folder; nothing if nothing was saved.
///
/// ```
/// use spanker_scheduler::{LinkEnd, ProbedLink, load_links, save_links};
/// # use spanker_scheduler::BytesPerSecond;
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// assert_eq!(load_links(folder)?, []);
/// let link = ProbedLink {
///     from: LinkEnd { serial: u64::MAX, port: 0 },
///     to: LinkEnd { serial: 7, port: 1 },
///     bandwidth: BytesPerSecond(493_000_000),
///     latency: "2 us".parse().unwrap(),
///     fitted: 1_760_000_000,
/// };
/// save_links(folder, &[link])?;
/// assert_eq!(load_links(folder)?, [link]);
/// # Ok::<(), spanker_scheduler::Error>(())
/// ```
///
/// # Errors
/// [`Error::Links`] names the file and what is wrong with it.
pub fn load_links(directory: &Path) -> Result<Vec<ProbedLink>> {
    let path: PathBuf = directory.join(FILE);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(&path, error)),
    };
    let mut text = String::new();
    file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(|error| failed(&path, error))?;
    parse(&text).map_err(|reason| failed(&path, reason))
}

fn parse(text: &str) -> std::result::Result<Vec<ProbedLink>, String> {
    if text.len() as u64 > MOST_BYTES {
        return Err(format!("more than {MOST_BYTES} bytes"));
    }
    let saved: Saved = toml::from_str(text).map_err(|error| error.to_string())?;
    if saved.links.len() > MOST_LINKS {
        return Err(format!("{} links, at most {MOST_LINKS} are possible", saved.links.len()));
    }
    let end = |SavedEnd { serial, port }: SavedEnd| match u64::from_str_radix(&serial, 16) {
        Ok(number) => Ok(LinkEnd { serial: number, port }),
        Err(_) => Err(format!("serial {serial:?} is not hexadecimal")),
    };
    let link = |SavedLink { from, to, bandwidth, latency, fitted }: SavedLink| {
        Ok(ProbedLink { from: end(from)?, to: end(to)?, bandwidth, latency, fitted })
    };
    saved.links.into_iter().map(link).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_makes_no_sense_is_named_with_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let good = "[[links]]\nfrom = { serial = \"a\", port = 0 }\nto = { serial = \"b\", port = 1 }\n\
                    bandwidth = \"1 MB/s\"\nlatency = 0\nfitted = 0\n";
        let cases = [
            ("\"a\"", "\"xyz\"", "\"xyz\" is not hexadecimal"),
            ("port = 1", "port = -1", "-1"),
            ("\"1 MB/s\"", "\"much\"", "much"),
            ("fitted", "fixed", "fixed"),
            ("[[links]]", "[[links", "TOML"),
        ];
        std::fs::write(folder.path().join(FILE), good).unwrap();
        assert_eq!(load_links(folder.path()).unwrap()[0].bandwidth, BytesPerSecond(1_000_000));
        for (from, to, named) in cases {
            std::fs::write(folder.path().join(FILE), good.replacen(from, to, 1)).unwrap();
            let error = load_links(folder.path()).unwrap_err().to_string();
            assert!(error.contains("links.toml: ") && error.contains(named), "{error}");
        }
        std::fs::write(folder.path().join(FILE), "#".repeat(2 << 20)).unwrap();
        let error = load_links(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("more than 1048576 bytes"), "{error}");
    }
}
