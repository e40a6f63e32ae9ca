// SPDX-License-Identifier: Apache-2.0
//! Text and tokens: the tokenizer of a GGUF file ([`Tokenizer`]), text that comes token by token
//! ([`Stream`]), chat templates ([`template`]) and the choice of the next token ([`Sampler`]).
//!
//! Nothing here computes with weights, opens files or knows the time.
#![forbid(unsafe_code)]

mod bpe;
mod error;
mod marks;
mod merge;
mod sample;
mod split;
mod stream;
pub mod template;
mod tokenizer;
mod unigram;
mod vocab;
mod words;

pub use error::TextError;
pub use sample::{Candidate, Penalties, Sampler, Settings, best};
pub use stream::Stream;
pub use tokenizer::Tokenizer;
pub use vocab::Kind;
