// SPDX-License-Identifier: Apache-2.0
//! The angles of a file: its base, and how positions beyond those of the training are brought near.

use ggml_spanker::ops::Pairs;
use spanker_model::gguf::{Header, Tensor, Value};
use spanker_model::{Model, Quant, Turning};

use super::{LongRope, Rope, range};
use crate::LlmError;

/// Families whose neighbouring numbers turn together; all others turn halves.
const ADJACENT: [&str; 4] = ["llama", "granite", "granitemoe", "smollm3"];

/// The base of layers with a window where they have one of their own and the file names none.
const LOCAL_BASE: f64 = 10_000.0;

/// Numbers of a header under the name of its architecture.
struct Keys<'h> {
    header: &'h Header,
    architecture: &'h str,
}

impl Keys<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.header.metadata().get(&format!("{}.{key}", self.architecture))
    }

    /// A number that must be finite and at least so much.
    fn number(&self, key: &str, least: f64) -> Result<Option<f64>, LlmError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite() && *number >= least) {
            Some(number) => Ok(Some(number)),
            None => {
                let shown = value.as_f64().map_or("no number".to_owned(), |n| n.to_string());
                let key = format!("{}.{key}", self.architecture);
                let what = format!("{key}: {shown} is not a number of at least {least}");
                Err(LlmError::unsupported(what))
            }
        }
    }

    /// The same with a default.
    fn or(&self, key: &str, least: f64, other: f64) -> Result<f64, LlmError> {
        Ok(self.number(key, least)?.unwrap_or(other))
    }
}

/// The key of the context of the training.
const ORIGINAL: &str = "rope.scaling.original_context_length";

/// What angles are divided by: everywhere, in contexts as long as those of the training, and in longer ones.
pub(super) const FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// What no divisor is smaller than.
const TINY: f64 = 1e-9;

/// How positions turn queries and keys.
pub(super) fn read(header: &Header, file: &[u8], model: &Model) -> Result<Rope, LlmError> {
    let keys = Keys { header, architecture: &model.architecture };
    let dims = model.rope_dims as usize;
    if dims == 0 || dims > model.head_size as usize || !dims.is_multiple_of(2) {
        let what = format!("{dims} turning numbers in heads of {}", model.head_size);
        return Err(LlmError::unsupported(what));
    }
    let scaling = keys.value("rope.scaling.type").and_then(Value::as_str).unwrap_or("none");
    let factor = match keys.number("rope.scaling.factor", TINY)? {
        Some(factor) => factor,
        None => keys.or("rope.scale_linear", TINY, 1.0)?,
    };
    let base = keys.or("rope.freq_base", TINY, 10_000.0)?;
    let plain = |base: f64| -> Vec<f64> {
        (0..dims / 2).map(|pair| base.powf(-2.0 * pair as f64 / dims as f64)).collect()
    };
    let (mut angles, mut scale) = (plain(base), 1.0);
    match scaling {
        // Llama 3 keeps its factors in a tensor, whatever this says.
        "none" | "llama3" => {}
        // Some files have longrope's factors and do not say its name.
        "linear" | "longrope" => angles.iter_mut().for_each(|angle| *angle /= factor),
        "yarn" => scale = yarn(&keys, model, (base, factor), &mut angles)?,
        other => {
            let what = format!(
                "positions are scaled as '{other}': none, linear, llama3, longrope and yarn are known"
            );
            return Err(LlmError::unsupported(what));
        }
    }
    let given = |name: &str| factors(header, file, name, dims / 2);
    let [usual, short, long] = FACTORS;
    divide(&mut angles, given(usual)?.as_deref());
    let long = match (given(short)?, given(long)?) {
        (None, None) => None,
        (Some(short), Some(long)) => {
            let trained = keys.or(ORIGINAL, 1.0, model.context as f64)? as usize;
            scale = keys.or("rope.scaling.attn_factor", TINY, scale)?;
            let mut stretched = angles.clone();
            divide(&mut angles, Some(&short));
            divide(&mut stretched, Some(&long));
            Some(LongRope { trained, angles: stretched })
        }
        (short, _) => {
            let missing = if short.is_some() { FACTORS[2] } else { FACTORS[1] };
            let what = format!("tensor {missing} is missing, and its counterpart is there");
            return Err(LlmError::unsupported(what));
        }
    };
    if long.is_none() && scaling == "longrope" {
        let what = format!("positions are scaled as 'longrope', and tensor {short} is missing");
        return Err(LlmError::unsupported(what));
    }
    let local = model.layers.iter().any(|layer| layer.turning == Turning::Local);
    let local = match local {
        true => Some(plain(keys.or("rope.freq_base_swa", TINY, LOCAL_BASE)?)),
        false => None,
    };
    let adjacent = ADJACENT.contains(&model.architecture.as_str());
    let pairs = if adjacent { Pairs::Adjacent } else { Pairs::Halves };
    Ok(Rope { dims, pairs, angles, long, local, scale })
}

/// YaRN: pairs that turn often within the context of the training stay, those that hardly turn are stretched, and between
/// them it is a bit of both. Gives what cosines and sines are multiplied with.
fn yarn(
    keys: &Keys<'_>,
    model: &Model,
    (base, factor): (f64, f64),
    angles: &mut [f64],
) -> Result<f64, LlmError> {
    let known = model.context as f64;
    let trained = keys.or(ORIGINAL, 1.0, known)?;
    let part = keys.or("rope.scaling.yarn_ext_factor", 0.0, 1.0)?;
    let [fast, slow] = [("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0)]
        .map(|(key, usual)| keys.or(&format!("rope.scaling.{key}"), TINY, usual));
    let more = keys.or("rope.scaling.yarn_attn_factor", TINY, 1.0)?;
    let more = more * keys.or("rope.scaling.attn_factor", TINY, 1.0)?;
    let log = keys.or("rope.scaling.yarn_log_multiplier", 0.0, 0.0)?;
    if log != 0.0 {
        let key = format!("{}.rope.scaling.yarn_log_multiplier", model.architecture);
        return Err(LlmError::unsupported(format!("{key}: {log}, and only 0 is known")));
    }
    let dims = 2.0 * angles.len() as f64;
    // The pair that turns so often in the context of the training.
    let pair =
        |turns: f64| dims * (trained / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
    let (low, high) = (pair(fast?).floor().max(0.0), pair(slow?).ceil().min(dims - 1.0));
    for (at, angle) in angles.iter_mut().enumerate() {
        let ramp = (at as f64 - low) / (high - low).max(0.001);
        let kept = (1.0 - ramp.clamp(0.0, 1.0)) * part;
        *angle = *angle / factor * (1.0 - kept) + *angle * kept;
    }
    let stretched = if factor > 1.0 && part > 0.0 { 1.0 + 0.1 * factor.ln() } else { 1.0 };
    Ok(more * stretched)
}

fn divide(angles: &mut [f64], factors: Option<&[f64]>) {
    for (angle, factor) in angles.iter_mut().zip(factors.unwrap_or_default()) {
        *angle /= factor;
    }
}

/// What the angles of pairs are divided by, if the file says it.
fn factors(
    header: &Header,
    file: &[u8],
    name: &str,
    pairs: usize,
) -> Result<Option<Vec<f64>>, LlmError> {
    let Some(tensor) = header.tensors().get(name) else { return Ok(None) };
    let words = |tensor: &Tensor| file[range(header, tensor)].as_chunks().0.iter();
    let given: Vec<f64> = words(tensor).map(|&word| f64::from(f32::from_le_bytes(word))).collect();
    let positive = given.iter().all(|factor| factor.is_finite() && *factor > 0.0);
    if tensor.quant != Quant::F32 || given.len() != pairs || !positive {
        let what = format!("tensor {name} is not {pairs} positive numbers");
        return Err(LlmError::unsupported(what));
    }
    Ok(Some(given))
}
