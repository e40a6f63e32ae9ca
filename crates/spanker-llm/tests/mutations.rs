// SPDX-License-Identifier: Apache-2.0
//! Tiny files of every family with something wrong in them: keys with absurd values, tensors with other names, sizes and
//! types, bytes that are anything. Each is refused or runs, the same on one card and on several; none panics or hangs.
//!
//! `SPANKER_MUTATIONS` says how many are made of each family; a failure names the seed.

use std::panic::catch_unwind;

use ggml_spanker::synthetic::{self, FAMILIES, Sizes, family};
use spanker_fuzz_targets::models::{Dice, tried_file};
use spanker_model::gguf::Header;
use spanker_model::{Quant, builtin, gating_of};

/// Files of each family where nobody asks for more.
const USUAL: u64 = 60;

/// A tiny file of a family, and where its tensors are described.
fn tiny(name: &str) -> (Vec<u8>, Vec<String>, usize) {
    let (architecture, window) = family(name);
    let experts = gating_of(architecture).filter(|_| architecture != "llama").map(|_| 3);
    let sizes = Sizes {
        layers: Some(2),
        hidden: Some(32),
        heads: Some(4),
        kv_heads: Some(2),
        head_size: Some(32),
        ffn: Some(64),
        vocab: Some(260),
        context: Some(12),
        window: window.map(|_| 5),
        experts,
        experts_used: experts.map(|_| 2),
        ..Sizes::default()
    };
    let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
    let (writer, _) = synthetic::like(&like, architecture, Quant::Q8_0, &sizes).expect(name);
    let mut file = Vec::new();
    synthetic::write(&writer, &mut file, 3, |_| Ok(())).expect("memory");
    let header = Header::read(&file[..], file.len() as u64).expect("a header");
    let keys = header.metadata().keys().filter(|key| key.starts_with(architecture)).cloned();
    let tensors = place(&file, b"token_embd.weight").expect("a table");
    (file, keys.collect(), tensors)
}

fn place(file: &[u8], text: &[u8]) -> Option<usize> {
    file.windows(text.len()).position(|bytes| bytes == text)
}

/// Changes one to three things in a file.
fn changed(
    (file, keys, tensors): &(Vec<u8>, Vec<String>, usize),
    data: usize,
    dice: &mut Dice,
) -> Vec<u8> {
    let mut file = file.clone();
    let odd = [0u32, 1, 2, 3, 5, 31, 33, 255, 1 << 16, 1 << 22, u32::MAX];
    let numbers = [0.0f32, -1.0, 1e-45, 1e38, 0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for _ in 0..dice.of(&[1, 1, 2, 3]) {
        let byte = dice.of(&[0, 1, 2, 8, 0x7F, 0x80, 0xFF, b'x']);
        match dice.below(5) {
            // The value of a key lies behind its name and its type.
            0 | 1 => {
                let key = &keys[dice.below(keys.len() as u64) as usize];
                let at = place(&file, key.as_bytes()).map(|at| at + key.len() + 4);
                let word = match dice.one_in(2) {
                    true => dice.of(&odd).to_le_bytes(),
                    false => dice.of(&numbers).to_le_bytes(),
                };
                if let Some(at) = at {
                    file[at..at + 4].copy_from_slice(&word);
                }
            }
            // Names, sizes, types and places of tensors.
            2 | 3 => {
                let at = *tensors + dice.below((data - *tensors) as u64) as usize;
                file[at] = byte;
            }
            _ => {
                let at = dice.below(file.len() as u64) as usize;
                file[at] = byte;
            }
        }
    }
    file
}

#[test]
fn files_of_every_family_with_something_wrong_are_refused_or_run_the_same_on_any_cards() {
    let count = std::env::var("SPANKER_MUTATIONS").map_or(USUAL, |text| text.parse().expect(&text));
    for (at, name) in FAMILIES.into_iter().enumerate() {
        let made = tiny(name);
        let header = Header::read(&made.0[..], made.0.len() as u64).expect("a header");
        let data = header.data_offset() as usize;
        assert!(tried_file(made.0.clone(), &mut Dice(1)), "{name}: the file itself runs");
        let mut run = 0;
        for seed in 0..count {
            let mut dice = Dice(seed << 8 | at as u64);
            let file = changed(&made, data, &mut dice);
            match catch_unwind(move || tried_file(file, &mut dice)) {
                Ok(ran) => run += u64::from(ran),
                Err(_) => panic!("{name}: seed {seed} panicked"),
            }
        }
        assert!(run > count / 20, "{name}: only {run} of {count} files could be run");
        assert!(run < count, "{name}: everything could be run");
    }
}
