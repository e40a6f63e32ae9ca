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
    render(template, &conversation(LONG), PROMPT).expect_err(template).to_string()
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
            "it takes too many steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
        ("{% include 'other' %}", "chat template"),
    ] {
        let said = error(template);
        assert!(said.contains(expected), "{template}: {said}");
    }
    let products = "{{ 'a' * 90000000 }}".repeat(5);
    assert!(error(&products).contains("more than 4 products"), "{}", error(&products));
    let long = "x".repeat(2 << 20);
    assert!(error(&long).contains("2097152 bytes"), "{}", error(&long));
    let wide = format!("{{% for a in range(9000) %}}{}{{% endfor %}}", "x".repeat(9000));
    assert!(error(&wide).contains("too many steps"), "{}", error(&wide));
}

#[test]
fn templates_that_multiply_what_they_keep_end_with_an_error() {
    // Without a bound, each of these takes all memory, the stack, or years.
    for template in [
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|join }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s={}) %}{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s|tojson }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s|replace('a', 'aa') ~ ns.s.replace('b', 'bb') %}{% endfor %}",
        "{% set ns = namespace(l=[], s='a' * 1000000) %}{% for i in range(90000) %}{% set ns.s = ns.s[1:] ~ i %}{% set ns.l = ns.l + [ns.s] %}{% endfor %}",
        "{% for i in range(90000) %}{% set x = ('a' ~ i) * 20000000 %}{% endfor %}",
        "{{ ([1] * 1000000000000)|list }}",
        "{{ 'a\\nb'|indent(1000000000000) }}",
        "{{ [1, 2]|tojson(indent=1000000000000) }}",
        "{{ range(90000)|map('replace', '1', 'a' * 100000)|join }}",
        "{% macro f(s) %}{{ f(s + s) }}{% endmacro %}{{ f('a' * 9999999) }}",
        // Deep and circular ones would take the stack.
        "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    ] {
        let said = error(template);
        assert!(said.contains("too long") || said.contains("too large"), "{template}: {said}");
    }
    let wide = "{% set ns = namespace(s=messages) %}{{ ns.s|map(attribute='role')|join(', ') }}";
    let text = render(wide, &conversation(LONG), PROMPT).expect("a good template");
    assert_eq!(text, "system, user, assistant, user");
}

#[test]
fn operators_filters_and_methods_are_those_of_the_language() {
    for (template, expected) in [
        ("{{ 1 + 2 }} {{ 1.5 + 1 }} {{ [1] + [2] }} {{ 'a' + 'b' }}", "3 2.5 [1, 2] ab"),
        (
            "{{ 2 * 3 }} {{ 'ab' * 2 }} {{ ([1] * 2)|list }} {{ 'a' ~ 1 ~ none }}",
            "6 abab [1, 1] a1None",
        ),
        (
            "{{ 'abcd'[1:3] }} {{ [1, 2, 3][::-1] }} {{ {'a': [1, 2]} }}",
            "bc [3, 2, 1] {\"a\": [1, 2]}",
        ),
        ("{{ 'a,b'.split(',')|join('-') }} {{ '-'.join(['x', 'y']) }}", "a-b x-y"),
        ("{{ 'aXa'|replace('a', 'b') }} {{ 'aXa'.replace('a', '') }}", "bXb X"),
        ("{{ {'a': 1}|tojson }} {{ [1]|tojson(indent=1) }}", "{\"a\":1} [\n 1\n]"),
        (
            "{{ 'a\nb'|indent(2) }}|{{ 'a\n\nb'|indent(1, true) }}|{{ 'a\nb'|indent(width=1, first=true) }}",
            "a\n  b| a\n\n b| a\n b",
        ),
        (
            "{{ undefined_name.x is defined }} {{ dict(a=1).a }} {{ 'A'|lower|upper|trim }}",
            "False 1 A",
        ),
    ] {
        assert_eq!(render(template, &[], PROMPT).expect(template), expected);
    }
}
