// SPDX-License-Identifier: Apache-2.0
//! A model's file with its matrices stored as another type. Rounding is plain: no weight counts more than another.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ggml_spanker::{ENCODE_TYPES, GgufFile, decode, encode, file_type};
use serde::Serialize;
use spanker_model::gguf::{Field, Header, Tensor, Writer};
use spanker_model::{ModelError, Quant};

use crate::error::{EngineError, Result, chain};
use crate::files::{self, Draft};

/// Weights that a thread converts at a time, about.
const PIECE: usize = 1 << 18;
/// Keys that are the writer's own, or that say how the input was stored.
const OWN: [&str; 6] = [
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "split.no",
    "split.count",
    "split.tensors.count",
];
/// The version of GGML's blocks.
const VERSION: u32 = 2;

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Quantized {
    /// The type that was asked for.
    pub quant: Quant,
    /// The file's length.
    pub bytes: u64,
    /// The length of what it was made from.
    pub input_bytes: u64,
    /// How many tensors have each type.
    pub tensors: BTreeMap<&'static str, usize>,
    /// Matrices whose rows are no whole blocks of the type, by name, and so have another.
    pub others: Vec<String>,
    /// Whether the input was rounded already, which adds its error to that of this rounding.
    pub again: bool,
}

/// Writes the model in `input` to `output` with its matrices as `quant`; vectors, norms and the choice of experts stay as
/// they are. Rows that are no whole blocks become Q8_0, or F16. The output has its name when it is complete; until
/// then what was there stays. `watch` is told how many weights of how many are done, and says whether to go on.
///
/// # Errors
/// [`EngineError::File`] for an input that is no sound model or a weight that the type cannot hold,
/// [`EngineError::Request`] for an output that is the input or cannot be written, [`EngineError::Io`] while it is written,
/// [`EngineError::Interrupted`] when `watch` ends it.
pub fn quantize(
    input: &Path,
    output: &Path,
    quant: Quant,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Quantized> {
    let wrong = |error: &dyn std::fmt::Display| EngineError::file(input, error);
    if !ENCODE_TYPES.contains(&quant) {
        return Err(EngineError::request(format!("nothing can be stored as {quant} here")));
    }
    let file = GgufFile::open(input).map_err(|error| wrong(&chain(&error)))?;
    if let (Ok(one), Ok(other)) = (input.canonicalize(), output.canonicalize())
        && one == other
    {
        return Err(EngineError::request(format!("{} is the input", output.display())));
    }
    files::check_output(output)?;
    let mut from: Vec<(&String, &Tensor)> = file.header().tensors().iter().collect();
    from.sort_by_key(|(_, tensor)| tensor.offset);
    let (writer, mut report) = plan(&file, &from, quant).map_err(|error| wrong(&error))?;
    let failed = |error| EngineError::io(format!("write {}", output.display()), error);
    let mut draft = Draft::new(output).map_err(failed)?;
    let all = from.iter().map(|(_, tensor)| tensor.dims.iter().product::<u64>()).sum();
    let (mut done, mut refused) = (0, None);
    let written = writer.write(BufWriter::new(draft.file()), |at, out| {
        let (name, tensor) = from[at];
        let to = writer.tensors()[at].1.quant;
        let bytes = file.tensor(name).map(|view| view.bytes).unwrap_or_default();
        let mut progress = |weights: u64| {
            done += weights;
            watch(done, all)
        };
        convert((tensor.quant, to), bytes, out, &mut progress).map_err(|error| match error {
            Stopped::Write(error) => error,
            Stopped::Ended => {
                refused = Some(EngineError::Interrupted);
                io::Error::other("interrupted")
            }
            Stopped::Value(error) => {
                refused = Some(wrong(&format_args!("tensor {name}: {error}")));
                io::Error::other("refused")
            }
        })
    });
    if let Some(error) = refused {
        return Err(error);
    }
    written.map_err(failed)?;
    draft.finish().map_err(failed)?;
    report.bytes = writer.file_bytes();
    Ok(report)
}

/// The output without its weights.
fn plan(
    file: &GgufFile,
    from: &[(&String, &Tensor)],
    quant: Quant,
) -> Result<(Writer, Quantized), ModelError> {
    let mut writer = Writer::new();
    for (key, value) in Header::fields(file.bytes())? {
        if !OWN.contains(&key.as_str()) {
            writer.put(&key, Field::Stored(value))?;
        }
    }
    writer.put("general.file_type", Field::U32(file_type(quant)))?;
    writer.put("general.quantization_version", Field::U32(VERSION))?;
    let (bytes, input_bytes) = (0, file.bytes().len() as u64);
    let tensors = BTreeMap::new();
    let mut report =
        Quantized { quant, bytes, input_bytes, tensors, others: Vec::new(), again: false };
    for (name, tensor) in from {
        let to = target(name, tensor, quant);
        let plain = [Quant::F32, Quant::F16, Quant::Bf16];
        if to != tensor.quant {
            report.again |= !plain.contains(&tensor.quant);
            if to != quant {
                report.others.push((*name).clone());
            }
        }
        *report.tensors.entry(to.name()).or_default() += 1;
        writer.tensor(name, &tensor.dims, to)?;
    }
    Ok((writer, report))
}

/// What a tensor is stored as.
fn target(name: &str, tensor: &Tensor, quant: Quant) -> Quant {
    let matrix = tensor.dims.iter().filter(|&&size| size > 1).count() > 1;
    let kept = ["_norm", "ffn_gate_inp", "rope_", "position_embd", "token_types"];
    if !matrix || !name.ends_with(".weight") || kept.iter().any(|part| name.contains(part)) {
        return tensor.quant;
    }
    let whole = |to: &Quant| tensor.dims[0].is_multiple_of(to.block());
    [quant, Quant::Q8_0, Quant::F16].into_iter().find(whole).unwrap_or(tensor.quant)
}

/// Why a tensor was not written.
enum Stopped {
    Write(io::Error),
    Value(String),
    Ended,
}

/// Writes a tensor as another type, or as it is.
fn convert(
    (from, to): (Quant, Quant),
    bytes: &[u8],
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<(), Stopped> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // Whole blocks of both types: every block's length divides 256, and every row is whole blocks of both.
    let blocks = PIECE / from.block() as usize;
    let piece = blocks * from.block_bytes() as usize;
    let mut begun = 0;
    for group in bytes.chunks(piece * threads) {
        let pieces: Vec<&[u8]> = group.chunks(piece).collect();
        let weights = |bytes: &[u8]| bytes.len() as u64 / from.block_bytes() * from.block();
        if from == to {
            out.write_all(group).map_err(Stopped::Write)?;
        } else {
            let work = |bytes: &[u8]| {
                let mut values = vec![0.0; weights(bytes) as usize];
                decode(from, bytes, &mut values)?;
                let mut stored =
                    vec![0; values.len() / to.block() as usize * to.block_bytes() as usize];
                encode(to, &values, &mut stored).map(|()| stored)
            };
            let made: Vec<ggml_spanker::Result<Vec<u8>>> = std::thread::scope(|scope| {
                let started: Vec<_> =
                    pieces.iter().map(|bytes| scope.spawn(move || work(bytes))).collect();
                started
                    .into_iter()
                    .map(|thread| {
                        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    })
                    .collect()
            });
            for (number, stored) in made.into_iter().enumerate() {
                let stored = stored.map_err(|error| match error {
                    ggml_spanker::Error::Value { value, at, quant } => {
                        let at = begun + number * PIECE + at;
                        Stopped::Value(format!("weight {at} is {value}, which {quant} cannot hold"))
                    }
                    error => Stopped::Value(error.to_string()),
                })?;
                out.write_all(&stored).map_err(Stopped::Write)?;
            }
        }
        begun += weights(group) as usize;
        if !progress(weights(group)) {
            return Err(Stopped::Ended);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::model::Model;
    use crate::testing;

    /// Types whose blocks keep something of every weight between -1 and 1, and how far off one may be.
    const OFF: [(Quant, f32); 13] = [
        (Quant::F32, 0.0),
        (Quant::F16, 0.005),
        (Quant::Bf16, 0.005),
        (Quant::Q8_0, 0.005),
        (Quant::Q4_0, 0.15),
        (Quant::Q4_1, 0.15),
        (Quant::Q5_0, 0.15),
        (Quant::Q5_1, 0.15),
        (Quant::Q4K, 0.15),
        (Quant::Q5K, 0.15),
        (Quant::Q6K, 0.15),
        (Quant::Iq4Nl, 0.15),
        (Quant::Mxfp4, 0.26),
    ];

    fn go(input: &Path, output: &Path, quant: Quant) -> Result<Quantized> {
        quantize(input, output, quant, &mut |_, _| true)
    }

    #[test]
    fn matrices_are_rounded_and_everything_else_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let input = testing::model(folder.path()).path().to_path_buf();
        let before = GgufFile::open(&input).expect("a file");
        for (quant, _) in OFF {
            let output = folder.path().join(format!("{quant}.gguf"));
            let report = go(&input, &output, quant).expect("a file");
            let after = GgufFile::open(&output).expect("a file");
            assert_eq!(after.bytes().len() as u64, report.bytes);
            assert_eq!(after.header().tensors().len(), before.header().tensors().len());
            let fields = |file: &GgufFile| {
                let fields = Header::fields(file.bytes()).expect("fields");
                fields.iter().filter(|(key, _)| !OWN.contains(&key.as_str())).count()
            };
            assert_eq!(fields(&after), fields(&before));
            for (name, tensor) in before.header().tensors() {
                let (one, two) =
                    (before.tensor(name).expect(name), after.tensor(name).expect(name));
                let expected = target(name, tensor, quant);
                assert_eq!((two.quant, two.dims), (expected, one.dims), "{name}");
                let values = |view: &ggml_spanker::TensorView<'_>| {
                    let mut values = vec![0.0; view.dims.iter().product::<u64>() as usize];
                    decode(view.quant, view.bytes, &mut values).expect("weights");
                    values
                };
                let (one, two) = (values(&one), values(&two));
                let most = OFF.iter().find(|(quant, _)| *quant == expected).expect("a type").1;
                let far = one.iter().zip(&two).map(|(one, two)| (one - two).abs());
                let far = far.fold(0.0, f32::max);
                assert!(far <= most, "{quant}: {name} is off by {far}");
            }
            Model::open(&output).expect("a model that runs");
            // Rows of 160 and 96 are no blocks of 256.
            assert_eq!(!report.others.is_empty(), quant.block() == 256, "{report:?}");
        }
    }

    #[test]
    fn output_that_is_the_input_and_ends_in_the_middle_leave_all_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let input = testing::model(folder.path()).path().to_path_buf();
        let before = fs::read(&input).expect("a file");
        let error = go(&input, &input, Quant::Q8_0).expect_err("the input").to_string();
        assert!(error.contains("is the input"), "{error}");
        let output = folder.path().join("out.gguf");
        fs::write(&output, "old").expect("a file");
        let mut calls = 0;
        let ended = quantize(&input, &output, Quant::Q4_0, &mut |done, all| {
            calls += 1;
            assert!(done <= all);
            calls < 3
        });
        assert!(matches!(ended, Err(EngineError::Interrupted)), "{ended:?}");
        assert_eq!(fs::read(&output).expect("a file"), b"old");
        assert_eq!(fs::read(&input).expect("a file"), before);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }

    #[test]
    fn weight_that_no_block_can_hold_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let input = testing::model(folder.path()).path().to_path_buf();
        let mut bytes = fs::read(&input).expect("a file");
        let header = Header::read(&bytes[..], bytes.len() as u64).expect("a header");
        let at = header.range(&header.tensors()["blk.1.ffn_up.weight"]).start as usize + 4 * 7;
        bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(&input, bytes).expect("a file");
        let error = go(&input, &folder.path().join("o.gguf"), Quant::Q4_0).expect_err("NaN");
        assert!(
            error.to_string().contains("tensor blk.1.ffn_up.weight: weight 7 is NaN, which q4_0"),
            "{error}"
        );
    }
}
