// SPDX-License-Identifier: Apache-2.0
//! The handshake and its ciphers: Noise with a pre-shared key, by `snow`, on the primitives of `ring`.
//!
//! `ring` is what TLS of the server runs on already, so the program has one implementation of each primitive. Its
//! ChaCha20-Poly1305 uses the vector units of PCs and boards.

use std::sync::{Mutex, PoisonError};

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::digest;
use ring::rand::{SecureRandom, SystemRandom};
use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, Error, HandshakeState};

use crate::Key;

/// Neither end has a static key: who knows the pre-shared key is a worker, or a leader.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// What both ends must mean. Any other version of the protocol is another handshake, which fails.
const PROLOGUE: &[u8] = b"spanker-fabric-tcp/1";

/// Bytes of either message of the handshake: a public key and a tag.
pub(crate) const HELLO: usize = 32 + TAG;
/// Bytes that a record is longer than what it says.
pub(crate) const TAG: usize = 16;
/// Bytes of the longest record.
pub(crate) const RECORD: usize = 65_535;

/// The end that dials, or the one that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Dials,
    Listens,
}

/// The beginning of a handshake.
pub(crate) fn handshake(key: &Key, role: Role) -> Result<HandshakeState, Error> {
    let params: NoiseParams = PATTERN.parse()?;
    let builder = Builder::with_resolver(params, Box::new(Resolver));
    let builder = builder.psk(0, key.bytes())?.prologue(PROLOGUE)?;
    match role {
        Role::Dials => builder.build_initiator(),
        Role::Listens => builder.build_responder(),
    }
}

struct Resolver;

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(System(SystemRandom::new())))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        matches!(choice, DHChoice::Curve25519)
            .then(|| Box::new(Ephemeral::default()) as Box<dyn Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        let hash = || Box::new(Sha256(digest::Context::new(&digest::SHA256))) as Box<dyn Hash>;
        matches!(choice, HashChoice::SHA256).then(hash)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        let cipher = || Box::new(ChaChaPoly(cipher_of(&[0; 32]))) as Box<dyn Cipher>;
        matches!(choice, CipherChoice::ChaChaPoly).then(cipher)
    }
}

struct System(SystemRandom);

impl Random for System {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), Error> {
        self.0.fill(dest).map_err(|_| Error::Rng)
    }
}

/// A key pair that agrees once. The pattern has no other.
#[derive(Default)]
struct Ephemeral {
    private: Mutex<Option<EphemeralPrivateKey>>,
    public: [u8; 32],
}

impl Dh for Ephemeral {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, _: &[u8]) {
        unreachable!("the pattern has no static keys");
    }

    /// `ring` draws from the system itself.
    fn generate(&mut self, _: &mut dyn Random) -> Result<(), Error> {
        let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new());
        let private = private.map_err(|_| Error::Rng)?;
        let public = private.compute_public_key().map_err(|_| Error::Dh)?;
        self.public.copy_from_slice(public.as_ref());
        self.private = Mutex::new(Some(private));
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        unreachable!("private keys stay where they are");
    }

    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let private = self.private.lock().unwrap_or_else(PoisonError::into_inner).take();
        let peer = UnparsedPublicKey::new(&X25519, pubkey.get(..32).ok_or(Error::Dh)?);
        agree_ephemeral(private.ok_or(Error::Dh)?, &peer, |shared| {
            out[..shared.len()].copy_from_slice(shared);
        })
        .map_err(|_| Error::Dh)
    }
}

struct Sha256(digest::Context);

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.0 = digest::Context::new(&digest::SHA256);
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(self.0.clone().finish().as_ref());
    }
}

struct ChaChaPoly(LessSafeKey);

fn cipher_of(key: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, key).expect("32 bytes are a key"))
}

/// Noise counts records; the cipher takes 12 bytes.
fn nonce_of(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl Cipher for ChaChaPoly {
    fn name(&self) -> &'static str {
        "ChaChaPoly"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0 = cipher_of(key);
    }

    fn encrypt(&self, nonce: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let (text, rest) = out.split_at_mut(plaintext.len());
        text.copy_from_slice(plaintext);
        let tag = self.0.seal_in_place_separate_tag(nonce_of(nonce), Aad::from(authtext), text);
        rest[..TAG].copy_from_slice(tag.expect("a record is short").as_ref());
        plaintext.len() + TAG
    }

    fn decrypt(
        &self,
        nonce: u64,
        authtext: &[u8],
        ciphertext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, Error> {
        let (text, tag) = ciphertext.split_last_chunk::<TAG>().ok_or(Error::Decrypt)?;
        let out = out.get_mut(..text.len()).ok_or(Error::Decrypt)?;
        out.copy_from_slice(text);
        let (nonce, aad) = (nonce_of(nonce), Aad::from(authtext));
        let opened = self.0.open_in_place_separate_tag(nonce, aad, (*tag).into(), out, 0..);
        opened.map(|_| text.len()).map_err(|_| Error::Decrypt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, RngCore, SeedableRng};
    use rand_pcg::Pcg64Mcg;

    fn key(byte: u8) -> Key {
        Key::from_bytes([byte; 32])
    }

    fn hellos(dials: &Key, listens: &Key) -> Result<(HandshakeState, HandshakeState), Error> {
        let (mut one, mut other) =
            (handshake(dials, Role::Dials)?, handshake(listens, Role::Listens)?);
        let (mut sent, mut nothing) = ([0; HELLO], [0; 0]);
        assert_eq!(one.write_message(&[], &mut sent)?, HELLO);
        other.read_message(&sent, &mut nothing)?;
        assert_eq!(other.write_message(&[], &mut sent)?, HELLO);
        one.read_message(&sent, &mut nothing)?;
        Ok((one, other))
    }

    #[test]
    fn ends_with_one_key_understand_each_other_in_both_directions() {
        let (one, other) = hellos(&key(7), &key(7)).expect("one key");
        let mut one = one.into_transport_mode().expect("finished");
        let mut other = other.into_transport_mode().expect("finished");
        let (mut record, mut text) = (vec![0; RECORD], vec![0; RECORD]);
        for length in [0, 1, 48, 4096, RECORD - TAG] {
            let said = vec![length as u8; length];
            for dials in [true, false] {
                let (from, to) =
                    if dials { (&mut one, &mut other) } else { (&mut other, &mut one) };
                let written = from.write_message(&said, &mut record).expect("short enough");
                assert_eq!(written, length + TAG);
                let read = to.read_message(&record[..written], &mut text).expect("as it was");
                assert_eq!(text[..read], said);
                // The same record once more, and one with a flipped bit, are refused.
                assert!(to.read_message(&record[..written], &mut text).is_err());
            }
        }
    }

    /// Random bytes as each message of a handshake, and messages of which some bits are flipped. As many bytes as
    /// `SPANKER_FUZZ_BYTES` says, or a million.
    #[test]
    fn what_is_no_message_of_a_handshake_is_refused_at_its_tag() {
        let wanted = std::env::var("SPANKER_FUZZ_BYTES").ok();
        let wanted = wanted.and_then(|bytes| bytes.parse().ok()).unwrap_or(1_000_000);
        let mut random = Pcg64Mcg::seed_from_u64(25);
        let mut sent = 0;
        while sent < wanted {
            let (mut dials, mut listens) = (
                handshake(&key(7), Role::Dials).unwrap(),
                handshake(&key(7), Role::Listens).unwrap(),
            );
            let (mut hello, mut nothing) = ([0; HELLO], [0; 0]);
            dials.write_message(&[], &mut hello).expect("48 bytes");
            let answers = random.random::<bool>();
            if answers {
                listens.read_message(&hello, &mut nothing).expect("as it was");
                listens.write_message(&[], &mut hello).expect("48 bytes");
            }
            let good = hello;
            if random.random::<bool>() {
                random.fill_bytes(&mut hello);
            } else {
                for _ in 0..random.random_range(1..4) {
                    hello[random.random_range(0..HELLO)] ^= random.random_range(1..=255u8);
                }
            }
            if hello == good {
                continue;
            }
            let reader = if answers { &mut dials } else { &mut listens };
            let refused = reader.read_message(&hello, &mut nothing);
            assert!(refused.is_err(), "seed 25, after {sent} bytes: {hello:?}");
            sent += HELLO;
        }
    }

    #[test]
    fn ends_with_different_keys_stop_at_the_first_message() {
        assert!(matches!(hellos(&key(7), &key(8)), Err(Error::Decrypt)));
    }

    #[test]
    fn a_record_opens_only_under_its_number_and_context_and_unchanged() {
        let key: [u8; 32] = std::array::from_fn(|at| 0x80 + at as u8);
        let cipher = ChaChaPoly(cipher_of(&key));
        let mut out = [0; 5 + TAG];
        assert_eq!(cipher.encrypt(1, b"head", b"hello", &mut out), out.len());
        let mut text = [0; 5];
        assert_eq!(cipher.decrypt(1, b"head", &out, &mut text).expect("as it was"), 5);
        assert_eq!(&text, b"hello");
        assert!(cipher.decrypt(2, b"head", &out, &mut text).is_err(), "another number");
        assert!(cipher.decrypt(1, b"tail", &out, &mut text).is_err(), "another context");
        out[0] ^= 1;
        assert!(cipher.decrypt(1, b"head", &out, &mut text).is_err(), "a flipped bit");
    }
}
