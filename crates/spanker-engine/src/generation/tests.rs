// SPDX-License-Identifier: Apache-2.0
//! Answers from cards that are wrong for a while before anybody finds out, and what ends an answer.

use std::cell::RefCell;
use std::path::Path;
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
use crate::threads::{on_threads, uniform};

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

/// A tiny model with random weights.
fn model(folder: &Path) -> Model {
    let path = folder.join("x.gguf");
    tiny::write(&path);
    Model::open(&path).expect("a model")
}

/// Weights that are the same every time, from a generator that everybody can write down.
mod tiny {
    use std::io::Write;
    use std::path::Path;

    use spanker_model::Quant;
    use spanker_model::gguf::{Field, Writer};

    const HIDDEN: u64 = 64;
    const VOCAB: u64 = 300;

    pub(super) fn write(path: &Path) {
        let mut writer = Writer::new();
        writer.put("general.architecture", Field::Text("llama")).expect("a key");
        for (key, size) in [
            ("llama.block_count", 2),
            ("llama.context_length", 64),
            ("llama.embedding_length", HIDDEN as u32),
            ("llama.feed_forward_length", 96),
            ("llama.attention.head_count", 2),
        ] {
            writer.put(key, Field::U32(size)).expect("a key");
        }
        writer.put("llama.attention.layer_norm_rms_epsilon", Field::F32(1e-5)).expect("a key");
        vocabulary(&mut writer);
        let mut tensor = |name: &str, shape: &[u64], quant| {
            writer.tensor(name, shape, quant).expect("a tensor");
        };
        tensor("token_embd.weight", &[HIDDEN, VOCAB], Quant::F32);
        tensor("output.weight", &[HIDDEN, VOCAB], Quant::F32);
        tensor("output_norm.weight", &[HIDDEN], Quant::F32);
        for layer in 0..2 {
            for (name, shape) in [
                ("attn_norm", &[HIDDEN][..]),
                ("ffn_norm", &[HIDDEN]),
                ("attn_q", &[HIDDEN, HIDDEN]),
                ("attn_k", &[HIDDEN, HIDDEN]),
                ("attn_v", &[HIDDEN, HIDDEN]),
                ("attn_output", &[HIDDEN, HIDDEN]),
                ("ffn_gate", &[HIDDEN, 96]),
                ("ffn_up", &[HIDDEN, 96]),
                ("ffn_down", &[96, HIDDEN]),
            ] {
                tensor(&format!("blk.{layer}.{name}.weight"), shape, Quant::F32);
            }
        }
        let sizes: Vec<u64> = writer.tensors().iter().map(|(_, tensor)| tensor.bytes).collect();
        let mut file = std::fs::File::create(path).expect("a file");
        let mut state = 1u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let weights = |at: usize, out: &mut dyn Write| {
            let numbers = (0..sizes[at] / 4).map(|_| number().to_le_bytes());
            out.write_all(&numbers.flatten().collect::<Vec<u8>>())
        };
        writer.write(&mut file, weights).expect("a file that can be written");
    }

    /// Every byte is a token, and some words.
    fn vocabulary(writer: &mut Writer) {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let words = (256..VOCAB - 2).map(|word| format!(" w{word}"));
        let names: Vec<String> =
            bytes.chain(words).chain(["<s>".to_owned(), "</s>".to_owned()]).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let kinds: Vec<i32> = (0..VOCAB)
            .map(|token| match token {
                0..256 => 6,
                token if token + 2 < VOCAB => 1,
                _ => 3,
            })
            .collect();
        let scores: Vec<f32> = (0..VOCAB).map(|token| -(token as f32)).collect();
        writer.put("tokenizer.ggml.model", Field::Text("llama")).expect("a key");
        writer.put("tokenizer.ggml.tokens", Field::Texts(&names)).expect("a key");
        writer.put("tokenizer.ggml.token_type", Field::I32s(&kinds)).expect("a key");
        writer.put("tokenizer.ggml.scores", Field::F32s(&scores)).expect("a key");
        writer.put("tokenizer.ggml.bos_token_id", Field::U32(VOCAB as u32 - 2)).expect("a key");
        writer.put("tokenizer.ggml.eos_token_id", Field::U32(VOCAB as u32 - 1)).expect("a key");
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
