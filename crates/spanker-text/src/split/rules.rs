// SPDX-License-Identifier: Apache-2.0
//! The rules by name. What a pattern's source has as `\s+(?!\S)|\s+` is `\s+` here, with the step's own rule for white space.

use super::{Rule, Step};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";

/// Every rule that is known.
pub(super) const RULES: &[Rule] = &[
    // Files that name no rule: signs, then as GPT-2, then numbers in threes.
    Rule {
        names: &["default"],
        steps: &[
            Step::Words(r"[\p{P}\$\+<=>\^~\|]+"),
            Step::Spaced(GPT2),
            Step::Words(r"\p{N}+"),
            Step::Words(r"[0-9][0-9][0-9]"),
        ],
        whole_words: false,
        add_bos: false,
    },
    // GPT-2: contractions, runs of letters, of numbers, of other signs, each with the space before.
    Rule {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
        ],
        steps: &[Step::Spaced(GPT2)],
        whole_words: false,
        add_bos: false,
    },
    // The same, with every digit alone.
    Rule {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        steps: &[Step::Words(r"\p{N}"), Step::Spaced(GPT2)],
        whole_words: false,
        add_bos: false,
    },
    // Llama 3: any sign before letters, up to three digits together, line ends together.
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        steps: &[Step::Lines(LLAMA3)],
        whole_words: true,
        add_bos: true,
    },
    // As Llama 3, merged from bytes.
    Rule {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"],
        steps: &[Step::Lines(LLAMA3)],
        whole_words: false,
        add_bos: false,
    },
    // As Llama 3, with every digit alone.
    Rule {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        steps: &[Step::Lines(QWEN2)],
        whole_words: false,
        add_bos: false,
    },
    // The same, with marks among letters.
    Rule {
        names: &["qwen35"],
        steps: &[Step::Lines(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        )],
        whole_words: false,
        add_bos: false,
    },
    // The same as Qwen 2, line by line.
    Rule {
        names: &["laguna"],
        steps: &[Step::Words(r"[^\n]+|[\n]+"), Step::Lines(QWEN2)],
        whole_words: false,
        add_bos: false,
    },
    // As Llama 3, with white space in lengths that halve.
    Rule { names: &["jais-2"], steps: &[Step::Halved(LLAMA3)], whole_words: false, add_bos: false },
    // Numbers in threes, then as Llama 3.
    Rule {
        names: &["minicpm5"],
        steps: &[
            Step::Words(r"\p{N}{1,3}"),
            Step::Lines(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
            ),
        ],
        whole_words: true,
        add_bos: false,
    },
    // Words begin where capitals do; digits alone.
    Rule {
        names: &["tekken"],
        steps: &[Step::Lines(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
        )],
        whole_words: true,
        add_bos: true,
    },
    // The same with contractions, and up to three digits together.
    Rule {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        steps: &[Step::Lines(GPT4O)],
        whole_words: false,
        add_bos: false,
    },
    // The same, with numbers in threes from their end.
    Rule {
        names: &["tiny_aya", "cohere2moe"],
        steps: &[Step::Threes(r"\d+\b"), Step::Lines(GPT4O)],
        whole_words: false,
        add_bos: false,
    },
    // The same as GPT-4o, with runs of Chinese characters.
    Rule {
        names: &["kimi-k2"],
        steps: &[Step::Lines(
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        )],
        whole_words: false,
        add_bos: false,
    },
    // East Asian scripts and signs first, then as GPT-4o with digits alone.
    Rule {
        names: &["youtu"],
        steps: &[
            Step::Words(
                r"[\u{ac00}-\u{d7a3}\u{3131}-\u{318e}]+|[\u{ff01}\u{2026}\u{201c}\u{201d}\u{2018}\u{2019}\u{2014}\u{ff1a}\u{ff1b}\u{ff0c}\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+|[\u{3105}-\u{312f}]+|[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
            ),
            Step::Lines(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
            ),
        ],
        whole_words: true,
        add_bos: false,
    },
    // DeepSeek LLM: letters, signs and numbers apart.
    Rule {
        names: &["deepseek-llm"],
        steps: &[
            Step::Words(r"[\r\n]"),
            Step::Words(
                r"\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+",
            ),
            Step::Words(
                r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+",
            ),
            Step::Words(r"\s+$"),
            Step::Words(r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"),
            Step::Words(r"\p{N}+"),
        ],
        whole_words: false,
        add_bos: false,
    },
    // DeepSeek Coder: the same by Unicode's classes, with digits alone.
    Rule {
        names: &["deepseek-coder"],
        steps: &[
            Step::Words(r"[\r\n]"),
            Step::Words(r"\s?\p{L}+"),
            Step::Words(r"\s?\p{P}+"),
            Step::Words(r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"),
            Step::Words(r"\p{N}"),
        ],
        whole_words: false,
        add_bos: false,
    },
    // DeepSeek V3: up to three digits, Chinese and Japanese, then words.
    Rule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        steps: &[
            Step::Words(r"\p{N}{1,3}"),
            Step::Words(r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"),
            Step::Lines(DEEPSEEK3),
        ],
        whole_words: false,
        add_bos: false,
    },
    // As DeepSeek V3, with numbers in threes from their end and more scripts.
    Rule {
        names: &["afmoe"],
        steps: &[
            Step::Threes(r"\p{N}+"),
            Step::Words(
                r"[\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{8c48}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+",
            ),
            Step::Lines(DEEPSEEK3),
        ],
        whole_words: false,
        add_bos: false,
    },
    // Falcon: signs, then as GPT-2, then digits in threes.
    Rule {
        names: &["falcon"],
        steps: &[
            Step::Words(r"[\p{P}\$\+<=>\^~\|`]+"),
            Step::Spaced(GPT2),
            Step::Words(r"[0-9][0-9][0-9]"),
        ],
        whole_words: false,
        add_bos: false,
    },
    // Bloom: whatever is no space and ends no sentence.
    Rule {
        names: &["bloom", "poro-chat", "gpt3-finnish"],
        steps: &[Step::Words(BLOOM)],
        whole_words: false,
        add_bos: false,
    },
    // The same, with every digit alone.
    Rule {
        names: &["viking"],
        steps: &[Step::Words(BLOOM), Step::Words(r"\p{N}")],
        whole_words: false,
        add_bos: false,
    },
    // Chameleon: names of images, then signs and digits alone.
    Rule {
        names: &["chameleon"],
        steps: &[
            Step::Words(r"<sentinel:[0-9]+>"),
            Step::Words(r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            Step::Words(r"([\t\n]|    |  )"),
            Step::Words(r"\p{N}"),
            Step::Words(r"[\p{P}!-/:-@\[-`{-~]"),
            Step::Spaced(GPT2),
        ],
        whole_words: false,
        add_bos: true,
    },
    // Words that may have spaces within.
    Rule {
        names: &["exaone-moe"],
        steps: &[Step::Lines(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+",
        )],
        whole_words: false,
        add_bos: false,
    },
    // As Qwen 2, with single line ends.
    Rule {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        steps: &[Step::Lines(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+",
        )],
        whole_words: false,
        add_bos: false,
    },
    // As Qwen 2, with signs that end before line ends.
    Rule {
        names: &["seed-coder"],
        steps: &[Step::Lines(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+",
        )],
        whole_words: false,
        add_bos: false,
    },
];
