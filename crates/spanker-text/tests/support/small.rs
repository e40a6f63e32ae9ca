// SPDX-License-Identifier: Apache-2.0
//! Small vocabularies as GGUF files: bytes with a few merges, and a few pieces with scores.

use spanker_model::gguf::{Field, Header, Writer};
use spanker_text::{TextError, Tokenizer};

/// What spells each byte in a byte-level vocabulary.
pub fn alphabet() -> Vec<String> {
    let seen = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 255;
    (0..256)
        .map(|byte| {
            let code = if seen(byte) {
                byte
            } else {
                next += 1;
                next
            };
            char::from_u32(code).expect("a character").to_string()
        })
        .collect()
}

pub const MERGES: [&str; 24] = [
    "Ġ t",
    "h e",
    "Ġt he",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "Ġwor l",
    "Ġworl d",
    "1 2",
    "12 3",
    "' s",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
    "Ċ Ċ",
    "= =",
    "Ã ©",
    "a a",
    "aa aa",
    "Ġ hello",
    "ðŁ ĺ",
    "ð Ł",
];
/// The marks behind the bytes and merges, with their kinds.
pub const MARKS: [(&str, i32); 5] =
    [("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3), ("<tool>", 4), ("<tool>s", 4)];

/// A file's bytes.
pub fn file(fields: &[(&str, Field<'_>)]) -> Vec<u8> {
    let mut writer = Writer::new();
    for (key, field) in fields {
        writer.put(key, *field).expect("a good key");
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes, |_, _| Ok(())).expect("memory takes all");
    bytes
}

pub fn open(bytes: &[u8]) -> Result<Tokenizer, TextError> {
    let header = Header::read(bytes, bytes.len() as u64).expect("a good file");
    Tokenizer::from_gguf(&header, bytes)
}

/// All 256 bytes, then what the merges make, then the marks.
pub fn byte_file(pre: &str) -> Vec<u8> {
    let mut tokens = alphabet();
    tokens.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    let mut kinds = vec![1; tokens.len()];
    for (mark, kind) in MARKS {
        tokens.push(mark.to_owned());
        kinds.push(kind);
    }
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    file(&[
        ("general.architecture", Field::Text("llama")),
        ("tokenizer.ggml.model", Field::Text("gpt2")),
        ("tokenizer.ggml.pre", Field::Text(pre)),
        ("tokenizer.ggml.tokens", Field::Texts(&tokens)),
        ("tokenizer.ggml.token_type", Field::I32s(&kinds)),
        ("tokenizer.ggml.merges", Field::Texts(&MERGES)),
        ("tokenizer.ggml.bos_token_id", Field::U32(280)),
        ("tokenizer.ggml.eos_token_id", Field::U32(280)),
    ])
}

/// Pieces with scores, as SentencePiece has them: marks, all bytes, some pieces.
pub fn scored_file() -> Vec<u8> {
    let mut tokens: Vec<(String, f32, i32)> =
        vec![("<unk>".to_owned(), 0.0, 2), ("<s>".to_owned(), 0.0, 3), ("</s>".to_owned(), 0.0, 3)];
    tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    let pieces = [
        "▁t", "he", "▁the", "ll", "hell", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "▁",
        "t", "h", "e", "l", "o", "w", "r", "d", "a", "aa", "aaa", "é", "日本", "日", "本",
    ];
    tokens.extend(pieces.iter().zip(0_u8..).map(|(p, at)| ((*p).to_owned(), -f32::from(at), 1)));
    tokens.push(("<tool>".to_owned(), 0.0, 4));
    let texts: Vec<&str> = tokens.iter().map(|token| token.0.as_str()).collect();
    let scores: Vec<f32> = tokens.iter().map(|token| token.1).collect();
    let kinds: Vec<i32> = tokens.iter().map(|token| token.2).collect();
    file(&[
        ("general.architecture", Field::Text("llama")),
        ("tokenizer.ggml.model", Field::Text("llama")),
        ("tokenizer.ggml.tokens", Field::Texts(&texts)),
        ("tokenizer.ggml.scores", Field::F32s(&scores)),
        ("tokenizer.ggml.token_type", Field::I32s(&kinds)),
        ("tokenizer.ggml.bos_token_id", Field::U32(1)),
        ("tokenizer.ggml.eos_token_id", Field::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Field::U32(0)),
    ])
}
