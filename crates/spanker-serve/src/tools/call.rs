// SPDX-License-Identifier: Apache-2.0
//! One call of a tool, as JSON that comes piece by piece: its name is known and its arguments are passed on before it
//! is complete. What is no call is said as soon as that is certain.

/// What was learned of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// Which tool it is.
    Name(String),
    /// More of its arguments, as text.
    Arguments(String),
}

/// How far the text was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// All of it, and more is to come.
    More,
    /// The call is complete, after so many bytes.
    Complete(usize),
    /// It is no call, as a byte shows before which there are so many.
    Wrong(usize),
}

/// Where in the object it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the object.
    Start,
    /// Before a key, or the end.
    Key,
    /// In a key.
    InKey,
    /// Before the colon.
    Colon,
    /// Before a value.
    Value,
    /// In the text of the name, or of arguments that are a text.
    InText,
    /// In a value; if it is the arguments, it is passed on.
    InValue,
}

/// Keys under which arguments come.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// The longest key or name.
const LONGEST: usize = 256;

/// A call that is being read.
#[derive(Debug)]
pub(super) struct Call {
    at: At,
    /// Lists and objects that the value is in.
    depth: usize,
    /// Objects of the call itself that are open: calls may lie in an object `function`.
    open: usize,
    in_text: bool,
    escaped: bool,
    key: String,
    /// The text that is being read, as JSON spells it.
    text: Vec<u8>,
    name: Option<String>,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
}

impl Call {
    /// Before its first byte.
    pub(super) fn new() -> Call {
        Call {
            at: At::Start,
            depth: 0,
            open: 0,
            in_text: false,
            escaped: false,
            key: String::new(),
            text: vec![b'"'],
            name: None,
            has_arguments: false,
            early: String::new(),
        }
    }

    /// One whose name was said before its arguments, which come next.
    pub(super) fn named(name: String) -> Call {
        let key = ARGUMENTS[0].to_owned();
        Call { at: At::Value, key, name: Some(name), ..Call::new() }
    }

    /// Which tool is called, if that is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Reads on. Tools of other names cannot be called.
    pub(super) fn push(&mut self, text: &str, names: &[String], parts: &mut Vec<Part>) -> Progress {
        // Where the arguments that are passed on begin.
        let mut from = (self.at == At::InValue && self.is_arguments()).then_some(0);
        for (at, byte) in text.bytes().enumerate() {
            let was = self.at;
            let step = self.step(byte, names, parts);
            if was == At::Value && self.at == At::InValue && self.is_arguments() {
                from = Some(at);
            }
            let ended = was == At::InValue && self.at != At::InValue;
            match step {
                Step::Wrong => return Progress::Wrong(at),
                Step::On if !ended => {}
                _ => {
                    if let Some(from) = from.take() {
                        self.pass_on(&text[from..=at], parts);
                    }
                    if step == Step::Complete {
                        self.flush(parts);
                        return Progress::Complete(at + 1);
                    }
                }
            }
        }
        if let Some(from) = from {
            self.pass_on(&text[from..], parts);
        }
        Progress::More
    }

    fn is_arguments(&self) -> bool {
        ARGUMENTS.contains(&self.key.as_str())
    }

    /// More of the arguments: at once if it is known whose.
    fn pass_on(&mut self, text: &str, parts: &mut Vec<Part>) {
        match self.name {
            Some(_) => parts.push(Part::Arguments(text.to_owned())),
            None => self.early += text,
        }
    }

    /// Whatever a complete call still lacks.
    fn flush(&mut self, parts: &mut Vec<Part>) {
        if !self.has_arguments {
            parts.push(Part::Arguments("{}".into()));
        }
    }

    fn step(&mut self, byte: u8, names: &[String], parts: &mut Vec<Part>) -> Step {
        match self.at {
            At::Start => match byte {
                b'{' => self.open_call(),
                _ if byte.is_ascii_whitespace() => Step::On,
                _ => Step::Wrong,
            },
            At::Key => match byte {
                b'"' => self.go(At::InKey),
                b'}' => self.close_call(),
                b',' => Step::On,
                _ if byte.is_ascii_whitespace() => Step::On,
                _ => Step::Wrong,
            },
            At::InKey => match self.spelled(byte) {
                None if self.text.len() > LONGEST => Step::Wrong,
                None => Step::On,
                Some(Some(key)) => {
                    self.key = key;
                    self.go(At::Colon)
                }
                Some(None) => Step::Wrong,
            },
            At::Colon => match byte {
                b':' => self.go(At::Value),
                _ if byte.is_ascii_whitespace() => Step::On,
                _ => Step::Wrong,
            },
            At::Value => self.begin_value(byte),
            At::InText => self.text_step(byte, names, parts),
            At::InValue => self.value_step(byte),
        }
    }

    fn go(&mut self, at: At) -> Step {
        self.at = at;
        Step::On
    }

    fn open_call(&mut self) -> Step {
        self.open += 1;
        self.go(At::Key)
    }

    fn close_call(&mut self) -> Step {
        self.open -= 1;
        match (self.open, &self.name) {
            (0, Some(_)) => Step::Complete,
            (0, None) => Step::Wrong,
            _ => Step::On,
        }
    }

    fn begin_value(&mut self, byte: u8) -> Step {
        if byte.is_ascii_whitespace() {
            return Step::On;
        }
        let arguments = self.is_arguments();
        if arguments && self.has_arguments || self.key == "name" && self.name.is_some() {
            return Step::Wrong;
        }
        match (self.key.as_str(), byte) {
            ("name", b'"') => self.go(At::InText),
            ("name", _) => Step::Wrong,
            ("function", b'{') => self.open_call(),
            (_, b'"') if arguments => self.go(At::InText),
            (_, b'{') if arguments => {
                self.has_arguments = true;
                self.depth = 1;
                self.go(At::InValue)
            }
            // Llamas call a tool without arguments with null.
            (_, _) if arguments && byte != b'n' => Step::Wrong,
            (_, b'{' | b'[') => {
                self.depth = 1;
                self.go(At::InValue)
            }
            (_, b'"') => {
                (self.depth, self.in_text) = (0, true);
                self.go(At::InValue)
            }
            (_, b',' | b'}' | b']' | b':') => Step::Wrong,
            _ => {
                self.key = "a value that is passed over".into();
                self.depth = 0;
                self.go(At::InValue)
            }
        }
    }

    /// A byte of a text: the text, once it is complete, if it is one.
    fn spelled(&mut self, byte: u8) -> Option<Option<String>> {
        self.text.push(byte);
        if byte == b'"' && !self.escaped {
            let text = std::mem::replace(&mut self.text, vec![b'"']);
            return Some(serde_json::from_slice(&text).ok());
        }
        self.escaped = byte == b'\\' && !self.escaped;
        None
    }

    fn text_step(&mut self, byte: u8, names: &[String], parts: &mut Vec<Part>) -> Step {
        let arguments = self.is_arguments();
        let spelled = match self.spelled(byte) {
            None if !arguments && self.text.len() > LONGEST => return Step::Wrong,
            None => return Step::On,
            Some(None) => return Step::Wrong,
            Some(Some(text)) => text,
        };
        if arguments {
            self.has_arguments = true;
            self.pass_on(&spelled, parts);
        } else if !names.contains(&spelled) {
            return Step::Wrong;
        } else {
            parts.push(Part::Name(spelled.clone()));
            self.name = Some(spelled);
            let early = std::mem::take(&mut self.early);
            if !early.is_empty() {
                parts.push(Part::Arguments(early));
            }
        }
        self.go(At::Key)
    }

    fn value_step(&mut self, byte: u8) -> Step {
        if self.in_text {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_text = false,
                _ => return Step::On,
            }
            return if !self.in_text && self.depth == 0 { self.go(At::Key) } else { Step::On };
        }
        match byte {
            b'"' if self.depth > 0 => self.in_text = true,
            b'{' | b'[' if self.depth > 0 => self.depth += 1,
            b'}' if self.depth == 0 => {
                self.at = At::Key;
                return self.close_call();
            }
            b',' if self.depth == 0 => return self.go(At::Key),
            b'}' | b']' => {
                if self.depth == 0 {
                    return Step::Wrong;
                }
                self.depth -= 1;
                if self.depth == 0 {
                    // Arguments without an object around them are the whole call.
                    if self.open == 0 {
                        self.at = At::Key;
                        return Step::Complete;
                    }
                    return self.go(At::Key);
                }
            }
            _ => {}
        }
        Step::On
    }
}

/// What comes of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    On,
    Complete,
    Wrong,
}
