"""An evaluation from its request to its result, on all ranks of its world: rank 0 tells what they all have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.agent.registry import build_environment
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.records import write
from megatron_rl.errors import ConfigurationError
from megatron_rl.evaluate.answer_file import kept_answers, naming
from megatron_rl.evaluate.blocks import BlockRunner, Progress, RunBlock, Waits
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.evaluate.result import result
from megatron_rl.evaluate.settings import default_out, settings_of
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.standalone.policy import ROWS, open_policy
from megatron_rl.standalone.source import Source, find_source


def evaluate(
    evaluation: Evaluation,
    run: RunBlock,
    report: Callable[[Progress], None],
    world: StandaloneWorld | None = None,
    waits: Waits = nullcontext,
    conclude: Callable[[bool], None] | None = None,
) -> tuple[EvaluationResult, Path] | None:
    """Answer what is not answered yet, and write the result; it and its file. None where it was given up, when what has
    been answered is kept, and on all ranks but the first. Collective.

    Args:
        world: of this rank; default: there is no other.
        conclude: called on rank 0 before any rank leaves, with whether all is answered.

    Raises:
        ConfigurationError: it cannot be asked so, or its file holds something else.
        CheckpointError: the checkpoint is damaged or cannot be read.
        OSError: the files cannot be written.
    """
    asked, world = evaluation.evaluate, world or StandaloneWorld.single()
    if world.size != asked.ranks:
        raise ConfigurationError(
            f"evaluate: {asked.replicas} replicas of {asked.tp} ranks are {asked.ranks}, and there are {world.size}"
        )
    source = find_source(asked.checkpoint, asked.dtype, asked.date)
    try:
        environment = build_environment(evaluation.environment, source.tokenizer)
        sets = choose_sets(environment.evaluation_problems(), asked.sets, asked.prompts)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    inference = source.recipe.inference if source.recipe else InferenceConfig(max_batch=ROWS)
    # A block must not depend on what the blocks before it have left in the cache.
    inference = inference.model_copy(update={"share_prefixes": False})
    with open_policy(
        source,
        device=asked.device,
        threads=asked.threads,
        max_length=_longest(sets, source, evaluation.sampling),
        inference=inference,
        tp=asked.tp,
        world=world,
    ) as opened:
        if not opened.ranks.drives:
            opened.engine.follow(waits)
            return None
        answering = BlockRunner(evaluation, environment, opened, sets, inference.max_batch, run, report, waits)
        if world.rank:
            answering.help()
            answering.part()
            return None
        settings = settings_of(evaluation, opened, environment, sets, inference.max_batch)
        out = Path(asked.out) if asked.out else default_out(source, evaluation, sets, settings)
        found = None
        with kept_answers(out.with_suffix(".answers.jsonl"), settings) as answers:
            if answering.lead(answers):
                sizes = {name: len(problems) for name, problems in sets.items()}
                found = result(settings, sizes, answers.known, str(answers.path))
                with naming(out):
                    write(out, found)
        if conclude:
            conclude(found is not None)
        answering.part()
        return found and (found, out)


def choose_sets(
    there: Mapping[str, Sequence[Problem]], names: Sequence[str] | None, prompts: int | None
) -> dict[str, Sequence[Problem]]:
    """The problems of the sets that were asked for. Raises ValueError where there is no such set, or none at all."""
    if not there:
        raise ValueError("the environment has no evaluation problems")
    if missing := sorted(set(names or ()) - there.keys()):
        raise ValueError(f"--set {missing[0]}: the environment has no such set; there are {', '.join(sorted(there))}")
    chosen = {name: there[name][:prompts] for name in (there if names is None else dict.fromkeys(names))}
    if not any(chosen.values()):
        raise ValueError(f"{', '.join(chosen)}: there are no problems in it")
    return chosen


def _longest(sets: Mapping[str, Sequence[Problem]], source: Source, sampling: Sampling) -> int:
    """Tokens that the cache has room for: the longest prompt and answer, but no more than the model knows. A prompt
    that leaves no room for an answer is lost, and counted so."""
    positions = source.model.max_position_embeddings
    if sampling.max_new_tokens >= positions:
        raise ConfigurationError(
            f"sampling.max_new_tokens {sampling.max_new_tokens}: the model knows {positions} positions, so there is no "
            "room for a prompt"
        )
    prompts = (source.tokenizer.encode(problem.prompt) for problems in sets.values() for problem in problems)
    return min(positions, max(map(len, prompts)) + sampling.max_new_tokens)
