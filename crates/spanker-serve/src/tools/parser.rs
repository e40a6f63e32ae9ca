// SPDX-License-Identifier: Apache-2.0
//! Calls of tools in an answer that comes piece by piece. What comes out depends on the text alone, never on where it
//! was cut into pieces; text is held back only while it may still become a call.

use super::Style;
use super::call::{Call, Part, Progress};

/// What comes of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// What is said.
    Text(String),
    /// A call begins.
    Call {
        /// The tool's name.
        name: String,
    },
    /// More of its arguments.
    Arguments(String),
    /// The call is complete.
    End,
}

/// Where in the answer it is.
#[derive(Debug)]
enum At {
    /// Where an answer that is a call begins.
    Start,
    /// In text.
    Text,
    /// Behind a mark: a list, an object or a name follows.
    Marked,
    /// In a call. Its text up to now is kept as long as it may turn out to be none.
    Call { call: Call, kept: String, is_known: bool },
    /// Behind a call.
    After,
}

/// Finds calls in an answer.
#[derive(Debug)]
pub(crate) struct Parser {
    style: Style,
    /// Whether the answer has to be a call, so that it is an object whatever the style.
    forced: bool,
    names: Vec<String>,
    at: At,
    held: String,
    /// Text of the mark before the call that is being read, in case it is none.
    mark: String,
    calls: usize,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// What the marks of styles are spelled as.
const LIST: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";
/// Between a name and its arguments.
const ARGS: &str = "[ARGS]";
/// The longest that may be a name.
const LONGEST_NAME: usize = 200;

impl Parser {
    /// One for calls of these tools.
    pub(crate) fn new(style: Style, forced: bool, names: Vec<String>) -> Parser {
        let at = if forced || style == Style::Object { At::Start } else { At::Text };
        let (held, mark) = (String::new(), String::new());
        Parser { style, forced, names, at, held, mark, calls: 0 }
    }

    /// How a special token is spelled that is part of calls; models' streams hide them.
    pub(crate) fn mark(&self, piece: &[u8]) -> Option<&'static str> {
        let marks: &[&str] = match self.style {
            Style::Tags => &[OPEN, CLOSE],
            Style::List => &[LIST, ARGS],
            Style::Object => &[PYTHON],
        };
        marks.iter().find(|mark| mark.as_bytes() == piece).copied()
    }

    /// Calls that were found.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// More of the answer.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Event> {
        self.held += text;
        let mut events = Vec::new();
        while self.step(&mut events) {}
        events
    }

    /// The end of the answer: what was held back is text.
    pub(crate) fn finish(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.at, At::Text) {
            At::Call { is_known: true, .. } => {
                self.calls += 1;
                events.push(Event::End);
            }
            At::Call { kept, .. } => self.say(&mut events, &[&self.mark.clone(), &kept, &held]),
            At::Marked => self.say(&mut events, &[&self.mark.clone(), &held]),
            // Space behind the last call is nothing.
            _ if self.calls > 0 && held.trim().is_empty() => {}
            _ => self.say(&mut events, &[&held]),
        }
        events
    }

    fn say(&self, events: &mut Vec<Event>, parts: &[&str]) {
        let text = parts.concat();
        if !text.is_empty() {
            events.push(Event::Text(text));
        }
    }

    /// Takes something from what is held, if that is certain.
    fn step(&mut self, events: &mut Vec<Event>) -> bool {
        match &self.at {
            At::Start => self.start(),
            At::Text => self.text(events),
            At::Marked => self.marked(events),
            At::Call { .. } => self.call(events),
            At::After => self.after(),
        }
    }

    /// The beginning of an answer that is a call or is not.
    fn start(&mut self) -> bool {
        let rest = self.held.trim_start();
        let space = self.held.len() - rest.len();
        if let Some(mark) = self.begins(rest, &[PYTHON, LIST, OPEN]) {
            return match mark {
                Some(mark) => self.go_marked(space + mark.len()),
                None => false,
            };
        }
        match rest.as_bytes().first() {
            None => false,
            Some(b'{') => self.go_call(space, Call::new()),
            Some(b'[') if self.forced => {
                self.mark = self.held.drain(..=space).collect();
                self.at = At::After;
                true
            }
            Some(_) => {
                self.at = At::Text;
                true
            }
        }
    }

    /// The mark that a text begins with; or that it may begin with one, when there is more of it.
    fn begins(&self, text: &str, marks: &[&'static str]) -> Option<Option<&'static str>> {
        if let Some(mark) = marks.iter().find(|mark| text.starts_with(**mark)) {
            return Some(Some(mark));
        }
        let may = |mark: &&&str| !text.is_empty() && mark.starts_with(text);
        marks.iter().find(may).map(|_| None)
    }

    fn text(&mut self, events: &mut Vec<Event>) -> bool {
        let mark = match self.style {
            _ if self.forced => return self.say_all(events),
            Style::Tags => OPEN,
            Style::List => LIST,
            Style::Object => return self.say_all(events),
        };
        if let Some(at) = self.held.find(mark) {
            // Space before a call is part of the call.
            let said = self.held[..at].trim_end().len();
            let said: String = self.held.drain(..said).collect();
            if !(self.calls > 0 && said.trim().is_empty()) {
                self.say(events, &[&said]);
            }
            let space = self.held.find(mark).unwrap_or(0);
            return self.go_marked(space + mark.len());
        }
        let may_be_mark = |at: &usize| mark.starts_with(&self.held[*at..]);
        let tail = self.held.char_indices().map(|(at, _)| at).find(may_be_mark);
        let tail = tail.unwrap_or(self.held.len());
        let certain = self.held[..tail].trim_end().len();
        let said: String = self.held.drain(..certain).collect();
        self.say(events, &[&said]);
        false
    }

    fn say_all(&mut self, events: &mut Vec<Event>) -> bool {
        let held = std::mem::take(&mut self.held);
        self.say(events, &[&held]);
        false
    }

    fn go_marked(&mut self, length: usize) -> bool {
        self.mark = self.held.drain(..length).collect();
        self.at = At::Marked;
        true
    }

    fn go_call(&mut self, space: usize, call: Call) -> bool {
        self.mark += &self.held[..space];
        self.held.drain(..space);
        self.at = At::Call { call, kept: String::new(), is_known: false };
        true
    }

    /// Behind a mark.
    fn marked(&mut self, events: &mut Vec<Event>) -> bool {
        let rest = self.held.trim_start();
        let space = self.held.len() - rest.len();
        match rest.as_bytes().first() {
            None => false,
            Some(b'{') => self.go_call(space, Call::new()),
            Some(b'[') if self.style == Style::List => {
                self.mark += &self.held[..=space];
                self.held.drain(..=space);
                self.at = At::After;
                true
            }
            Some(_) if self.style == Style::List => self.name_before_arguments(space, events),
            Some(_) => self.is_text(0, events),
        }
    }

    /// A name, then its arguments.
    fn name_before_arguments(&mut self, space: usize, events: &mut Vec<Event>) -> bool {
        let rest = &self.held[space..];
        let Some(end) = rest.find('{') else {
            let is_name = rest.len() < LONGEST_NAME && !rest.contains('\n');
            return !is_name && self.is_text(0, events);
        };
        let name = rest[..end].trim().trim_end_matches(ARGS).trim().to_owned();
        if !self.names.contains(&name) {
            return self.is_text(0, events);
        }
        self.go_call(space + end, Call::named(name))
    }

    /// What looked like a call is text, with so many bytes of what is held.
    fn is_text(&mut self, length: usize, events: &mut Vec<Event>) -> bool {
        let mark = std::mem::take(&mut self.mark);
        let held: String = self.held.drain(..length).collect();
        self.say(events, &[&mark, &held]);
        self.at = At::Text;
        true
    }

    fn call(&mut self, events: &mut Vec<Event>) -> bool {
        let At::Call { call, kept, is_known } = &mut self.at else { return false };
        if self.held.is_empty() {
            return false;
        }
        if let (Some(name), false) = (call.name(), *is_known) {
            // It stood before the arguments.
            *is_known = true;
            events.push(Event::Call { name: name.to_owned() });
        }
        let mut parts = Vec::new();
        let progress = call.push(&self.held, &self.names, &mut parts);
        for part in parts {
            events.push(match part {
                Part::Name(name) => {
                    *is_known = true;
                    Event::Call { name }
                }
                Part::Arguments(text) => Event::Arguments(text),
            });
        }
        match progress {
            Progress::More => {
                if !*is_known {
                    kept.push_str(&self.held);
                }
                self.held.clear();
                false
            }
            Progress::Complete(length) => {
                self.held.drain(..length);
                self.end_call(events, At::After)
            }
            // What was given out as a call cannot be taken back.
            Progress::Wrong(length) if *is_known => {
                self.held.drain(..length);
                self.end_call(events, At::Text)
            }
            Progress::Wrong(length) => {
                let kept = std::mem::take(kept);
                self.mark.push_str(&kept);
                self.is_text(length, events)
            }
        }
    }

    fn end_call(&mut self, events: &mut Vec<Event>, at: At) -> bool {
        events.push(Event::End);
        self.calls += 1;
        self.mark.clear();
        self.at = at;
        true
    }

    /// Behind a call: another one, or text again.
    fn after(&mut self) -> bool {
        let rest = self.held.trim_start();
        let space = self.held.len() - rest.len();
        if rest.is_empty() {
            return false;
        }
        match self.style {
            Style::Tags if !self.forced => match self.begins(rest, &[CLOSE]) {
                Some(None) => false,
                found => {
                    let mark = found.flatten().map_or(0, |mark| space + mark.len());
                    self.held.drain(..mark);
                    self.at = At::Text;
                    true
                }
            },
            _ => match rest.as_bytes()[0] {
                b'{' => self.go_call(space, Call::new()),
                b',' | b';' => {
                    self.held.drain(..=space);
                    true
                }
                b']' => {
                    self.held.drain(..=space);
                    self.at = At::Text;
                    true
                }
                _ => {
                    self.at = At::Text;
                    true
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
