// SPDX-License-Identifier: Apache-2.0
//! Conversations by templates: the text is what Python's Jinja makes, and hostile templates end.

use spanker_text::template::{CHATML, Context, Message, render};

const HEADERS: &str = "{% for turn in messages %}\
{% set text = '<|start|>' + turn['role'] + '<|mid|>\n\n' + turn['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant<|mid|>\n\n' }}{% endif %}";

const TURNS: &str = "{{ bos_token }}{% for m in messages %}\
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}\
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}\
{% else %}{{ ' ' + m['content'].rstrip('!').upper() + eos_token }}{% endif %}{% endfor %}";

const LINES: &str = "{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0]['content'] -%}
  {%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}
  {%- set rest = messages -%}
{%- endif -%}
{%- if system is defined and system|length > 0 %}
{{ '<<' ~ system ~ '>>' }}
{%- endif %}
{% for m in rest %}
  {% if m.content.startswith('H') %}
{{ loop.index }}:{{ m.role | title }}={{ m.content.split(' ')[0] }}
  {% endif %}
{% endfor %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}
{{ ns.n }} {{ strftime_now('%d %b %Y') }}{{ tools is defined }}{{ none_such }}";

const PROMPT: Context<'_> =
    Context { add_generation_prompt: true, bos: "<s>", eos: "</s>", date: "26 Jul 2024" };

fn conversation(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(role, content)| Message::new(*role, *content)).collect()
}

const SHORT: &[(&str, &str)] = &[("user", "Hello there")];
const LONG: &[(&str, &str)] = &[
    ("system", "Be brief."),
    ("user", " Hi! \n"),
    ("assistant", "Hey you!!"),
    ("user", "How <|im_end|> are you?"),
];
const PAIRS: &[(&str, &str)] = &[("user", "Hi a b"), ("assistant", "Ho c!"), ("user", "x 日本")];

#[test]
fn text_is_what_jinja_makes() {
    for (template, turns, expected) in [
        (
            HEADERS,
            SHORT,
            "<s><|start|>user<|mid|>\n\nHello there<|eot_id|><|start|>assistant<|mid|>\n\n",
        ),
        (
            HEADERS,
            LONG,
            "<s><|start|>system<|mid|>\n\nBe brief.<|eot_id|><|start|>user<|mid|>\n\nHi!<|eot_id|><|start|>assistant<|mid|>\n\nHey you!!<|eot_id|><|start|>user<|mid|>\n\nHow <|im_end|> are you?<|eot_id|><|start|>assistant<|mid|>\n\n",
        ),
        (
            HEADERS,
            PAIRS,
            "<s><|start|>user<|mid|>\n\nHi a b<|eot_id|><|start|>assistant<|mid|>\n\nHo c!<|eot_id|><|start|>user<|mid|>\n\nx 日本<|eot_id|><|start|>assistant<|mid|>\n\n",
        ),
        (TURNS, SHORT, "<s>[INST] Hello there [/INST]"),
        (TURNS, PAIRS, "<s>[INST] Hi a b [/INST] HO C</s>[INST] x 日本 [/INST]"),
        (LINES, SHORT, "1:User=Hello\n1 26 Jul 2024False"),
        (LINES, LONG, "<<Be brief.>>2:Assistant=Hey\n3:User=How\n4 26 Jul 2024False"),
        (LINES, PAIRS, "1:User=Hi\n2:Assistant=Ho\n3 26 Jul 2024False"),
        (CHATML, SHORT, "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"),
        (
            CHATML,
            LONG,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi! \n<|im_end|>\n<|im_start|>assistant\nHey you!!<|im_end|>\n<|im_start|>user\nHow <|im_end|> are you?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            CHATML,
            PAIRS,
            "<|im_start|>user\nHi a b<|im_end|>\n<|im_start|>assistant\nHo c!<|im_end|>\n<|im_start|>user\nx 日本<|im_end|>\n<|im_start|>assistant\n",
        ),
    ] {
        assert_eq!(render(template, &conversation(turns), PROMPT).expect("a text"), expected);
    }
    let context = Context { add_generation_prompt: false, ..PROMPT };
    let text = render(HEADERS, &conversation(SHORT), context).expect("a text");
    assert_eq!(text, "<s><|start|>user<|mid|>\n\nHello there<|eot_id|>");
}

fn error(template: &str) -> String {
    render(template, &conversation(LONG), PROMPT).expect_err("a bad template").to_string()
}

#[test]
fn template_can_refuse_a_conversation() {
    assert_eq!(error(TURNS), "chat template: line 1: turns must alternate");
}

#[test]
fn templates_that_are_malformed_or_hostile_end_with_an_error() {
    for (template, expected) in [
        ("{% for x in %}", "chat template: line 1"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ messages.no_such_method() }}", "chat template: line 1"),
        ("{{ raise_exception('\u{1b}[2J') }}", "\\u{1b}[2J"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "it takes more than 1000000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
        ("{% include 'other' %}", "chat template"),
    ] {
        let said = error(template);
        assert!(said.contains(expected), "{template}: {said}");
    }
    let long = "x".repeat(2 << 20);
    assert!(error(&long).contains("2097152 bytes"), "{}", error(&long));
    let wide = format!("{{% for a in range(9000) %}}{}{{% endfor %}}", "x".repeat(9000));
    assert!(error(&wide).contains("too long"), "{}", error(&wide));
}
