// SPDX-License-Identifier: Apache-2.0
//! The `config.json` that Hugging Face keeps beside a model's weights.
//!
//! It tells the shape only: how the weights are stored is the caller's choice, whatever
//! `torch_dtype` or `quantization_config` say.

use serde_json::{Map, Value};

use crate::builtin::variant;
use crate::error::printable;
use crate::model::{MAX_CONTEXT, MAX_VOCAB, MAX_WIDTH};
use crate::shape::{Extras, Shape};
use crate::{Gating, MAX_EXPERTS, MAX_LAYERS, Mixture, Model, ModelError, Quant};

/// The architectures that are understood, with their names in GGUF files.
const KNOWN: [(&str, &str); 9] = [
    ("LlamaForCausalLM", "llama"),
    ("MistralForCausalLM", "llama"),
    ("Qwen2ForCausalLM", "qwen2"),
    ("Qwen3ForCausalLM", "qwen3"),
    ("MixtralForCausalLM", "llama"),
    ("Qwen2MoeForCausalLM", "qwen2moe"),
    ("Qwen3MoeForCausalLM", "qwen3moe"),
    ("OlmoeForCausalLM", "olmoe"),
    ("GptOssForCausalLM", "gpt-oss"),
];

/// Fields that only mixtures of experts have.
const EXPERTS: [&str; 5] = [
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
];

/// The field with the width of the feed-forward network, or of one expert.
fn ffn_field(architecture: &str) -> &'static str {
    // Qwen has a dense width beside it.
    let beside = matches!(architecture, "qwen2moe" | "qwen3moe");
    if beside { "moe_intermediate_size" } else { "intermediate_size" }
}

/// The model that `text`, a `config.json`, describes, as if all its matrices were stored in `quant`.
///
/// Understood are `LlamaForCausalLM`, `MistralForCausalLM`, `MixtralForCausalLM`, `Qwen2ForCausalLM`,
/// `Qwen2MoeForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, `OlmoeForCausalLM` and `GptOssForCausalLM`.
///
/// ```
/// use spanker_model::{Quant, from_config_json};
/// let text = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
///     "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
///     "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048}"#;
/// let model = from_config_json(text, "tinyllama", Quant::Q4_0)?;
/// assert_eq!(model.parameters(), 1_100_048_384);
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
///
/// # Errors
///
/// No JSON object, an architecture that is not understood, or a field that is missing or absurd,
/// which the error names.
pub fn from_config_json(text: &str, name: &str, quant: Quant) -> Result<Model, ModelError> {
    let fields: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| ModelError::Json { reason: error.to_string() })?;
    let config = Config(&fields);
    let (given, architecture) = config.architecture()?;
    let mixture = config.mixture(given)?;
    let hidden = config.size("hidden_size", MAX_WIDTH)?;
    let heads = config.size("num_attention_heads", MAX_WIDTH)?;
    let attention_bias = config.flag("attention_bias")?;
    let shape = Shape {
        architecture,
        layers: config.size("num_hidden_layers", MAX_LAYERS)?,
        hidden,
        heads,
        kv_heads: config.kv_heads(heads)?,
        head_size: config.head_size(hidden, heads)?,
        ffn: config.size(ffn_field(architecture), MAX_WIDTH)?,
        vocab: config.size("vocab_size", MAX_VOCAB)?,
        context: config.size("max_position_embeddings", MAX_CONTEXT)?,
        tied: config.flag("tie_word_embeddings")?,
        extras: Extras {
            qkv_bias: attention_bias || architecture.starts_with("qwen2"),
            window: config.window(architecture)?,
            o_bias: attention_bias && !architecture.starts_with("qwen2"),
            ffn_bias: config.flag("mlp_bias")?,
            qk_norm: architecture.starts_with("qwen3") || architecture == "olmoe",
        },
        mixture,
        variant: variant(architecture),
    };
    shape.model(name, "config.json", quant)
}

/// The fields of a `config.json`.
struct Config<'a>(&'a Map<String, Value>);

impl Config<'_> {
    /// A field that is there and not null.
    fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    /// The architecture as it is given, and its name in GGUF files.
    fn architecture(&self) -> Result<(&str, &'static str), ModelError> {
        let given = self
            .get("architectures")
            .ok_or_else(|| ModelError::field("architectures", "missing"))?
            .as_array()
            .and_then(|names| names.first())
            .and_then(Value::as_str)
            .ok_or_else(|| ModelError::field("architectures", "not a list of names"))?;
        let known = KNOWN.iter().find(|(name, _)| *name == given);
        known.map(|(_, architecture)| (given, *architecture)).ok_or_else(|| {
            let names = KNOWN.map(|(name, _)| name).join(", ");
            ModelError::unsupported(given, format!("expected one of: {names}"))
        })
    }

    /// What the model is a mixture of.
    fn mixture(&self, given: &str) -> Result<Option<Mixture>, ModelError> {
        let (count, gating, shared) = match given {
            "MixtralForCausalLM" => ("num_local_experts", Gating::SoftmaxNormed, false),
            "Qwen3MoeForCausalLM" => ("num_experts", Gating::SoftmaxNormed, false),
            "Qwen2MoeForCausalLM" => ("num_experts", Gating::Softmax, true),
            "OlmoeForCausalLM" => ("num_experts", Gating::Softmax, false),
            "GptOssForCausalLM" => ("num_local_experts", Gating::SoftmaxOfChosen, false),
            _ => {
                return match EXPERTS.iter().find(|field| self.get(field).is_some()) {
                    Some(field) => Err(ModelError::field(field, format!("{given} has no experts"))),
                    None => Ok(None),
                };
            }
        };
        let experts = self.size(count, MAX_EXPERTS)?;
        let used = self.size("num_experts_per_tok", experts)?;
        if !["MixtralForCausalLM", "GptOssForCausalLM"].contains(&given) {
            let normed = self.flag("norm_topk_prob")?;
            if normed != (gating == Gating::SoftmaxNormed) {
                let reason = format!("{normed}, which {given} is not understood with");
                return Err(ModelError::field("norm_topk_prob", reason));
            }
            if let Some(step @ 2..) = self.optional_size("decoder_sparse_step", MAX_LAYERS)? {
                let reason = format!("{step}: some layers are dense");
                return Err(ModelError::field("decoder_sparse_step", reason));
            }
            if let Some(list) =
                self.get("mlp_only_layers").filter(|list| **list != Value::Array(vec![]))
            {
                let reason = format!("{}: some layers are dense", printable(&list.to_string()));
                return Err(ModelError::field("mlp_only_layers", reason));
            }
        }
        let shared = match shared {
            true => self.size("shared_expert_intermediate_size", MAX_WIDTH)?,
            false => 0,
        };
        Ok(Some(Mixture { experts, used, gating, shared }))
    }

    /// A whole number between 1 and `max`, if the field is there.
    fn optional_size(&self, field: &str, max: u64) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(size) if (1..=max).contains(&size) => Ok(Some(size)),
            _ => {
                let value = printable(&value.to_string());
                let reason = format!("{value} is not a whole number between 1 and {max}");
                Err(ModelError::field(field, reason))
            }
        }
    }

    fn size(&self, field: &str, max: u64) -> Result<u64, ModelError> {
        self.optional_size(field, max)?.ok_or_else(|| ModelError::field(field, "missing"))
    }

    fn flag(&self, field: &str) -> Result<bool, ModelError> {
        let Some(value) = self.get(field) else {
            return Ok(false);
        };
        value.as_bool().ok_or_else(|| {
            let value = printable(&value.to_string());
            ModelError::field(field, format!("{value} is not true or false"))
        })
    }

    /// A window, and in how many layers there is one without. Only gpt-oss has its window by layers here; others are
    /// read as if they saw everything.
    fn window(&self, architecture: &str) -> Result<Option<(u64, u64)>, ModelError> {
        match architecture {
            "gpt-oss" => Ok(Some((self.size("sliding_window", MAX_CONTEXT)?, 2))),
            _ => Ok(None),
        }
    }

    fn kv_heads(&self, heads: u64) -> Result<u64, ModelError> {
        let kv_heads = self.optional_size("num_key_value_heads", MAX_WIDTH)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("{kv_heads} do not divide {heads} heads");
            return Err(ModelError::field("num_key_value_heads", reason));
        }
        Ok(kv_heads)
    }

    fn head_size(&self, hidden: u64, heads: u64) -> Result<u64, ModelError> {
        if let Some(size) = self.optional_size("head_dim", MAX_WIDTH)? {
            return Ok(size);
        }
        if !hidden.is_multiple_of(heads) {
            let reason = format!("missing, and {heads} heads do not divide a width of {hidden}");
            return Err(ModelError::field("head_dim", reason));
        }
        Ok(hidden / heads)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::from_config_json;
    use crate::{Model, ModelError, Quant, builtin};

    fn llama_3_2() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "head_dim": 64,
            "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131_072,
            "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "rope_scaling": {"factor": 32.0}, "rope_theta": 500_000.0,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128_256
        })
    }

    fn read(config: &Value) -> Result<Model, ModelError> {
        from_config_json(&config.to_string(), "a model", Quant::Q4_0)
    }

    #[test]
    fn config_of_a_built_in_model_gives_the_same_sizes() {
        let qwen = json!({
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "vocab_size": 152_064, "max_position_embeddings": 131_072, "tie_word_embeddings": false,
            "use_sliding_window": false
        });
        for (config, name) in [(llama_3_2(), "llama-3.2-1b"), (qwen, "qwen2.5-7b")] {
            let expected = builtin(name, Quant::Q4_0).expect(name);
            let model = read(&config).expect(name);
            assert_eq!(model.source, "config.json");
            let renamed = Model { name: name.into(), source: expected.source.clone(), ..model };
            assert_eq!(renamed, expected);
        }
    }

    #[test]
    fn qwen3_has_its_own_head_size_and_norms_on_heads() {
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
            "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "tie_word_embeddings": true, "vocab_size": 151_936
        });
        let model = read(&config).expect("Qwen3-0.6B");
        assert_eq!(model.parameters(), 596_049_920);
        assert_eq!((model.layers[0].q.rows, model.layers[0].o.cols), (2048, 2048));
    }

    #[test]
    fn defaults_are_those_of_the_family() {
        let mut config = llama_3_2();
        for field in ["num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias"] {
            config[field] = Value::Null;
        }
        let model = read(&config).expect("defaults");
        assert_eq!((model.kv_heads, model.head_size, model.tied), (32, 64, false));
        config["attention_bias"] = true.into();
        config["mlp_bias"] = true.into();
        let biased = read(&config).expect("biases");
        let added = biased.layers[0].other_bytes - model.layers[0].other_bytes;
        assert_eq!(added, 4 * (4 * 2048 + 2 * 8192 + 2048));
    }

    #[test]
    fn fields_that_are_missing_or_absurd_are_named() {
        let required = [
            "architectures",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ];
        for field in required {
            let mut config = llama_3_2();
            config.as_object_mut().expect("an object").remove(field);
            let error = read(&config).expect_err(field).to_string();
            assert_eq!(error, format!("config.json: {field}: missing"));
        }
        for field in &required[1..] {
            for value in [json!(0), json!(-1), json!(1.5), json!("8"), json!(u64::MAX), json!([])] {
                let mut config = llama_3_2();
                config[*field] = value.clone();
                let error = read(&config).expect_err(field).to_string();
                let start = format!("config.json: {field}: {value} is not a whole number between");
                assert!(error.starts_with(&start), "{error}");
            }
        }
        for (field, value) in [("head_dim", json!(0)), ("num_key_value_heads", json!(5))] {
            let mut config = llama_3_2();
            config[field] = value;
            assert!(read(&config).expect_err(field).to_string().contains(field));
        }
        let mut config = llama_3_2();
        config["tie_word_embeddings"] = "yes".into();
        let error = read(&config).expect_err("no flag").to_string();
        assert_eq!(error, "config.json: tie_word_embeddings: \"yes\" is not true or false");
    }

    /// Qwen3-30B-A3B.
    fn mixture() -> Value {
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "head_dim": 128,
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "tie_word_embeddings": false, "vocab_size": 151_936
        })
    }

    #[test]
    fn mixtures_of_experts_are_the_built_in_ones() {
        let shared = json!({
            "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048,
            "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
            "shared_expert_intermediate_size": 5632, "max_position_embeddings": 8192,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": false, "vocab_size": 151_936
        });
        let rows = json!({
            "architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 1024,
            "num_hidden_layers": 16, "max_position_embeddings": 4096, "num_attention_heads": 16,
            "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": false, "vocab_size": 50304
        });
        let oss = json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "head_dim": 64,
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "max_position_embeddings": 131_072, "num_attention_heads": 64, "num_key_value_heads": 8,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
            "vocab_size": 201_088
        });
        for (config, name) in [
            (mixture(), "qwen3-30b-a3b"),
            (shared, "qwen1.5-moe-a2.7b"),
            (rows, "olmoe-1b-7b"),
            (oss, "gpt-oss-20b"),
        ] {
            let expected = builtin(name, Quant::Q4_0).expect(name);
            let model = read(&config).expect(name);
            let source = expected.source.clone();
            assert_eq!(Model { name: name.into(), source, ..model }, expected);
        }
    }

    #[test]
    fn experts_that_are_missing_or_absurd_are_named() {
        for (field, value, expected) in [
            ("num_experts", json!(0), "num_experts: 0 is not a whole number between 1 and 1024"),
            (
                "num_experts",
                json!(4),
                "num_experts_per_tok: 8 is not a whole number between 1 and 4",
            ),
            ("num_experts", Value::Null, "num_experts: missing"),
            ("norm_topk_prob", json!(false), "norm_topk_prob: false, which"),
            ("mlp_only_layers", json!([3]), "mlp_only_layers: [3]: some layers are dense"),
            ("decoder_sparse_step", json!(2), "decoder_sparse_step: 2: some layers are dense"),
        ] {
            let mut config = mixture();
            config[field] = value;
            let error = read(&config).expect_err(field).to_string();
            assert!(error.contains(expected), "{error}");
        }
        let mut config = llama_3_2();
        config["num_local_experts"] = 8.into();
        let error = read(&config).expect_err("experts").to_string();
        assert_eq!(error, "config.json: num_local_experts: LlamaForCausalLM has no experts");
    }

    #[test]
    fn other_architectures_are_errors_that_list_those_that_are_known() {
        let mut config = llama_3_2();
        config["architectures"] = json!(["GPT2LMHeadModel"]);
        let error = read(&config).expect_err("another family").to_string();
        assert!(error.contains("GPT2LMHeadModel") && error.contains("LlamaForCausalLM"), "{error}");
    }

    #[test]
    fn text_that_is_no_object_is_an_error() {
        for text in ["", "{", "[]", "null", "3", "{\"hidden_size\": }"] {
            let error = from_config_json(text, "a model", Quant::F16).expect_err(text);
            assert!(matches!(error, ModelError::Json { .. }), "{error}");
        }
    }
}
