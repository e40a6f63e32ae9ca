// SPDX-License-Identifier: Apache-2.0
//! Cutting text into words before they are merged: the rule that `tokenizer.ggml.pre` names.
//!
//! Each rule is a regular expression in its origin; here it is a loop over characters. Letters are
//! Unicode's `L`, numbers its `N`, by version 16; programs with older tables cut differently around
//! the characters that are newer than these. All words together are the text.

use unicode_general_category::{GeneralCategory, get_general_category};

use crate::TextError;
use crate::error::printable;

/// How text is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// GPT-2: contractions, runs of letters, of numbers, of other signs, each with the space before.
    Gpt2,
    /// Files that name no rule: signs first, then as GPT-2, then numbers in threes.
    Default,
    /// As GPT-2, with every digit alone.
    Digits,
    /// Llama 3: any sign before letters, at most this many digits together, line ends together.
    Lines {
        /// The most digits in a word.
        digits: usize,
    },
}

const KNOWN: [&str; 8] =
    ["default", "gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen"];

/// What the rules ask about a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Space,
    Other,
}

fn class(c: char) -> Class {
    if c.is_ascii() {
        return match c {
            'a'..='z' | 'A'..='Z' => Class::Letter,
            '0'..='9' => Class::Number,
            '\t'..='\r' | ' ' => Class::Space,
            _ => Class::Other,
        };
    }
    if c.is_whitespace() {
        return Class::Space;
    }
    match get_general_category(c) {
        GeneralCategory::UppercaseLetter
        | GeneralCategory::LowercaseLetter
        | GeneralCategory::TitlecaseLetter
        | GeneralCategory::ModifierLetter
        | GeneralCategory::OtherLetter => Class::Letter,
        GeneralCategory::DecimalNumber
        | GeneralCategory::LetterNumber
        | GeneralCategory::OtherNumber => Class::Number,
        _ => Class::Other,
    }
}

/// Whether the rule for files without one cuts at it first.
fn is_sign(c: char) -> bool {
    let category = get_general_category(c);
    "$+<=>^~|".contains(c)
        || matches!(
            category,
            GeneralCategory::ConnectorPunctuation
                | GeneralCategory::DashPunctuation
                | GeneralCategory::OpenPunctuation
                | GeneralCategory::ClosePunctuation
                | GeneralCategory::InitialPunctuation
                | GeneralCategory::FinalPunctuation
                | GeneralCategory::OtherPunctuation
        )
}

impl Split {
    /// The rule of this name; whether a word that is a token is not merged from its bytes; whether a
    /// text begins with a token of its own unless the file says otherwise.
    pub(crate) fn named(name: &str) -> Result<(Split, bool, bool), TextError> {
        match name {
            "default" => Ok((Split::Default, false, false)),
            "gpt-2" => Ok((Split::Gpt2, false, false)),
            "smollm" => Ok((Split::Digits, false, false)),
            "llama-bpe" | "llama3" | "llama-v3" => Ok((Split::Lines { digits: 3 }, true, true)),
            "qwen2" | "deepseek-r1-qwen" => Ok((Split::Lines { digits: 1 }, false, false)),
            _ => Err(TextError::Unsupported {
                what: "tokenizer.ggml.pre",
                name: printable(name),
                expected: KNOWN.join(", "),
            }),
        }
    }

    /// The words of `text`, in order and without gaps.
    pub(crate) fn words(self, text: &str) -> Vec<&str> {
        let chars: Vec<char> = text.chars().collect();
        let mut ends = Vec::new();
        match self {
            Split::Gpt2 => cut(&chars, &mut ends, gpt2_word),
            Split::Lines { digits } => cut(&chars, &mut ends, |rest| lines_word(rest, digits)),
            Split::Digits => {
                // Every number stands alone; what lies between is cut as if it were all there is.
                for part in runs(&chars, |c| class(c) == Class::Number, 1) {
                    cut(part, &mut ends, gpt2_word);
                }
            }
            Split::Default => {
                for part in runs(&chars, is_sign, usize::MAX) {
                    let mut lengths = Vec::new();
                    cut(part, &mut lengths, gpt2_word);
                    default_numbers(part, &lengths, &mut ends);
                }
            }
        }
        let mut rest = text;
        let mut at = 0;
        ends.iter()
            .map(|count| {
                let bytes: usize = chars[at..at + count].iter().map(|c| c.len_utf8()).sum();
                let (word, after) = rest.split_at(bytes);
                (rest, at) = (after, at + count);
                word
            })
            .collect()
    }
}

/// Cuts `chars` from left to right; `next` says how long the word at the beginning is.
fn cut(chars: &[char], lengths: &mut Vec<usize>, next: impl Fn(&[char]) -> usize) {
    let mut rest = chars;
    while !rest.is_empty() {
        let length = next(rest).clamp(1, rest.len());
        lengths.push(length);
        rest = &rest[length..];
    }
}

/// Cuts out the runs of characters that are `wanted`, of at most `most`, and what lies between.
fn runs(chars: &[char], wanted: impl Fn(char) -> bool, most: usize) -> Vec<&[char]> {
    let mut parts = Vec::new();
    let mut rest = chars;
    while let Some(first) = rest.first() {
        let kind = wanted(*first);
        let most = if kind { most } else { usize::MAX };
        let length = rest.iter().take(most).take_while(|c| wanted(**c) == kind).count();
        let (part, after) = rest.split_at(length);
        parts.push(part);
        rest = after;
    }
    parts
}

/// The last cuts of the rule for files without one: runs of numbers, and of these ASCII's in threes.
fn default_numbers(part: &[char], words: &[usize], lengths: &mut Vec<usize>) {
    let mut rest = part;
    for length in words {
        let (word, after) = rest.split_at(*length);
        for run in runs(word, |c| class(c) == Class::Number, usize::MAX) {
            let mut from = 0;
            let mut at = 0;
            while at + 3 <= run.len() {
                if run[at..at + 3].iter().all(char::is_ascii_digit) {
                    lengths.extend([at - from, 3].into_iter().filter(|length| *length > 0));
                    at += 3;
                    from = at;
                } else {
                    at += 1;
                }
            }
            if from < run.len() {
                lengths.push(run.len() - from);
            }
        }
        rest = after;
    }
}

/// How many characters at the beginning are of this class.
fn run(chars: &[char], wanted: Class) -> usize {
    chars.iter().take_while(|c| class(**c) == wanted).count()
}

/// The length of an English contraction at the beginning, such as `'re`.
fn contraction(chars: &[char], any_case: bool) -> Option<usize> {
    let lower = |at: usize| {
        let c = chars.get(at)?;
        Some(if any_case { c.to_ascii_lowercase() } else { *c })
    };
    if chars.first() != Some(&'\'') {
        return None;
    }
    match (lower(1)?, lower(2)) {
        ('s' | 't' | 'm' | 'd', _) => Some(2),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(3),
        _ => None,
    }
}

/// White space, of which the last stays for the word that follows.
fn space(chars: &[char]) -> usize {
    let length = run(chars, Class::Space);
    if length > 1 && length < chars.len() { length - 1 } else { length }
}

fn gpt2_word(chars: &[char]) -> usize {
    if let Some(length) = contraction(chars, false) {
        return length;
    }
    let skip = usize::from(chars[0] == ' ');
    match chars.get(skip).map(|c| class(*c)) {
        None | Some(Class::Space) => space(chars),
        Some(wanted) => skip + run(&chars[skip..], wanted),
    }
}

fn lines_word(chars: &[char], digits: usize) -> usize {
    if let Some(length) = contraction(chars, true) {
        return length;
    }
    let is_line = |c: &char| matches!(c, '\r' | '\n');
    let first = class(chars[0]);
    let next = chars.get(1).map(|c| class(*c));
    if first == Class::Letter {
        return run(chars, Class::Letter);
    }
    if first == Class::Number {
        return run(chars, Class::Number).min(digits);
    }
    if next == Some(Class::Letter) && !is_line(&chars[0]) {
        return 1 + run(&chars[1..], Class::Letter);
    }
    let skip = usize::from(chars[0] == ' ');
    let signs = run(&chars[skip..], Class::Other);
    if signs > 0 {
        let end = skip + signs;
        return end + chars[end..].iter().take_while(|c| is_line(c)).count();
    }
    let spaces = &chars[..run(chars, Class::Space)];
    match spaces.iter().rposition(is_line) {
        Some(last) => last + 1,
        None => space(chars),
    }
}

#[cfg(test)]
mod tests {
    use super::Split;
    use proptest::prelude::*;

    const LLAMA3: Split = Split::Lines { digits: 3 };

    #[test]
    fn gpt2_words_keep_the_space_before() {
        let words = Split::Gpt2.words("Hello  world's 123!?\n\n x");
        assert_eq!(words, ["Hello", " ", " world", "'s", " 123", "!?", "\n\n", " x"]);
        assert_eq!(Split::Gpt2.words("I'LL it'll"), ["I", "'", "LL", " it", "'ll"]);
        assert_eq!(Split::Gpt2.words("a \n"), ["a", " \n"]);
    }

    #[test]
    fn digits_stand_alone_and_lose_their_space() {
        assert_eq!(Split::Digits.words("in 2024 x"), ["in", " ", "2", "0", "2", "4", " x"]);
        assert_eq!(Split::Digits.words("½x"), ["½", "x"]);
    }

    #[test]
    fn llama3_words_take_signs_before_and_line_ends_behind() {
        assert_eq!(
            LLAMA3.words("(foo) 12345\r\n\n  x"),
            ["(foo", ")", " ", "123", "45", "\r\n\n", " ", " x"]
        );
        assert_eq!(LLAMA3.words("we'RE;\n\n}"), ["we", "'RE", ";\n\n", "}"]);
        let qwen2 = Split::Lines { digits: 1 };
        assert_eq!(qwen2.words("a12  "), ["a", "1", "2", "  "]);
    }

    #[test]
    fn default_cuts_signs_and_threes() {
        let words = Split::Default.words("x=12345; y");
        assert_eq!(words, ["x", "=", "123", "45", ";", " y"]);
    }

    #[test]
    fn unknown_rule_is_named_with_the_known_ones() {
        let error = Split::named("tekken").expect_err("unknown").to_string();
        assert!(
            error.contains("tokenizer.ggml.pre 'tekken'") && error.contains("smollm"),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn words_are_the_whole_text(text in any::<String>(), spaced in "[ \\n\\ra1'.é]{0,40}") {
            for split in [Split::Gpt2, Split::Default, Split::Digits, LLAMA3] {
                for text in [&text, &spaced] {
                    let words = split.words(text);
                    prop_assert!(words.iter().all(|word| !word.is_empty()));
                    prop_assert_eq!(&words.concat(), text);
                }
            }
        }
    }
}
