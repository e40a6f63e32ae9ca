// SPDX-License-Identifier: Apache-2.0
//! What a schema may take before a parser is made of it. The parser bounds the work of a step; what it does before the
//! first step grows with products: of patterns that one text has to match, of a pattern's size and the longest text, of
//! divisors that one number has to have. These products are estimated here, from above.

use serde_json::{Map, Value};

/// Bytes of a schema, at most.
const MOST_BYTES: usize = 256 << 10;
/// Values in it, at most: schemas, and what stands in them.
const MOST_VALUES: usize = 20_000;
/// Keys of an object, at most.
const MOST_KEYS: usize = 2000;
/// Patterns of keys of an object, at most: each is compared with each.
const MOST_KEY_PATTERNS: usize = 16;
/// Patterns and formats that one text has to match, at most.
const MOST_PATTERNS: u32 = 4;
/// The size of these patterns and the longest text, multiplied, at most; and of all places together.
const MOST_TEXT: u64 = 200_000;
/// The product of what one number has to be a multiple of, at most, without its decimal point.
const MOST_DIVISOR: u64 = 100_000;
/// The size of a format's pattern, about.
const FORMAT: u64 = 100;
/// References that lead to each other, at most.
const MOST_REFERENCES: usize = 64;

/// What the values of a place have to match, or the hardest of the places below it.
#[derive(Debug, Clone, Copy)]
struct Load {
    /// Patterns, and the product of their sizes.
    patterns: u32,
    size: u64,
    /// The longest that a text may be.
    length: u64,
    divisor: u64,
}

const NOTHING: Load = Load { patterns: 0, size: 1, length: 1, divisor: 1 };

impl Load {
    /// Both at once.
    fn and(self, other: Load) -> Load {
        Load {
            patterns: self.patterns + other.patterns,
            size: self.size.saturating_mul(other.size),
            length: self.length.max(other.length),
            divisor: self.divisor.saturating_mul(other.divisor),
        }
    }

    /// Either.
    fn or(self, other: Load) -> Load {
        Load {
            patterns: self.patterns.max(other.patterns),
            size: self.size.max(other.size),
            length: self.length.max(other.length),
            divisor: self.divisor.max(other.divisor),
        }
    }

    /// Steps through the texts that may match.
    fn text(self) -> u64 {
        if self.patterns == 0 { 0 } else { self.size.saturating_mul(self.length) }
    }
}

/// Goes through a schema.
struct Walk<'s> {
    root: &'s Value,
    /// References that are being followed.
    following: Vec<&'s str>,
    /// Schemas that were looked at; a reference has what it leads to looked at again.
    looked: usize,
    /// What all places take together.
    text: u64,
}

/// Whether a parser of a schema can be made in bounded time and memory.
///
/// # Errors
/// A sentence that says what is too much.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let bytes = schema.to_string().len();
    if bytes > MOST_BYTES {
        return Err(format!("it has {bytes} bytes: at most {MOST_BYTES}"));
    }
    count(schema, &mut 0)?;
    let mut walk = Walk { root: schema, following: Vec::new(), looked: 0, text: 0 };
    walk.load(schema).map(drop)
}

fn count(value: &Value, counted: &mut usize) -> Result<(), String> {
    *counted += 1;
    if *counted > MOST_VALUES {
        return Err(format!("it has more than {MOST_VALUES} values"));
    }
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| count(item, counted)),
        Value::Object(fields) if fields.len() > MOST_KEYS => {
            Err(format!("an object has {} keys: at most {MOST_KEYS}", fields.len()))
        }
        Value::Object(fields) => fields.values().try_for_each(|field| count(field, counted)),
        _ => Ok(()),
    }
}

/// Keywords with a schema.
const ONE: [&str; 3] = ["additionalProperties", "additionalItems", "items"];
/// Keywords with schemas by name.
const NAMED: [&str; 2] = ["properties", "patternProperties"];

impl<'s> Walk<'s> {
    fn load(&mut self, schema: &'s Value) -> Result<Load, String> {
        let Some(fields) = schema.as_object() else { return Ok(NOTHING) };
        self.looked += 1;
        if self.looked > MOST_VALUES {
            return Err("its references lead to too many schemas".into());
        }
        let mut below = NOTHING;
        for key in ONE {
            if let Some(inner) = fields.get(key) {
                below = below.or(self.load(inner)?);
            }
        }
        for key in NAMED {
            for inner in
                fields.get(key).and_then(Value::as_object).into_iter().flat_map(Map::values)
            {
                below = below.or(self.load(inner)?);
            }
        }
        // A list of schemas is one for each place.
        for key in ["prefixItems", "items"] {
            for inner in fields.get(key).and_then(Value::as_array).into_iter().flatten() {
                below = below.or(self.load(inner)?);
            }
        }
        let mut load = own(fields)?.or(below);
        for inner in fields.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            load = load.and(self.load(inner)?);
        }
        for key in ["anyOf", "oneOf"] {
            let mut either = NOTHING;
            for inner in fields.get(key).and_then(Value::as_array).into_iter().flatten() {
                either = either.or(self.load(inner)?);
            }
            load = load.and(either);
        }
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            load = load.and(self.follow(reference)?);
        }
        self.check(load)?;
        Ok(load)
    }

    fn follow(&mut self, reference: &'s str) -> Result<Load, String> {
        // What goes round in circles is looked at once.
        if self.following.contains(&reference) {
            return Ok(NOTHING);
        }
        if self.following.len() >= MOST_REFERENCES {
            return Err(format!("more than {MOST_REFERENCES} references lead to each other"));
        }
        // What leads nowhere is for the parser to say.
        let pointer = reference.strip_prefix('#').map(|pointer| pointer.trim_end_matches('/'));
        let Some(target) = pointer.and_then(|pointer| self.root.pointer(pointer)) else {
            return Ok(NOTHING);
        };
        self.following.push(reference);
        let load = self.load(target);
        self.following.pop();
        load
    }

    fn check(&mut self, load: Load) -> Result<(), String> {
        if load.patterns > MOST_PATTERNS {
            let patterns = load.patterns;
            return Err(format!("{patterns} patterns for one text: at most {MOST_PATTERNS}"));
        }
        self.text = self.text.saturating_add(load.text());
        if load.text() > MOST_TEXT || self.text > 20 * MOST_TEXT {
            return Err("its patterns are too large for texts of that length".into());
        }
        if load.divisor > MOST_DIVISOR {
            let divisor = load.divisor;
            return Err(format!("multipleOf comes to {divisor}: at most {MOST_DIVISOR}"));
        }
        Ok(())
    }
}

/// What a schema itself asks of texts and numbers.
fn own(fields: &Map<String, Value>) -> Result<Load, String> {
    let mut load = NOTHING;
    if let Some(pattern) = fields.get("pattern").and_then(Value::as_str) {
        load = load.and(Load { patterns: 1, size: size(pattern), ..NOTHING });
    }
    if fields.get("format").is_some_and(Value::is_string) {
        load = load.and(Load { patterns: 1, size: FORMAT, ..NOTHING });
    }
    for key in ["minLength", "maxLength"] {
        let length = fields.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        load.length = load.length.max(length as u64);
    }
    if let Some(multiple) = fields.get("multipleOf").and_then(Value::as_f64) {
        let digits: String = format!("{multiple}").chars().filter(char::is_ascii_digit).collect();
        load.divisor = digits.parse().unwrap_or(u64::MAX).max(1);
    }
    let keys = fields.get("patternProperties").and_then(Value::as_object);
    let keys: Vec<&str> = keys.into_iter().flat_map(Map::keys).map(String::as_str).collect();
    if keys.len() > MOST_KEY_PATTERNS {
        let count = keys.len();
        return Err(format!("patternProperties has {count} patterns: at most {MOST_KEY_PATTERNS}"));
    }
    // Each is compared with each, and a key may have to match none of them.
    let sizes = keys.iter().map(|key| size(key)).fold(0u64, u64::saturating_add);
    if sizes.saturating_mul(sizes) > MOST_TEXT {
        return Err("patternProperties: its patterns are too large".into());
    }
    Ok(load)
}

/// The size of a pattern with its repetitions written out, about.
fn size(pattern: &str) -> u64 {
    // What is in the group, and what came last in it.
    let mut groups: Vec<(u64, u64)> = vec![(0, 0)];
    let mut rest = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(one) = rest.next() {
        let is_inner = groups.len() > 1;
        let Some((sum, last)) = groups.last_mut() else { break };
        match one {
            '\\' => {
                rest.next();
                (*sum, *last) = (sum.saturating_add(*last), 1);
            }
            ']' if in_class => in_class = false,
            _ if in_class => {}
            '[' => {
                in_class = true;
                (*sum, *last) = (sum.saturating_add(*last), 1);
            }
            '(' => {
                (*sum, *last) = (sum.saturating_add(*last), 0);
                groups.push((0, 0));
            }
            ')' if is_inner => {
                let (sum, last) = groups.pop().unwrap_or((0, 0));
                let whole = sum.saturating_add(last).max(1);
                if let Some(outer) = groups.last_mut() {
                    outer.1 = whole;
                }
            }
            '{' => {
                let times: String = rest.by_ref().take_while(|&one| one != '}').collect();
                let most = times.split(',').filter_map(|number| number.trim().parse::<u64>().ok());
                *last = last.saturating_mul(most.max().unwrap_or(1).max(1));
            }
            '*' | '+' | '?' => {}
            _ => (*sum, *last) = (sum.saturating_add(*last), 1),
        }
    }
    let all = groups.iter().map(|(sum, last)| sum.saturating_add(*last));
    all.fold(0, u64::saturating_add).max(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sizes_of_patterns_count_what_repetitions_write_out() {
        for (pattern, expected) in [
            ("", 1),
            ("abc", 3),
            ("^[a-z]{2,4}\\d+$", 7),
            ("(ab){3}c", 7),
            ("((a{10}){10}){10}", 1000),
            ("(a{1000}){1000}", 1_000_000),
            ("a{99999999999999999999}", 1),
            ("[{}()]{3}", 3),
            ("((((", 1),
            ("))))", 4),
        ] {
            assert_eq!(size(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn what_is_asked_at_once_multiplies_and_what_is_asked_elsewhere_does_not() {
        let text = |size: usize| json!({ "type": "string", "pattern": "a".repeat(size) });
        let long = json!({ "type": "string", "pattern": "ab", "maxLength": 50_000 });
        let divisor = |number: f64| json!({ "type": "number", "multipleOf": number });
        for (schema, fits) in [
            (json!({ "allOf": [text(100), text(100)] }), true),
            (json!({ "allOf": [text(500), text(500)] }), false),
            (json!({ "anyOf": [text(500), text(500)] }), true),
            (json!({ "anyOf": [text(500)], "pattern": "a".repeat(500) }), false),
            (json!({ "properties": { "a": text(500), "b": text(500) } }), true),
            (
                json!({ "allOf": [{ "properties": { "a": text(500) } }, { "properties": { "a": text(500) } }] }),
                false,
            ),
            (
                json!({ "allOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/a" }], "$defs": { "a": text(500) } }),
                false,
            ),
            (
                json!({ "$ref": "#/$defs/a", "$defs": { "a": { "items": { "$ref": "#/$defs/a" }, "pattern": "a" } } }),
                true,
            ),
            (json!({ "allOf": vec![text(1); 5] }), false),
            (long.clone(), true),
            (json!({ "allOf": [long, text(10)] }), false),
            (json!({ "type": "string", "maxLength": 100_000_000 }), true),
            (divisor(0.01), true),
            (divisor(99_999.0), true),
            (divisor(123_456_789.0), false),
            (divisor(1e300), false),
            (json!({ "allOf": [divisor(9973.0), divisor(9967.0)] }), false),
        ] {
            assert_eq!(
                check(&schema).is_ok(),
                fits,
                "{:?}: {:.80}",
                check(&schema),
                schema.to_string()
            );
        }
    }
}
