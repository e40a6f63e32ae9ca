// SPDX-License-Identifier: Apache-2.0
//! The tokenizer of a GGUF file: from text to tokens and back.

use spanker_model::gguf::Header;

use crate::bpe::{self, Bpe};
use crate::error::printable;
use crate::marks::{Marks, Part};
use crate::unigram::{self, Unigram};
use crate::vocab::{Kind, Vocab};
use crate::words::Texts;
use crate::{Stream, TextError};

#[derive(Debug, Clone)]
enum Encoding {
    Bpe(Box<Bpe>),
    Unigram(Unigram),
}

/// The tokenizer of a GGUF file.
///
/// Understood are `tokenizer.ggml.model` `gpt2` (bytes that are merged in the order of a list) and
/// `llama` (SentencePiece with scores). Tokens are those of llama.cpp.
///
/// ```
/// use spanker_model::gguf::{Field, Header, Writer};
/// use spanker_text::Tokenizer;
///
/// let mut writer = Writer::new();
/// writer.put("tokenizer.ggml.model", Field::Text("gpt2"))?;
/// writer.put("tokenizer.ggml.pre", Field::Text("gpt-2"))?;
/// writer.put("tokenizer.ggml.tokens", Field::Texts(&["h", "i", "hi", "<|end|>"]))?;
/// writer.put("tokenizer.ggml.token_type", Field::I32s(&[1, 1, 1, 3]))?;
/// writer.put("tokenizer.ggml.merges", Field::Texts(&["h i"]))?;
/// let mut file = Vec::new();
/// writer.write(&mut file, |_, _| Ok(())).expect("memory");
///
/// let header = Header::read(&file[..], file.len() as u64)?;
/// let tokenizer = Tokenizer::from_gguf(&header, &file)?;
/// assert_eq!(tokenizer.encode("hih<|end|>", false, true), [2, 0, 3]);
/// assert_eq!(tokenizer.decode(&[2, 0, 3]), "hih");
/// assert!(tokenizer.is_end(3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    vocab: Vocab,
    pieces: Texts,
    marks: Marks,
    encoding: Encoding,
    add_bos: bool,
}

/// What stands within control tokens that a user has spelled: no character of any text.
const GUARD: char = '\u{10FFFE}';

impl Tokenizer {
    /// The tokenizer of a file, from its header and the bytes of all of it.
    ///
    /// # Errors
    ///
    /// A file without vocabulary, a kind of vocabulary or a rule for words that is not understood, or
    /// parts that do not fit together; the error names them.
    pub fn from_gguf(header: &Header, bytes: &[u8]) -> Result<Tokenizer, TextError> {
        let key = "tokenizer.ggml.model";
        let model = header.text(bytes, key)?;
        if !["gpt2", "llama"].contains(&model.as_str()) {
            let (name, expected) = (printable(&model), "gpt2, llama".to_owned());
            return Err(TextError::Unsupported { what: key, name, expected });
        }
        let (vocab, texts) = Vocab::read(header, bytes)?;
        let marks = Marks::new(&texts, &vocab.kinds);
        let pieces = pieces(&texts, &vocab.kinds, model == "gpt2")?;
        let (encoding, add_bos) = if model == "gpt2" {
            let (bpe, add_bos) = Bpe::read(header, bytes, texts)?;
            (Encoding::Bpe(Box::new(bpe)), add_bos)
        } else {
            (Encoding::Unigram(Unigram::read(header, bytes, &vocab, &texts)?), true)
        };
        let add_bos = vocab.add_bos.unwrap_or(add_bos) && vocab.bos.is_some();
        Ok(Tokenizer { vocab, pieces, marks, encoding, add_bos })
    }

    /// The tokens of `text`.
    ///
    /// With `bos`, the token that begins a text comes first, where there is one; whether a model
    /// wants that says [`Tokenizer::add_bos`]. With `parse_special`, control tokens that `text`
    /// spells, such as `<|im_end|>`, are found; without, they are plain text, so that a user cannot
    /// forge them. Tokens that a file's author added as pieces of text are always found.
    #[must_use]
    pub fn encode(&self, text: &str, bos: bool, parse_special: bool) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.vocab.bos.filter(|_| bos).into_iter().collect();
        let mut after_mark = true;
        for part in self.marks.parts(text, parse_special) {
            match (part, &self.encoding) {
                (Part::Mark(token), _) => tokens.push(token),
                (Part::Text(text), Encoding::Bpe(bpe)) => bpe.encode(text, &mut tokens),
                (Part::Text(text), Encoding::Unigram(unigram)) => {
                    unigram.encode(text, after_mark, &mut tokens);
                }
            }
            after_mark = matches!(part, Part::Mark(_));
        }
        tokens
    }

    /// Text of a user as part of a template: control tokens that it spells stay text in
    /// [`Tokenizer::encode_template`], so that a user cannot forge them. Everything else is unchanged.
    ///
    /// A character that no text has stands within each of them until it is encoded.
    #[must_use]
    pub fn guard(&self, text: &str) -> String {
        let mut guarded: String = text.chars().filter(|&one| one != GUARD).collect();
        for mark in self.marks.special() {
            let mut whole = mark.chars();
            if let Some(first) = whole.next()
                && guarded.contains(mark)
            {
                guarded = guarded.replace(mark, &format!("{first}{GUARD}{}", whole.as_str()));
            }
        }
        guarded
    }

    /// A template's text as people read it, without what [`Tokenizer::guard`] has put into it.
    #[must_use]
    pub fn unguard(&self, text: &str) -> String {
        text.replace(GUARD, "")
    }

    /// The tokens of a template's text, with control tokens except in what was guarded.
    #[must_use]
    pub fn encode_template(&self, text: &str, bos: bool) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.vocab.bos.filter(|_| bos).into_iter().collect();
        self.encode_parts(&self.marks.parts(text, true), &mut tokens);
        tokens
    }

    fn encode_parts(&self, parts: &[Part<'_>], tokens: &mut Vec<u32>) {
        let mut after_mark = true;
        for part in parts {
            match (part, &self.encoding) {
                (Part::Mark(token), _) => tokens.push(*token),
                (Part::Text(text), encoding) => {
                    let plain = text.replace(GUARD, "");
                    match encoding {
                        Encoding::Bpe(bpe) => bpe.encode(&plain, tokens),
                        Encoding::Unigram(unigram) => unigram.encode(&plain, after_mark, tokens),
                    }
                }
            }
            after_mark = matches!(part, Part::Mark(_));
        }
    }

    /// The text of `tokens`, without control tokens. What is not UTF-8 in it is replaced, and the
    /// space that [`Tokenizer::encode`] put before a text is removed.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = Stream::new();
        let mut text = String::new();
        for token in tokens {
            text.push_str(&stream.push(self, *token));
        }
        text.push_str(&stream.finish());
        match &self.encoding {
            Encoding::Unigram(unigram) if unigram.space_prefix && text.starts_with(' ') => {
                text.split_off(1)
            }
            _ => text,
        }
    }

    /// The bytes of a token as text: a control token's are its name. A token that does not exist has
    /// none.
    #[must_use]
    pub fn piece(&self, token: u32) -> &[u8] {
        self.pieces.get(token as usize).unwrap_or_default()
    }

    /// How many tokens there are.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// What a token is for, if it exists.
    #[must_use]
    pub fn kind(&self, token: u32) -> Option<Kind> {
        self.vocab.kinds.get(token as usize).copied()
    }

    /// Whether a token is a mark, or what stands for unknown text.
    #[must_use]
    pub fn is_control(&self, token: u32) -> bool {
        matches!(self.kind(token), Some(Kind::Control | Kind::Unknown))
    }

    /// Whether a token is never shown: a control token, unless it gives what a model says its structure.
    #[must_use]
    pub fn is_hidden(&self, token: u32) -> bool {
        self.is_control(token) && self.vocab.shown.binary_search(&token).is_err()
    }

    /// The token that begins a text.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.vocab.bos
    }

    /// The token that ends a text.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.vocab.eos
    }

    /// The token that ends a turn of a conversation.
    #[must_use]
    pub fn eot(&self) -> Option<u32> {
        self.vocab.eot
    }

    /// All tokens after which a model has nothing more to say, in ascending order.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.vocab.ends
    }

    /// Whether a model has nothing more to say after `token`.
    #[must_use]
    pub fn is_end(&self, token: u32) -> bool {
        self.vocab.ends.binary_search(&token).is_ok()
    }

    /// Whether the model wants the token that begins a text before a prompt. A prompt from a chat
    /// template may spell it already.
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }
}

/// The bytes of each token as text, where tokens are spelled byte by byte or not.
fn pieces(texts: &[&str], kinds: &[Kind], byte_level: bool) -> Result<Texts, TextError> {
    // None is longer than its spelling.
    let mut pieces = Texts::with_capacity(texts.len(), texts.iter().map(|text| text.len()).sum());
    let mut piece = Vec::new();
    for (text, kind) in texts.iter().zip(kinds) {
        piece.clear();
        // Marks and pieces of users are spelled in plain text.
        let plain = matches!(kind, Kind::Control | Kind::UserDefined | Kind::Unknown);
        if !byte_level {
            unigram::piece(text, *kind, &mut piece);
        } else if plain || !bpe::spelled_bytes(text, &mut piece) {
            piece.clear();
            piece.extend_from_slice(text.as_bytes());
        }
        pieces.push(&piece)?;
    }
    pieces.shrink();
    Ok(pieces)
}
