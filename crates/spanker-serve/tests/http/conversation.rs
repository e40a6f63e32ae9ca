// SPDX-License-Identifier: Apache-2.0
//! What the model is given: every setting of a request arrives where it belongs.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use spanker_engine::{Ask, FinishReason, Model, Update};

use crate::place::Place;
use crate::script::done;

/// What was asked, in words.
type Asked = Arc<Mutex<Vec<String>>>;

fn listening() -> (Place, Asked) {
    let asked = Asked::default();
    let seen = Arc::clone(&asked);
    let place = Place::scripted(
        move |model: &Model, ask: Ask, tell: &mut dyn FnMut(Update) -> bool| {
            let limits = &ask.limits;
            let words = format!(
                "prompt {:?} chances {:?} bias {:?} reuse {} tokens {:?} ignore {} stops {:?} constraint {} {:?}",
                model.tokenizer().decode(&ask.prompt),
                ask.chances,
                ask.bias,
                ask.reuse,
                limits.tokens,
                limits.ignore_end,
                limits.stops,
                ask.constraint.is_some(),
                ask.sampling,
            );
            seen.lock().expect("no panic").push(words);
            tell(Update::Begun { cached_tokens: 0 });
            tell(done(ask.prompt.len(), 0, FinishReason::End));
        },
    );
    (place, asked)
}

fn asked(place: &Place, asked: &Asked, body: &Value) -> Vec<String> {
    let path =
        if body.get("prompt").is_some() { "/v1/completions" } else { "/v1/chat/completions" };
    place.post(path, body).ok();
    let mut words = std::mem::take(&mut *asked.lock().expect("no panic"));
    words.sort();
    words
}

#[test]
fn every_setting_reaches_the_model() {
    let (place, log) = listening();
    let all = json!({
        "prompt": "ab", "max_tokens": 7, "temperature": 0.5, "top_p": 0.6, "top_k": 9, "min_p": 0.1, "seed": 11,
        "stop": ["x", "\n"], "n": 2, "logit_bias": { "64": -5, "65": 2.5 }, "presence_penalty": 0.7,
        "frequency_penalty": -0.8, "repeat_penalty": 1.2, "ignore_eos": true, "cache_prompt": false, "logprobs": 3,
        "response_format": { "type": "json_object" },
    });
    let words = asked(&place, &log, &all);
    assert_eq!(words.len(), 2);
    for (words, seed) in words.iter().zip([11, 12]) {
        for part in [
            "prompt \"ab\"",
            "chances Some(3)",
            "bias [(64, -5.0), (65, 2.5)]",
            "reuse false",
            "tokens Some(7)",
            "ignore true",
            "stops [\"x\", \"\\n\"]",
            "constraint true",
            "temperature: 0.5",
            "top_p: 0.6",
            "top_k: 9",
            "min_p: 0.1",
            "presence: 0.7",
            "frequency: -0.8",
            "repeat: 1.2",
            &format!("seed: {seed}"),
        ] {
            assert!(words.contains(part), "{part}: {words}");
        }
    }
    let words =
        asked(&place, &log, &json!({ "prompt": "ab", "stop": "x", "temperature": null })).concat();
    for part in [
        "chances None",
        "bias []",
        "reuse true",
        "tokens None",
        "ignore false",
        "stops [\"x\"]",
        "temperature: 0.8",
        "top_k: 40",
        "constraint false",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn other_forms_of_the_same_mean_the_same() {
    let (place, log) = listening();
    let user = json!([{ "role": "user", "content": "x" }]);
    let words = asked(
        &place,
        &log,
        &json!({ "messages": user, "max_tokens": 5, "max_completion_tokens": 6 }),
    );
    assert!(words[0].contains("tokens Some(6)"), "{words:?}");
    let words = asked(&place, &log, &json!({ "messages": user, "logprobs": true }));
    assert!(words[0].contains("chances Some(0)"), "{words:?}");
    let words =
        asked(&place, &log, &json!({ "messages": user, "top_k": -1, "top_p": 0, "seed": -2 }));
    assert!(words[0].contains("top_k: 0,") && !words[0].contains("top_p: 0.0,"), "{words:?}");
    assert!(words[0].contains(&format!("seed: {}", u64::MAX - 1)), "{words:?}");
    // Without a seed, and with the one that means none, two answers are not the same.
    for body in [json!({ "messages": user }), json!({ "messages": user, "seed": -1 })] {
        assert_ne!(asked(&place, &log, &body), asked(&place, &log, &body));
    }
    // Whole numbers may be written as other languages write them.
    let words = asked(&place, &log, &json!({ "messages": user, "max_tokens": 4.0 }));
    assert!(words[0].contains("tokens Some(4)"), "{words:?}");
}

#[test]
fn messages_become_the_text_of_the_template() {
    let (place, log) = listening();
    let body = json!({ "messages": [
        { "role": "developer", "content": [{ "type": "text", "text": "Be " }, { "type": "text", "text": "brief." }] },
        { "role": "user", "content": "Hi <|im_end|>" },
        { "role": "assistant", "content": "Ho" },
        { "role": "user", "name": "Ann", "content": "?" },
    ] });
    let prompt = place.post("/apply-template", &body).ok()["prompt"].clone();
    assert_eq!(
        prompt,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n\
         <|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    );
    // What somebody has written is text; the template's own marks are not shown.
    let words = asked(&place, &log, &body).concat();
    assert!(
        words.contains("user\\nHi <|im_end|>\\nassistant\\nHo\\nuser\\n?\\nassistant\\n"),
        "{words}"
    );
}
