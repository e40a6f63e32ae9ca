// SPDX-License-Identifier: Apache-2.0
//! The vocabulary as a GGUF file lists it: pieces, their kinds, and the tokens with a meaning.

use spanker_model::gguf::Header;

use crate::TextError;
use crate::error::printable;

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A piece of text.
    Normal,
    /// What stands for text that no other token can spell.
    Unknown,
    /// A mark that is no text, such as the end of a turn.
    Control,
    /// A piece that is found in text before it is cut into words.
    UserDefined,
    /// A token that the model was never trained on.
    Unused,
    /// One byte, for text that no other token can spell.
    Byte,
}

impl Kind {
    fn of(number: i64) -> Option<Kind> {
        Some(match number {
            // Files of the first days leave it undefined.
            0 | 1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }
}

/// Tokens that end what a model says, where a file has them as control tokens or pieces of their own.
const ENDS: [&str; 25] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    // What lies between files in what models of code were trained on.
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];
/// Tokens that end a turn, where the file does not say which does.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];
/// Where a file has all of these, `<|end|>` ends a message, and a turn may have several.
const MESSAGES: [&str; 3] = ["<|return|>", "<|call|>", MESSAGE_END];
const MESSAGE_END: &str = "<|end|>";
/// Control tokens of such files that structure what is said, so they are shown.
const SHOWN: [&str; 5] = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", MESSAGE_END];

/// The tokens of a file.
#[derive(Debug, Clone)]
pub(crate) struct Vocab {
    pub(crate) kinds: Vec<Kind>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) eot: Option<u32>,
    pub(crate) unknown: Option<u32>,
    /// All tokens that end what a model says, in ascending order.
    pub(crate) ends: Vec<u32>,
    /// Control tokens that are shown, in ascending order.
    pub(crate) shown: Vec<u32>,
    /// What the file says of the token that begins a text.
    pub(crate) add_bos: Option<bool>,
}

impl Vocab {
    /// The tokens of a file, and each as the file spells it.
    pub(crate) fn read<'a>(
        header: &Header,
        bytes: &'a [u8],
    ) -> Result<(Vocab, Vec<&'a str>), TextError> {
        let tokens = header.texts(bytes, "tokenizer.ggml.tokens")?;
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            let reason = format!("{} tokens: expected 1 to 2^32 - 1", tokens.len());
            return Err(TextError::vocabulary("tokenizer.ggml.tokens", reason));
        }
        // This takes the place of `tokens`.
        let texts: Vec<&str> = tokens
            .into_iter()
            .enumerate()
            .map(|(at, token)| {
                let wrong = |_| TextError::vocabulary(format!("token {at}"), "it is not UTF-8");
                std::str::from_utf8(token).map_err(wrong)
            })
            .collect::<Result<_, _>>()?;
        let kinds = kinds(header, bytes, texts.len())?;
        let id = |name: &str| id(header, name, texts.len());
        let (bos, eos) = (id("bos")?, id("eos")?);
        let marks = |names: &[&str]| -> Vec<u32> {
            let of_text = |kind: Kind| matches!(kind, Kind::Control | Kind::UserDefined);
            let is_mark = |at: &usize| of_text(kinds[*at]) && names.contains(&texts[*at]);
            (0..texts.len()).filter(is_mark).map(|at| at as u32).collect()
        };
        let messages = marks(&MESSAGES).len() == MESSAGES.len();
        let message_end = |token: &u32| messages && texts[*token as usize] == MESSAGE_END;
        let turn_end = || marks(&TURN_ENDS).into_iter().find(|token| !message_end(token));
        let eot = id("eot")?.or_else(turn_end);
        let mut ends = marks(&ENDS);
        ends.extend([eos, eot, id("eom")?].into_iter().flatten());
        ends.retain(|token| !message_end(token));
        ends.sort_unstable();
        ends.dedup();
        let shown = if messages { marks(&SHOWN) } else { Vec::new() };
        let unknown = id("unknown")?;
        let add_bos = header.flag("tokenizer.ggml.add_bos_token");
        Ok((Vocab { kinds, bos, eos, eot, unknown, ends, shown, add_bos }, texts))
    }
}

fn kinds(header: &Header, bytes: &[u8], tokens: usize) -> Result<Vec<Kind>, TextError> {
    let key = "tokenizer.ggml.token_type";
    if !header.metadata().contains_key(key) {
        return Ok(vec![Kind::Normal; tokens]);
    }
    let numbers = header.integers(bytes, key)?;
    same_length(key, numbers.len(), tokens)?;
    let kinds = numbers.iter().enumerate().map(|(at, number)| {
        let reason = || format!("type {number} is not 0 to 6");
        Kind::of(*number).ok_or_else(|| TextError::vocabulary(format!("token {at}"), reason()))
    });
    kinds.collect()
}

/// Checks that an array has an entry for every token.
pub(crate) fn same_length(key: &str, length: usize, tokens: usize) -> Result<(), TextError> {
    if length == tokens {
        return Ok(());
    }
    Err(TextError::vocabulary(key, format!("{length} entries for {tokens} tokens")))
}

/// The token that `tokenizer.ggml.<name>_token_id` names.
fn id(header: &Header, name: &str, tokens: usize) -> Result<Option<u32>, TextError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(value) = header.metadata().get(&key) else { return Ok(None) };
    match value.as_u64() {
        Some(id) if id < tokens as u64 => Ok(Some(id as u32)),
        // Some files say -1, or all ones, for none.
        None if value.as_f64() == Some(-1.0) => Ok(None),
        Some(id) if id == u64::from(u32::MAX) => Ok(None),
        _ => {
            let value = printable(&format!("{value:?}"));
            Err(TextError::vocabulary(key, format!("{value} is none of {tokens} tokens")))
        }
    }
}
