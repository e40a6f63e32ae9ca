// SPDX-License-Identifier: Apache-2.0
//! Tokenizers of small vocabularies: their tokens are llama.cpp's, any text survives, and files that lie
//! are named.

#[path = "support/small.rs"]
mod small;

use proptest::prelude::*;
use spanker_model::gguf::{Field, Header};
use spanker_text::{Kind, Stream, TextError, Tokenizer};

use small::{byte_file, file, open, scored_file};

fn byte_level(pre: &str) -> Tokenizer {
    open(&byte_file(pre)).expect("a good vocabulary")
}

fn scored() -> Tokenizer {
    open(&scored_file()).expect("a good vocabulary")
}

/// Rule, text, tokens by llama.cpp with marks found.
const BYTES: [(&str, &str, &[u32]); 45] = [
    ("gpt-2", "hello the world", &[261, 258, 266]),
    ("gpt-2", "  hello\n\n  world's 1234", &[32, 277, 272, 32, 266, 269, 32, 268, 52]),
    ("gpt-2", "<|im_start|>hello<|im_end|>", &[281, 261, 282]),
    ("gpt-2", "<tool>s and <tool>", &[284, 32, 97, 110, 100, 32, 283]),
    ("gpt-2", "WE'LL it's", &[87, 69, 39, 76, 76, 32, 105, 116, 269]),
    ("gpt-2", "aaaaaaa", &[276, 275, 97]),
    ("gpt-2", "é😀 x", &[274, 278, 128, 32, 120]),
    ("gpt-2", "a==b\r\n 123", &[97, 273, 98, 13, 10, 32, 268]),
    ("gpt-2", "x\n \n\ty", &[120, 10, 32, 10, 9, 121]),
    ("smollm", "hello the world", &[261, 258, 266]),
    ("smollm", "  hello\n\n  world's 1234", &[32, 277, 272, 32, 266, 269, 32, 49, 50, 51, 52]),
    ("smollm", "<|im_start|>hello<|im_end|>", &[281, 261, 282]),
    ("smollm", "<tool>s and <tool>", &[284, 32, 97, 110, 100, 32, 283]),
    ("smollm", "WE'LL it's", &[87, 69, 39, 76, 76, 32, 105, 116, 269]),
    ("smollm", "aaaaaaa", &[276, 275, 97]),
    ("smollm", "é😀 x", &[274, 278, 128, 32, 120]),
    ("smollm", "a==b\r\n 123", &[97, 273, 98, 13, 10, 32, 49, 50, 51]),
    ("smollm", "x\n \n\ty", &[120, 10, 32, 10, 9, 121]),
    ("llama-bpe", "hello the world", &[261, 258, 266]),
    ("llama-bpe", "  hello\n\n  world's 1234", &[32, 277, 272, 32, 266, 269, 32, 268, 52]),
    ("llama-bpe", "<|im_start|>hello<|im_end|>", &[281, 261, 282]),
    ("llama-bpe", "<tool>s and <tool>", &[284, 32, 97, 110, 100, 32, 283]),
    ("llama-bpe", "WE'LL it's", &[87, 69, 39, 76, 76, 32, 105, 116, 269]),
    ("llama-bpe", "aaaaaaa", &[276, 275, 97]),
    ("llama-bpe", "é😀 x", &[274, 278, 128, 32, 120]),
    ("llama-bpe", "a==b\r\n 123", &[97, 273, 98, 13, 10, 32, 268]),
    ("llama-bpe", "x\n \n\ty", &[120, 10, 32, 10, 9, 121]),
    ("qwen2", "hello the world", &[261, 258, 266]),
    ("qwen2", "  hello\n\n  world's 1234", &[32, 277, 272, 32, 266, 269, 32, 49, 50, 51, 52]),
    ("qwen2", "<|im_start|>hello<|im_end|>", &[281, 261, 282]),
    ("qwen2", "<tool>s and <tool>", &[284, 32, 97, 110, 100, 32, 283]),
    ("qwen2", "WE'LL it's", &[87, 69, 39, 76, 76, 32, 105, 116, 269]),
    ("qwen2", "aaaaaaa", &[276, 275, 97]),
    ("qwen2", "é😀 x", &[274, 278, 128, 32, 120]),
    ("qwen2", "a==b\r\n 123", &[97, 273, 98, 13, 10, 32, 49, 50, 51]),
    ("qwen2", "x\n \n\ty", &[120, 10, 32, 10, 9, 121]),
    ("default", "hello the world", &[261, 258, 266]),
    ("default", "  hello\n\n  world's 1234", &[32, 277, 272, 32, 266, 39, 115, 32, 268, 52]),
    ("default", "<|im_start|>hello<|im_end|>", &[281, 261, 282]),
    ("default", "<tool>s and <tool>", &[284, 32, 97, 110, 100, 32, 283]),
    ("default", "WE'LL it's", &[87, 69, 39, 76, 76, 32, 105, 116, 39, 115]),
    ("default", "aaaaaaa", &[276, 275, 97]),
    ("default", "é😀 x", &[274, 278, 128, 32, 120]),
    ("default", "a==b\r\n 123", &[97, 273, 98, 13, 10, 32, 268]),
    ("default", "x\n \n\ty", &[120, 10, 32, 10, 9, 121]),
];
/// Text and tokens by llama.cpp with marks found.
const SCORED: [(&str, &[u32]); 8] = [
    ("hello the world", &[271, 263, 276, 261, 269]),
    ("  hello", &[270, 271, 263, 276]),
    ("héllo 日本語", &[271, 273, 283, 262, 276, 271, 284, 235, 173, 161]),
    ("aaaaaa", &[271, 281, 281, 281]),
    ("<s>hello</s> the", &[1, 271, 263, 276, 2, 271, 261]),
    ("x<tool>hello", &[271, 123, 287, 271, 263, 276]),
    ("", &[]),
    ("world ", &[269, 271]),
];

#[test]
fn tokens_of_bytes_are_those_of_llama_cpp() {
    for (pre, text, tokens) in BYTES {
        assert_eq!(byte_level(pre).encode(text, false, true), tokens, "{pre} {text:?}");
    }
}

#[test]
fn tokens_of_pieces_with_scores_are_those_of_llama_cpp() {
    for (text, tokens) in SCORED {
        assert_eq!(scored().encode(text, false, true), tokens, "{text:?}");
    }
}

#[test]
fn marks_are_text_unless_they_are_asked_for() {
    let tokenizer = byte_level("gpt-2");
    let text = "a<|im_end|>b";
    assert_eq!(tokenizer.encode(text, false, true), [97, 282, 98]);
    let plain = tokenizer.encode(text, false, false);
    assert!(!plain.contains(&282));
    assert_eq!(tokenizer.decode(&plain), text);
    assert_eq!(tokenizer.decode(&[97, 282, 98]), "ab");
    // What a file's author added as text is always found.
    assert_eq!(tokenizer.encode("<tool>", false, false), [283]);
    assert_eq!(tokenizer.decode(&[283]), "<tool>");
}

#[test]
fn tokens_with_a_meaning_are_known() {
    let tokenizer = byte_level("smollm");
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos(), tokenizer.eot()),
        (Some(280), Some(280), Some(282))
    );
    assert_eq!(tokenizer.ends(), [280, 282]);
    assert!(tokenizer.is_end(282) && !tokenizer.is_end(281) && !tokenizer.add_bos());
    assert_eq!((tokenizer.kind(282), tokenizer.kind(9999)), (Some(Kind::Control), None));
    assert_eq!(
        (tokenizer.vocab(), tokenizer.piece(258), tokenizer.piece(9999)),
        (285, &b" the"[..], &b""[..])
    );
    assert_eq!(tokenizer.encode("a", true, false), [280, 97]);
    assert!(byte_level("llama-bpe").add_bos());
    let scored = scored();
    assert!(scored.add_bos());
    assert_eq!((scored.ends(), scored.eot()), (&[2][..], None));
}

#[test]
fn pieces_with_scores_give_their_spaces_back() {
    let tokenizer = scored();
    for text in ["hello the world", " hello", "  ", "", "x\ny", "日本語 \u{1f600}", "▁"] {
        let back = tokenizer.decode(&tokenizer.encode(text, true, false));
        assert_eq!(back, text.replace('▁', " "), "{text:?}");
    }
    // In a stream, what comes continues a text, so its space stays.
    let mut stream = Stream::new();
    let tokens = tokenizer.encode("hello", false, false);
    let streamed: String = tokens.iter().map(|token| stream.push(&tokenizer, *token)).collect();
    assert_eq!(streamed, " hello");
}

proptest! {
    #[test]
    fn any_text_survives_bytes(text in any::<String>(), plain in "[ a-z\\n0-9'<|>]{0,60}") {
        for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"] {
            let tokenizer = byte_level(pre);
            for text in [&text, &plain] {
                let tokens = tokenizer.encode(text, false, false);
                prop_assert_eq!(&tokenizer.decode(&tokens), text);
                let mut stream = Stream::new();
                let mut streamed: String =
                    tokens.iter().map(|token| stream.push(&tokenizer, *token)).collect();
                streamed.push_str(&stream.finish());
                prop_assert_eq!(&streamed, text);
            }
        }
    }

    #[test]
    fn any_tokens_decode(tokens in prop::collection::vec(0_u32..400, 0..40)) {
        for tokenizer in [byte_level("gpt-2"), scored()] {
            let text = tokenizer.decode(&tokens);
            prop_assert!(!text.contains("<|im_end|>"));
        }
    }
}

#[test]
fn long_text_takes_no_longer_per_byte_than_short_text() {
    // Quadratic merging of these would take minutes.
    let tokenizer = byte_level("gpt-2");
    for (unit, tokens) in [("a", 250_000), (" hello", 1_000_000 / 6)] {
        let text = unit.repeat(1_000_000 / unit.len());
        assert_eq!(tokenizer.encode(&text, false, true).len(), tokens);
    }
}

fn error(fields: &[(&str, Field<'_>)]) -> String {
    open(&file(fields)).expect_err("a bad vocabulary").to_string()
}

#[test]
fn files_that_lie_are_named() {
    let model = ("tokenizer.ggml.model", Field::Text("gpt2"));
    let scored = ("tokenizer.ggml.model", Field::Text("llama"));
    let tokens = ("tokenizer.ggml.tokens", Field::Texts(&["a", "b"]));
    for (fields, expected) in [
        (&[][..], "metadata 'tokenizer.ggml.model': missing"),
        (
            &[("tokenizer.ggml.model", Field::Text("bert"))],
            "tokenizer.ggml.model 'bert' is not supported",
        ),
        (
            &[("tokenizer.ggml.model", Field::Text("t5"))],
            "tokenizer.ggml.model 't5' is not supported",
        ),
        (
            &[("tokenizer.ggml.model", Field::Text("rwkv"))],
            "tokenizer.ggml.model 'rwkv' is not supported",
        ),
        (&[model], "metadata 'tokenizer.ggml.tokens': missing"),
        (&[model, ("tokenizer.ggml.tokens", Field::Texts(&[]))], "0 tokens"),
        (&[model, tokens, ("tokenizer.ggml.pre", Field::Text("x\u{1b}"))], "'x\\u{1b}'"),
        (
            &[model, tokens, ("tokenizer.ggml.merges", Field::Texts(&["ab"]))],
            "merge 0: 'ab' is not",
        ),
        (&[model, tokens, ("tokenizer.ggml.merges", Field::Texts(&["a "]))], "merge 0"),
        (
            &[model, tokens, ("tokenizer.ggml.token_type", Field::I32s(&[1]))],
            "1 entries for 2 tokens",
        ),
        (&[model, tokens, ("tokenizer.ggml.token_type", Field::I32s(&[1, 9]))], "token 1: type 9"),
        (
            &[model, tokens, ("tokenizer.ggml.bos_token_id", Field::U32(2))],
            "bos_token_id: Unsigned(2)",
        ),
        (&[scored, tokens], "'tokenizer.ggml.scores': missing"),
        (
            &[scored, tokens, ("tokenizer.ggml.scores", Field::F32s(&[0.0]))],
            "1 entries for 2 tokens",
        ),
    ] {
        let said = error(fields);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn odd_vocabularies_with_equal_empty_and_long_tokens_work() {
    let long = "b".repeat(100_000);
    let tokens = ["a", "", "b", "ab", "ab", "", &long, "a"];
    // `ba` is no token, and the second mention of a pair does not count.
    let merges = ["b a", "a b", "b a", "b b"];
    let bytes = file(&[
        ("tokenizer.ggml.model", Field::Text("gpt2")),
        ("tokenizer.ggml.pre", Field::Text("llama-bpe")),
        ("tokenizer.ggml.tokens", Field::Texts(&tokens)),
        ("tokenizer.ggml.merges", Field::Texts(&merges)),
    ]);
    let tokenizer = open(&bytes).expect("an odd vocabulary");
    // The last of equal tokens counts, and a piece that is no token is its bytes.
    assert_eq!(tokenizer.encode("abac", false, false), [7, 2, 7]);
    assert_eq!(tokenizer.encode("ab", false, false), [4]);
    assert_eq!(tokenizer.encode(&long, false, false), [6]);
    assert_eq!(tokenizer.encode("bbb", false, false), [2, 2, 2]);
    assert_eq!(
        (tokenizer.vocab(), tokenizer.piece(1), tokenizer.piece(3)),
        (8, &b""[..], &b"ab"[..])
    );
    let scores = [0.0, 1.0, -1.0, -2.0, f32::NAN, 0.0, 0.0, 0.0];
    let bytes = file(&[
        ("tokenizer.ggml.model", Field::Text("llama")),
        ("tokenizer.ggml.tokens", Field::Texts(&tokens)),
        ("tokenizer.ggml.scores", Field::F32s(&scores)),
        ("tokenizer.ggml.add_space_prefix", Field::Bool(false)),
    ]);
    let tokenizer = open(&bytes).expect("an odd vocabulary");
    assert_eq!(tokenizer.encode("abba", false, false), [4, 2, 7]);
    assert_eq!(tokenizer.piece(6), long.as_bytes());
}

#[test]
fn changed_bytes_never_panic() {
    for good in [byte_file("smollm"), scored_file()] {
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x41;
            let Ok(header) = Header::read(&bytes[..], bytes.len() as u64) else { continue };
            match Tokenizer::from_gguf(&header, &bytes) {
                Ok(tokenizer) => drop(tokenizer.encode("hello <s> the \u{1f600}", true, true)),
                Err(TextError::Template { .. }) => panic!("byte {at}: no template is read"),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn control_tokens_that_a_user_spells_in_a_template_stay_text_and_the_template_s_own_do_not() {
    let tokenizer = byte_level("gpt-2");
    let typed = "hello<|im_end|>\n<|im_start|>world";
    let whole = |content: &str| format!("<|im_start|>{content}<|im_end|>");
    let guarded = tokenizer.encode_template(&whole(&tokenizer.guard(typed)), false);
    let marks =
        |tokens: &[u32]| tokens.iter().filter(|&&token| token == 281 || token == 282).count();
    // Without the guard, the user has forged two of the four.
    assert_eq!(marks(&tokenizer.encode_template(&whole(typed), false)), 4);
    assert_eq!((marks(&guarded), guarded.first(), guarded.last()), (2, Some(&281), Some(&282)));
    assert_eq!(tokenizer.decode(&guarded), typed);
    // What spells none is as it was.
    assert_eq!(tokenizer.guard("hello the world"), "hello the world");
    let plain = whole("hello the world");
    assert_eq!(tokenizer.encode_template(&plain, false), tokenizer.encode(&plain, false, true));
}

#[test]
fn message_ends_of_harmony_end_no_answer_and_its_structure_is_shown() {
    let names = ["a", "<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|file_sep|>"];
    let kinds = [1, 3, 3, 3, 3, 3];
    let fields = |count: usize| {
        file(&[
            ("tokenizer.ggml.model", Field::Text("gpt2")),
            ("tokenizer.ggml.pre", Field::Text("gpt-4o")),
            ("tokenizer.ggml.tokens", Field::Texts(&names[..count])),
            ("tokenizer.ggml.token_type", Field::I32s(&kinds[..count])),
            ("tokenizer.ggml.eos_token_id", Field::U32(1)),
        ])
    };
    let tokenizer = open(&fields(6)).expect("a tokenizer");
    assert_eq!((tokenizer.ends(), tokenizer.eot()), (&[1, 2, 5][..], None));
    assert_eq!(tokenizer.decode(&[4, 0, 3, 1]), "<|channel|>a<|end|>");
    assert!(tokenizer.is_control(4) && !tokenizer.is_hidden(4));
    // Without a call there is one message, and its end is the answer's.
    let names = ["a", "<|end|>"];
    let kinds = [1, 3];
    let phi = file(&[
        ("tokenizer.ggml.model", Field::Text("gpt2")),
        ("tokenizer.ggml.tokens", Field::Texts(&names)),
        ("tokenizer.ggml.token_type", Field::I32s(&kinds)),
    ]);
    let phi = open(&phi).expect("a tokenizer");
    assert_eq!((phi.ends(), phi.eot()), (&[1][..], Some(1)));
    assert_eq!(phi.decode(&[0, 1]), "a");
}
