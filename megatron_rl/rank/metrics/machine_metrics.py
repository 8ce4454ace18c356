"""Metrics of the machines: speed, seconds by phase, memory, replicas. They may differ between two runs of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.rank.metrics.metric import Metric, StepReport, of_devices, ratio

if TYPE_CHECKING:
    from megatron_rl.rank.metrics.stats import Number


def _mfu(step: StepReport) -> Any:
    device, seconds = step.stats.device, step.seconds["train"]
    if device is None or not device.peak_flops or not seconds:
        return None
    return device.flops / (seconds * step.ranks * device.peak_flops)


def _seconds(step: StepReport) -> float:
    return sum(step.seconds.values())


def _tokens(step: StepReport) -> Number:
    batch = step.stats.batch
    return batch.unpacked_tokens if step.rows else batch.answer_tokens


MACHINES: dict[str, Metric] = {
    "throughput/tokens_per_s": Metric(
        "generated tokens per second of the whole step; with training.objective: supervised all tokens of the rows",
        lambda step: _tokens(step) / _seconds(step),
        unit="tokens/s",
        good="stable, apart from the length of answers",
        advice="`mrl status` names the phase that takes the time; `mrl plan RECIPE --measured RUN_DIR` compares "
        "splits.",
    ),
    "throughput/tokens_per_s_per_rank": Metric(
        "the same per rank", lambda step: _tokens(step) / _seconds(step) / step.ranks, unit="tokens/s"
    ),
    "throughput/generated_tokens_per_s": Metric(
        "generated tokens per second of generation; absent where it runs ahead of training (async.max_lag)",
        lambda step: None if step.ahead else ratio(step.stats.batch.answer_tokens, step.seconds["generate"]),
        unit="tokens/s",
        good="stable",
        advice="Raise `inference.max_batch` or `inference.cache_tokens`, so that more answers run at once.",
    ),
    "throughput/mfu": Metric(
        "share of the GPUs' bf16 peak used by the training passes: operations that forward and backward of the tokens "
        "need (recipe/flops.py: no recomputation), per second of time/train_s; absent in fp32 and for GPUs of unknown "
        "peak",
        _mfu,
        unit="share",
        good="0.2 to 0.5",
        advice="Raise `training.tokens_per_microbatch`, lower the parallel sizes, and look at "
        "`attempts/NNN/kernels.json` for missing kernels.",
    ),
    "time/step_s": Metric(
        "seconds of the step without evaluation and saving; like all seconds of phases the mean over the ranks",
        _seconds,
        unit="s",
        good="stable",
        advice="The other metrics of time name the phase that takes it.",
    ),
    "time/generate_s": Metric(
        "seconds in generation; if it runs ahead of training, seconds waiting for the batch",
        lambda step: step.seconds["generate"],
        unit="s",
        good="most of a synchronous step; near 0 where generation runs ahead",
        advice="Try a partitioned split (`mrl plan`), more answers at once (`inference.max_batch`), or a lower "
        "`sampling.max_new_tokens`.",
    ),
    "time/reward_s": Metric(
        "seconds waiting for rewards while nothing was generated",
        lambda step: step.seconds["reward"],
        unit="s",
        good="near 0",
        advice="Make rewards `async`, or compute them in a pool of processes.",
    ),
    "time/log_probs_s": Metric(
        "seconds scoring old and reference log-probs",
        lambda step: step.seconds["log-probs"],
        unit="s",
        good="less than time/train_s",
        advice="The reference model of `grpo.kl_beta` needs another pass; without it, one update per step needs none.",
    ),
    "time/train_s": Metric("seconds in forward, backward and update", lambda step: step.seconds["train"], unit="s"),
    "time/offload_s": Metric(
        "seconds moving Adam's state from host memory for the updates and back; absent if it stays on the device "
        "(placement.offload)",
        lambda step: step.seconds["offload"] if step.stats.update.offloaded else None,
        unit="s",
        good="far below time/train_s",
        advice="Set `placement.offload: buffers` if `mrl plan` says that it fits.",
    ),
    "time/refit_s": Metric(
        "seconds until the engine had the new weights; in a partitioned run only those that delayed the step",
        lambda step: step.seconds["refit"],
        unit="s",
        good="a few seconds",
        advice="On slow networks train adapters (`model.lora`): they alone are sent.",
    ),
    "time/wait_s": Metric(
        "seconds waiting for other ranks",
        lambda step: step.seconds["wait"],
        unit="s",
        good="below a tenth of time/step_s",
        advice="Ranks wait for the one with the longest answers (try `async.max_lag`), or for one on a slow node: "
        "`mrl status` names it.",
    ),
    "time/save_blocked_s": Metric(
        "seconds that the newest published checkpoint stopped the training",
        unit="s",
        good="a few seconds",
        advice="Save less often (`save.every`); `mrl doctor` measures the file system.",
    ),
    "time/save_s": Metric(
        "seconds from the start of the newest save until it was published",
        unit="s",
        good="below the time between two saves",
        advice="Save less often (`save.every`); `mrl doctor` measures the file system.",
    ),
    "system/failed_saves": Metric(
        "checkpoints that could not be written",
        unit="checkpoints",
        good="0",
        advice="Make room on the disk; `save.keep` and `save.keep_every` need less.",
    ),
    "system/refit_bytes": Metric(
        "bytes that ranks sent one another to give the engine the new weights; absent if it shares the trainer's",
        lambda step: step.refit_bytes or None,
        unit="bytes",
    ),
    "system/replicas": Metric(
        "inference replicas that answer the first rank with the weights of the step, or are asleep while it trains; "
        "absent if the training ranks generate (placement.mode), as are the next ten",
        unit="replicas",
        good="all of the plan",
        advice="`mrl status` shows each replica, and how it ended last.",
    ),
    "system/slow_replicas": Metric(
        "replicas that get no requests because they are far slower than the others",
        unit="replicas",
        good="0",
        advice="Its node has other work or a slow GPU: exclude the node.",
    ),
    "system/repeated_requests": Metric(
        "requests of the first driver since the previous step that another replica repeated because the first one was "
        "lost or slow",
        unit="requests",
        good="0, or few",
        advice="Look at the logs of the replicas, and at the network.",
    ),
    "system/replica_busy_mean": Metric(
        "share of the time since the previous step in which an inference replica computed, mean over the replicas "
        "present; the time in which it is asleep, because the ranks train on its GPUs, does not count; updated every "
        "few seconds",
        unit="share",
        good="above 0.8",
        advice="Replicas wait for work: raise `async.max_lag`, or give them fewer nodes (`mrl plan RECIPE --measured "
        "RUN_DIR`).",
    ),
    "system/replica_tokens_per_s": Metric(
        "tokens per second of the time in which a replica computed since the previous step, mean over the replicas "
        "present; updated like system/replica_busy_mean",
        unit="tokens/s",
        good="stable, apart from the length of answers",
        advice="With vLLM, FP8 and speculative decoding may raise it (docs/partitioned.md, Cheaper tokens).",
    ),
    "system/replica_draft_acceptance": Metric(
        "share of the tokens drafted since the previous step that became tokens of answers; absent without "
        "speculative decoding",
        unit="share",
        good="above 0.5",
        advice="Rejected drafts cost time, the more the fuller the replica: draft fewer tokens "
        "(`num_speculative_tokens` of `speculative-config`), or leave them out and compare "
        "`system/replica_tokens_per_s`.",
    ),
    "system/replica_running_mean": Metric(
        "answers that a replica generates at the end of the step, mean over replicas", unit="answers"
    ),
    "system/replica_waiting_mean": Metric(
        "answers that wait in a replica at the end of the step, mean over replicas",
        unit="answers",
        good="near 0",
        advice="Raise `inference.max_batch` and `inference.cache_tokens`, or give generation more nodes.",
    ),
    "system/replica_cache_used_mean": Metric(
        "share of a replica's cache of keys and values that is in use at the end of the step, mean over replicas",
        unit="share",
        good="below 0.9",
        advice="Raise `inference.cache_tokens`.",
    ),
    "system/replica_preemptions": Metric(
        "answers that lost their cache to others since the replicas started, and were computed again, sum over "
        "replicas",
        unit="answers",
        good="0, or few per step",
        advice="Raise `inference.cache_tokens`, or lower `inference.max_batch`.",
    ),
    "time/publish_s": Metric(
        "seconds until the replicas sampled with the newest weights, most of them beside the training; the weights of "
        "the step itself may still be on their way",
        unit="s",
        good="below time/step_s",
        advice="On slow networks train adapters (`model.lora`): they alone are sent.",
    ),
    "time/sleep_s": Metric(
        "seconds until the replicas on the training ranks' GPUs had left them to the step; absent if replicas have "
        "other GPUs",
        unit="s",
    ),
    "time/probe_s": Metric(
        "seconds in which the ranks computed log-probs of a short text, which replicas must report under the "
        "new weights; absent if the engine is not probed",
        unit="s",
    ),
    "system/offloaded_bytes": Metric(
        "bytes of Adam's state that each update moves from host memory and back, over all ranks; absent if it stays on "
        "the device",
        lambda step: step.stats.update.offloaded or None,
        unit="bytes",
    ),
    "system/peak_memory_gib": Metric(
        "GiB that torch's tensors held at once on a GPU since the previous step, maximum over the GPUs",
        of_devices(lambda device: device.peak_memory / 2**30),
        unit="GiB",
        good="2 GiB or more below the GPU's memory",
        advice="Lower `training.tokens_per_microbatch`, or set `placement.offload`; `mrl plan` shows what takes the "
        "memory.",
    ),
    "system/power_w": Metric(
        "watts of a GPU at the end of training, mean over the GPUs; absent without NVML",
        of_devices(lambda device: device.power / device.powers if device.powers else None),
        unit="W",
    ),
}
