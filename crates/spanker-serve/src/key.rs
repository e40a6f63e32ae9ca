// SPDX-License-Identifier: Apache-2.0
//! API keys. What is kept and compared are digests of them, in a time that does not depend on how much is right.

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

type Hash = [u8; 32];

/// The keys of which a request must have one.
#[derive(Clone, Default)]
pub(crate) struct Keys(Vec<Hash>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    pub(crate) fn new(keys: &[String]) -> Keys {
        Keys(keys.iter().map(|key| Sha256::digest(key).into()).collect())
    }

    /// Whether no key is asked for.
    pub(crate) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a request with these headers may go on.
    pub(crate) fn allow(&self, headers: &HeaderMap) -> bool {
        if self.are_none() {
            return true;
        }
        // OpenAI's clients send the first, some others the second.
        let bearer =
            headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().split_at_checked(7));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        let given = match (bearer, headers.get("x-api-key")) {
            (Some((_, key)), _) => key.trim_ascii(),
            (None, Some(key)) => key.as_bytes(),
            (None, None) => return false,
        };
        let given: Hash = Sha256::digest(given).into();
        let all = self.0.iter().map(|key| key.ct_eq(&given));
        all.fold(Choice::from(0), |one, other| one | other).into()
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn one_of_the_keys_opens_and_nothing_else_does() {
        let keys = Keys::new(&["secret".into(), "\u{e9}".into()]);
        let allowed = |name: &'static str, value: &str| {
            let value = HeaderValue::from_bytes(value.as_bytes()).expect("a value");
            let headers = HeaderMap::from_iter([(HeaderName::from_static(name), value)]);
            keys.allow(&headers)
        };
        for value in ["Bearer secret", "bearer secret", "BEARER  secret ", "Bearer \u{e9}"] {
            assert!(allowed("authorization", value), "{value}");
        }
        assert!(allowed("x-api-key", "secret"));
        for value in [
            "secret",
            "Basic secret",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Bearer SECRET",
        ] {
            assert!(!allowed("authorization", value), "{value}");
        }
        assert!(!allowed("x-api-key", "secre") && !keys.allow(&HeaderMap::new()));
        assert!(Keys::default().allow(&HeaderMap::new()));
        assert!(!format!("{keys:?}").contains("secret"));
    }
}
