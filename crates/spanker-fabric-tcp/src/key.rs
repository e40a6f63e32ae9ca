// SPDX-License-Identifier: Apache-2.0
//! The key that a leader and its workers share, and the file that it lies in.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;

use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;

use crate::TcpError;

/// Bytes of a key.
const LENGTH: usize = 32;
/// Bytes of a file that can be a key: its digits and some white space.
const LONGEST_FILE: u64 = 256;

/// 32 random bytes. Who has them can lead workers and be one; neither `{:?}` nor any error shows them.
#[derive(Clone)]
pub struct Key([u8; LENGTH]);

impl Key {
    /// What ends without a key use: it protects nothing, which is why it is for loopback only.
    pub(crate) const NONE: Key = Key([0; LENGTH]);

    /// A key that nobody has yet.
    ///
    /// # Errors
    /// [`TcpError::Random`] if the system has no random numbers.
    pub fn generate() -> Result<Key, TcpError> {
        let mut bytes = [0; LENGTH];
        SystemRandom::new().fill(&mut bytes).map_err(|_| TcpError::Random)?;
        Ok(Key(bytes))
    }

    /// A key of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; LENGTH]) -> Key {
        Key(bytes)
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }

    /// Reads a key from a file that only its owner can read.
    ///
    /// # Errors
    /// [`TcpError::KeyFile`] with the reason.
    pub fn read(path: &Path) -> Result<Key, TcpError> {
        let wrong = |reason: String| TcpError::KeyFile { path: path.to_owned(), reason };
        let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
        let about = file.metadata().map_err(|error| wrong(error.to_string()))?;
        let mode = about.mode() & 0o777;
        if mode & 0o077 != 0 {
            let reason = format!("others than its owner can read it (mode {mode:04o})");
            return Err(wrong(format!("{reason}\nhint: chmod 600 {}", path.display())));
        }
        let mut text = String::new();
        let read = file.take(LONGEST_FILE + 1).read_to_string(&mut text);
        read.map_err(|error| wrong(error.to_string()))?;
        text.parse().map_err(|error: TcpError| wrong(error.to_string()))
    }

    /// Writes the key to a file that does not exist yet, for its owner alone.
    ///
    /// # Errors
    /// [`TcpError::KeyFile`] with the reason: a file of that name exists, too.
    pub fn write(&self, path: &Path) -> Result<(), TcpError> {
        let wrong = |error: std::io::Error| TcpError::KeyFile {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(path).map_err(wrong)?;
        file.write_all(format!("{}\n", self.to_hex()).as_bytes()).map_err(wrong)?;
        file.sync_all().map_err(wrong)
    }

    /// The key as 64 hexadecimal digits: whoever reads them has the key.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FromStr for Key {
    type Err = TcpError;

    fn from_str(text: &str) -> Result<Key, TcpError> {
        let text = text.trim();
        let digits = text.chars().count();
        if digits != 2 * LENGTH {
            return Err(TcpError::KeyText { reason: format!("{digits} characters, a key has 64") });
        }
        let mut bytes = [0; LENGTH];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| !pair.contains('+'));
            *byte = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(|| {
                TcpError::KeyText { reason: "not hexadecimal digits throughout".into() }
            })?;
        }
        Ok(Key(bytes))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_read_as_it_was_written_and_never_shown_or_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let key = Key::generate().expect("random numbers");
        key.write(&path).expect("a new file");
        assert_eq!(Key::read(&path).expect("a key"), key);
        assert_ne!(Key::generate().expect("random numbers"), key);
        assert_eq!(std::fs::metadata(&path).expect("a file").mode() & 0o777, 0o600);
        let other = Key::generate().expect("random numbers").write(&path).expect_err("it exists");
        assert!(other.to_string().contains("exists"), "{other}");
        assert!(!format!("{key:?}").contains(&key.to_hex()[..8]));
    }

    #[test]
    fn a_file_that_others_can_read_is_refused_with_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        Key::generate().expect("random numbers").write(&path).expect("a new file");
        for mode in [0o640, 0o604, 0o620] {
            let wider = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, wider).expect("ours");
            let refused = Key::read(&path).expect_err("others can read it").to_string();
            assert!(refused.contains(&format!("mode {mode:04o}")), "{refused}");
            assert!(refused.contains("\nhint: chmod 600 "), "{refused}");
        }
    }

    #[test]
    fn texts_that_are_no_keys_are_refused_without_being_shown() {
        let long = "0123456789abcdef".repeat(8);
        let not_hex = "zz".repeat(32);
        let signs = "+1".repeat(32);
        let wide = "ä".repeat(32);
        for text in ["", "00", &long[..63], &long[..65], &not_hex, &signs, &wide, &"ä".repeat(64)]
        {
            let error = text.parse::<Key>().expect_err(text).to_string();
            assert!(text.is_empty() || text == "00" || !error.contains(text), "{error}");
        }
        assert_eq!(long[..64].parse::<Key>().expect("64 digits").to_hex(), long[..64]);
    }
}
