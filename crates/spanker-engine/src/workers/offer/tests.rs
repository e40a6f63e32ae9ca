// SPDX-License-Identifier: Apache-2.0
//! Offers of a hostile leader.

use super::*;

fn offered() -> Offer {
    Offer {
        version: env!("CARGO_PKG_VERSION").into(),
        id: "0123456789abcdef".repeat(4),
        name: "x.gguf".into(),
        length: 1 << 30,
        header: Some(1 << 20),
        timeout_ms: 5000,
    }
}

#[test]
fn offer_is_read_as_it_was_written() {
    assert_eq!(Offer::from_bytes(&offered().to_bytes()), Ok(offered()));
}

#[test]
fn offers_that_make_no_sense_are_refused_and_names_are_made_harmless() {
    let bad = [
        Offer { id: "../../../etc".into(), ..offered() },
        Offer { id: "0123456789ABCDEF".repeat(4), ..offered() },
        Offer { length: u64::MAX, ..offered() },
        Offer { header: Some((1 << 30) + 1), ..offered() },
        Offer { length: 1 << 40, header: Some(1 << 39), ..offered() },
        Offer { timeout_ms: 0, ..offered() },
        Offer { timeout_ms: u64::MAX, ..offered() },
        Offer { version: "0.0.1".into(), ..offered() },
    ];
    for offer in bad {
        assert!(Offer::from_bytes(&offer.to_bytes()).is_err(), "{offer:?}");
    }
    let bytes = offered().to_bytes();
    for length in 0..bytes.len() {
        assert!(Offer::from_bytes(&bytes[..length]).is_err(), "{length}");
    }
    let long = Offer { name: "x".repeat(5000), ..offered() };
    assert!(Offer::from_bytes(&long.to_bytes()).is_err());
    let rude = Offer { name: "\u{1b}[2Jx".into(), ..offered() };
    let name = Offer::from_bytes(&rude.to_bytes()).unwrap().name;
    assert!(!name.contains('\u{1b}'), "{name:?}");
}
