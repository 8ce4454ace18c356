"""Tiny random models of `transformers`, published as on the hub: weights in several files, config, tokenizer. The
library takes seconds to import, so only `publish` and `tokenizer` import it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from checkpoint_helpers import checkpointer, outcome
from core_helpers import tiny_run
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.hf_config import read_hf_config
from megatron_rl.recipe.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 61  # padded to 64
SHARD = 20_000  # largest size of a file, in bytes: there are several files
TOKENS = 50
SENTENCE = [3, 10, 4, 60, 7, 13, 0, 14, 1, 44, 21, 5]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = SIZES | {"model_type": "qwen3_moe", "head_dim": 12, "num_experts": 4, "moe_intermediate_size": 16}
GPT_OSS: dict[str, Any] = SIZES | {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
DEEPSEEK: dict[str, Any] = SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 16,
    },
}
DELTA: dict[str, Any] = SIZES | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
DELTA_EXPERTS: dict[str, Any] = DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
GEMMA: dict[str, Any] = SIZES | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
OLMO: dict[str, Any] = SIZES | {
    "model_type": "olmo3",
    "eos_token_id": 0,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.2,
            "rope_theta": 5e5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "Qwen2, tied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3, wider heads": SIZES | {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "Llama 3.1": SIZES | {"model_type": "llama", "rope_parameters": STRETCHED},
    "Llama, one key for all": SIZES | {"model_type": "llama", "num_key_value_heads": 1},
    "Mistral": SIZES | {"model_type": "mistral", "sliding_window": None},
    "Qwen3 MoE": EXPERTS | {"num_experts_per_tok": 2, "norm_topk_prob": True},
    "Qwen3 MoE, one expert a token": EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, one projection of queries": DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2},
    "gpt-oss": GPT_OSS,
    "GLM-4.5": SIZES
    | {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "n_group": 2,
        "topk_group": 1,
    },
    "Qwen3-Next": DELTA_EXPERTS | {"model_type": "qwen3_next", "norm_topk_prob": False},
    "Qwen3.5": DELTA | {"tie_word_embeddings": True},
    "Qwen3.5 MoE": DELTA_EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "Gemma 3": GEMMA,
    "OLMo 3": OLMO,
}
"""Name -> contents of config.json."""


def publish(
    folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32, shard: str = "20KB", seed: int = 0
) -> PreTrainedModel:
    """Save a random model of this shape with transformers, in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():  # otherwise norms and biases are ones and zeros
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
        for module in model.modules():
            if (bias := module._buffers.get("e_score_correction_bias")) is not None:  # in fp32 whatever the dtype
                module._buffers["e_score_correction_bias"] = torch.rand(bias.shape)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return model


def pack_experts(folder: Path) -> None:
    """Replace the experts of a published gpt-oss of one file by random blocks and scales in MXFP4."""
    path, draws = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        size = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=draws, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, size, generator=draws, dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))


def tokenizer(tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character, and one for the end."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<end>": 0} | {chr(ord("0") + index): index + 1 for index in range(tokens - 1)}
    splitter = Tokenizer(WordLevel(vocabulary, unk_token="<end>"))
    splitter.pre_tokenizer = Split("", "isolated")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=splitter, eos_token="<end>", chat_template=template)


def model_of(folder: Path, **fields: Any) -> ModelConfig:
    """Model section of a recipe that only names the folder."""
    return ModelConfig(
        **read_hf_config(folder).shape
        | {"init": "huggingface", "huggingface": str(folder), "dtype": "fp32", "vocab_multiple": 16}
        | fields
    )


def usual_mode(folder: Path) -> int:
    """Permissions of a file that is created in a folder."""
    file = folder / "usual"
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    file.unlink()
    return mode


def saved_run(published: Path, run: Path, platform: Any, **fields: Any) -> Path:
    """Write the run directory of a run that starts from published weights, and the checkpoint of its first step, which
    has these weights. Returns the folder of the checkpoint. fields: of the model."""
    model = model_of(published, **fields)
    recipe = tiny_run(model=model.model_dump()).model_dump()
    recipe["tokenizer"] = {"type": "huggingface", "path": str(published)}
    run.mkdir(exist_ok=True)
    RunDir(run).resolved.write_text(yaml.safe_dump(recipe))
    policy = build_policy(model, VOCAB, platform)
    load_pretrained(policy, model, published)
    saving = checkpointer(run)
    saving.save(1, {"model": policy.sharded_state_dict()}, {})
    outcome(saving)
    return RunDir(run).checkpoint(1)


def export(run: RunDir, target: Path) -> Path:
    """Export the newest checkpoint of a run as `mrl convert` does. Returns the folder of the weights."""
    command = [sys.executable, "-m", "megatron_rl.checkpoint.hf", "megatron-to-hf", "--shard-bytes", str(10**9)]
    subprocess.run([*command, str(run.root), str(target)], check=True)
    return target
