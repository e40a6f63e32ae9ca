// SPDX-License-Identifier: Apache-2.0
//! Answers from cards that are wrong for a while before anybody finds out.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use clap::Parser;
use spanker_llm::{InProcess, Runner, Step};
use spanker_plan::Plan;
use spanker_scheduler::DeviceError;
use spanker_text::Settings;
use spanker_topology::{Cluster, Profile, Shape};

use super::*;
use crate::llm::{self, FabricKind, Split, layout};
use crate::synth;

#[derive(Parser)]
struct Synth {
    #[command(flatten)]
    args: synth::Args,
}

/// A tiny model, and a plan for one card.
fn model(folder: &std::path::Path) -> (Loaded, Plan) {
    let path = folder.join("x.gguf");
    let line = "synth llama --layers 2 --hidden 64 --heads 2 --kv-heads 2 --ffn 96 --vocab 300 \
         --context 64 --quant q4_0 --out";
    let words = line.split_whitespace().map(Into::into).chain([path.clone().into_os_string()]);
    let words: Vec<std::ffi::OsString> = words.collect();
    synth::run(&Synth::parse_from(words).args).expect("a model");
    let args = llm::Args {
        model: path.display().to_string(),
        ctx_size: None,
        threads: Some(1),
        batch_size: 8,
        fabric: Some(FabricKind::Inproc),
        tensor_split: None,
        deadline: None,
    };
    let loaded = Loaded::open(&args).expect("a model");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, 1, Shape::Ring).expect("a card");
    let request = layout::request(loaded.context, loaded.batch, 3, 8);
    let plan = layout::plan(loaded.network.model(), cluster, request, Some(Split::Gather), None);
    (loaded, plan.expect("a plan"))
}

fn honest(loaded: &Loaded, plan: &Plan) -> InProcess<ggml_spanker::GgufFile> {
    let network = Arc::clone(&loaded.network);
    InProcess::new(network, plan, loaded.context, loaded.batch, 1).expect("threads")
}

/// Wrong from a step on, and found in a later one.
struct Liar {
    inner: InProcess<ggml_spanker::GgufFile>,
    steps: usize,
    wrong_from: usize,
    found_at: usize,
}

impl Runner for Liar {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        let mut outcome = self.inner.step(step)?;
        self.steps += 1;
        if self.steps > self.found_at {
            return Err(DeviceError::wrong(2, "layer 0".into()).into());
        }
        if self.steps > self.wrong_from {
            outcome.best.iter_mut().for_each(|best| best.0 = (best.0 + 1) % 256);
        }
        Ok(outcome)
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

/// Honest cards in the place of those that were not.
struct Replace<'p> {
    plan: &'p Plan,
    times: Rc<Cell<usize>>,
}

impl<'r> Mend<'r> for Replace<'_> {
    fn mend(
        &mut self,
        loaded: &Loaded,
        _: LlmError,
        session: &mut Session<'r>,
        want: Want,
    ) -> anyhow::Result<Outcome> {
        self.times.set(self.times.get() + 1);
        session.release();
        Ok(session.go_on(Box::new(honest(loaded, self.plan)), want)?)
    }

    fn audit(&self) -> Option<AuditLog> {
        None
    }
}

/// An answer, what was shown, and how often cards were replaced.
fn answer(
    (loaded, plan): (&Loaded, &Plan),
    runner: Box<dyn Runner>,
    audience: Audience,
) -> (anyhow::Result<Answer>, String, usize) {
    let settings = Settings { temperature: 0.9, top_k: 20, top_p: 0.95, min_p: 0.0, seed: 5 };
    let mut sampler = Sampler::new(settings).expect("settings");
    let times = Rc::new(Cell::new(0));
    let mut mend = Replace { plan, times: Rc::clone(&times) };
    let mut shown = String::new();
    let limits = Limits { tokens: 12, ignore_end: true, keep_logits: false, audience };
    let mut show = |text: &str| {
        shown += text;
        Ok(())
    };
    let mut session = Session::new(runner);
    let prompt = [3, 4, 5];
    let answer =
        generate(loaded, &mut session, &prompt, &mut sampler, limits, &mut mend, &mut show);
    (answer, shown, times.get())
}

#[test]
fn answer_after_a_wrong_card_is_the_right_one_and_readers_of_wrong_text_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let (loaded, plan) = model(folder.path());
    let both = (&loaded, &plan);
    let liar = |wrong_from, found_at| -> Box<dyn Runner> {
        Box::new(Liar { inner: honest(&loaded, &plan), steps: 0, wrong_from, found_at })
    };
    let (right, text, _) = answer(both, Box::new(honest(&loaded, &plan)), Audience::Later);
    let right = right.expect("an answer");
    // Found before anything wrong came out: the text goes on, also in a pipe.
    let (found, shown, times) = answer(both, liar(12, 5), Audience::Stream);
    let found = found.expect("an answer");
    assert_eq!((&found.tokens, shown.as_str(), times), (&right.tokens, text.as_str(), 1));
    assert_eq!(found.corrected_from, None);
    // Found after wrong tokens: the right text from there on.
    for audience in [Audience::Later, Audience::Terminal] {
        let (found, shown, times) = answer(both, liar(3, 7), audience);
        let found = found.expect("an answer");
        assert_eq!((&found.tokens, &found.text, times), (&right.tokens, &right.text, 1));
        assert_eq!(found.corrected_from, Some(3), "{shown}");
    }
    // What a pipe has cannot be taken back.
    let (found, _, _) = answer(both, liar(3, 7), Audience::Stream);
    let error = found.expect_err("wrong text").to_string();
    assert!(error.contains("token 4 and what follows it"), "{error}");
    assert!(error.contains("card 2 gives wrong answers"), "{error}");
}
