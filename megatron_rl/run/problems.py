"""The material of a run, its problems or rows: chosen at the start, the same on all ranks and in every attempt.

The prompt stream counts problems. If an ordinal meant another problem than before (the data were edited, or the package
that makes them was updated), some problems would be trained on twice and others never, held-out ones perhaps among
them, and nothing in the record would show it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from megatron_rl.agent.api import Environment, TrainingSet
from megatron_rl.agent.indexed_problems import IndexedProblems, digest_of, prompt_bytes
from megatron_rl.agent.problem_digest import ProblemDigest, differences
from megatron_rl.agent.prompts import check_characters
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import UnreadableRecord, read
from megatron_rl.contract.run_records import Fork
from megatron_rl.learn.rollout.known_rates import read_rates, with_known_rates
from megatron_rl.learn.supervised.row_mix import RowMix
from megatron_rl.model.tokenizer import CharacterTokenizer, Tokenizer
from megatron_rl.rank.control import Control
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.own_code import CopiesUnreadable, kept
from megatron_rl.run.standalone.first_rows import Fault, Lesson, faults, open_lesson, unknown_end_of

logger = logging.getLogger("megatron_rl")

STALE_MOUNT_S = 30.0  # seconds to retry a file of the run directory that cannot be read, as on a stale mount

DATA = "data"  # name of the rows of `data` among the digests
HELD_OUT = ", held out"  # end of the names of held-out rows among them

MOST_TOKENISED = 20_000
"""Prompts of a set that are tokenised at the start, at most; these take some seconds. Other prompts that are too long
are dropped when their turn comes."""

SPARE = 8  # tokens that a text may have beyond its number of bytes: some tokenizers put a blank first


@dataclass(frozen=True, slots=True)
class Material:
    """Problems or rows that a run trains on, and how they become tokens."""

    lesson: Lesson
    """Tokenizer, environment, and the sets without problems that are too long. Its configuration names the run's copies
    of the user's code."""
    left_out: Mapping[str, int]  # number of problems that are too long, by environment
    digests: Mapping[str, ProblemDigest]
    mix: RowMix | None = None  # order of the rows of supervised training

    @property
    def scoring(self) -> Environment | None:
        """Environment that scores the answers to train on; None for rows of data."""
        return None if self.lesson.config.supervised else self.lesson.environment


def build_material(config: RunConfig, here: Here, *, resumes: bool) -> Material:
    """Read the sets to train on, build their environment, and check both. Collective.

    resumes: whether the run has a checkpoint.

    Raises ConfigurationError for an inconsistent recipe, on all ranks, and RuntimeError if this rank's problems differ
    from those of most ranks.
    """
    try:
        config = with_kept_functions(config, here.run_dir)
        lesson = open_lesson(config, here.run_dir, STALE_MOUNT_S)
    except CopiesUnreadable as error:  # no fault of the recipe: the run starts again
        raise UnreadableRecord(str(error)) from error
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    left_out: Mapping[str, int] = {}
    if not config.supervised and lesson.environment is not None:
        sets, left_out = choose_problems(lesson.environment, config, lesson.tokenizer)
        if (curriculum := config.curriculum) is not None and curriculum.only and curriculum.start is not None:
            sets = with_known_rates(sets, read_rates(curriculum.start))
        lesson = replace(lesson, sets=sets)
    if warning := unknown_end_of(lesson):
        logger.warning("%s", warning)
    check_lesson(lesson, resumes, here.groups.control)
    digests = digests_of(lesson.sets, DATA if config.supervised else config.task.name)
    if lesson.rows is not None:
        digests |= {f"{id or DATA}{HELD_OUT}": digest_of(its) for id, its in lesson.rows.held_out.items()}
    check_alike(digests, here.groups.control)
    mix = RowMix(lesson.sets, config.training.seed, lesson.rows.total) if lesson.rows else None
    return Material(lesson, left_out, digests, mix)


def with_kept_functions(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Replace the files of the user's functions by the run's copies. Raises ValueError if their record cannot be
    read."""
    copies = {key: kept(function, run_dir, STALE_MOUNT_S) for key, function in config.grpo.own_functions.items()}
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=copies)})


def check_lesson(lesson: Lesson, resumes: bool, control: Control) -> None:
    """Check the first rows, and the user's reward on an answer, before any model is built. Rank 0 does it for all.

    Raises ConfigurationError on all ranks.
    """
    found: list[Fault] = control.share([*faults(lesson, resumes)] if control.rank == 0 else [])
    for fault in found:
        if not fault.certain:
            logger.warning("%s", fault.text)
    if certain := [fault.text for fault in found if fault.certain]:
        raise ConfigurationError("; ".join(certain))


def choose_problems(
    environment: Environment, config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[TrainingSet], dict[str, int]]:
    """Return the training sets without problems whose prompt leaves no room for an answer, and the number of problems
    left out, by environment. Leaving them out here costs no step an answer.

    Raises ConfigurationError if no problem of an environment is left, or if the tokenizer cannot write a prompt.
    """
    if not all(each.problems for each in environment.training_sets()):
        raise ConfigurationError(f"environment {config.task.name!r} has no training problems")
    _check_prompts(environment, config, tokenizer)
    _check_own_teacher(environment, config)
    longest = config.sequence_length - config.sampling.max_new_tokens
    room = f"training.sequence_length {config.sequence_length} less sampling.max_new_tokens"
    chosen: list[TrainingSet] = []
    left_out: dict[str, int] = {}
    for each in environment.training_sets():
        name = each.environment or config.task.name
        try:
            fitting = without_long_prompts(each, longest, tokenizer.encode)
        except ValueError as error:
            raise ConfigurationError(f"environment {name!r}: {error}") from error
        if not fitting.problems:
            raise ConfigurationError(
                f"environment {name!r}: the prompts of all its {len(each.problems)} training problems are longer than "
                f"{longest} tokens, {room} {config.sampling.max_new_tokens}: nothing is left to train on"
            )
        if missing := len(each.problems) - len(fitting.problems):
            left_out[name] = missing
            logger.warning(
                "environment %r: %d of %d training problems left out, their prompts are longer than %d tokens (%s %d)",
                *(name, missing, len(each.problems), longest, room, config.sampling.max_new_tokens),
            )
        chosen.append(fitting)
    return chosen, left_out


def _check_prompts(environment: Environment, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigurationError for a prompt, also one of an evaluation, with a character that the tokenizer lacks."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return
    sets = [(each.environment or config.task.name, each.problems) for each in environment.training_sets()]
    for name, problems in chain(sets, environment.evaluation_problems().items()):
        for problem in problems:
            try:
                if problem.is_prompt:
                    check_characters(tokenizer, problem.prompt)
            except ValueError as error:
                raise ConfigurationError(f"environment {config.task.name!r}, problems {name!r}: {error}") from error


def _check_own_teacher(environment: Environment, config: RunConfig) -> None:
    """Raise ConfigurationError where the policy would judge answers by what it has read itself, which teaches
    nothing."""
    for each in environment.training_sets():
        teaching = config.teachings.by(each.environment)
        if teaching is not None and teaching.teacher == POLICY and each.problems[0].teacher_prompt is None:
            raise ConfigurationError(
                f"environment {each.environment or config.task.name!r}: distill.teacher is policy, and its problems "
                "have no other prompt for a teacher: give environment.args.teacher_prompt, or Problem.teacher_prompt "
                "in an environment of yours"
            )


def without_long_prompts(whole: TrainingSet, longest: int, encode: Callable[[str], Sequence[int]]) -> TrainingSet:
    """Return the set without the problems whose prompt has more than `longest` tokens, or the set itself if it has
    none.

    Most prompts are not tokenised, because a text has at most one token per byte, plus SPARE. A tokenizer that first
    lengthens a text may break that rule; such prompts are dropped when their turn comes.
    """
    problems = whole.problems

    def too_long(sizes: Iterable[int]) -> set[int]:
        doubtful = (index for index, size in enumerate(sizes) if size and size + SPARE > longest)
        tokenised = islice(doubtful, MOST_TOKENISED)
        return {index for index in tokenised if len(encode(problems[index].prompt)) > longest}

    if isinstance(problems, IndexedProblems):
        if not problems.longest or problems.longest + SPARE <= longest:
            return whole
        fitting = problems.without(f"over {longest} tokens", lambda: too_long(problems.sizes()))
        return whole if len(fitting) == len(problems) else replace(whole, problems=fitting)
    left_out = too_long(map(prompt_bytes, problems))
    if not left_out:
        return whole
    return replace(whole, problems=[each for index, each in enumerate(problems) if index not in left_out])


def digests_of(training_sets: Sequence[TrainingSet], only: str) -> dict[str, ProblemDigest]:
    """Digest of each set, by environment. only: name of the environment if there is a single one, which has no id."""
    return {each.environment or only: digest_of(each.problems) for each in training_sets}


def check_alike(problems: Mapping[str, ProblemDigest], control: Control) -> None:
    """Raises RuntimeError on ranks whose problems differ from those of most ranks. Collective over all ranks.

    This is a crash, not a bad configuration: a file system that shows one node an older file catches up, and a node
    where it happens again is avoided. The other ranks, whose nodes are not to blame, leave when they lose these.
    """
    of_ranks = control.gather(tuple(problems.items()))
    ((of_most, _),) = Counter(of_ranks).most_common(1)  # in a tie, the problems of the lowest rank
    if differing := differences(dict(of_most), problems):
        raise RuntimeError(
            "this rank has other training problems than most: its node shows it other data or has another package, or "
            f"the environment draws others in every process. {'; '.join(differing)}"
        )


def begun_fork(run_dir: RunDir, step: int) -> Fork | None:
    """Return the record of a fork that begins at this step, and so has made no step yet; None for other runs."""
    fork = read(Fork, run_dir.fork, STALE_MOUNT_S)
    return fork if isinstance(fork, Fork) and fork.step == step else None


def check_unchanged(
    run_dir: RunDir, step: int, trained: Mapping[str, ProblemDigest], now: Mapping[str, ProblemDigest]
) -> None:
    """Refuse to continue after `step` with other problems than before. A fork that begins at this step is an exception:
    its user asked for it.

    trained: problems trained on up to the checkpoint; empty without a checkpoint, or if it does not record them.

    Raises ConfigurationError, which no retry follows: a retry would find the same, and a user must decide.
    """
    changed = "; ".join(differences(trained, now) if trained else [])
    if not changed:
        return
    if (fork := begun_fork(run_dir, step)) is not None:
        logger.warning("this fork trains on other problems than %s: %s", fork.source, changed)
        return
    name = run_dir.root.name
    raise ConfigurationError(
        f"the training problems differ from those that the run had up to step {step}: some would be trained on twice, "
        f"others never. Restore the data, or the package that makes the problems, and `mrl resume {name}`; or continue "
        f"with the present problems in a new run: `mrl fork {name}@{step}`. Changed: {changed}"
    )
