// SPDX-License-Identifier: Apache-2.0
//! A conversation: turns of a user and a model, as text that is saved and as the tokens that the model's own chat template
//! makes of them.

use serde_json::{Value, json};
use spanker_text::template::Message;

use crate::error::{EngineError, Result};
use crate::model::Model;

/// Turns of a user and a model.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    /// What the model is told before the first turn.
    pub system: Option<String>,
    turns: Vec<Message>,
}

impl Conversation {
    /// One without turns.
    #[must_use]
    pub fn new(system: Option<String>) -> Conversation {
        Conversation { system, turns: Vec::new() }
    }

    /// The turns so far, the oldest first.
    #[must_use]
    pub fn turns(&self) -> &[Message] {
        &self.turns
    }

    /// Adds a turn of the user.
    pub fn ask(&mut self, text: impl Into<String>) {
        self.turns.push(Message::new("user", text));
    }

    /// Adds a turn of the model.
    pub fn answer(&mut self, text: impl Into<String>) {
        self.turns.push(Message::new("assistant", text));
    }

    /// Forgets all turns.
    pub fn clear(&mut self) {
        self.turns.clear();
    }

    /// The conversation as the tokens after which the model answers. The oldest turns are forgotten if there would be no
    /// room for `answer` tokens, or for a quarter of the context if that is less.
    ///
    /// # Errors
    /// [`EngineError::Prompt`] for a last turn that leaves no room by itself, [`EngineError::Text`] for a template that
    /// fails.
    pub fn fit(&mut self, model: &Model, context: usize, answer: usize) -> Result<Vec<u32>> {
        let reserved = answer.min(context / 4).max(1);
        loop {
            let tokens = self.encode(model)?;
            if tokens.is_empty() {
                return Err(EngineError::request("the chat template makes no text of this turn"));
            }
            if tokens.len() + reserved <= context {
                return Ok(tokens);
            }
            if self.turns.len() <= 1 {
                let what = format!(
                    "this turn has {} tokens, too many for a context of {context}",
                    tokens.len()
                );
                return Err(EngineError::Prompt {
                    what,
                    hint: Some("give more room with --ctx-size".into()),
                });
            }
            self.turns.drain(..2.min(self.turns.len() - 1));
        }
    }

    fn encode(&self, model: &Model) -> Result<Vec<u32>> {
        let system = self.system.as_ref().map(|text| Message::new("system", text.clone()));
        let all: Vec<Message> = system.into_iter().chain(self.turns.iter().cloned()).collect();
        Ok(model.chat(&all, &[])?.tokens)
    }

    /// The turns as JSON, in the form that chat APIs have.
    #[must_use]
    pub fn to_json(&self) -> String {
        let turn = |turn: &Message| json!({ "role": turn.role, "content": turn.content });
        format!("{:#}\n", self.turns.iter().map(turn).collect::<Value>())
    }

    /// Goes on with the turns of a JSON text.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a text that is not such a list; the turns are as they were.
    pub fn load_json(&mut self, text: &str) -> Result<()> {
        let list: Vec<Value> = serde_json::from_str(text)
            .map_err(|error| EngineError::request(format!("no conversation: {error}")))?;
        let turn = |(at, value): (usize, &Value)| {
            let field = |name: &str| {
                let missing = || EngineError::request(format!("turn {at} has no text '{name}'"));
                value[name].as_str().map(str::to_owned).ok_or_else(missing)
            };
            Ok(Message::new(field("role")?, field("content")?))
        };
        self.turns = list.iter().enumerate().map(turn).collect::<Result<_>>()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_back_from_json_and_other_texts_change_nothing() {
        let mut one = Conversation::new(None);
        one.ask("what is a \"sail\"?\n");
        one.answer("a card");
        let mut other = Conversation::new(Some("be brief".into()));
        other.load_json(&one.to_json()).expect("a conversation");
        assert_eq!(other.turns(), one.turns());
        for text in
            ["", "{}", "[1]", "[{\"role\": \"user\"}]", "[{\"role\": 1, \"content\": \"\"}]"]
        {
            let error = other.load_json(text).expect_err(text).to_string();
            assert!(error.contains("turn 0") || error.contains("no conversation"), "{error}");
            assert_eq!(other.turns(), one.turns());
        }
    }
}
