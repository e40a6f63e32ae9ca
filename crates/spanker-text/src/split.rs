// SPDX-License-Identifier: Apache-2.0
//! Cutting text into words before they are merged: the rule that `tokenizer.ggml.pre` names.
//!
//! A rule is a list of steps, and each cuts the pieces of the one before. Patterns are those that are published with the
//! models, but for looking ahead: white space before a word leaves its last character to that word, which is done here, so
//! that every step is linear in the text. Classes of characters are those of Unicode 16; programs with older tables cut
//! differently around newer characters. All words together are the text.

mod rules;

use regex::{Regex, RegexBuilder};

use crate::TextError;
use crate::error::printable;
use rules::RULES;

/// The most memory that a compiled pattern may take, in bytes. Classes of letters are large.
const MOST_COMPILED: usize = 64 << 20;

/// What cuts a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// What matches a pattern is a word, and so is what lies between.
    Words(&'static str),
    /// The same; white space that a match consists of leaves its last character to what follows, if it has more than one.
    Spaced(&'static str),
    /// The same, unless a match ends with the end of a line.
    Lines(&'static str),
    /// As `Lines`, with white space in halving lengths from 512 down.
    Halved(&'static str),
    /// Matches are cut into threes, counted from their end.
    Threes(&'static str),
}

/// A rule of some names.
struct Rule {
    names: &'static [&'static str],
    steps: &'static [Step],
    /// Whether a word that is a token is not merged from its bytes.
    whole_words: bool,
    /// Whether a text begins with a token of its own unless the file says otherwise.
    add_bos: bool,
}

/// How text is cut.
#[derive(Debug, Clone)]
pub(crate) struct Split {
    steps: Vec<(Step, Regex)>,
    pub(crate) whole_words: bool,
    pub(crate) add_bos: bool,
}

impl Split {
    /// The rule of this name.
    pub(crate) fn named(name: &str) -> Result<Split, TextError> {
        let what = "tokenizer.ggml.pre";
        let Some(rule) = RULES.iter().find(|rule| rule.names.contains(&name)) else {
            let known: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
            let (name, expected) = (printable(name), known.join(", "));
            return Err(TextError::Unsupported { what, name, expected });
        };
        let compiled = rule.steps.iter().map(|step| {
            let (Step::Words(pattern)
            | Step::Spaced(pattern)
            | Step::Lines(pattern)
            | Step::Halved(pattern)
            | Step::Threes(pattern)) = step;
            let regex = RegexBuilder::new(pattern).size_limit(MOST_COMPILED).build();
            let wrong = |error| TextError::vocabulary(what, format!("'{name}': {error}"));
            Ok((*step, regex.map_err(wrong)?))
        });
        let steps = compiled.collect::<Result<_, TextError>>()?;
        Ok(Split { steps, whole_words: rule.whole_words, add_bos: rule.add_bos })
    }

    /// The words of `text`, in order and without gaps.
    pub(crate) fn words<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![text];
        for (step, regex) in &self.steps {
            let mut next = Vec::with_capacity(pieces.len());
            for piece in pieces {
                cut(*step, regex, piece, &mut next);
            }
            pieces = next;
        }
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }
}

/// Cuts one piece.
fn cut<'t>(step: Step, regex: &Regex, piece: &'t str, out: &mut Vec<&'t str>) {
    let mut at = 0;
    while let Some(found) = regex.find_at(piece, at) {
        let word = found.as_str();
        if word.is_empty() {
            break;
        }
        // What lies between is a word too; none is empty in the end.
        out.push(&piece[at..found.start()]);
        let kept = match step {
            Step::Words(_) => word,
            Step::Threes(_) => {
                threes(word, out);
                at = found.end();
                continue;
            }
            Step::Spaced(_) | Step::Lines(_) | Step::Halved(_) => {
                spaces(step, word, found.end() == piece.len())
            }
        };
        out.push(kept);
        at = found.start() + kept.len();
    }
    out.push(&piece[at..]);
}

/// What stays of a match if it is white space, of which the last character belongs to what follows.
fn spaces(step: Step, word: &str, last: bool) -> &str {
    let line_end = !matches!(step, Step::Spaced(_)) && word.ends_with(['\r', '\n']);
    if line_end || !word.ends_with(char::is_whitespace) {
        return word;
    }
    let count = word.chars().count();
    let free = if last { count } else { count - 1 };
    let kept = match step {
        Step::Halved(_) => {
            (2..10).rev().map(|power| 1 << power).find(|&n| n <= free).unwrap_or(free.min(2))
        }
        _ => free,
    };
    let end = word.char_indices().nth(kept.max(1)).map_or(word.len(), |(at, _)| at);
    &word[..end]
}

/// Cuts a run of digits into threes, of which the first may be shorter.
fn threes<'t>(run: &'t str, out: &mut Vec<&'t str>) {
    let starts: Vec<usize> = run.char_indices().map(|(at, _)| at).collect();
    let mut from = 0;
    for (digit, &at) in starts.iter().enumerate() {
        if digit > 0 && (starts.len() - digit).is_multiple_of(3) {
            out.push(&run[from..at]);
            from = at;
        }
    }
    out.push(&run[from..]);
}

#[cfg(test)]
mod tests {
    use super::{RULES, Split};
    use proptest::prelude::*;

    fn words<'t>(rule: &str, text: &'t str) -> Vec<&'t str> {
        Split::named(rule).expect(rule).words(text)
    }

    #[test]
    fn gpt2_words_keep_the_space_before() {
        let text = "Hello  world's 123!?\n\n x";
        let expected = ["Hello", " ", " world", "'s", " 123", "!?", "\n\n", " x"];
        assert_eq!(words("gpt-2", text), expected);
        assert_eq!(words("gpt-2", "I'LL it'll"), ["I", "'", "LL", " it", "'ll"]);
        assert_eq!(words("gpt-2", "a \n"), ["a", " \n"]);
    }

    #[test]
    fn digits_stand_alone_and_lose_their_space() {
        assert_eq!(words("smollm", "in 2024 x"), ["in", " ", "2", "0", "2", "4", " x"]);
        assert_eq!(words("smollm", "½x"), ["½", "x"]);
    }

    #[test]
    fn llama3_words_take_signs_before_and_line_ends_behind() {
        assert_eq!(
            words("llama-bpe", "(foo) 12345\r\n\n  x"),
            ["(foo", ")", " ", "123", "45", "\r\n\n", " ", " x"]
        );
        assert_eq!(words("llama-bpe", "we'RE;\n\n}"), ["we", "'RE", ";\n\n", "}"]);
        assert_eq!(words("qwen2", "a12  "), ["a", "1", "2", "  "]);
    }

    #[test]
    fn default_cuts_signs_and_threes() {
        assert_eq!(words("default", "x=12345; y"), ["x", "=", "123", "45", ";", " y"]);
    }

    #[test]
    fn capitals_begin_words_and_numbers_are_cut_from_either_end() {
        let text = "GetHTTPResponse's URLs 12345";
        let expected = ["Get", "HTTPResponse", "'s", " URLs", " ", "1", "2", "3", "4", "5"];
        assert_eq!(words("tekken", text), expected);
        let expected = ["Get", "HTTPResponse's", " URLs", " ", "123", "45"];
        assert_eq!(words("gpt-4o", text), expected);
        let expected = ["Get", "HTTPResponse's", " URLs", " ", "12", "345"];
        assert_eq!(words("tiny_aya", text), expected);
        assert_eq!(words("tiny_aya", "12345x"), ["123", "45", "x"]);
    }

    #[test]
    fn words_are_those_of_the_published_patterns() {
        let golden = include_str!("../tests/oracle/words.json");
        let golden: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(golden).expect("JSON");
        let list = |value: &serde_json::Value| value.as_array().expect("a list").clone();
        let texts = list(&golden["texts"]);
        assert!(golden.len() > 24);
        for (rule, expected) in golden.iter().filter(|(rule, _)| *rule != "texts") {
            for (text, expected) in texts.iter().zip(list(expected)) {
                let text = text.as_str().expect("a text");
                let expected = list(&expected).into_iter().map(|length| length.as_u64());
                let expected: Vec<usize> =
                    expected.map(|length| length.expect("a length") as usize).collect();
                let found = words(rule, text);
                let lengths: Vec<usize> = found.iter().map(|word| word.chars().count()).collect();
                assert_eq!(lengths, expected, "{rule}: {found:?}");
            }
        }
    }

    #[test]
    fn unknown_rule_is_named_with_the_known_ones() {
        let error = Split::named("tekken2").expect_err("unknown").to_string();
        assert!(
            error.contains("tokenizer.ggml.pre 'tekken2'") && error.contains("smollm"),
            "{error}"
        );
    }

    #[test]
    fn names_of_rules_are_unique() {
        let mut names: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn long_runs_take_linear_time() {
        // What takes time in the square of the length does not end here.
        for rule in RULES {
            let split = Split::named(rule.names[0]).expect("a rule");
            for text in ["A", " ", "1", "\u{4e00}", "'", "\n", "é", " \t"] {
                let text = text.repeat(100_000 / text.len());
                assert_eq!(split.words(&text).concat().len(), text.len());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn words_are_the_whole_text(text in any::<String>(), spaced in "[ \\n\\ra1'.é]{0,40}") {
            static SPLITS: std::sync::LazyLock<Vec<Split>> = std::sync::LazyLock::new(|| {
                let split = |rule: &super::Rule| Split::named(rule.names[0]).expect("a rule");
                RULES.iter().map(split).collect()
            });
            for split in &*SPLITS {
                for text in [&text, &spaced] {
                    let words = split.words(text);
                    prop_assert!(words.iter().all(|word| !word.is_empty()));
                    prop_assert_eq!(&words.concat(), text);
                }
            }
        }
    }
}
