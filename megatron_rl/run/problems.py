"""What a run is trained on: chosen when it starts, the same on all ranks, and the same in every attempt.

The prompt stream counts problems. Where others stand behind its ordinals than before (the data were edited, the package
that makes them was updated), some would be trained on twice and others never, held-out ones perhaps among them, and
nothing in the record would show it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_rl.agent.api import Environment, TrainingSet
from megatron_rl.agent.problem_digest import ProblemDigest, differences
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read
from megatron_rl.contract.run_records import Fork
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rollout.fitting import fitting

logger = logging.getLogger("megatron_rl")

PATIENCE_S = 30.0
"""For a fork.json that cannot be read: a stale mount."""


def choose_problems(
    environment: Environment, config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[TrainingSet], dict[str, int]]:
    """What is trained on, and how many problems are not, because their prompt leaves no room for an answer.

    Raises ConfigurationError where none of an environment's is left.
    """
    longest = config.sequence_length - config.sampling.max_new_tokens
    room = f"training.sequence_length {config.sequence_length} less sampling.max_new_tokens"
    chosen: list[TrainingSet] = []
    left_out: dict[str, int] = {}
    for each in environment.training_sets():
        name = each.environment or config.task.name
        try:
            found = fitting(each, longest, tokenizer.encode)
        except ValueError as error:
            raise ConfigurationError(f"environment {name!r}: {error}") from error
        if not found.training_set.problems:
            raise ConfigurationError(
                f"environment {name!r}: the prompts of all its {found.problems} training problems are longer than "
                f"{longest} tokens, {room} {config.sampling.max_new_tokens}: nothing is left to train on"
            )
        if found.left_out:
            left_out[name] = found.left_out
            logger.warning(
                "environment %r: %d of %d training problems left out, their prompts are longer than %d tokens (%s %d)",
                *(name, found.left_out, found.problems, longest, room, config.sampling.max_new_tokens),
            )
        chosen.append(found.training_set)
    return chosen, left_out


def digests_of(training_sets: Sequence[TrainingSet], only: str) -> dict[str, ProblemDigest]:
    """By environment. only: what the one is called that has no id, where it is the only one."""
    return {each.environment or only: ProblemDigest.of(each.problems) for each in training_sets}


def check_alike(problems: Mapping[str, ProblemDigest], control: dist.ProcessGroup) -> None:
    """Raises RuntimeError on the ranks that have other problems than most. Collective over all ranks.

    It is a crash and no bad configuration: a file system that shows a node an older file catches up, and a node where
    it happens again is avoided. The other ranks, whose nodes are not to blame, leave when they lose these.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(of_ranks, tuple(problems.items()), group=control)
    ((of_most, _),) = Counter(of_ranks).most_common(1)  # of equally many, what the lowest rank has
    if differing := differences(dict(of_most), problems):
        raise RuntimeError(
            "this rank has other training problems than most: its node shows it other data or has another package, or "
            f"the environment draws others in every process. {'; '.join(differing)}"
        )


def check_unchanged(
    run_dir: RunDir, step: int, trained: Mapping[str, ProblemDigest], now: Mapping[str, ProblemDigest]
) -> None:
    """Refuse to go on after `step` with other problems than before; but for a fork that begins there, which somebody
    has asked for and which takes those that there are.

    Nobody watches a run that starts again by itself, and a retry would find the same: so it waits for somebody to look.

    trained: what was trained on up to the checkpoint; empty where it does not say, or there is none.

    Raises ConfigurationError.
    """
    changed = "; ".join(differences(trained, now) if trained else [])
    if not changed:
        return
    fork = read(Fork, run_dir.fork, PATIENCE_S)
    if isinstance(fork, Fork) and fork.step == step:
        logger.warning("goes on with other training problems than %s: %s", fork.source, changed)
        return
    name = run_dir.root.name
    raise ConfigurationError(
        f"the training problems are not those that the run had up to step {step}: some would be trained on twice, "
        "others never. Bring back the data, or the package that makes the problems, and `mrl resume "
        f"{name}`; or go on with those that there are now, in a new run: `mrl fork {name}@{step}`. Changed: {changed}"
    )
