// SPDX-License-Identifier: Apache-2.0
//! The Rust mirror of `include/spanker_ioctl.h`: request numbers, the structs they carry, and the
//! tie between the two. It performs no I/O, and it adds nothing that the header lacks.

use std::fmt;
use std::mem::offset_of;

use nix::libc::Ioctl;

/// The major version of the ABI that this crate mirrors; a change breaks older programs.
pub const ABI_VERSION_MAJOR: u16 = 0;
/// The minor version of the ABI that this crate mirrors; a change adds requests.
pub const ABI_VERSION_MINOR: u16 = 1;
/// The patch version of the ABI that this crate mirrors; a change alters neither numbers nor layout.
pub const ABI_VERSION_PATCH: u16 = 0;

/// The type byte that every request of this ABI carries.
const MAGIC: u8 = 0xE3;

/// Ties a request's number to the struct it carries.
///
/// # Safety
///
/// A driver that honours `NUMBER` reads and writes at most `size_of::<Self>()` bytes at the
/// argument, and every bit pattern of those bytes is a valid `Self`.
pub(crate) unsafe trait Request {
    /// The request's number, with direction, type byte and size encoded.
    const NUMBER: Ioctl;
    /// The request's name in error messages.
    const NAME: &'static str;
}

/// The request that carries no data.
pub(crate) struct Ping;

// SAFETY: the number encodes no data, so the driver touches no memory.
unsafe impl Request for Ping {
    const NUMBER: Ioctl = nix::request_code_none!(MAGIC, 1);
    const NAME: &'static str = "PING";
}

/// `struct spanker_version` as the driver writes it.
#[derive(Default)]
#[repr(C)]
pub(crate) struct RawVersion {
    major: u16,
    minor: u16,
    patch: u16,
    reserved: u16,
}

// SAFETY: the number encodes this struct's size, and any bits are valid in a `u16`.
unsafe impl Request for RawVersion {
    const NUMBER: Ioctl = nix::request_code_read!(MAGIC, 2, size_of::<Self>());
    const NAME: &'static str = "GET_VERSION";
}

const _: () = {
    assert!(size_of::<Ping>() == 0);
    assert!(size_of::<RawVersion>() == 8);
    assert!(offset_of!(RawVersion, major) == 0);
    assert!(offset_of!(RawVersion, minor) == 2);
    assert!(offset_of!(RawVersion, patch) == 4);
    assert!(offset_of!(RawVersion, reserved) == 6);
};

/// The version of the ABI that a driver speaks.
///
/// # Examples
///
/// ```
/// let version = spanker_runtime::AbiVersion { major: 0, minor: 1, patch: 0 };
/// assert_eq!(version.to_string(), "0.1.0");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AbiVersion {
    /// A difference here breaks older programs.
    pub major: u16,
    /// A difference here means that one side knows more requests.
    pub minor: u16,
    /// A difference here alters neither numbers nor layout.
    pub patch: u16,
}

impl fmt::Display for AbiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl From<RawVersion> for AbiVersion {
    fn from(raw: RawVersion) -> Self {
        Self { major: raw.major, minor: raw.minor, patch: raw.patch }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::process::Command;

    use super::{
        ABI_VERSION_MAJOR, ABI_VERSION_MINOR, ABI_VERSION_PATCH, MAGIC, Ping, RawVersion, Request,
    };
    use crate::cc;

    const HEADER: &str = include_str!("../include/spanker_ioctl.h");

    /// The ABI as Rust sees it, under the names that `tests/abi_layout.c` prints.
    fn mirror() -> BTreeMap<String, u64> {
        let number = |number| u64::from(number as u32);
        let size = |size: usize| size as u64;
        [
            ("SPANKER_IOC_MAGIC", MAGIC.into()),
            ("SPANKER_ABI_VERSION_MAJOR", ABI_VERSION_MAJOR.into()),
            ("SPANKER_ABI_VERSION_MINOR", ABI_VERSION_MINOR.into()),
            ("SPANKER_ABI_VERSION_PATCH", ABI_VERSION_PATCH.into()),
            ("SPANKER_IOC_PING", number(Ping::NUMBER)),
            ("SPANKER_IOC_GET_VERSION", number(RawVersion::NUMBER)),
            ("sizeof(spanker_version)", size(size_of::<RawVersion>())),
            ("alignof(spanker_version)", size(align_of::<RawVersion>())),
            ("offsetof(spanker_version.major)", size(std::mem::offset_of!(RawVersion, major))),
            ("offsetof(spanker_version.minor)", size(std::mem::offset_of!(RawVersion, minor))),
            ("offsetof(spanker_version.patch)", size(std::mem::offset_of!(RawVersion, patch))),
            (
                "offsetof(spanker_version.reserved)",
                size(std::mem::offset_of!(RawVersion, reserved)),
            ),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
    }

    /// The ABI as the C compiler sees it.
    fn c_layout() -> BTreeMap<String, u64> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = folder.path().join("abi_layout");
        cc::compile("abi_layout.c", &program, &["-pedantic"]);
        let run = Command::new(&program).output().expect("the layout program runs");
        assert!(run.status.success(), "the layout program ends with {}", run.status);
        let mut layout = BTreeMap::new();
        for line in String::from_utf8(run.stdout).expect("text").lines() {
            let (name, value) = line.split_once(' ').expect("a name and a value");
            let value = value.parse().expect("a number");
            assert_eq!(layout.insert(name.to_owned(), value), None, "{name} is printed twice");
        }
        layout
    }

    #[test]
    fn rust_mirror_against_compiled_header_has_same_numbers_and_layout() {
        assert_eq!(mirror(), c_layout());
    }

    #[test]
    fn header_definitions_are_all_compared_with_the_mirror() {
        let defined: BTreeSet<_> = HEADER
            .lines()
            .filter_map(|line| line.strip_prefix("#define SPANKER_"))
            .filter_map(|rest| rest.split_once(' '))
            .map(|(name, _)| format!("SPANKER_{name}"))
            .collect();
        let compared = mirror().into_keys().filter(|name| name.starts_with("SPANKER_")).collect();
        assert_eq!(defined, compared);
    }
}
