"""Pure: suggest a known key for an unknown one."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

KeyPath = tuple[str, ...]

_MEANT = {
    "environment": "dataset datasets env reward_function reward_funcs task train_files",
    "evaluation.every": "eval_every eval_freq eval_interval eval_steps test_freq val_interval val_period",
    "grpo.advantage_std": "norm_adv_by_std scale_rewards",
    "grpo.dual_clip": "clip_ratio_c",
    "grpo.baseline": "adv_estimator advantage_estimator",
    "grpo.dynamic_sampling": "filter_groups",
    "grpo.entropy_coefficient": "ent_coef entropy_coeff entropy_coef",
    "grpo.eps_high": "clip_high clip_ratio_high eps_clip_high epsilon_high ratio_clip_max",
    "grpo.eps_low": "clip clip_eps clip_low clip_range clip_ratio clip_ratio_low eps_clip ratio_clip_min",
    "grpo.group_size": "generations n num_generations num_rollouts rollout_n rollouts samples_per_prompt",
    "grpo.kl_beta": "beta kl kl_coef kl_loss_coef kl_penalty reference_policy_kl_penalty",
    "grpo.kl_estimator": "kl_loss_type",
    "grpo.kl_importance": "use_bias_correction_kl",
    "grpo.policy_loss": "loss loss_fn loss_mode loss_type",
    "grpo.prompts_per_step": "batch_size global_batch_size num_prompts_per_step rollout_batch_size train_batch_size",
    "grpo.reduction": "loss_agg_mode",
    "grpo.reduction_length": "loss_scale_factor",
    "inference.max_batch": "max_num_seqs",
    "job.gpus_per_node": "gpus n_gpus_per_node nproc_per_node num_gpus",
    "job.nodes": "nnodes num_nodes",
    "job.time_limit": "time walltime",
    "logging.wandb": "report_to wandb",
    "model.dtype": "bf16 fp16 precision torch_dtype",
    "model.huggingface": "hf_model model_name model_name_or_path model_path pretrained pretrained_model_name_or_path",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rank": "lora_dim lora_r lora_rank",
    "model.lora.rs": "use_rslora",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.max_position_embeddings": "context_length n_positions",
    "model.num_layers": "layers n_layers num_hidden_layers",
    "optimizer.clip_grad": "clip_grad_norm grad_clip gradient_clipping max_grad_norm",
    "optimizer.decay": "lr_decay lr_scheduler lr_scheduler_type scheduler",
    "optimizer.learning_rate": "lr rate",
    "optimizer.min_learning_rate": "lr_min min_lr",
    "optimizer.warmup_steps": "lr_warmup_iters num_warmup_steps warmup",
    "placement.inference.tp": "rollout_tp",
    "placement.training.cp": "context_parallel context_parallel_size cp",
    "placement.training.ep": "ep expert_parallel expert_parallel_size",
    "placement.training.pp": "pipeline_parallel pipeline_parallel_size pp",
    "placement.training.tp": "tensor_parallel tensor_parallel_size tp",
    "sampling.max_new_tokens": "max_completion_length max_response_length max_tokens response_length",
    "save.every": "checkpoint_every save_freq save_interval save_steps",
    "save.keep": "max_to_keep save_total_limit",
    "training.recompute": "activation_checkpointing gradient_checkpointing",
    "training.seed": "random_seed seed",
    "training.sequence_length": "max_length max_model_len max_seq_len max_seq_length max_sequence_length seq_length",
    "training.steps": "epochs iterations max_steps num_epochs num_iterations num_train_epochs total_epochs train_iters "
    "total_steps",
    "training.tokens_per_microbatch": "micro_batch_size microbatch per_device_train_batch_size",
}
"""Key -> names of it, mostly those of other toolkits."""

SYNONYMS = {word: tuple(key.split(".")) for key, words in _MEANT.items() for word in words.split()}

_IN_SECTION: dict[KeyPath, str] = {
    ("model", "name"): "huggingface",
    ("model", "path"): "huggingface",
    ("tokenizer", "name"): "path",
}
"""Words that mean a key in one section only."""


def did_you_mean(path: KeyPath, known: Collection[KeyPath]) -> str:
    """Return ` (did you mean X?)`, or nothing if no known key resembles the unknown one.

    Prefers names of other toolkits, then similar spelling in the same section, then in any section.
    """
    guess = _guess(path, known)
    return f" (did you mean {guess}?)" if guess else ""


def _guess(path: KeyPath, known: Collection[KeyPath]) -> str | None:
    section, word = path[:-1], path[-1]
    siblings = [key[-1] for key in known if key[:-1] == section]
    if path in _IN_SECTION and _IN_SECTION[path] in siblings:
        return _IN_SECTION[path]
    if (there := SYNONYMS.get(word)) in known and there is not None:
        return there[-1] if there[:-1] == section else ".".join(there)
    if close := get_close_matches(word, siblings, n=1):
        return close[0]
    named_so = [".".join(key) for key in known if key[-1] == word]
    if close := get_close_matches(".".join(path), named_so, n=1, cutoff=0.0):
        return close[0]
    close = get_close_matches(".".join(path), [".".join(key) for key in known], n=1, cutoff=0.8)
    return close[0] if close else None
