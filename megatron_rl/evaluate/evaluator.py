"""An evaluation from request to result, on all ranks of its world. Rank 0 writes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.agent.api import Environment
from megatron_rl.agent.registry import build_environment
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.records import write
from megatron_rl.errors import ConfigurationError
from megatron_rl.evaluate.answer_file import kept_answers, naming
from megatron_rl.evaluate.blocks import BlockRunner, Opened, Progress, RunBlock, Waits
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.evaluate.result import result
from megatron_rl.evaluate.settings import default_out, settings_of
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.standalone.policy import MOST_POSITIONS, ROWS, open_policy
from megatron_rl.standalone.source import Source, find_source


def evaluate(
    evaluation: Evaluation,
    run: RunBlock,
    report: Callable[[Progress], None],
    world: StandaloneWorld | None = None,
    waits: Waits = nullcontext,
    conclude: Callable[[bool], None] | None = None,
) -> tuple[EvaluationResult, Path] | None:
    """Answer the problems that are not answered yet, and write the result. Collective. Returns the result and its file;
    None on ranks other than 0, and if the evaluation was interrupted, in which case its answers are kept.

    Args:
        world: of this rank; default: the only rank.
        conclude: called on rank 0 with whether all is answered, before any rank leaves.

    Raises:
        ConfigurationError: the request is invalid, or its file has other content.
        CheckpointError: the checkpoint is damaged or cannot be read.
        OSError: the files cannot be written.
    """
    asked, world = evaluation.evaluate, world or StandaloneWorld.single()
    if world.size != asked.ranks:
        raise ConfigurationError(
            f"evaluate: {asked.replicas} replicas of {asked.tp} ranks need {asked.ranks} ranks, not {world.size}"
        )
    source = find_source(asked.checkpoint, asked.dtype, asked.date)
    try:
        environment = build_environment(evaluation.environment, source.tokenizer)
        sets = choose_sets(environment.evaluation_problems(), asked.sets, asked.prompts)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    inference = source.recipe.inference if source.recipe else InferenceConfig(max_batch=ROWS)
    # Answers of a block must not depend on what earlier blocks have left in the cache.
    inference = inference.model_copy(update={"share_prefixes": False})
    longest, rows = _longest(sets, source, evaluation.sampling, environment), inference.max_batch

    def answered(opened: Opened) -> tuple[EvaluationResult, Path] | None:
        try:
            return answered_by(BlockRunner(evaluation, environment, opened, sets, rows, run, report, waits))
        finally:
            run(environment.close(), opened.engine)

    def answered_by(runner: BlockRunner) -> tuple[EvaluationResult, Path] | None:
        opened = runner.opened
        if world.rank:
            runner.run_share()
            runner.leave()
            return None
        settings = settings_of(evaluation, opened, environment, sets, rows)
        out = Path(asked.out) if asked.out else default_out(source, evaluation, sets, settings)
        found = None
        with kept_answers(out.with_suffix(".answers.jsonl"), settings) as answers:
            if runner.run_all(answers):
                sizes = {name: len(problems) for name, problems in sets.items()}
                found = result(settings, sizes, answers.known, str(answers.path))
                with naming(out):
                    write(out, found)
        if conclude:
            conclude(found is not None)
        runner.leave()
        return found and (found, out)

    if asked.engine == "vllm":
        from megatron_rl.evaluate.vllm import open_vllm  # imports httpx

        def waits_for(what: str) -> None:
            report(Progress("", "", 0, 0, what))

        with open_vllm(source, asked, longest, rows, waits_for) as opened:
            return answered(opened)
    with open_policy(
        source,
        device=asked.device,
        threads=asked.threads,
        max_length=longest,
        inference=inference,
        tp=asked.tp,
        world=world,
    ) as policy:
        ranks = policy.ranks
        if not ranks.drives:
            policy.engine.follow(waits)
            return None
        return answered(
            Opened(
                policy.engine,
                source,
                policy.digest,
                replica=ranks.index,
                replicas=ranks.count,
                leaders=policy.leaders,
            )
        )


def choose_sets(
    there: Mapping[str, Sequence[Problem]], names: Sequence[str] | None, prompts: int | None
) -> dict[str, Sequence[Problem]]:
    """Return the problems of the requested sets. Raises ValueError if a set does not exist, or if all are empty."""
    if not there:
        raise ValueError("the environment has no evaluation problems")
    if missing := sorted(set(names or ()) - there.keys()):
        raise ValueError(f"--set {missing[0]}: the environment has no such set; there are {', '.join(sorted(there))}")
    chosen = {name: there[name][:prompts] for name in (there if names is None else dict.fromkeys(names))}
    if not any(chosen.values()):
        raise ValueError(f"{', '.join(chosen)}: the set has no problems")
    return chosen


def _longest(
    sets: Mapping[str, Sequence[Problem]], source: Source, sampling: Sampling, environment: Environment
) -> int:
    """Return the tokens that the cache needs: the longest prompt and answer, at most the model's positions. A prompt
    that leaves no room for an answer fails, and is counted as a failure. Rollouts of several turns get at least the
    run's sequence length, or without a run up to MOST_POSITIONS."""
    positions = source.model.max_position_embeddings
    if sampling.max_new_tokens >= positions:
        raise ConfigurationError(
            f"sampling.max_new_tokens {sampling.max_new_tokens}: the model has {positions} positions, which leaves no "
            "room for a prompt"
        )
    prompts = (source.tokenizer.encode(problem.prompt) for problems in sets.values() for problem in problems)
    needed = max(map(len, prompts)) + sampling.max_new_tokens
    if any(environment.agent_of(problem).several_turns for problems in sets.values() for problem in problems):
        needed = max(needed, source.recipe.sequence_length if source.recipe else MOST_POSITIONS)
    return min(positions, needed)
