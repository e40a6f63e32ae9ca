// SPDX-License-Identifier: Apache-2.0
//! The filter `tojson` as the library has it that models are published with: Python's `json.dumps`, which puts a space
//! behind commas and colons and keeps the order of keys. Not the filter of web pages, which escapes what HTML knows.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde_json::ser::Formatter;

use super::Json;
use super::meter::{WIDEST, refused};

/// How JSON is written.
pub(super) struct Style {
    /// Spaces of a level; nothing writes one line.
    indent: Option<usize>,
    /// What is between items, and between a key and its value.
    between: (String, String),
    sorted: bool,
    ascii: bool,
}

impl Style {
    /// What the arguments of the filter ask for.
    pub(super) fn of(indent: Option<Value>, named: &Kwargs) -> Result<Style, Error> {
        let indent = match indent {
            Some(indent) => Some(indent),
            None => named.get::<Option<Value>>("indent")?,
        };
        let indent = indent.filter(|indent| !indent.is_none());
        let indent = indent.map(|indent| indent.as_usize().filter(|&width| width <= WIDEST));
        let indent = indent.map(|indent| indent.ok_or_else(refused)).transpose()?;
        let separators = named.get::<Option<Vec<String>>>("separators")?;
        let between = match separators.as_deref() {
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "two separators")),
            None if indent.is_some() => (",".into(), ": ".into()),
            None => (", ".into(), ": ".into()),
        };
        let flag = |name| named.get::<Option<bool>>(name).map(Option::unwrap_or_default);
        Ok(Style { indent, between, sorted: flag("sort_keys")?, ascii: flag("ensure_ascii")? })
    }

    /// The text of a value. Every byte is paid for before it is written.
    pub(super) fn write(
        &self,
        value: &Value,
        pay: impl FnMut(usize) -> Result<(), Error>,
    ) -> Result<Value, Error> {
        let unwritten = |error: serde_json::Error| match error.is_io() {
            true => refused(),
            false => Error::new(ErrorKind::InvalidOperation, "cannot be written as JSON"),
        };
        let mut out = Paid { bytes: Vec::new(), pay };
        let form = Form { style: self, depth: 0, is_empty: true };
        let mut writer = serde_json::Serializer::with_formatter(&mut out, form);
        if self.sorted {
            let mut json: Json = serde_json::to_value(value).map_err(unwritten)?;
            json.sort_all_objects();
            serde::Serialize::serialize(&json, &mut writer)
        } else {
            serde::Serialize::serialize(value, &mut writer)
        }
        .map_err(unwritten)?;
        Ok(Value::from(String::from_utf8_lossy(&out.bytes).into_owned()))
    }
}

/// Bytes that are paid for.
struct Paid<P> {
    bytes: Vec<u8>,
    pay: P,
}

impl<P: FnMut(usize) -> Result<(), Error>> Write for Paid<P> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.pay)(bytes.len()).map_err(io::Error::other)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lists and maps as Python does.
struct Form<'s> {
    style: &'s Style,
    depth: usize,
    /// Whether the list or map that ends has nothing in it.
    is_empty: bool,
}

impl Form<'_> {
    fn open<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn close<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket)
    }

    fn next<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.style.between.0.as_bytes())?;
        }
        self.line(out)
    }

    fn line<W: Write + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        match self.style.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Form<'_> {
    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn end_array_value<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.style.between.1.as_bytes())
    }

    fn end_object_value<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        if !self.style.ascii {
            return out.write_all(text.as_bytes());
        }
        for part in text.split_inclusive(|one: char| !one.is_ascii()) {
            let plain = part.trim_end_matches(|one: char| !one.is_ascii());
            out.write_all(plain.as_bytes())?;
            for unit in part[plain.len()..].encode_utf16() {
                write!(out, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}
