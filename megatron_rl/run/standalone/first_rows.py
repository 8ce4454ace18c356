"""The lesson of a recipe: tokenizer, environment and sets to train on, and a check of their first rows before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.agent.api import Environment, TrainingSet, build_environment
from megatron_rl.agent.dropped_rows import CHECKED
from megatron_rl.agent.scripted_trial import try_answers
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.rollout.known_rates import rates_of, read_rates
from megatron_rl.learn.supervised.example_rows import RowEncoder, demonstrations, token_example
from megatron_rl.learn.supervised.row_sets import RowSets, open_sets
from megatron_rl.model.chat.turn_end import unknown_end
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.registry import used_files, with_kept_files


@dataclass(frozen=True, slots=True)
class Lesson:
    """Rows or problems that a recipe trains on, and how they become tokens."""

    config: RunConfig
    tokenizer: Tokenizer
    environment: Environment | None
    sets: Sequence[TrainingSet]  # sets of rows of data, or problems of each environment
    rows: RowSets | None = None  # rows of data, whose sets these are; None: problems


def open_lesson(config: RunConfig, copies: RunDir | None = None, patience: float = 0.0) -> Lesson:
    """Open the lesson of a recipe as a rank does.

    Args:
        copies: run whose copies of the user's code are used; None: the files themselves.
        patience: seconds for which reading the record of the copies is retried.

    Raises ValueError.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    environment = None
    if config.generates:
        task = config.task if copies is None else with_kept_files(config.task, copies, patience)
        environment = build_environment(task, tokenizer)
    if config.supervised or environment is None:
        rows = open_sets(config.rows, environment)
        return Lesson(config, tokenizer, environment, rows.trained, rows)
    return Lesson(config, tokenizer, environment, environment.training_sets())


def unknown_end_of(lesson: Lesson) -> str | None:
    """Say that answers do not end where the chat template ends them; None if they do, or if it does not write them."""
    if lesson.config.supervised:
        return None if lesson.config.rows.chat == "never" else unknown_end(lesson.tokenizer)
    first = next((problem for each in lesson.sets for problem in each.problems), None)
    return None if first is None else unknown_end(lesson.tokenizer, first.prompt if first.is_prompt else None)


class Fault(NamedTuple):
    """Something that the run would end with, or train on without a word."""

    text: str
    certain: bool = True
    """False: it may be another machine's or another moment's, such as a judge that cannot be reached from here."""


def faults(lesson: Lesson, resumes: bool = False) -> Iterator[Fault]:
    """Yield the faults of the first rows, of the prompts, and of the user's reward.

    resumes: whether the run has a checkpoint, so that it may need no worked examples any more.
    """
    yield from map(Fault, (*_unknown_sets(lesson), *_unusable_rates(lesson)))
    if lesson.config.supervised:
        encoder = RowEncoder(lesson.config.rows, lesson.tokenizer, lesson.config.sequence_length)
        assert lesson.rows is not None
        for rows in (*(each.problems for each in lesson.sets), *lesson.rows.held_out.values()):
            try:
                encoder.check(rows)
            except ValueError as error:
                yield Fault(str(error))
        yield from map(Fault, _too_many_steps(lesson.config, lesson.rows.total))
    elif lesson.environment is not None:
        begins = not resumes or lesson.config.keeps_initial_weights
        found = [*(_without_examples(lesson) if begins else ()), *_faults_of_problems(lesson)]
        yield from map(Fault, found)
        if not found:
            yield from _faults_of_reward(lesson, lesson.environment)


def _unknown_sets(lesson: Lesson) -> Iterator[str]:
    there = {} if lesson.environment is None else lesson.environment.evaluation_problems()
    for name in lesson.config.evaluation.sets:
        if name not in there:
            known = f"there are {', '.join(sorted(there))}" if there else "the run has none"
            yield f"evaluation.sets.{name}: there is no evaluation set of this name; {known}"


def _unusable_rates(lesson: Lesson) -> Iterator[str]:
    curriculum = lesson.config.curriculum
    if curriculum is None or curriculum.start is None:
        return
    try:
        known = read_rates(curriculum.start)
        for each in lesson.sets:
            rates_of(each, known)
    except ConfigurationError as error:
        yield str(error)


def _too_many_steps(config: RunConfig, rows: int | None) -> Iterator[str]:
    """rows: of the whole run, where its sets have epochs."""
    steps, each = config.training.steps, config.rows.examples_per_step
    if rows is not None and steps > (most := -(-rows // each)):
        yield (
            f"training.steps is {steps:,}, and the epochs of data.sets have {rows:,} rows, which fill {most:,} steps "
            f"of data.examples_per_step {each}: set training.steps to {most} or less, or raise the epochs"
        )


def _without_examples(lesson: Lesson) -> Iterator[str]:
    if lesson.config.model.init != "supervised":
        return
    name, worked = lesson.config.task.name, demonstrations(lesson.environment)
    if not worked:
        yield (
            f"model.init is supervised, but environment {name!r} has no worked examples: give it `demonstrations`, or "
            "set model.init to from-scratch"
        )
    for number, (prompt, answer) in enumerate(worked[:CHECKED], 1):
        try:
            token_example(prompt, answer, lesson.tokenizer)
        except ValueError as error:
            yield f"environment {name!r}: worked example {number} cannot be turned into tokens: {error}"
            return


def _faults_of_problems(lesson: Lesson) -> Iterator[str]:
    for each in lesson.sets:
        name = each.environment or lesson.config.task.name
        if not each.problems:
            yield f"environment {name!r} has no training problems"
        for number, problem in enumerate(each.problems[:CHECKED], 1):
            if fault := _fault_of_prompt(problem, lesson.tokenizer):
                yield f"environment {name!r}: problem {number} {fault}"
                break


def _fault_of_prompt(problem: Problem, tokenizer: Tokenizer) -> str | None:
    if not problem.is_prompt:
        return None
    try:
        return None if tokenizer.encode(problem.prompt) else "has an empty prompt"
    except ValueError as error:
        return f"cannot be turned into tokens: {error}"


def _faults_of_reward(lesson: Lesson, environment: Environment) -> Iterator[Fault]:
    """Score a right and a wrong answer to the first problem of each environment that scores by the user's code."""
    config = lesson.config
    own = [each for each in lesson.sets if used_files(config.environment_of(each.environment))]
    for each in own:
        problems = [problem for problem in each.problems[:1] if problem.is_prompt]
        if not problems:
            continue
        scoring = f"{_file_key(config, each.environment)}: the reward of an answer to the first problem"
        try:
            for found in try_answers(environment, config.task, problems, lesson.tokenizer):
                for reason in dict.fromkeys(found.get("failures", ())):
                    yield Fault(f"{scoring}: {reason}", certain=False)  # a judge may be out of reach from here
        except ConfigurationError as error:
            yield Fault(f"{scoring}: {error}")


def _file_key(config: RunConfig, name: str) -> str:
    """Return the key of the file of an environment, by its name among several."""
    places = [f"environments.{at}" for at, one in enumerate(config.environments or ()) if one.id == name]
    return f"{(places or ['environment'])[0]}.args.file"
