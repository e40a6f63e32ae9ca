// SPDX-License-Identifier: Apache-2.0
//! Templates in the manner of each family that runs: the text is what Python's jinja2 makes of them, with tools, calls
//! and answers, and what a template refuses it refuses here. `oracle/templates.py` makes the expected texts.

use std::path::Path;

use spanker_text::template::{Context, Json, Message, ToolCall, render};

fn texts(of: &Json, key: &str) -> Option<String> {
    of[key].as_str().map(str::to_owned)
}

fn message(given: &Json) -> Message {
    let role = texts(given, "role").expect("a role");
    let mut message = Message::new(role, texts(given, "content").expect("a content"));
    for call in given["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        message.calls.push(ToolCall {
            id: texts(call, "id").expect("an id"),
            name: texts(function, "name").expect("a name"),
            arguments: function["arguments"].clone(),
        });
    }
    (message.call_id, message.name) = (texts(given, "tool_call_id"), texts(given, "name"));
    message
}

/// What a template makes of a case, or what it says against it.
fn made(template: &str, case: &Json) -> Result<String, String> {
    let messages: Vec<Message> =
        case["messages"].as_array().expect("messages").iter().map(message).collect();
    let context = Context {
        add_generation_prompt: case["prompt"] == true,
        bos: "<s>",
        eos: "</s>",
        date: "26 Jul 2024",
        tools: case["tools"].as_array().expect("tools"),
    };
    render(template, &messages, context).map_err(|error| error.to_string())
}

fn families() -> Vec<(String, String, Vec<Json>)> {
    let stored: Vec<Json> =
        serde_json::from_str(include_str!("oracle/templates.json")).expect("JSON");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/templates");
    let read = |family: Json| {
        let name = texts(&family, "family").expect("a name");
        let template = std::fs::read_to_string(folder.join(format!("{name}.jinja")));
        let cases = family["cases"].as_array().expect("cases").clone();
        (name, template.expect("a template"), cases)
    };
    stored.into_iter().map(read).collect()
}

#[test]
fn conversations_of_every_family_are_what_jinja2_makes() {
    let families = families();
    let names: Vec<&str> = families.iter().map(|(name, ..)| name.as_str()).collect();
    let all = ["gemma", "gpt-oss", "granite", "mistral", "olmoe", "phi3", "qwen", "smollm3"];
    assert_eq!(names, all);
    for (family, template, cases) in &families {
        for (at, case) in cases.iter().enumerate() {
            let found = made(template, case);
            match texts(case, "refused") {
                Some(refused) => {
                    let said = found.expect_err(family);
                    assert!(said.contains(&refused), "{family}, case {at}: {said}");
                }
                None => {
                    let expected = texts(case, "text").expect("a text");
                    assert_eq!(found.as_deref(), Ok(&expected[..]), "{family}, case {at}");
                }
            }
        }
    }
}

#[test]
fn another_character_in_a_template_is_seen() {
    for (family, template, cases) in families() {
        let changed = template.replacen("<|", "<!", 1).replacen("<start", "<begin", 1);
        let changed = changed.replacen("[INST]", "[inst]", 1);
        let same = cases.iter().filter(|case| made(&changed, case).ok() == texts(case, "text"));
        assert!(same.count() < cases.len(), "{family}");
    }
}
