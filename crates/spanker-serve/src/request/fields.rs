// SPDX-License-Identifier: Apache-2.0
//! Fields of requests: a table says what each may be. Requests are read by it, and the OpenAPI document is written
//! from it, so that they cannot differ.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};

/// What a field may be; `null` is always as if it were not there.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// A number between these, both included.
    Number { least: f64, most: f64 },
    /// A whole number between these, both included.
    Integer { least: i64, most: i64 },
    /// `true` or `false`.
    Flag,
    /// What a schema says; whoever reads it has to find the same.
    Other(fn() -> Value),
}

/// A field of a request.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// What it is for, for the OpenAPI document.
    pub(crate) about: &'static str,
}

impl Field {
    pub(crate) const fn number(
        name: &'static str,
        least: f64,
        most: f64,
        about: &'static str,
    ) -> Field {
        Field { name, kind: Kind::Number { least, most }, about }
    }

    pub(crate) const fn integer(
        name: &'static str,
        least: i64,
        most: i64,
        about: &'static str,
    ) -> Field {
        Field { name, kind: Kind::Integer { least, most }, about }
    }

    pub(crate) const fn flag(name: &'static str, about: &'static str) -> Field {
        Field { name, kind: Kind::Flag, about }
    }

    pub(crate) const fn other(
        name: &'static str,
        schema: fn() -> Value,
        about: &'static str,
    ) -> Field {
        Field { name, kind: Kind::Other(schema), about }
    }

    /// The field in an OpenAPI document.
    pub(crate) fn schema(&self) -> Value {
        let mut schema = match self.kind {
            Kind::Number { least, most } => {
                json!({ "type": ["number", "null"], "minimum": least, "maximum": most })
            }
            Kind::Integer { least, most } => {
                json!({ "type": ["integer", "null"], "minimum": least, "maximum": most })
            }
            Kind::Flag => json!({ "type": ["boolean", "null"] }),
            Kind::Other(schema) => schema(),
        };
        schema["description"] = self.about.into();
        schema
    }
}

/// The fields of an object in a request.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where the object is, as errors name it; empty for the request itself.
    at: String,
}

impl<'a> Fields<'a> {
    /// Those of the request itself.
    pub(crate) fn of_request(value: &'a Value) -> Result<Fields<'a>> {
        let not = || ApiError::request(format!("the body is {}: expected an object", kind(value)));
        Ok(Fields { map: value.as_object().ok_or_else(not)?, at: String::new() })
    }

    /// Those of a part of it.
    pub(crate) fn of(value: &'a Value, at: impl Into<String>) -> Result<Fields<'a>> {
        let at = at.into();
        match value.as_object() {
            Some(map) => Ok(Fields { map, at }),
            None => Err(ApiError::field(at, format!("expected an object, got {}", shown(value)))),
        }
    }

    /// A field's name, as errors have it.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// An error about a field.
    pub(crate) fn wrong(&self, name: &str, what: impl std::fmt::Display) -> ApiError {
        ApiError::field(self.path(name), what)
    }

    /// A field that is not what it should be.
    pub(crate) fn expected(&self, name: &str, expected: &str, got: &Value) -> ApiError {
        self.wrong(name, format!("expected {expected}, got {}", shown(got)))
    }

    /// A field, if it is there and not `null`.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub(crate) fn required(&self, name: &str) -> Result<&'a Value> {
        self.get(name).ok_or_else(|| self.wrong(name, "missing"))
    }

    /// A number that the field's table allows.
    pub(crate) fn number(&self, field: &Field) -> Result<Option<f64>> {
        let Kind::Number { least, most } = field.kind else {
            panic!("{} is no number", field.name)
        };
        let Some(value) = self.get(field.name) else { return Ok(None) };
        match value.as_f64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.expected(field.name, &between("a number", least, most), value)),
        }
    }

    /// A whole number that the field's table allows.
    pub(crate) fn integer(&self, field: &Field) -> Result<Option<i64>> {
        let Kind::Integer { least, most } = field.kind else {
            panic!("{} is no whole number", field.name)
        };
        let Some(value) = self.get(field.name) else { return Ok(None) };
        match whole(value).filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.expected(field.name, &between("a whole number", least, most), value)),
        }
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, field: &Field) -> Result<Option<bool>> {
        debug_assert!(matches!(field.kind, Kind::Flag), "{} is no flag", field.name);
        let Some(value) = self.get(field.name) else { return Ok(None) };
        let expected = || self.expected(field.name, "true or false", value);
        value.as_bool().map(Some).ok_or_else(expected)
    }

    /// A text.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.expected(name, "a text", value))
    }

    /// A list.
    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.expected(name, "a list", value))?;
        Ok(Some(list))
    }

    /// Says of fields that cannot be done what they are, unless they ask for nothing.
    pub(crate) fn refuse(&self, refused: &[Refused]) -> Result<()> {
        for Refused { name, why, harmless } in refused {
            if let Some(value) = self.get(name).filter(|value| !harmless(value)) {
                let message = format!("{why} (got {})", shown(value));
                return Err(self.wrong(name, message));
            }
        }
        Ok(())
    }
}

/// A field that is known and cannot be done.
pub(crate) struct Refused {
    pub(crate) name: &'static str,
    /// Why not, for people.
    pub(crate) why: &'static str,
    /// Which values ask for nothing.
    pub(crate) harmless: fn(&Value) -> bool,
}

/// A whole number; JSON has 2.0 for 2 as well.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    let exact = |float: f64| (float.fract() == 0.0 && float.abs() < 9e15).then_some(float as i64);
    value.as_i64().or_else(|| value.as_f64().and_then(exact))
}

fn between(what: &str, least: impl std::fmt::Display, most: impl std::fmt::Display) -> String {
    format!("{what} from {least} to {most}")
}

/// What kind of value it is.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value as an error shows it: not all of it, and nothing that a terminal would obey.
pub(crate) fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        other => {
            let text = other.to_string();
            let mut cut: String = text.chars().take(MOST).map(printable).collect();
            if text.chars().nth(MOST).is_some() {
                cut += "..";
            }
            cut
        }
    }
}

fn printable(one: char) -> char {
    if one.is_control() { '\u{fffd}' } else { one }
}
