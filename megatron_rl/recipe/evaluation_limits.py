"""Contradictions of the keys of evaluations with one another and with other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.recipe.evaluation_section import EvaluationConfig, EvaluationSetConfig
from megatron_rl.recipe.sections import Sections


def against_evaluation(config: Sections) -> Iterator[str]:
    """Yield the reason for each contradiction, with its keys and what to do."""
    evaluation = config.evaluation
    yield from _of_answers(config, "evaluation", evaluation, evaluation)
    for name, given in evaluation.sets.items():
        yield from _of_answers(config, f"evaluation.sets.{name}", given, evaluation.of(name))
    if evaluation.replicas is not None:
        yield from _of_replicas(config, evaluation.replicas)


def _of_answers(
    config: Sections, key: str, given: EvaluationConfig | EvaluationSetConfig, asked: EvaluationConfig
) -> Iterator[str]:
    """given: the keys of a section. asked: the settings that follow from them."""
    if not asked.greedy and not asked.samples:
        yield f"{key}: greedy is false and samples is 0, so nothing is answered: set one of them"
    if not asked.samples:
        for name in ("pass_at", "temperature", "top_p", "top_k"):
            if getattr(given, name) is not None and not _used_by_a_set(given):
                yield f"{key}.{name} is for sampled answers, and samples is 0: set {key}.samples, or leave {name} out"
    elif given.pass_at and max(given.pass_at) > asked.samples and not _used_by_a_set(given):
        yield (
            f"{key}.pass_at has {max(given.pass_at)}, and there are {asked.samples} answers to a problem: raise "
            f"{key}.samples to it"
        )
    if (longest := given.max_new_tokens) is None:
        return
    if longest >= config.sequence_length:
        yield f"{key}.max_new_tokens {longest} leaves no room for a prompt in {config.sequence_length} tokens"
    elif longest < config.sampling.min_new_tokens:
        yield f"{key}.max_new_tokens {longest} is less than sampling.min_new_tokens {config.sampling.min_new_tokens}"


def _used_by_a_set(given: EvaluationConfig | EvaluationSetConfig) -> bool:
    """Whether a set has more samples than these settings, so that a value that they cannot use may be for it."""
    samples = given.samples or 0
    return isinstance(given, EvaluationConfig) and any((one.samples or 0) > samples for one in given.sets.values())


def _of_replicas(config: Sections, kept: int) -> Iterator[str]:
    if config.placement.mode != "partitioned":
        yield (
            f"evaluation.replicas is {kept}, and placement.mode is colocated, where ranks cannot train while they "
            "answer: leave it out, or set partitioned"
        )
        return
    placement = config.placement
    if placement.inference.nodes is None:
        return
    replicas = placement.inference.nodes * config.job.gpus_per_node // placement.gpus_per_replica
    if kept >= replicas:
        yield (
            f"evaluation.replicas is {kept}, and the run has {replicas} (placement.inference): at least one must "
            "take newer weights; leave it out, and training waits for evaluations"
        )
