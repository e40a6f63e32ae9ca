// SPDX-License-Identifier: Apache-2.0
//! What came of a case of `spanker verify`, in words and as JSON.

use serde_json::{Value, json};
use spanker_llm::{Difference, Distance, Fault, RunLogits, Side};
use spanker_text::Tokenizer;

/// What came of a case.
pub(super) struct Verdict {
    pub(super) holds: bool,
    pub(super) words: String,
    /// One word for what is wrong, if anything is.
    reason: Option<&'static str>,
    /// Of a reduce split whose logits can be compared.
    distance: Option<Distance>,
}

impl Verdict {
    fn holds(words: String, distance: Option<Distance>) -> Verdict {
        Verdict { holds: true, words, reason: None, distance }
    }

    /// A split that must have one card's bits.
    pub(super) fn exact(
        found: &RunLogits,
        reference: &RunLogits,
        cards: usize,
        tokenizer: &Tokenizer,
    ) -> Verdict {
        match found.difference(reference) {
            None => Self::holds(format!("{:016x}  identical", found.fingerprint()), None),
            Some(difference) => Self::differs(&difference, cards, tokenizer),
        }
    }

    /// A run on so many cards, or what it is measured by, that differs.
    pub(super) fn differs(difference: &Difference, cards: usize, tokenizer: &Tokenizer) -> Verdict {
        let mut words = difference.to_string();
        if let Difference::NotFinite { side, .. } = difference {
            let cards = if *side == Side::Reference { 1 } else { cards };
            words += &format!(" on {cards} card{}", if cards == 1 { "" } else { "s" });
        }
        if let Some(tokens) = difference.tokens() {
            let [theirs, ours] = tokens.map(|token| tokenizer.decode(&[token]));
            words += &format!("; tokens {theirs:?} and {ours:?}");
        }
        Verdict { holds: false, words, reason: Some(difference.kind()), distance: None }
    }

    /// A reduce split on several cards, and how far it is from one card if that can be measured.
    pub(super) fn reduce(
        found: &RunLogits,
        examined: Result<Distance, Fault>,
        measured: Option<Distance>,
        cards: usize,
        tokenizer: &Tokenizer,
    ) -> Verdict {
        let distance = match examined {
            Ok(distance) => distance,
            Err(fault) => {
                let verdict = match fault {
                    Fault::Reference(difference) => Self::differs(&difference, cards, tokenizer),
                    fault => Verdict {
                        holds: false,
                        words: fault.to_string(),
                        reason: Some(fault.kind()),
                        distance: None,
                    },
                };
                return Verdict { distance: measured, ..verdict };
            }
        };
        let tokens = match distance.other_tokens {
            0 => "same tokens".to_owned(),
            1 => "1 other token, a tie within that".to_owned(),
            others => format!("{others} other tokens, all of them ties within that"),
        };
        let words = format!(
            "{:016x}  repeats; logits within {:.2e} of one card ({:.0} % of what rounding explains), {tokens}",
            found.fingerprint(),
            distance.greatest,
            100.0 * distance.share(),
        );
        Self::holds(words, Some(distance))
    }

    /// Adds what is known to the fields of a case.
    pub(super) fn describe(&self, line: &mut Value) {
        line["holds"] = self.holds.into();
        line["what"] = self.words.as_str().into();
        line["reason"] = self.reason.into();
        line["distance"] = self.distance.map_or(Value::Null, |distance| {
            json!({
                "greatest": distance.greatest, "other_tokens": distance.other_tokens,
                "step": distance.step, "most": distance.most[0], "rms": distance.mean[0],
            })
        });
        line["bound"] = self.distance.map_or(Value::Null, |distance| {
            json!({ "step": distance.step, "most": distance.most[1], "rms": distance.mean[1] })
        });
    }
}
