"""An evaluation from request to result, on all ranks of its world. Rank 0 writes the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_rl.agent.api import Environment, build_environment
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.problem_digest import ProblemDigest, prompt_digest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.algorithms.evaluation_scores import average, result
from megatron_rl.checkpoint.source import PolicySource, find_source
from megatron_rl.contract.evaluation_records import SAMPLED, EvaluationResult, PassRate, ProblemAnswers, ProblemKey
from megatron_rl.contract.files import WRITE_PATIENCE_S, until_written, write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import encode_line, write
from megatron_rl.generate.engine.opened_policy import MOST_POSITIONS, ROWS, open_policy
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.run.evaluate.answer_file import kept_answers
from megatron_rl.run.evaluate.blocks import BlockRunner, EvaluationProgress, OpenedEvaluation, RunBlock, Waits

TRAINING = "training"  # name of the set of training problems
PASS_RATES = ".pass_rates.jsonl"  # end of the name of a file of pass rates
SHOWN = 200  # characters of a prompt in it


def evaluate(
    evaluation: Evaluation,
    run: RunBlock,
    report: Callable[[EvaluationProgress], None],
    world: StandaloneWorld | None = None,
    waits: Waits = nullcontext,
    conclude: Callable[[bool], None] | None = None,
) -> tuple[EvaluationResult, Path] | None:
    """Answer the problems that are not answered yet, and write the result. Collective. Returns the result and its file;
    None on ranks other than 0, and if the evaluation was interrupted, whose answers are kept.

    Args:
        world: of this rank; default: the only rank.
        conclude: called on rank 0 with whether all is answered, before any rank leaves.

    Raises:
        ConfigurationError: the request is invalid, or its file has other content.
        CheckpointError: the checkpoint is damaged or cannot be read.
        OSError: the files cannot be written.
    """
    world = world or StandaloneWorld.single()
    if world.size != evaluation.ranks:
        raise ConfigurationError(
            f"evaluate: {evaluation.replicas} replicas of {evaluation.tp} ranks need {evaluation.ranks} ranks, not "
            f"{world.size}"
        )
    source = find_source(evaluation.checkpoint, evaluation.dtype, evaluation.date)
    try:
        environment = build_environment(evaluation.environment, source.tokenizer)
        sets = choose_sets(sets_of(environment, evaluation), evaluation.sets, evaluation.prompts)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    inference = source.recipe.inference if source.recipe else InferenceConfig(max_batch=ROWS)
    longest, rows = _longest(sets, source, evaluation.sampling, environment), inference.max_batch
    with _opened(evaluation, source, inference, longest, world, report, waits) as opened:
        if opened is None:
            return None
        runner = BlockRunner(evaluation, environment, opened, sets, rows, run, report, waits)
        try:
            if world.rank:
                runner.run_share()
                found = None
            else:
                found = _answered(runner)
                if conclude:
                    conclude(found is not None)
            runner.leave()
            return found
        finally:
            run(environment.close(), opened.engine)


@contextmanager
def _opened(
    evaluation: Evaluation,
    source: PolicySource,
    inference: InferenceConfig,
    longest: int,
    world: StandaloneWorld,
    report: Callable[[EvaluationProgress], None],
    waits: Waits,
) -> Iterator[OpenedEvaluation | None]:
    """Open the policy; None on a rank that has followed the first of its replica to the end."""
    if evaluation.engine == "vllm":
        from megatron_rl.run.evaluate.vllm_answers import open_vllm  # imports httpx

        def waits_for(what: str) -> None:
            report(EvaluationProgress("", "", 0, 0, what))

        with open_vllm(source, evaluation, longest, inference.max_batch, waits_for) as opened:
            yield opened
        return
    with open_policy(
        source,
        device=evaluation.device,
        threads=evaluation.threads,
        max_length=longest,
        # Answers of a block must not depend on what earlier blocks have left in the cache.
        inference=inference.model_copy(update={"share_prefixes": False}),
        tp=evaluation.tp,
        world=world,
    ) as policy:
        engine, ranks = policy.engine, policy.ranks
        if not ranks.drives:
            engine.follow(waits)
            yield None
            return
        yield OpenedEvaluation(
            engine, source, policy.digest, replica=ranks.index, replicas=ranks.count, leaders=policy.leaders
        )


def _answered(runner: BlockRunner) -> tuple[EvaluationResult, Path] | None:
    """Answer all problems, on rank 0, and write the result. None if the evaluation was interrupted."""
    evaluation, opened, sets = runner.evaluation, runner.opened, runner.sets
    settings = settings_of(evaluation, opened, runner.environment, sets, runner.rows)
    out = Path(evaluation.out) if evaluation.out else default_out(opened.source, evaluation, sets, settings)
    with kept_answers(out.with_suffix(".answers.jsonl"), settings) as answers:
        if not runner.run_all(answers):
            return None
        sizes = {name: len(problems) for name, problems in sets.items()}
        found = result(settings, sizes, answers.known, str(answers.path))
        if evaluation.keep:
            kept = out.with_suffix(PASS_RATES)
            found = found._replace(pass_rates=str(kept))
            text = "".join(f"{encode_line(line)}\n" for line in pass_rates(sets, answers.known))
            until_written(kept, lambda: write_atomic(kept, text))
        write(out, found, patience=WRITE_PATIENCE_S)
    return found, out


def sets_of(environment: Environment, evaluation: Evaluation) -> dict[str, Sequence[Problem]]:
    """Return the problems by the name of their set: the evaluation sets, or with `keep` the training sets, which are
    called training or ID/training."""
    if not evaluation.keep:
        return dict(environment.evaluation_problems())
    return {f"{each.environment}/{TRAINING}".lstrip("/"): each.problems for each in environment.training_sets()}


def pass_rates(sets: Mapping[str, Sequence[Problem]], known: Mapping[ProblemKey, ProblemAnswers]) -> Iterator[PassRate]:
    """Yield the pass rate of each problem that has sampled answers."""
    for name, problems in sets.items():
        for number, problem in enumerate(problems):
            answers = known[name, SAMPLED, number].answers
            if rate := average([answers]):
                begin = problem.prompt[:SHOWN]
                yield PassRate(problem.environment, prompt_digest(problem), rate.value, len(answers), begin)


def choose_sets(
    there: Mapping[str, Sequence[Problem]], names: Sequence[str] | None, prompts: int | None
) -> dict[str, Sequence[Problem]]:
    """Return the problems of the requested sets. Raises ValueError if a set does not exist, or if all are empty."""
    if not there:
        raise ValueError("the environment has no evaluation problems; --keep answers those to train on")
    if missing := sorted(set(names or ()) - there.keys()):
        raise ValueError(f"--set {missing[0]}: the environment has no such set; there are {', '.join(sorted(there))}")
    chosen = {name: there[name][:prompts] for name in (there if names is None else dict.fromkeys(names))}
    if not any(chosen.values()):
        raise ValueError(f"{', '.join(chosen)}: the set has no problems")
    return chosen


def _longest(
    sets: Mapping[str, Sequence[Problem]], source: PolicySource, sampling: Sampling, environment: Environment
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


def settings_of(
    evaluation: Evaluation,
    opened: OpenedEvaluation,
    environment: Environment,
    sets: Mapping[str, Sequence[Problem]],
    rows: int,
) -> dict[str, Any]:
    """Return all settings on which scores depend, as JSON. The number of threads is not among them: it only changes the
    rounding of some sums, and a job may resume on a node with another number."""
    source = opened.source
    return {
        "checkpoint": {
            "path": str(source.folder),
            "name": source.name,
            "kind": source.kind,
            "step": source.step,
            "policy_version": opened.engine.policy_version,
            "digest": opened.digest,
            "dtype": source.model.dtype,
        },
        "environment": evaluation.environment.model_dump(mode="json"),
        "prompt_format": environment.prompt_format,
        "compares_answers": environment.compares_answers,
        "sets": {name: asdict(ProblemDigest.of(problems)) for name, problems in sets.items()},
        "sampling": evaluation.sampling.model_dump(mode="json"),
        "k": evaluation.k,
        "greedy": evaluation.greedy,
        "seed": evaluation.seed,
        "golden": {name: golden_digest(problems) for name, problems in sets.items()},
        "engine": opened.name,
        "device": evaluation.device,
        "rows": rows,
        "version": version("mrl"),
        "code": evaluation.code,
    }


def default_out(
    source: PolicySource, evaluation: Evaluation, sets: Mapping[str, Sequence[Problem]], settings: Mapping[str, Any]
) -> Path:
    """Return a path that is the same for the same settings, and different for others."""
    folder, name = Path("evaluations"), source.name
    if source.step is not None:
        run = RunDir(source.folder.parent.parent)
        folder, name = run.evaluation_results, source.folder.name
    of = f"{stable_key(repr(settings)):016x}"[:8]
    return folder / f"{name.replace('/', '-')}.{evaluation.environment.name}.{'-'.join(sets)}.{of}.json"


def golden_digest(problems: Sequence[Problem]) -> str:
    """Return a digest of the golden data that answers are judged by. A value that JSON cannot represent counts only by
    its type, since its text may differ between processes."""
    hashed = hashlib.sha256()
    for problem in problems:
        known = json.dumps(dict(problem.golden), skipkeys=True, default=lambda value: type(value).__qualname__)
        hashed.update(known.encode() + b"\n")
    return hashed.hexdigest()[:16]
