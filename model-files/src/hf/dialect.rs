//! What `config.json` may say, family by family.
//!
//! Each key is read, checked against the one value that we compute, or known to be without effect on the numbers. Any
//! other key refuses the model: a key that is ignored with a warning is how a server comes to answer with another
//! model than the one that was asked for.
//! Source: the `configuration_*.py` files of <https://github.com/huggingface/transformers>.

use crate::config::Family;
use crate::error::{Refusal, quoted};
use crate::json::Fields;

/// One family's `config.json`.
pub(super) struct Dialect {
    pub(super) family: Family,
    model_type: &'static str,
    architecture: &'static str,
    /// Keys that are read for this family, besides those of all.
    read: &'static [&'static str],
    /// Keys with the only value that is supported, as it stands in the file.
    fixed: &'static [(&'static str, &'static str)],
    /// Keys without effect for this family.
    inert: &'static [&'static str],
}

const SILU: (&str, &str) = ("hidden_act", "\"silu\"");
/// Inert while `use_sliding_window` is false.
const QWEN_WINDOW: [&str; 2] = ["sliding_window", "max_window_layers"];

const DIALECTS: [Dialect; 7] = [
    Dialect {
        family: Family::Llama,
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        read: &[],
        fixed: &[SILU],
        inert: &[],
    },
    Dialect {
        family: Family::Mistral,
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        read: &["sliding_window"],
        fixed: &[SILU],
        inert: &[],
    },
    Dialect {
        family: Family::Mixtral,
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        read: &["sliding_window", "num_local_experts", "num_experts_per_tok"],
        fixed: &[SILU],
        inert: &[
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
        ],
    },
    Dialect {
        family: Family::Qwen2,
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        read: &[],
        fixed: &[SILU],
        inert: &QWEN_WINDOW,
    },
    Dialect {
        family: Family::Qwen3,
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        read: &[],
        fixed: &[SILU],
        inert: &QWEN_WINDOW,
    },
    Dialect {
        family: Family::Qwen3Moe,
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        read: &[
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
        ],
        fixed: &[
            SILU,
            ("decoder_sparse_step", "1"),
            ("mlp_only_layers", "[]"),
        ],
        inert: &[
            "sliding_window",
            "max_window_layers",
            "output_router_logits",
            "router_aux_loss_coef",
        ],
    },
    Dialect {
        family: Family::Gemma3,
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        read: &[
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
            "_sliding_window_pattern",
        ],
        fixed: &[
            ("hidden_activation", "\"gelu_pytorch_tanh\""),
            ("hidden_act", "\"gelu_pytorch_tanh\""),
        ],
        inert: &["cache_implementation"],
    },
];

/// Keys that are read for every family.
const READ_KEYS: [&str; 17] = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "model_type",
    "architectures",
    "tie_word_embeddings",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "partial_rotary_factor",
];

/// Keys that switch something on which we do not compute; each is fine when false or absent.
const OFF_KEYS: [&str; 6] = [
    "attention_bias",
    "mlp_bias",
    "rope_interleaved",
    "use_sliding_window",
    "use_mrope",
    "use_bidirectional_attention",
];

/// Keys that must be null or absent, where a family does not read them.
const NULL_KEYS: [&str; 5] = [
    "sliding_window",
    "quantization_config",
    "auto_map",
    "attn_logit_softcapping",
    "final_logit_softcapping",
];

/// Keys without effect on the numbers: provenance, training, and token ids, which come from the tokenizer's files.
const INERT_KEYS: [&str; 20] = [
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "pretraining_tp",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "is_llama_config",
    "transformers.js_config",
    "attn_implementation",
    "_attn_implementation_autoset",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "model_name",
];

impl Dialect {
    /// The dialect that a file names in `model_type`; every key is then known and supported.
    pub(super) fn of(fields: &Fields<'_>) -> Result<&'static Self, Refusal> {
        let model_type: String = fields.required("model_type")?;
        let dialect = DIALECTS.iter().find(|d| d.model_type == model_type);
        let dialect = dialect.ok_or_else(|| {
            let supported: Vec<_> = DIALECTS.iter().map(|d| d.model_type).collect();
            let problem = format!(
                "{}, supported: {}",
                quoted(&model_type),
                supported.join(", ")
            );
            Refusal::new("model_type", problem)
        })?;
        dialect.check_architecture(fields)?;
        for key in fields.keys() {
            dialect.check_key(fields, key)?;
        }
        Ok(dialect)
    }

    fn check_architecture(&self, fields: &Fields<'_>) -> Result<(), Refusal> {
        let architectures: Option<Vec<String>> = fields.get("architectures")?;
        match architectures.as_deref() {
            None => Ok(()),
            Some([one]) if one == self.architecture => Ok(()),
            Some(_) => Err(Refusal::new(
                "architectures",
                format!(
                    "{}, supported: [\"{}\"]",
                    quoted(fields.raw("architectures")),
                    self.architecture
                ),
            )),
        }
    }

    fn check_key(&self, fields: &Fields<'_>, key: &str) -> Result<(), Refusal> {
        let value = fields.raw(key);
        let fixed = self.fixed.iter().find(|(fixed, _)| *fixed == key);
        let supported = match key {
            _ if fixed.is_some_and(|(_, only)| value == *only) => return Ok(()),
            _ if fixed.is_some() => fixed.map_or("", |(_, only)| only),
            "partial_rotary_factor" if fields.get(key)? == Some(1.0_f64) => return Ok(()),
            "partial_rotary_factor" => "1.0",
            _ if self.knows(key) => return Ok(()),
            _ if OFF_KEYS.contains(&key) && matches!(value, "false" | "null") => return Ok(()),
            _ if OFF_KEYS.contains(&key) => "false",
            _ if NULL_KEYS.contains(&key) && value == "null" => return Ok(()),
            _ if NULL_KEYS.contains(&key) => "null",
            _ => {
                return Err(Refusal::new(
                    quoted(key),
                    format!(
                        "{}; this key is not known and may change the result",
                        quoted(value)
                    ),
                ));
            }
        };
        Err(Refusal::new(
            key,
            format!("{}, supported: {supported}", quoted(value)),
        ))
    }

    fn knows(&self, key: &str) -> bool {
        [self.read, self.inert, &READ_KEYS, &INERT_KEYS]
            .iter()
            .any(|keys| keys.contains(&key))
    }
}
