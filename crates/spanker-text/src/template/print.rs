// SPDX-License-Identifier: Apache-2.0
//! What Python prints of a value: templates are written for it, and some print lists of types.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};

/// Writes a value as Python's `str` gives it.
pub(super) fn print(out: &mut impl Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => represent(out, value),
        _ => write!(out, "{value}"),
    }
}

/// The same as a text.
pub(super) fn printed(value: &Value) -> String {
    let mut text = String::new();
    // Texts can be written to without an end.
    let _ = print(&mut text, value);
    text
}

/// Writes a value as Python's `repr` gives it: in lists and maps, texts have quotes.
fn represent(out: &mut impl Write, value: &Value) -> fmt::Result {
    let (open, close) = match value.kind() {
        ValueKind::String => return quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => ("[", "]"),
        ValueKind::Map => ("{", "}"),
        ValueKind::None | ValueKind::Undefined => return out.write_str("None"),
        _ => return write!(out, "{value}"),
    };
    out.write_str(open)?;
    for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
        if at > 0 {
            out.write_str(", ")?;
        }
        represent(out, &item)?;
        if value.kind() == ValueKind::Map {
            out.write_str(": ")?;
            represent(out, &value.get_item(&item).unwrap_or_default())?;
        }
    }
    out.write_str(close)
}

/// Single quotes, unless only they are in the text.
fn quoted(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if c < ' ' || c == '\x7f' => write!(out, "\\x{:02x}", u32::from(c))?,
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}
