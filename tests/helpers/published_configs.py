"""config.json of fifty published models, by name on the hub, with every key that the file has.

Lists of layers and of heads are written as rules. `parameters` are published totals and active parameters per token, in
billions.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_SAVED = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.0}

_QWEN2: Config = _SAVED | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_QWEN3: Config = _SAVED | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE: Config = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
_QWEN_30B = _QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
_QWEN_235B = _QWEN3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
_QWEN_CODER = {"max_position_embeddings": 262144, "qkv_bias": False, "rope_theta": 10000000, "use_qk_norm": True}
_QWEN_CODER |= {"shared_expert_intermediate_size": 0, "max_window_layers": 28}

_LLAMA: Config = _SAVED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.42.3",
    "vocab_size": 128256,
}
_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
_LLAMA_70B = _LLAMA | {
    "head_dim": 128,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
_MISTRAL: Config = _SAVED | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.42.0.dev0",
}

_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_DEEPSEEK: Config = _SAVED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": _FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "transformers_version": "4.33.1",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_KIMI: Config = _DEEPSEEK | {
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": _DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "transformers_version": "4.48.3",
    "vocab_size": 163840,
}
_INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
_GLM: Config = _SAVED | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.54.0",
    "use_qk_norm": True,
    "vocab_size": 151552,
}


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


_DELTA = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT: Config = (
    _SAVED
    | _DELTA
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "transformers_version": "4.57.0.dev0",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
)


def _qwen35(kind: str, name: str, layers: int, **text: Any) -> Config:
    """A model that also sees: its text model stands under text_config."""
    attention = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    rotation = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
    shared: Config = _DELTA | {
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "initializer_range": 0.02,
        "layer_types": attention * (layers // 4),
        "mamba_ssm_dtype": "float32",
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": layers,
        "rope_parameters": rotation | {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "use_cache": True,
        "vocab_size": 248320,
    }
    seen = {"model_type": kind, "depth": 27, "hidden_size": 1152, "num_heads": 16, "patch_size": 16}
    return {
        "architectures": [name],
        "model_type": kind,
        "image_token_id": 248056,
        "text_config": shared | text,
        "tie_word_embeddings": shared.get("tie_word_embeddings") if "tie_word_embeddings" not in text else True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": seen,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def _olmo_types(layers: int) -> list[str]:
    return ["sliding_attention" if (number + 1) % 4 else "full_attention" for number in range(layers)]


_OLMO: Config = _SAVED | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": _olmo_types(32),
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0",
    "vocab_size": 100278,
}


def _gemma(layers: int, **sizes: int) -> Config:
    return _SAVED | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "_sliding_window_pattern": 6,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if (number + 1) % 6 else "full_attention" for number in range(layers)],
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "transformers_version": "4.55.0.dev0",
        "use_bidirectional_attention": False,
        "vocab_size": 262144,
        **sizes,
    }


def _sized(hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any) -> Config:
    found = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**found, "num_key_value_heads": groups, **more}


_QWEN_7B = _QWEN2 | _sized(3584, 18944, 28, 28, 4)
_QWEN_32B = _QWEN2 | _sized(5120, 27648, 64, 40, 8, max_window_layers=64)
_QWEN_72B = _QWEN2 | _sized(8192, 29568, 80, 64, 8, max_window_layers=70)
_QWEN3_4B = _QWEN3 | _sized(2560, 9728, 36, 32, 8, tie_word_embeddings=True)
_QWEN3_8B = _QWEN3 | _sized(4096, 12288, 36, 32, 8)
_LONG = {"max_position_embeddings": 131072}

PUBLISHED_CONFIGS: dict[str, Config] = {
    "Qwen/Qwen2-7B-Instruct": _QWEN_7B | {"transformers_version": "4.41.2"},
    "Qwen/Qwen2.5-0.5B": _QWEN2
    | _sized(896, 4864, 24, 14, 2, tie_word_embeddings=True, use_mrope=False, vocab_size=151936, max_window_layers=24),
    "Qwen/Qwen2.5-3B": _QWEN2 | _sized(2048, 11008, 36, 16, 2, tie_word_embeddings=True, vocab_size=151936),
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B,
    "Qwen/Qwen2.5-7B-Instruct-1M": _QWEN_7B
    | {
        "max_position_embeddings": 1010000,
        "rope_theta": 10000000.0,
        "dual_chunk_attention_config": {
            "chunk_size": 262144,
            "local_size": 8192,
            "original_max_position_embeddings": 262144,
        },
    },
    "Qwen/Qwen2.5-32B": _QWEN_32B | _LONG | {"rms_norm_eps": 1e-05},
    "Qwen/Qwen2.5-72B-Instruct": _QWEN_72B,
    "Qwen/Qwen2.5-72B-Instruct, YaRN": _QWEN_72B | {"rope_scaling": _YARN},
    "Qwen/Qwen2.5-Math-7B": _QWEN_7B
    | {"max_position_embeddings": 4096, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False},
    "Qwen/Qwen2.5-Coder-32B-Instruct": _QWEN_32B | {"max_window_layers": 70},
    "Qwen/QwQ-32B": _QWEN_32B | {"max_position_embeddings": 40960, "rms_norm_eps": 1e-05, "sliding_window": 32768},
    "Qwen/Qwen3-0.6B": _QWEN3 | _sized(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B | {"max_position_embeddings": 262144, "rope_theta": 5000000},
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-8B, YaRN": _QWEN3_8B
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "Qwen/Qwen3-32B": _QWEN3 | _sized(5120, 25600, 64, 64, 8, max_window_layers=64),
    "Qwen/Qwen3-30B-A3B": _QWEN_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen/Qwen3-235B-A22B": _QWEN_235B,
    "Qwen/Qwen3-235B-A22B-Thinking-2507": _QWEN_235B | {"max_position_embeddings": 262144, "rope_theta": 5000000},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _QWEN3_MOE
    | _QWEN_CODER
    | _sized(6144, 8192, 62, 96, 8, moe_intermediate_size=2560, num_experts=160, max_window_layers=62),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": _QWEN3_NEXT,
    "Qwen/Qwen3.5-35B-A3B": _qwen35(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        40,
        hidden_size=2048,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
    ),
    "Qwen/Qwen3.5-27B": _qwen35(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        64,
        hidden_size=5120,
        intermediate_size=17408,
        linear_num_value_heads=48,
        num_attention_heads=24,
        num_key_value_heads=4,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.2-1B": _LLAMA
    | _sized(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True)
    | {"rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0}},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _LLAMA
    | _sized(2048, 8192, 24, 32, 32, tie_word_embeddings=True, rope_theta=130000, rope_scaling=None, vocab_size=49152)
    | {
        "max_position_embeddings": 8192,
        "pad_token_id": 2,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "HuggingFaceTB/SmolLM3-3B": _SAVED
    | _sized(2048, 11008, 36, 16, 4, tie_word_embeddings=True, rope_theta=5000000.0, rope_scaling=None)
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL
    | _sized(4096, 14336, 32, 32, 8, rope_theta=1000000.0, vocab_size=32768),
    "mistralai/Mistral-Small-24B-Instruct-2501": _MISTRAL
    | _sized(5120, 32768, 40, 32, 8, rope_theta=100000000.0, vocab_size=131072),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN_7B
    | _LONG
    | {"rope_theta": 10000, "sliding_window": 4096, "use_mrope": False, "eos_token_id": 151643},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_8B | {"eos_token_id": 128001},
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK,
    "deepseek-ai/DeepSeek-V3-0324": _DEEPSEEK | {"transformers_version": "4.46.3"},
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK
    | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}, "transformers_version": "4.44.2"},
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK,
    "deepseek-ai/DeepSeek-R1-0528": _DEEPSEEK | {"transformers_version": "4.46.3"},
    "moonshotai/Kimi-K2-Instruct": _KIMI,
    "moonshotai/Kimi-K2-Instruct-0905": _KIMI
    | {"max_position_embeddings": 262144, "rope_scaling": _KIMI["rope_scaling"] | {"factor": 64.0}},
    "moonshotai/Kimi-K2-Thinking": _KIMI
    | {
        "max_position_embeddings": 262144,
        "quantization_config": _INT4,
        "rope_scaling": _KIMI["rope_scaling"] | {"factor": 64.0},
    },
    "moonshotai/Moonlight-16B-A3B-Instruct": {
        key: value for key, value in _DEEPSEEK.items() if key not in ("quantization_config", "rope_scaling")
    }
    | _sized(2048, 11264, 27, 16, 16, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6)
    | {
        "first_k_dense_replace": 1,
        "max_position_embeddings": 8192,
        "n_group": 1,
        "n_shared_experts": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "zai-org/GLM-4.5": _GLM,
    "zai-org/GLM-4.5-Air": _GLM
    | _sized(4096, 10944, 46, 96, 8, moe_intermediate_size=1408, n_routed_experts=128, first_k_dense_replace=1)
    | {"routed_scaling_factor": 1.0, "use_qk_norm": False},
    "zai-org/GLM-4.6": _GLM | {"max_position_embeddings": 202752},
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "google/gemma-3-1b-it": _gemma(26, hidden_size=1152, intermediate_size=6912),
    "allenai/Olmo-3-7B-Think": _OLMO,
    "allenai/Olmo-3-32B-Think": _OLMO | _sized(5120, 27648, 64, 40, 8) | {"layer_types": _olmo_types(64)},
}
"""Configurations with YaRN have the change that their cards describe for long texts."""

PARAMETERS: dict[str, tuple[float, float | None]] = {
    "Qwen/Qwen2.5-7B-Instruct": (7.62, None),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (480, 35),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3.9),
    "Qwen/Qwen3.5-35B-A3B": (34.7, 3),
    "Qwen/Qwen3.5-27B": (26.9, None),
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "moonshotai/Kimi-K2-Instruct": (1026, 32),
    "moonshotai/Moonlight-16B-A3B-Instruct": (16, None),
    "zai-org/GLM-4.5": (353, 32),
    "zai-org/GLM-4.5-Air": (106, 12),
    "openai/gpt-oss-20b": (20.9, 3.6),
    "openai/gpt-oss-120b": (116.8, 5.1),
    "google/gemma-3-1b-it": (1.0, None),
    "allenai/Olmo-3-7B-Think": (7.3, None),
    "allenai/Olmo-3-32B-Think": (32.2, None),
}
