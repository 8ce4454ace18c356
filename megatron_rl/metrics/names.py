"""Every metric a run writes, by name: the one registry behind console, TensorBoard and metrics.jsonl.

Names under time/ throughput/ system/ may differ between two runs of the same recipe; all others are reproducible.
A value that does not exist in a step is absent from its line, never NaN.
"""

from __future__ import annotations

STEP_METRICS = {
    "mean_reward": "mean reward of the step's answers, as scored",
    "reward_std": "standard deviation of those rewards",
    "nonzero_groups_ratio": "share of groups whose rewards differ, the only ones with a gradient",
    "loss": "GRPO loss, mean over the step's updates",
    "grad_norm": "gradient norm before clipping, mean over the step's applied updates",
    "learning_rate": "of the step's last update",
    "entropy": "mean entropy in nats of the distributions the answer tokens were drawn from, full vocabulary",
    "clip_fraction": "share of tokens whose gradient the clip removed",
    "clip_fraction_low": "... by the lower clip",
    "clip_fraction_high": "... by the upper clip",
    "kl": "mean KL estimate to the initial weights (kl_beta > 0)",
    "importance_ratio": "mean of exp(log_prob - old_log_prob)",
    "importance_ratio_max": "largest of them",
    "importance_weight": "mean truncated importance weight (importance_cap)",
    "inference_logprob_difference": "mean |training - engine log-prob| of the sampled tokens",
    "inference_logprob_difference_max": "largest of them",
    "answer_length": "mean tokens per answer",
    "answer_length_max": "longest answer",
    "answer_length_min": "shortest answer",
    "prompt_length": "mean tokens per prompt",
    "truncated_ratio": "share of answers cut at sampling.max_new_tokens",
    "staleness": "mean optimizer steps between the weights that sampled and those trained",
    "staleness_max": "largest of them",
    "failed_rollouts": "answers lost; reasons are in failed_rollouts_by_reason",
    "failed_rollouts_by_reason": "answers lost, by reason (absent where none is)",
    "skipped_updates": "updates of this step skipped for a non-finite gradient",
    "packed_tokens_ratio": "packed tokens over tokens of prompts and answers: below 1 where prompts are shared",
    "generation_rounds": "rounds of generation (dynamic sampling draws several)",
    "first_ordinal": "first prompt of the step in the prompt stream",
    "next_ordinal": "first prompt of the next step",
    "dropped_ordinals": "prompts settled without training, with the reason (absent where none is)",
    "policy_version": "optimizer steps behind the weights at the end of the step",
    "throughput/tokens_per_s": "generated tokens per second of the whole step",
    "throughput/tokens_per_s_per_rank": "... per rank",
    "throughput/generated_tokens_per_s": "generated tokens per second of generation",
    "time/step_s": "seconds of the whole step, evaluation and saving aside; like all below the mean over the ranks",
    "time/generate_s": "seconds in generation",
    "time/reward_s": "seconds in which rewards were waited for and nothing was generated",
    "time/log_probs_s": "seconds scoring old and reference log-probs",
    "time/train_s": "seconds in forward, backward and update",
    "time/refit_s": "seconds until the engine had the new weights",
    "time/wait_s": "seconds waiting for other ranks",
    "time/save_blocked_s": "seconds training stood still for the newest published checkpoint",
    "time/save_s": "seconds from its begin until it was published",
    "system/failed_saves": "checkpoints that could not be written",
}


def check_name(name: str) -> None:
    """Raises ValueError for a metric that is not in the registry."""
    if name not in STEP_METRICS and not name.startswith("eval/"):
        raise ValueError(f"metric {name!r} is not registered in megatron_rl/metrics/names.py")
