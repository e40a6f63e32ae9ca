// SPDX-License-Identifier: Apache-2.0
//! Numbers of the stored vectors: bytes in hexadecimal, and lists.

use serde_json::Value;

pub fn bytes(value: &Value) -> Vec<u8> {
    let text = value.as_str().expect("bytes");
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    (0..text.len()).step_by(2).map(byte).collect()
}

pub fn floats(value: &Value) -> Vec<f32> {
    bytes(value).as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

pub fn doubles(value: &Value) -> Vec<f64> {
    list(value).iter().map(|number| number.as_f64().expect("a number")).collect()
}

pub fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

pub fn size(value: &Value, field: &str) -> usize {
    value[field].as_u64().unwrap_or_else(|| panic!("{field}")) as usize
}
