// SPDX-License-Identifier: Apache-2.0
//! Files that are almost models: odd shapes, odd numbers, tensors that do not belong together, random weights.
//! Each is opened and run for a few steps. Errors are right, panics are not; and what runs on one card gives the
//! same logits on several.

use std::panic::catch_unwind;
use std::sync::Arc;

use spanker_fuzz_targets::models::{Dice, Field, Sketch, plan, sound, tried};
use spanker_llm::{InProcess, LlmError, Network, Runner, Want};
use spanker_plan::Split;

/// Files that are tried.
const FILES: u64 = 1500;

#[test]
fn file_that_is_almost_a_model_is_refused_or_runs_the_same_on_any_cards() {
    let mut run = 0;
    for seed in 0..FILES {
        let mut dice = Dice(!seed);
        let count = if dice.one_in(8) { dice.of(&[1, 2, 3]) } else { 0 };
        let patches: Vec<(u16, u8)> = (0..count)
            .map(|_| (dice.below(2000) as u16, dice.of(&[0, 1, 2, 0x7F, 0xFF])))
            .collect();
        match catch_unwind(|| tried(seed, &patches)) {
            Ok(ran) => run += u64::from(ran),
            Err(_) => panic!("seed {seed} panicked"),
        }
    }
    assert!(run > FILES / 4, "only {run} of {FILES} files could be run");
}

/// The first sound model that can be run.
fn model(change: impl Fn(&mut Sketch)) -> Result<Network<Vec<u8>>, LlmError> {
    let mut dice = Dice(7);
    let mut sketch = sound(&mut dice);
    sketch.tensors.retain(|(name, ..)| name != "rope_freqs.weight");
    change(&mut sketch);
    Network::new(sketch.file(&mut dice))
}

#[test]
fn epsilon_that_is_no_small_number_is_refused() {
    assert!(model(|_| ()).is_ok());
    for epsilon in [f32::NAN, f32::INFINITY, -1e-5] {
        let error = model(|sketch| {
            for architecture in ["llama", "qwen2", "qwen3"] {
                let key = format!("{architecture}.attention.layer_norm_rms_epsilon");
                sketch.put(&key, Field::F32(epsilon));
            }
        });
        let error = error.expect_err("no model").to_string();
        assert!(error.contains(&format!("an epsilon of {epsilon}")), "{error}");
    }
}

#[test]
fn step_for_more_candidates_than_cards_keep_is_refused_and_the_next_one_runs() {
    let network = Arc::new(model(|_| ()).unwrap());
    let groups = [vec![(0, 1.0), (1, 1.0)]];
    let plan = plan(&network, Split::Gather, &groups).unwrap();
    let context = network.model().context as usize;
    let mut runner = InProcess::new(network, &plan, context, 1, 1).unwrap();
    for k in [0, 1025, u32::MAX] {
        let error = runner.step_alone(&[0], 0, Want::Best(k));
        let error = error.expect_err("too many or none").to_string();
        assert_eq!(error, format!("{k} candidates, from 1 to 1024 are possible"));
    }
    let outcome = runner.step_alone(&[0], 0, Want::Best(1024)).unwrap();
    assert!(!outcome.last().best.is_empty());
}

#[test]
fn context_that_no_memory_holds_is_refused() {
    let network = Arc::new(model(|_| ()).unwrap());
    let plan = plan(&network, Split::Gather, &[vec![(0, 1.0)]]).unwrap();
    let error = InProcess::new(network, &plan, 1 << 56, 1, 1).expect_err("too much").to_string();
    assert!(error.contains("bytes"), "{error}");
}
