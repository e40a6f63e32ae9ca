// SPDX-License-Identifier: Apache-2.0
//! Answers from cards that are wrong for a while before anybody finds out, and what ends an answer.

use std::cell::RefCell;
use std::rc::Rc;

use spanker_llm::{LlmError, Outcome, Runner, Step};
use spanker_plan::{Layout, Plan, Request};
use spanker_scheduler::DeviceError;
use spanker_text::Settings;
use spanker_topology::Cluster;

use super::*;
use crate::host::{Backend, Fabric, Host, Load, Loaded, Watch};
use crate::layout::{Wish, request};
use crate::model::Model;
use crate::profiles::{self, Freshness};
use crate::testing::model;
use crate::threads::{on_threads, uniform};

mod draft;

/// Two cards that are threads; what the first to load computes is wrong from a step on, and found in a later one.
struct Lying {
    wrong_from: usize,
    found_at: usize,
    loads: Rc<RefCell<usize>>,
}

struct Liar<'h> {
    inner: Box<dyn Runner + 'h>,
    steps: usize,
    wrong_from: usize,
    found_at: usize,
}

impl Runner for Liar<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.inner.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        let mut outcome = self.inner.end()?;
        self.steps += 1;
        if self.steps > self.found_at {
            return Err(DeviceError::wrong(2, "layer 0".into()).into());
        }
        if self.steps > self.wrong_from {
            let best = outcome.outputs.iter_mut().flat_map(|output| &mut output.best);
            best.for_each(|best| best.0 = (best.0 + 1) % 256);
        }
        Ok(outcome)
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

impl Backend for Lying {
    fn fabric(&self) -> Fabric {
        Fabric::Cards
    }

    fn indices(&self) -> Vec<usize> {
        vec![2, 3]
    }

    fn threads(&self) -> usize {
        1
    }

    fn cluster(
        &self,
        _: &Model,
        _: &Request,
        layout: &Layout,
        _: Freshness,
        _: &Watch,
    ) -> Result<Cluster> {
        uniform(profiles::assumed(layout)?, layout)
    }

    fn measures_layouts(&self) -> bool {
        false
    }

    fn load<'h>(&'h self, _: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let inner: Box<dyn Runner> = Box::new(on_threads(load.model, load.plan, 1)?);
        *self.loads.borrow_mut() += 1;
        let runner = match *self.loads.borrow() {
            1 => {
                let Lying { wrong_from, found_at, .. } = *self;
                Box::new(Liar { inner, steps: 0, wrong_from, found_at })
            }
            _ => inner,
        };
        Ok(Loaded { runner, memory: Vec::new() })
    }

    fn replan(&self, left: &[usize], model: &Model, request: Request) -> Result<Plan> {
        assert_eq!(left, [3], "card 2 was wrong");
        let layout = crate::Split::Gather.layout(model.shape(), &[1.0])?;
        let cluster = uniform(profiles::assumed(&layout)?, &layout)?;
        Ok(Plan::new(model.shape().clone(), cluster, request, layout)?)
    }

    fn survivors(&self, _: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        Some(left.iter().copied().filter(|&index| index != 2).collect())
    }
}

/// What came out of a generation: the text as a reader has it who takes corrections, and the answer.
struct Came {
    read: String,
    corrections: Vec<Correction>,
    answer: Answer,
}

fn sampling() -> Sampling {
    let settings = Settings { temperature: 0.9, top_k: 20, min_p: 0.0, ..Settings::usual(5) };
    Sampling::new(settings).expect("settings")
}

fn came(host: &Host, model: &Model, limits: Limits) -> Came {
    let plan = host.plan(model, &request(64, 8, 3, 8), &Wish::default()).expect("a plan");
    let mut engine = Engine::load(host, model, plan).expect("cards");
    let mut generation = engine.generate(&[3, 4, 5], sampling(), limits).expect("a prompt");
    let (mut read, mut corrections) = (String::new(), Vec::new());
    for piece in &mut generation {
        let piece = piece.expect("a piece");
        if let Some(correction) = piece.corrects {
            read.truncate(correction.text);
            corrections.push(correction);
        }
        read += &piece.text;
    }
    let (answer, _) = generation.into_answer();
    Came { read, corrections, answer }
}

fn lying(wrong_from: usize, found_at: usize) -> Host {
    Host::test(Lying { wrong_from, found_at, loads: Rc::default() })
}

fn limits() -> Limits {
    Limits { ignore_end: true, ..Limits::tokens(12) }
}

#[test]
fn answer_after_a_wrong_card_is_the_right_one_and_readers_of_wrong_text_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path());
    let right = came(&Host::threads(1, 1).expect("threads"), &model, limits());
    assert_eq!((right.answer.tokens.len(), right.answer.finish), (12, Some(FinishReason::Length)));
    assert_eq!(right.read, right.answer.text);
    // Found before anything wrong came out.
    let found = came(&lying(99, 5), &model, limits());
    assert_eq!((&found.answer.tokens, &found.read), (&right.answer.tokens, &right.read));
    assert_eq!((found.corrections, found.answer.corrected_from), (Vec::new(), None));
    // Found after wrong tokens: the right text follows what was right.
    let found = came(&lying(3, 7), &model, limits());
    assert_eq!((&found.answer.tokens, &found.read), (&right.answer.tokens, &right.read));
    assert_eq!(found.answer.corrected_from, Some(3));
    let [correction] = &found.corrections[..] else { panic!("{:?}", found.corrections) };
    assert!(correction.token == 3 && correction.blamed.contains("card 2"), "{correction:?}");
}

#[test]
fn stop_string_ends_the_answer_before_it_wherever_its_tokens_begin() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path());
    let host = Host::threads(1, 1).expect("threads");
    let whole = came(&host, &model, limits());
    let text = whole.answer.text;
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for pair in starts.windows(4).skip(1) {
        let stop = text[pair[0]..pair[3]].to_owned();
        let first = text.find(&stop).expect("it is in the text");
        let found = came(&host, &model, Limits { stops: vec![stop.clone()], ..limits() });
        assert_eq!(found.answer.finish, Some(FinishReason::StopString), "{stop:?} in {text:?}");
        assert_eq!((&found.read[..], &found.answer.text[..]), (&text[..first], &text[..first]));
    }
}

#[test]
fn full_contexts_and_stopped_answers_say_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path());
    let host = Host::threads(1, 1).expect("threads");
    let endless = Limits { ignore_end: true, ..Limits::default() };
    let full = came(&host, &model, endless.clone());
    // The last token needs no place of its own.
    assert_eq!((full.answer.tokens.len(), full.answer.finish), (62, Some(FinishReason::Context)));
    endless.stop.stop();
    let stopped = came(&host, &model, endless);
    assert_eq!(
        (stopped.answer.tokens.len(), stopped.answer.finish),
        (1, Some(FinishReason::Stopped))
    );
}
