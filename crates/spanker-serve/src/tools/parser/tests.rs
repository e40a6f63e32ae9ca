// SPDX-License-Identifier: Apache-2.0
//! Calls in answers, cut into pieces anywhere.

use proptest::prelude::*;

use super::*;

/// What comes of an answer in these pieces, with neighbours joined.
fn read<'t>(style: Style, forced: bool, pieces: impl IntoIterator<Item = &'t str>) -> Vec<Event> {
    let names = ["weather", "time"].map(str::to_owned).to_vec();
    let mut parser = Parser::new(style, forced, names);
    let mut all: Vec<Event> = Vec::new();
    let mut events: Vec<Event> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    let calls = events.iter().filter(|event| **event == Event::End).count();
    assert_eq!(parser.calls(), calls);
    for event in events {
        match (all.last_mut(), event) {
            (Some(Event::Text(last)), Event::Text(more))
            | (Some(Event::Arguments(last)), Event::Arguments(more)) => last.push_str(&more),
            (_, event) => all.push(event),
        }
    }
    all
}

fn said(text: &str) -> Event {
    Event::Text(text.into())
}

fn called(name: &str, arguments: &str) -> [Event; 3] {
    [Event::Call { name: name.into() }, Event::Arguments(arguments.into()), Event::End]
}

type Case = (Style, bool, &'static str, Vec<Event>);

/// Answers with calls, and what comes of them.
fn calls() -> Vec<Case> {
    use Style::{List, Tags};
    let one = || called("weather", r#"{"city": "Paris }\" "}"#).to_vec();
    let two = || [called("weather", r#"{"a": [{"b": 1}]}"#), called("time", "{}")].concat();
    vec![
        (
            Tags,
            false,
            r#"<tool_call>{"name": "weather", "arguments": {"city": "Paris }\" "}}</tool_call>"#,
            one(),
        ),
        (
            Tags,
            false,
            "<tool_call>\n{\"arguments\": {\"city\": \"Paris }\\\" \"}, \"name\": \"weather\"}\n</tool_call>\n",
            one(),
        ),
        (
            Tags,
            false,
            r#"<tool_call>{"id": 7, "x": [1, {"y": "]"}], "name": "weather", "arguments": "{\"city\": \"Paris }\\\" \"}"}"#,
            one(),
        ),
        (
            Tags,
            false,
            "Let me see. \n<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": [{\"b\": 1}]}}</tool_call>\n<tool_call>{\"name\": \"time\"}</tool_call> Done.",
            [vec![said("Let me see.")], two(), vec![said(" Done.")]].concat(),
        ),
        (
            Tags,
            false,
            r#"<tool_call>{"type": "function", "function": {"name": "time", "arguments": null}}</tool_call>"#,
            called("time", "{}").to_vec(),
        ),
        (
            List,
            false,
            r#"[TOOL_CALLS][{"name": "weather", "arguments": {"a": [{"b": 1}]}}, {"name": "time", "arguments": {}}]"#,
            two(),
        ),
        (
            List,
            false,
            r#"[TOOL_CALLS]weather[ARGS]{"a": [{"b": 1}]}"#,
            called("weather", r#"{"a": [{"b": 1}]}"#).to_vec(),
        ),
        (
            List,
            false,
            r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris }\" "}, "id": "abcdefghi"}] "#,
            one(),
        ),
    ]
}

/// Answers that are calls from their first byte.
fn bare_calls() -> Vec<Case> {
    use Style::{List, Object, Tags};
    let one = || called("weather", r#"{"city": "Paris }\" "}"#).to_vec();
    let two = || [called("weather", r#"{"a": [{"b": 1}]}"#), called("time", "{}")].concat();
    vec![
        (Object, false, r#" {"name": "weather", "parameters": {"city": "Paris }\" "}}"#, one()),
        (
            Object,
            false,
            r#"<|python_tag|>{"name": "weather", "parameters": {"a": [{"b": 1}]}}; {"name": "time", "parameters": {}}"#,
            two(),
        ),
        (Tags, true, r#"{"name": "weather", "arguments": {"city": "Paris }\" "}}"#, one()),
        (
            List,
            true,
            r#"[{"name": "weather", "arguments": {"a": [{"b": 1}]}}, {"name": "time", "arguments": {}}]"#,
            two(),
        ),
        // Cut off in the midst of a call: what was given out stays.
        (
            Object,
            true,
            r#"{"name": "weather", "arguments": {"city": "Pa"#,
            [
                Event::Call { name: "weather".into() },
                Event::Arguments(r#"{"city": "Pa"#.into()),
                Event::End,
            ]
            .to_vec(),
        ),
    ]
}

/// Answers that are text, and those that have both.
fn texts() -> Vec<Case> {
    use Style::{List, Object, Tags};
    let text = |style, text| (style, false, text, vec![said(text)]);
    vec![
        text(Tags, "Use <tool_call> or <tool_"),
        text(Tags, r#"<tool_call>{"name": "other", "arguments": {}}</tool_call> and so on"#),
        text(Tags, r#"<tool_call>{"arguments": {}}</tool_call>"#),
        text(Tags, r#"<tool_call>{"name": 5}"#),
        text(Tags, r#"<tool_call>{"name"#),
        text(Tags, r#"{"name": "weather", "arguments": {}}"#),
        text(List, "[TOOL_CALLS]nothing of the kind {}"),
        text(List, "[TOOL_CALLS"),
        text(Object, r#"{"temperature": 21, "parameters": {}}"#),
        text(Object, "The answer is {\"name\": \"weather\", \"parameters\": {}}"),
        text(Object, "  "),
        text(Tags, "\u{e9}\u{1f600} <\u{e9}tool_call>\n\n"),
        (Tags, false, "", vec![]),
        // Text of another call's beginning is given back, and the call behind it is found.
        (
            Tags,
            false,
            r#"<tool_call>[] <tool_call>{"name": "time", "arguments": {}}"#,
            [vec![said("<tool_call>[]")], called("time", "{}").to_vec()].concat(),
        ),
    ]
}

#[test]
fn calls_of_every_style_are_found_and_other_text_is_as_it_was() {
    for (style, forced, text, expected) in [calls(), bare_calls(), texts()].concat() {
        assert_eq!(read(style, forced, [text]), expected, "{style:?}: {text}");
        let single = text.split_inclusive(|_: char| true);
        assert_eq!(read(style, forced, single), expected, "{style:?}, byte by byte: {text}");
    }
}

#[test]
fn arguments_come_before_the_call_is_complete() {
    let mut parser = Parser::new(Style::Tags, false, vec!["weather".into()]);
    assert_eq!(parser.push("Yes. <tool"), [said("Yes.")]);
    assert_eq!(parser.push("_call>{\"name\": \"weat"), []);
    let name = Event::Call { name: "weather".into() };
    assert_eq!(
        parser.push("her\", \"arguments\": {\"a\""),
        [name, Event::Arguments("{\"a\"".into())]
    );
    assert_eq!(parser.push(": 1"), [Event::Arguments(": 1".into())]);
    assert_eq!(parser.push("}}"), [Event::Arguments("}".into()), Event::End]);
}

#[test]
fn marks_that_are_special_tokens_are_known_by_style() {
    for (style, piece, mark) in [
        (Style::Tags, "<tool_call>", true),
        (Style::Tags, "[TOOL_CALLS]", false),
        (Style::List, "[TOOL_CALLS]", true),
        (Style::List, "[ARGS]", true),
        (Style::Object, "<|python_tag|>", true),
        (Style::Object, "<|eot_id|>", false),
    ] {
        let parser = Parser::new(style, false, Vec::new());
        assert_eq!(parser.mark(piece.as_bytes()), mark.then_some(piece));
    }
}

fn pieces() -> impl Strategy<Value = String> {
    let words = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ":",
        ",",
        ";",
        " ",
        "\n",
        "name",
        "arguments",
        "weather",
        "time",
        "\"name\": \"time\"",
        "\"arguments\": {",
        "null",
        "1",
        "\u{e9}",
    ];
    prop::collection::vec(prop::sample::select(words.to_vec()), 0..24)
        .prop_map(|words| words.concat())
}

proptest! {
    #[test]
    fn what_comes_out_does_not_depend_on_where_the_text_was_cut(
        text in prop_oneof![pieces(), any::<String>()],
        cuts in prop::collection::vec(1_usize..6, 1..12),
        style in prop::sample::select(vec![Style::Tags, Style::List, Style::Object]),
        forced: bool,
    ) {
        let whole = read(style, forced, [text.as_str()]);
        let (mut rest, mut parts) = (text.as_str(), Vec::new());
        for cut in cuts.iter().cycle() {
            let at = rest.char_indices().nth(*cut).map_or(rest.len(), |(at, _)| at);
            let (part, after) = rest.split_at(at);
            parts.push(part);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(read(style, forced, parts), whole);
    }
}
