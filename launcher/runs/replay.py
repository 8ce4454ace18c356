"""Repetition of a recorded group: which group and which checkpoint are meant, and what differs from the record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from launcher.backends.child import ModuleProcess
from launcher.doctor.preflight import refuse_unready
from launcher.errors import BadInput, Failed
from launcher.recipe.load import read_resolved
from launcher.runs.owner import refuse_others
from launcher.runs.rollout_selection import recorded_groups
from megatron_rl.contract.manifest import CheckpointError, read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import STEPS_PER_FILE, AnswerLine, GroupLine, group_json, parent_of
from megatron_rl.contract.shapes import from_json
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.registry import required_extras
from megatron_rl.recipe.requests import Replay

MODULE = "megatron_rl.run.standalone.replay"
NAMED = 8  # prompts or steps to name where another one was asked for


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded group, and what became of it today."""

    recorded: GroupLine
    checkpoint: int | None
    """Step of the weights that answered again; None: no answer was sampled."""
    again: GroupLine | None
    """The answers of these weights, scored by today's code; None: no answer was sampled."""
    scores: Sequence[Mapping[str, Any]]
    """Score of each recorded answer by today's code: `reward` and `components`, or `lost`, the reason why it has none;
    empty where the environment does not score answers itself."""
    notes: tuple[str, ...]

    def pairs(self) -> list[Pair]:
        """Return the recorded answers, each with the new one of the same sample."""
        again = {} if self.again is None else dict(zip(_samples(self.again), self.again.answers, strict=True))
        rewards = {} if self.again is None else dict(zip(_samples(self.again), self.again.rewards, strict=True))
        return [
            Pair(sample, answer, again.get(sample), rewards.get(sample))
            for sample, answer in zip(_samples(self.recorded), self.recorded.answers, strict=True)
        ]


class Pair(NamedTuple):
    sample: int
    recorded: AnswerLine
    again: AnswerLine | None  # None: nothing was sampled, or the answer was lost
    reward: float | None  # of `again`

    @property
    def differs_at(self) -> tuple[int, int] | None:
        """Sequence and place of the first token that differs, where one of them ends at the latest, or the end of the
        last sequence that both have; None: they are equal, or there is only one answer."""
        if self.again is None:
            return None
        for number, (old, new) in enumerate(zip(self.recorded.sequences, self.again.sequences, strict=False)):
            if old.tokens != new.tokens:
                both = enumerate(zip(old.tokens, new.tokens, strict=False))
                shorter = min(len(old.tokens), len(new.tokens))
                return number, next((place for place, (one, other) in both if one != other), shorter)
        both_have = min(len(self.recorded.sequences), len(self.again.sequences))
        if both_have < max(len(self.recorded.sequences), len(self.again.sequences)):
            return both_have - 1, len(self.again.sequences[both_have - 1].tokens)
        return None

    @property
    def largest_difference(self) -> float:
        """Largest difference of the log-probs of equal tokens before the first one that differs."""
        if self.again is None:
            return 0.0
        sequences = zip(self.recorded.sequences, self.again.sequences, strict=False)
        return max(
            (_difference(old.tokens, new.tokens, old.logprobs, new.logprobs) for old, new in sequences), default=0
        )


def _difference(old: Sequence[int], new: Sequence[int], before: Sequence[float], after: Sequence[float]) -> float:
    largest = 0.0
    for one, other, first, second in zip(old, new, before, after, strict=False):
        if one != other:
            break
        largest = max(largest, abs(first - second))
    return largest


def changed_scores(recorded: GroupLine, place: int, score: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what today's code scores otherwise: name of a component, or `reward` -> recorded and new value; None for a
    component that there is not."""
    if "lost" in score:
        return {"reward": (recorded.rewards[place], None)}
    before = {"reward": recorded.rewards[place], **recorded.answers[place].components}
    now = {"reward": score["reward"], **score["components"]}
    names = [*before, *(name for name in now if name not in before)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def replay(
    run: RunDir,
    step: int,
    prompt: str,
    *,
    checkpoint: int | None = None,
    sample: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    trust: bool = False,
) -> Replayed:
    """Answer the prompt of a recorded group again, and score the recorded answers by today's code. Takes as long as the
    start of a process with torch, and then as the answers.

    Args:
        prompt: its ordinal, or the digest of its problem or the start of one, as `mrl rollouts` names them.
        checkpoint: step of the weights that answer; default: those that sampled the group.
        sample: False: only score the recorded answers; this needs no checkpoint.
        trust: whether to run the code and open the checkpoints of another user's run.

    Raises BadInput where the group or the checkpoint is missing, Failed where the process fails.
    """
    refuse_others(run, trust)
    config = read_resolved(run.resolved)
    if config.supervised or not config.generates:
        raise BadInput(f"{run.root.name} trains on rows of data, so it has sampled no answers that could be repeated")
    recorded = _group(run, step, prompt)
    chosen = _checkpoint(run, recorded, checkpoint) if sample else None
    refuse_unready(required_extras(config.task), device, policy=str(run.root) if sample else None)
    asked = Replay(
        run=str(run.root.absolute()),
        group=json.loads(group_json(recorded)),
        checkpoint=None if chosen is None else str(run.checkpoint(chosen).absolute()),
        device=device,
    )
    said: dict[str, Any] = {}
    with ModuleProcess(MODULE) as child:
        child.send(asked.model_dump_json())
        child.end_input()
        for one in child.said():
            said |= one
        child.finish()
    notes = [said[name] for name in ("unscored",) if name in said]
    if "unscored" in said and "group" not in said:
        raise BadInput(f"{run.root.name}: nothing can be repeated: {'; '.join(notes)}")
    again = from_json(GroupLine, said["group"]) if "group" in said else None
    if again is not None:
        notes += _caveats(config, recorded)
    if said.get("programs"):
        notes.append("a program took part again: what its tools, its clock and other servers say may differ")
    return Replayed(recorded, chosen if again else None, again, said.get("scores", ()), tuple(notes))


def _group(run: RunDir, step: int, prompt: str) -> GroupLine:
    """Return a recorded group with tokens. Raises BadInput, which names those that there are."""
    fork = parent_of(run)
    if fork is not None and step <= fork.step:
        raise BadInput(f"step {step} is one of {fork.source}, from which {run.root.name} was forked: replay that run")
    try:
        groups = [*recorded_groups(run, (step, step))]
    except Failed as error:
        raise BadInput(error.problems) from error
    with_tokens = [group for group in groups if group.answers]
    if not with_tokens:
        raise BadInput(f"step {step} was recorded without tokens; {_steps_with_tokens(run, step)}")
    meant = [group for group in groups if str(group.ordinal) == prompt]
    meant = meant or [group for group in groups if group.problem.startswith(prompt)]
    named = ", ".join(f"{group.ordinal} ({group.problem})" for group in with_tokens[:NAMED])
    if len(meant) == 1 and meant[0].answers:
        return meant[0]
    if len(meant) == 1:
        raise BadInput(
            f"prompt {prompt} of step {step} was recorded without tokens; with tokens: {named}. logging.samples "
            "records more prompts of a step"
        )
    found = f"{len(meant)} prompts" if meant else "no prompt"
    raise BadInput(f"{prompt} means {found} of step {step}; with tokens: {named}")


def _steps_with_tokens(run: RunDir, step: int) -> str:
    try:
        near = recorded_groups(run, (step - STEPS_PER_FILE, step + STEPS_PER_FILE))
        steps = sorted({group.step for group in near if group.answers}, key=lambda other: abs(other - step))[:NAMED]
    except Failed:
        steps = []
    named = f"the nearest with tokens: {', '.join(map(str, steps))}" if steps else "none near it has them"
    return f"{named}. logging.samples_every records more steps"


def _checkpoint(run: RunDir, recorded: GroupLine, asked: int | None) -> int:
    """Return the step of the checkpoint that answers. Raises BadInput, which names the nearest one."""
    if recorded.begun_version < 0:
        raise BadInput(
            f"step {recorded.step} was recorded by an older mrl, without what its random numbers depend on; "
            "--no-sample only scores the recorded answers"
        )
    try:
        kept = run.checkpoint_steps()
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from error
    if asked in kept:
        return asked
    versions = {step: version for step in kept if (version := _version(run, step)) is not None}
    if asked is None:
        for step, version in versions.items():
            if version == recorded.lowest_version:
                return step
    if not kept:
        raise BadInput(f"{run.root.name} keeps no checkpoint; --no-sample only scores the recorded answers")
    wanted = recorded.step - 1 if asked is None else asked
    nearest = min(kept, key=lambda step: abs(step - wanted))
    what = f"step {asked}" if asked is not None else f"policy version {recorded.lowest_version}, which sampled this,"
    raise BadInput(
        f"no checkpoint of {what} is kept; the nearest is that of step {nearest}: --checkpoint {nearest}. save.keep "
        "and save.keep_every keep more"
    )


def _version(run: RunDir, step: int) -> int | None:
    try:
        version = read_manifest(run.checkpoint(step)).meta.get("policy_version", step)
    except (CheckpointError, OSError):
        return None
    return version if isinstance(version, int) else None


def _caveats(config: RunConfig, recorded: GroupLine) -> list[str]:
    found = []
    if config.inference.engine != "native":
        found.append(f"sampled by {config.inference.engine}, and again by mrl's own engine: the numbers are others")
    if recorded.lowest_version != recorded.highest_version:
        versions = f"{recorded.lowest_version} to {recorded.highest_version}"
        found.append(f"sampled by policy versions {versions}, and again by one alone")
    return found


def _samples(group: GroupLine) -> Sequence[int]:
    return group.samples or range(len(group.answers))
