// SPDX-License-Identifier: Apache-2.0
//! Conversations by templates: the text is what Python's Jinja makes, and hostile templates end.

use spanker_text::template::{
    CHATML, Context, Json, Message, ToolCall, render, shows_system, shows_tools,
};

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

const PROMPT: Context<'_> = Context {
    add_generation_prompt: true,
    bos: "<s>",
    eos: "</s>",
    date: "26 Jul 2024",
    tools: &[],
};

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
            "bc [3, 2, 1] {'a': [1, 2]}",
        ),
        ("{{ 'a,b'.split(',')|join('-') }} {{ '-'.join(['x', 'y']) }}", "a-b x-y"),
        ("{{ 'aXa'|replace('a', 'b') }} {{ 'aXa'.replace('a', '') }}", "bXb X"),
        ("{{ {'a': 1}|tojson }} {{ [1]|tojson(indent=1) }}", "{\"a\": 1} [\n 1\n]"),
        (
            "{{ 'a\nb'|indent(2) }}|{{ 'a\n\nb'|indent(1, true) }}|{{ 'a\nb'|indent(width=1, first=true) }}",
            "a\n  b| a\n\n b| a\n b",
        ),
        (
            "{{ {'b': 'é<', 'a': []}|tojson }} {{ {'b': 1, 'a': {}}|tojson(sort_keys=true, ensure_ascii=true) }}",
            "{\"b\": \"é<\", \"a\": []} {\"a\": {}, \"b\": 1}",
        ),
        (
            "{{ ['é😀'] | tojson(ensure_ascii=true) }} {{ [1, {'a': 2}]|tojson(separators=[',', ':']) }}",
            "[\"\\u00e9\\ud83d\\ude00\"] [1,{\"a\":2}]",
        ),
        (
            "{{ {'a': [1, []], 'b': {}}|tojson(indent=2) }}",
            "{\n  \"a\": [\n    1,\n    []\n  ],\n  \"b\": {}\n}",
        ),
        (
            "{{ undefined_name.x is defined }} {{ dict(a=1).a }} {{ 'A'|lower|upper|trim }}",
            "False 1 A",
        ),
    ] {
        assert_eq!(render(template, &[], PROMPT).expect(template), expected);
    }
}

/// In the manner of Qwen, Llama 3 and Mistral.
const TAGS: &str = "{% if tools %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>{% endif %}{% for m in messages %}
{% if m.role == 'tool' %}
<response>{{ m.content }}</response>
{% elif m.tool_calls %}
{% for call in m.tool_calls %}
{% if call.function %}{% set call = call.function %}{% endif %}
<call>{'name': '{{ call.name }}', 'arguments': {{ call.arguments | tojson }}}</call>
{% endfor %}
{% else %}
{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}";
const PLAIN: &str = "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}\
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}\
{%- for m in messages %}{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}\
{\"name\": \"{{ f.name }}\", \"parameters\": {{ f.arguments | tojson }}}\
{%- else %}|{{ m['role'] }}|{{ m['content'] }}{% endif %}{% endfor %}";
const IDS: &str = "{%- for m in messages %}{% if m.tool_calls is defined %}\
{%- for c in m.tool_calls %}{{ c.function|tojson }}{{ c.id }}{{ c.type }}{% endfor %}\
{%- elif m.role == 'tool' %}{{ m.tool_call_id }}={{ m.name }}={{ m.content }}\
{%- else %}{{ m.name is defined }}{{ m.tool_call_id is defined }}{% endif %}{% endfor %}";

/// A question, a call, and the tool's answer.
fn conversation_with_a_call() -> [Message; 3] {
    let mut call = Message::new("assistant", "");
    let arguments = r#"{"zone": "<é>", "at": [1, 2.5]}"#.parse().expect("JSON");
    call.calls.push(ToolCall { id: "c1".into(), name: "weather".into(), arguments });
    let mut answer = Message::new("tool", "sun");
    (answer.call_id, answer.name) = (Some("c1".into()), Some("weather".into()));
    [Message::new("user", "Hi"), call, answer]
}

fn weather() -> [Json; 1] {
    let tool = r#"{"type": "function", "function": {"name": "weather", "parameters": {}}}"#;
    [tool.parse().expect("JSON")]
}

#[test]
fn tools_and_their_calls_are_written_as_python_writes_json() {
    let tools = weather();
    let context = Context { tools: &tools, ..PROMPT };
    for (template, expected) in [
        (
            TAGS,
            "<tools>{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {}}}\
             </tools>user: Hi\n<call>{'name': 'weather', 'arguments': {\"zone\": \"<é>\", \"at\": [1, 2.5]}}\
             </call>\n<response>sun</response>\n",
        ),
        (
            PLAIN,
            "{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"weather\",\n        \
             \"parameters\": {}\n    }\n}|user|Hi{\"name\": \"weather\", \"parameters\": {\"zone\": \"<é>\", \
             \"at\": [1, 2.5]}}|tool|sun",
        ),
        (
            IDS,
            "FalseFalse{\"name\": \"weather\", \"arguments\": {\"zone\": \"<é>\", \"at\": [1, 2.5]}}\
             c1functionc1=weather=sun",
        ),
    ] {
        let text = render(template, &conversation_with_a_call(), context).expect(template);
        assert_eq!(text, expected);
    }
    let text = render(PLAIN, &conversation(SHORT), PROMPT).expect("without tools");
    assert_eq!(text, "|user|Hello there");
}

#[test]
fn templates_say_what_they_show() {
    for (template, tools, system) in [
        (TAGS, true, true),
        (PLAIN, true, true),
        (IDS, false, false),
        (CHATML, false, true),
        (TURNS, false, false),
        ("{{ tools[0].function.parameters.properties.items() }}", false, false),
        ("{% for x in %}", false, false),
    ] {
        assert_eq!((shows_tools(template), shows_system(template)), (tools, system), "{template}");
    }
}

#[test]
fn json_that_a_template_multiplies_ends_with_an_error() {
    let deep = "[".repeat(100) + &"]".repeat(100);
    let tools: Vec<Json> = vec![deep.parse().expect("JSON"); 100];
    let context = Context { tools: &tools, ..PROMPT };
    for template in [
        "{% for i in range(9999) %}{{ tools|tojson(indent=100) }}{% endfor %}",
        "{% set ns = namespace(s=tools) %}{% for i in range(9999) %}{% set ns.s = ns.s|tojson(indent=100) %}{% endfor %}",
        "{{ tools|tojson(indent=-1) }}",
    ] {
        let said = render(template, &conversation(SHORT), context).expect_err(template).to_string();
        assert!(said.contains("too long"), "{template}: {said}");
    }
}

#[test]
fn lists_are_printed_as_python_prints_them_and_marks_of_training_are_no_text() {
    let template = "{% set x = [1, 2.5, 'a', \"it's\", none, true, {'k': ['x\"y', '\\n']}] %}\n\
        {{ x }}|{{ x ~ '!' }}|{{ ['string', 'null'] | string }}|{{ 'a' | string }}|{{ [] }}{{ {} }}|\n\
        {%- for m in messages -%}\n  {%- generation %} {{ m.content }} {% endgeneration -%}\n{%- endfor %}.";
    let text = render(template, &conversation(&[("user", "Hi"), ("user", "Ho")]), PROMPT);
    let list = "[1, 2.5, 'a', \"it's\", None, True, {'k': ['x\"y', '\\n']}]";
    let expected = format!("{list}|{list}!|['string', 'null']|a|[]{{}}| Hi  Ho .");
    assert_eq!(text.expect("a text"), expected);
}
