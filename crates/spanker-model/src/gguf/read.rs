// SPDX-License-Identifier: Apache-2.0
//! From bytes to a header.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Read;

use super::cursor::Cursor;
use super::{Header, Stored, Tensor, Value, ValueType};
use crate::error::printable;
use crate::{ModelError, Quant};

/// The most tensors.
pub(super) const MAX_TENSORS: u64 = 1 << 16;
/// The most keys of metadata.
const MAX_KEYS: u64 = 1 << 16;
/// The longest key, by the format's definition.
const MAX_KEY: u64 = (1 << 16) - 1;
/// The longest name of a tensor; the format has 64, some programs more.
const MAX_NAME: u64 = 256;
/// The most dimensions, by the format's definition.
const MAX_DIMS: u32 = 4;
/// The alignment of a file that names none.
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

impl Header {
    /// Reads the header of a GGUF file of `file_bytes` bytes.
    ///
    /// Up to 64 KiB more than the header are taken from the reader, at most 256 MiB and never more
    /// than `file_bytes`. Every tensor is checked to consist of whole blocks, to lie within the file
    /// and to overlap no other.
    ///
    /// # Errors
    ///
    /// A reader that fails, or a file that is malformed, truncated, in big endian or of a version
    /// that is not understood; the error names the byte.
    pub fn read(reader: impl Read, file_bytes: u64) -> Result<Header, ModelError> {
        let mut cursor = Cursor::new(reader, file_bytes);
        let version = read_version(&mut cursor)?;
        let tensor_count = read_count(&mut cursor, "tensor count", MAX_TENSORS)?;
        let key_count = read_count(&mut cursor, "metadata count", MAX_KEYS)?;
        let metadata = read_metadata(&mut cursor, key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = read_tensors(&mut cursor, tensor_count)?;
        // The cursor is within 256 MiB and the alignment within 2^32.
        let data_offset = cursor.at().next_multiple_of(alignment);
        let header = Header { version, alignment, data_offset, metadata, tensors };
        header.check_layout(file_bytes)?;
        Ok(header)
    }

    /// The keys of the metadata of the file that `bytes` are, in its order, with their values as they are stored: what it
    /// takes to write them to another file.
    ///
    /// ```
    /// use spanker_model::gguf::{Field, Header, Writer};
    ///
    /// let mut writer = Writer::new();
    /// writer.put("general.architecture", Field::Text("llama"))?;
    /// let file = writer.header();
    /// let mut copy = Writer::new();
    /// for (key, value) in Header::fields(&file)? {
    ///     copy.put(&key, Field::Stored(value))?;
    /// }
    /// assert_eq!(copy.header(), file);
    /// # Ok::<(), spanker_model::ModelError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Header::read`], for what comes before the tensors.
    pub fn fields(bytes: &[u8]) -> Result<Vec<(String, Stored<'_>)>, ModelError> {
        let mut cursor = Cursor::new(bytes, bytes.len() as u64);
        read_version(&mut cursor)?;
        read_count(&mut cursor, "tensor count", MAX_TENSORS)?;
        let count = read_count(&mut cursor, "metadata count", MAX_KEYS)?;
        let field = |_| {
            let key = cursor.name(MAX_KEY, "a metadata key")?;
            let start = cursor.at() as usize;
            let kind = ValueType::read(&mut cursor)?;
            Value::read(&mut cursor, kind)?;
            // The cursor has been through these bytes.
            Ok((key, Stored(&bytes[start..cursor.at() as usize])))
        };
        (0..count).map(field).collect()
    }

    /// Checks that tensors are aligned, lie within the file and do not overlap.
    fn check_layout(&self, file_bytes: u64) -> Result<(), ModelError> {
        let mut by_offset: Vec<(&String, &Tensor)> = self.tensors.iter().collect();
        by_offset.sort_by_key(|(_, tensor)| tensor.offset);
        let mut before: Option<(&String, u64)> = None;
        for (name, tensor) in by_offset {
            let start = self.data_offset.saturating_add(tensor.offset);
            let wrong = |reason: String| {
                Err(ModelError::gguf(start, format!("tensor '{}' {reason}", printable(name))))
            };
            if !tensor.offset.is_multiple_of(self.alignment) {
                let (offset, alignment) = (tensor.offset, self.alignment);
                return wrong(format!("has offset {offset}, no multiple of {alignment}"));
            }
            let end = self.data_offset.checked_add(tensor.offset);
            let end = end.and_then(|start| start.checked_add(tensor.bytes));
            let Some(end) = end.filter(|end| *end <= file_bytes) else {
                let bytes = tensor.bytes;
                return wrong(format!("of {bytes} bytes ends beyond the file's {file_bytes}"));
            };
            if let Some((other, its_end)) = before.filter(|(_, its_end)| *its_end > start) {
                return wrong(format!(
                    "overlaps '{}', which ends at byte {its_end}",
                    printable(other)
                ));
            }
            before = Some((name, end));
        }
        Ok(())
    }
}

fn read_version<R: Read>(cursor: &mut Cursor<R>) -> Result<u32, ModelError> {
    let magic: [u8; 4] = cursor.bytes("the magic")?;
    if &magic != b"GGUF" {
        let magic = magic.escape_ascii();
        return Err(ModelError::gguf(0, format!("the file begins with '{magic}', not 'GGUF'")));
    }
    let at = cursor.at();
    match cursor.u32("the version")? {
        version @ 2..=3 => Ok(version),
        version if matches!(version.swap_bytes(), 1..=0xffff) => {
            Err(ModelError::gguf(at, "the file is big endian, only little endian is supported"))
        }
        version => Err(ModelError::gguf(at, format!("version {version} is not 2 or 3"))),
    }
}

fn read_count<R: Read>(
    cursor: &mut Cursor<R>,
    what: &'static str,
    max: u64,
) -> Result<u64, ModelError> {
    let at = cursor.at();
    let count = cursor.u64(&format!("the {what}"))?;
    if count > max {
        return Err(ModelError::gguf(at, format!("{what} {count} is more than {max}")));
    }
    Ok(count)
}

fn read_metadata<R: Read>(
    cursor: &mut Cursor<R>,
    count: u64,
) -> Result<BTreeMap<String, Value>, ModelError> {
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let at = cursor.at();
        let key = cursor.name(MAX_KEY, "a metadata key")?;
        let kind = ValueType::read(cursor)?;
        let value = Value::read(cursor, kind)?;
        match metadata.entry(key) {
            Entry::Vacant(slot) => slot.insert(value),
            Entry::Occupied(slot) => {
                let key = printable(slot.key());
                return Err(ModelError::gguf(at, format!("metadata key '{key}' comes twice")));
            }
        };
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, ModelError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value {
        Value::Unsigned(alignment) if alignment.is_power_of_two() && *alignment < 1 << 32 => {
            Ok(*alignment)
        }
        _ => {
            let reason = format!("{value:?} is not a power of two below 2^32");
            Err(ModelError::metadata(ALIGNMENT_KEY, printable(&reason)))
        }
    }
}

fn read_tensors<R: Read>(
    cursor: &mut Cursor<R>,
    count: u64,
) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let mut tensors = BTreeMap::new();
    for _ in 0..count {
        let at = cursor.at();
        let name = cursor.name(MAX_NAME, "a tensor's name")?;
        let tensor = read_tensor(cursor, &name)?;
        match tensors.entry(name) {
            Entry::Vacant(slot) => slot.insert(tensor),
            Entry::Occupied(slot) => {
                let name = printable(slot.key());
                return Err(ModelError::gguf(at, format!("tensor '{name}' comes twice")));
            }
        };
    }
    Ok(tensors)
}

/// Reads what follows a tensor's name.
fn read_tensor<R: Read>(cursor: &mut Cursor<R>, name: &str) -> Result<Tensor, ModelError> {
    let wrong = |at: u64, reason: String| {
        Err(ModelError::gguf(at, format!("tensor '{}' {reason}", printable(name))))
    };
    let at = cursor.at();
    let count = cursor.u32("a tensor's dimensions")?;
    if count > MAX_DIMS {
        return wrong(at, format!("has {count} dimensions, more than {MAX_DIMS}"));
    }
    let mut dims = Vec::new();
    for _ in 0..count {
        let at = cursor.at();
        let dim = cursor.u64("a tensor's dimension")?;
        if dim == 0 {
            return wrong(at, "has a dimension of 0".to_owned());
        }
        dims.push(dim);
    }
    let type_at = cursor.at();
    let id = cursor.u32("a tensor's type")?;
    let Some(quant) = Quant::from_ggml_id(id) else {
        return wrong(type_at, format!("has type {id}, which GGML does not define"));
    };
    // A tensor without dimensions is one number.
    let (cols, outer) = dims.split_first().map_or((1, &[][..]), |(first, rest)| (*first, rest));
    if !cols.is_multiple_of(quant.block()) {
        let block = quant.block();
        return wrong(at, format!("has rows of {cols}, not whole {quant} blocks of {block}"));
    }
    let size = |unit: u64| outer.iter().try_fold(unit, |size, dim| size.checked_mul(*dim));
    let row_bytes = (cols / quant.block()).checked_mul(quant.block_bytes());
    // Both the elements and the bytes are countable, so that neither overflows later.
    let (Some(bytes), Some(_)) = (row_bytes.and_then(size), size(cols)) else {
        return wrong(at, format!("has dimensions {dims:?}, whose product overflows"));
    };
    let offset = cursor.u64("a tensor's offset")?;
    Ok(Tensor { dims, quant, offset, bytes })
}
