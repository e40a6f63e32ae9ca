// SPDX-License-Identifier: Apache-2.0
//! The real vocabulary and template of SmolLM2, where `SPANKER_SMOLLM2` names its file.

use std::fs;

use spanker_model::gguf::Header;
use spanker_text::template::{self, Context, Message, render};
use spanker_text::{Kind, Tokenizer};

/// The file's bytes, or nothing, aloud.
fn file() -> Option<Vec<u8>> {
    let Some(path) = std::env::var_os("SPANKER_SMOLLM2") else {
        eprintln!("skipped: SPANKER_SMOLLM2 names no file");
        return None;
    };
    Some(fs::read(path).expect("the file that SPANKER_SMOLLM2 names"))
}

/// Text and tokens by llama.cpp with marks found.
const VECTORS: [(&str, &[u32]); 48] = [
    ("a", &[81]),
    ("  ", &[256]),
    ("\n", &[198]),
    (" \n \n", &[3717, 3717]),
    ("Hello, world!", &[19556, 28, 905, 17]),
    ("hello  world", &[28120, 216, 905]),
    ("trailing  ", &[4861, 4966, 256]),
    ("I'M YOU'RE HE'S WE'LL", &[57, 23, 61, 12246, 23, 3256, 18209, 23, 67, 26587, 23, 16421]),
    ("can't'll", &[4055, 982, 3060]),
    ("12", &[33, 34]),
    ("1234", &[33, 34, 35, 36]),
    ("3.14159", &[35, 30, 33, 36, 33, 37, 41]),
    ("$100 €200 £3", &[20, 33, 32, 32, 24927, 34, 32, 32, 10257, 35]),
    ("a+b-c*d/e%f", &[81, 27, 82, 29, 83, 26, 84, 31, 85, 21, 86]),
    (
        "for (int i = 0; i < 10; ++i) { printf(\"%d\\n\", i); }",
        &[
            1710, 365, 591, 2056, 446, 216, 32, 43, 2056, 2067, 216, 33, 32, 43, 1232, 27, 89, 25,
            1662, 1628, 86, 23901, 84, 76, 94, 1002, 2056, 4258, 4029,
        ],
    ),
    (
        "#include <stdio.h>\r\n\r\nint main() {}\r\n",
        &[19, 21745, 2067, 10491, 1119, 30, 88, 46, 7209, 198, 591, 1085, 1000, 4548, 2738],
    ),
    (
        "中文字符测试,你好世界",
        &[
            28589, 29184, 36518, 40562, 116, 43222, 229, 16313, 239, 28, 18645, 250, 48392, 138,
            7906, 240, 178, 239, 230,
        ],
    ),
    (
        "Привет, мир! Как дела?",
        &[
            155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17, 5470, 244, 6511, 13760,
            33427, 42292, 6511, 47,
        ],
    ),
    ("مرحبا بالعالم", &[21706, 20602, 44626, 31462, 10805, 45726, 22208, 34966, 22208, 21706]),
    (
        "नमस्ते दुनिया",
        &[30658, 35090, 38770, 16525, 26293, 30581, 12335, 116, 42990, 30658, 27011, 32932, 18075],
    ),
    (
        "😀 emoji 😃😄 👨\u{200d}👩\u{200d}👧\u{200d}👦 🇩🇪",
        &[
            10813, 242, 218, 649, 33777, 40303, 221, 10813, 242, 222, 15107, 235, 118, 321, 231,
            10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231, 10813, 235, 116, 15107, 225, 119,
            10813, 225, 120,
        ],
    ),
    (
        "ﬁ ﬂ ½ ¼ ² ³ ① ② Ⅷ ⅷ",
        &[
            27141, 216, 20755, 220, 216, 16738, 216, 28151, 216, 19133, 216, 39050, 216, 173, 235,
            250, 216, 173, 235, 111, 216, 173, 223, 117, 216, 173, 223, 132,
        ],
    ),
    ("\u{200b}\u{200d}\u{feff}x", &[321, 229, 321, 231, 186, 136, 140, 104]),
    ("<|endoftext|>", &[0]),
    ("<|im_end|><|im_end|>", &[2, 2]),
    ("<s></s>", &[44, 99, 29299, 99, 46]),
    (" <|user|>y", &[2067, 108, 4093, 108, 46, 105]),
    ("\\u0041", &[76, 101, 32, 32, 36, 33]),
    ("user@example.com", &[4093, 48, 7434, 30, 824]),
    (
        "CamelCase snake_case kebab-case",
        &[51, 14548, 10802, 14321, 79, 7544, 902, 82, 369, 29, 7544],
    ),
    ("...!!!???", &[2026, 29646, 16693, 47]),
    ("a\rb", &[81, 201, 82]),
    ("x\n\n\n\ny   z\n  w", &[104, 16506, 198, 105, 256, 1892, 3805, 267]),
    ("▁x▁", &[11007, 219, 104, 11007, 219]),
    ("=====", &[2031, 45]),
    ("||||", &[38733]),
    ("<<<>>>", &[33691, 44, 36991]),
    ("++--", &[11444, 423]),
    ("ⓐⓑⓒ Ⓐ 🄰", &[173, 237, 234, 173, 237, 235, 173, 237, 236, 4636, 236, 131, 15107, 222, 125]),
    ("ªº", &[141, 120, 26697]),
    ("ªb", &[141, 120, 82]),
    ("१२३", &[9310, 117, 9310, 118, 9310, 119]),
    ("𒀀𒀁", &[187, 236, 218, 218, 187, 236, 218, 219]),
    ("1st 2nd 3rd", &[33, 302, 216, 34, 268, 216, 35, 7212]),
    (
        "2024-01-31T23:59:59Z",
        &[34, 32, 34, 36, 29, 32, 33, 29, 35, 33, 68, 34, 35, 42, 37, 41, 42, 37, 41, 74],
    ),
    ("1e-10", &[33, 85, 29, 33, 32]),
    ("a1b2c3", &[81, 33, 82, 34, 83, 35]),
    ("  12  345", &[256, 33, 34, 256, 35, 36, 37]),
];

#[test]
fn tokens_are_those_of_llama_cpp() {
    let Some(bytes) = file() else { return };
    let header = Header::read(&bytes[..], bytes.len() as u64).expect("a good file");
    let tokenizer = Tokenizer::from_gguf(&header, &bytes).expect("a good vocabulary");
    for (text, tokens) in VECTORS {
        assert_eq!(tokenizer.encode(text, tokenizer.add_bos(), true), tokens, "{text:?}");
        if !text.contains("<|") {
            assert_eq!(tokenizer.decode(tokens), text);
        }
    }
    assert_eq!((tokenizer.vocab(), tokenizer.add_bos()), (49152, false));
    assert_eq!(
        (tokenizer.eos(), tokenizer.eot(), tokenizer.ends()),
        (Some(2), Some(2), &[0, 2][..])
    );
    assert_eq!((tokenizer.piece(2), tokenizer.kind(2)), (&b"<|im_end|>"[..], Some(Kind::Control)));
}

#[test]
fn conversation_is_rendered_as_jinja_does() {
    let Some(bytes) = file() else { return };
    let header = Header::read(&bytes[..], bytes.len() as u64).expect("a good file");
    let template = template::of(&header, &bytes).expect("a template");
    let context = Context {
        add_generation_prompt: true,
        bos: "<|im_start|>",
        eos: "<|im_end|>",
        date: "",
        tools: &[],
    };
    let turns = [
        Message::new("system", "Be brief."),
        Message::new("user", " Hi! \n"),
        Message::new("assistant", "Hey you!!"),
        Message::new("user", "How are you?"),
    ];
    assert_eq!(
        render(&template, &turns, context).expect("a text"),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi! \n<|im_end|>\n\
         <|im_start|>assistant\nHey you!!<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    // Without a system turn, the model's own comes first.
    let text = render(&template, &turns[3..], context).expect("a text");
    assert!(text.starts_with("<|im_start|>system\nYou are"), "{text}");
    assert!(
        text.ends_with("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
}
