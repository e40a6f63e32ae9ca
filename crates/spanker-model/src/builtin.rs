// SPDX-License-Identifier: Apache-2.0
//! Models that are known by name, with the sizes of their published `config.json`.

use crate::shape::{Extras, Shape};
use crate::{Activation, Gating, Mixture, Model, ModelError, Quant, Variant};

/// One built-in model: layers, width, heads, KV heads, head size, feed-forward width, vocabulary,
/// context, whether the head is the embedding table.
type Line = (&'static str, u64, u64, u64, u64, u64, u64, u64, u64, bool);

const LLAMA: [Line; 17] = [
    ("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, true),
    ("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49152, 8192, true),
    ("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, 8192, true),
    ("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000, 2048, false),
    ("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, false),
    ("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096, false),
    ("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096, false),
    ("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128_256, 8192, false),
    ("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128_256, 8192, false),
    ("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128_256, 131_072, false),
    ("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128_256, 131_072, false),
    ("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128_256, 131_072, false),
    ("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, true),
    ("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128_256, 131_072, true),
    ("llama-3.3-70b", 80, 8192, 64, 8, 128, 28672, 128_256, 131_072, false),
    ("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, false),
    ("mistral-7b-v0.3", 32, 4096, 32, 8, 128, 14336, 32768, 32768, false),
];

const QWEN2: [Line; 7] = [
    ("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151_936, 32768, true),
    ("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, 32768, true),
    ("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151_936, 32768, true),
    ("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152_064, 131_072, false),
    ("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152_064, 131_072, false),
    ("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152_064, 131_072, false),
    ("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152_064, 131_072, false),
];

/// Mixtures of experts, with their architectures; the feed-forward width is an expert's.
const MIXTURES: [(&str, Line, Mixture); 5] = [
    (
        "qwen3moe",
        ("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, 40960, false),
        mixture(128, 8, Gating::SoftmaxNormed, 0),
    ),
    (
        "llama",
        ("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, false),
        mixture(8, 2, Gating::SoftmaxNormed, 0),
    ),
    (
        "qwen2moe",
        ("qwen1.5-moe-a2.7b", 24, 2048, 16, 16, 128, 1408, 151_936, 8192, false),
        mixture(60, 4, Gating::Softmax, 5632),
    ),
    (
        "olmoe",
        ("olmoe-1b-7b", 16, 2048, 16, 16, 128, 1024, 50304, 4096, false),
        mixture(64, 8, Gating::Softmax, 0),
    ),
    (
        "gpt-oss",
        ("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201_088, 131_072, false),
        mixture(32, 4, Gating::SoftmaxOfChosen, 0),
    ),
];

const fn mixture(experts: u64, used: u64, gating: Gating, shared: u64) -> Mixture {
    Mixture { experts, used, gating, shared }
}

/// A line with its architecture, and what it is a mixture of.
type Known = (&'static str, &'static Line, Option<Mixture>);

/// Every line.
fn lines() -> impl Iterator<Item = Known> {
    let llama = LLAMA.iter().map(|line| ("llama", line, None));
    let dense = llama.chain(QWEN2.iter().map(|line| ("qwen2", line, None)));
    dense.chain(MIXTURES.iter().map(|(name, line, mixture)| (*name, line, Some(*mixture))))
}

/// The names that [`builtin`] knows, in the order in which help texts list them.
#[must_use]
pub fn builtin_names() -> Vec<&'static str> {
    lines().map(|(_, line, _)| line.0).collect()
}

/// The built-in model `name` as if all its matrices were stored in `quant`.
///
/// Names are forgiving: case, an owner before a slash, underscores, and endings that do not change
/// the shape, such as `-chat`, `-hf`, `-instruct` or a version, make no difference. Norms and biases
/// count as `f32`; where a row is no multiple of the block, see [`Quant::for_row`].
///
/// ```
/// use spanker_model::{Quant, builtin};
/// let model = builtin("meta-llama/Llama-2-7B-chat-hf", Quant::Q4_0)?;
/// assert_eq!(model.name, "llama-2-7b");
/// assert_eq!(model.layers.len(), 32);
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
///
/// # Errors
///
/// An unknown name; the error lists those that are known.
pub fn builtin(name: &str, quant: Quant) -> Result<Model, ModelError> {
    let (architecture, line, mixture) =
        find(name).ok_or_else(|| ModelError::unknown("model", name, &builtin_names()))?;
    let &(name, layers, hidden, heads, kv_heads, head_size, ffn, vocab, context, tied) = line;
    let oss = architecture == "gpt-oss";
    let extras = Extras {
        qkv_bias: architecture.starts_with("qwen2") || oss,
        o_bias: oss,
        qk_norm: architecture.starts_with("qwen3") || architecture == "olmoe",
        window: oss.then_some((128, 2)),
        ..Extras::default()
    };
    let shape = Shape {
        architecture,
        layers,
        hidden,
        heads,
        kv_heads,
        head_size,
        ffn,
        vocab,
        context,
        tied,
        extras,
        mixture,
        variant: variant(architecture),
    };
    shape.model(name, "built-in", quant)
}

/// What an architecture without scales of its own does differently from a plain Llama.
pub(crate) fn variant(architecture: &str) -> Variant {
    let oss = architecture == "gpt-oss";
    Variant {
        activation: if oss { Activation::ClampedSilu } else { Activation::Silu },
        output_bias: oss,
        sinks: oss,
        expert_biases: oss,
        row_norms: architecture == "olmoe",
        ..Variant::default()
    }
}

fn find(name: &str) -> Option<Known> {
    let words = words(name);
    let versionless: Vec<String> = words.iter().filter(|word| !is_version(word)).cloned().collect();
    // A version that is a model of its own comes first.
    [words, versionless]
        .iter()
        .find_map(|wanted| lines().find(|(_, line, _)| self::words(line.0) == *wanted))
}

/// The words of a name that say which model it is.
fn words(name: &str) -> Vec<String> {
    let name = name.rsplit('/').next().unwrap_or(name).trim().to_ascii_lowercase();
    let noise = ["", "meta", "chat", "hf", "instruct", "base"];
    let mut words: Vec<String> =
        name.split(['-', '_', ':']).filter(|word| !noise.contains(word)).map(Into::into).collect();
    // "llama-2" and "llama2" are one name, but the "7b" in "llama-7b" is a size.
    let is_generation =
        |word: &str| word.starts_with(|c: char| c.is_ascii_digit()) && !word.ends_with(['b', 'm']);
    if words.len() > 1 && is_generation(&words[1]) {
        let generation = words.remove(1);
        words[0].push_str(&generation);
    }
    words
}

/// Whether the word is a version, such as `v0.1`.
fn is_version(word: &str) -> bool {
    word.strip_prefix('v').is_some_and(|number| {
        !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.')
    })
}

#[cfg(test)]
mod tests {
    use super::{builtin, builtin_names};
    use crate::Quant;

    #[test]
    fn parameters_of_every_built_in_model_are_the_published_ones() {
        let published = [
            ("smollm2-135m", 134_515_008_u64),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-3.3-70b", 70_553_706_496),
            ("mistral-7b", 7_241_732_096),
            ("mistral-7b-v0.3", 7_248_023_552),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("mixtral-8x7b", 46_702_792_704),
            ("qwen1.5-moe-a2.7b", 14_315_784_192),
            ("olmoe-1b-7b", 6_919_161_856),
            ("gpt-oss-20b", 20_914_757_184),
        ];
        assert_eq!(published.map(|(name, _)| name).to_vec(), builtin_names());
        for (name, parameters) in published {
            let model = builtin(name, Quant::F16).expect(name);
            assert_eq!(model.parameters(), parameters, "{name}");
            assert_eq!(model.name, name);
        }
    }

    #[test]
    fn read_per_token_in_q4_0_is_what_the_parameters_without_the_embedding_take() {
        for (name, gigabytes) in
            [("tinyllama-1.1b", 0.582), ("llama-2-7b", 3.716), ("llama-2-70b", 38.65)]
        {
            let read = builtin(name, Quant::Q4_0).expect(name).read_per_token() as f64 / 1e9;
            assert!((read / gigabytes - 1.0).abs() < 1e-3, "{name}: {read} GB");
        }
    }

    #[test]
    fn names_are_found_in_any_usual_spelling() {
        for (given, name) in [
            ("llama2-7b", "llama-2-7b"),
            ("LLAMA_2_7B", "llama-2-7b"),
            ("Llama-2-7B-chat-hf", "llama-2-7b"),
            ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
            ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
            ("llama3.1:8b", "llama-3.1-8b"),
            ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
            ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
            ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
            ("qwen-2.5-7b", "qwen2.5-7b"),
            ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
            ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ] {
            assert_eq!(builtin(given, Quant::Q4_0).expect(given).name, name, "{given}");
        }
    }

    #[test]
    fn names_that_are_unknown_or_say_too_little_are_errors_that_list_the_names() {
        for given in ["", "/", "llama", "llama-7b", "llama-27b", "llama-2", "qwen2.5-coder-7b"] {
            let error = builtin(given, Quant::Q4_0).expect_err(given).to_string();
            for name in builtin_names() {
                assert!(error.contains(name), "{given}: {error}");
            }
        }
    }
}
