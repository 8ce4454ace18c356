"""An inference interface whose work outlives the process: what earlier attempts left of it is gone on with, and what
there is of it can be written at any time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.inference.api import AnswerPrefix, Completion, GenerationRequest, ResumableInference
from megatron_rl.rollout.bank.file import Entry, Record
from megatron_rl.rollout.bank.records import (
    AnswerKey,
    Lineage,
    answer_key,
    join,
    part_record,
    prompt_checksum,
)
from megatron_rl.rollout.encoding import decode_group


@dataclass(frozen=True, slots=True)
class EarlierWork:
    """What earlier attempts left: records on disk, whose bodies are read when they are needed. One that is gone or
    cannot be read costs generating it again."""

    groups: dict[int, Entry]
    """By ordinal."""
    parts: dict[AnswerKey, list[Entry]]
    """In the order in which they were written."""
    versions: dict[int, int]
    """Policy version under which an ordinal with parts was submitted."""

    @classmethod
    def index(cls, entries: Iterable[Entry], *, with_parts: bool) -> EarlierWork:
        """entries: a later one takes precedence over an earlier one."""
        groups: dict[int, Entry] = {}
        parts: dict[AnswerKey, list[Entry]] = defaultdict(list)
        versions: dict[int, int] = {}
        for entry in entries:
            if entry.head["kind"] == "group":
                groups[entry.head["ordinal"]] = entry
            elif with_parts:
                parts[answer_key(entry.head)].append(entry)
                versions[entry.head["ordinal"]] = entry.head["version"]
        return cls(groups, dict(parts), versions)

    def scored(self, ordinals: Sequence[int], problem: Callable[[int], Problem]) -> dict[int, TrajectoryGroup]:
        """Groups of these ordinals."""
        found = {}
        for ordinal in ordinals:
            entry = self.groups.get(ordinal)
            body = _body(entry) if entry else None
            if entry and body is not None:
                found[ordinal] = decode_group(entry.head, body, problem(ordinal))
        return found

    def beginning(self, answer: AnswerKey) -> AnswerPrefix | None:
        return join((entry.head, _body(entry)) for entry in self.parts.get(answer, []))


def _body(entry: Entry) -> bytes | None:
    with suppress(OSError):
        return entry.read()
    return None


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group of this attempt."""

    group: TrajectoryGroup
    version: int
    newest: int
    """See `group_record`."""


@dataclass(slots=True)
class _OpenRequest:
    """A request whose group is not scored yet."""

    request: GenerationRequest
    ordinal: int
    prompt: int
    """Its checksum."""
    written: dict[int, int]
    """Tokens of each sample that are on disk or on their way there."""
    completions: list[Completion] | None = None


class Recording:
    """Implements `InferenceInterface` for the agents of one driver."""

    def __init__(
        self,
        inference: ResumableInference,
        earlier: Callable[[], EarlierWork],
        lineage: Lineage,
        scored: Callable[[ScoredGroup], None],
        *,
        with_parts: bool,
    ) -> None:
        """
        Args:
            earlier: what there is of it by now.
            scored: is told every group of this attempt.
            with_parts: whether interrupted answers are gone on with.
        """
        self._inference = inference
        self._earlier = earlier
        self._lineage = lineage
        self._scored = scored
        self._with_parts = with_parts
        self._versions: dict[int, int] = {}
        self._open: dict[str, _OpenRequest] = {}

    def policy_version(self, ordinal: int) -> int:
        """The one that an ordinal's keys are made of: that under which it was first submitted."""
        earlier = self._earlier().versions.get(ordinal, self._inference.policy_version)
        return self._versions.setdefault(ordinal, earlier)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`."""
        ordinal = request.ordinal
        if ordinal is None or not self._with_parts:
            return await self._inference.generate(request)
        prompt = prompt_checksum(request)
        answers = ((sample, (request.key, prompt, sample)) for sample in range(request.num_samples))
        earlier = self._earlier()
        beginnings = ((sample, earlier.beginning(answer)) for sample, answer in answers)
        known = {sample: beginning for sample, beginning in beginnings if beginning is not None}
        request = replace(request, known=known)
        written = {sample: len(beginning.tokens) for sample, beginning in known.items()}
        work = self._open[request.id] = _OpenRequest(request, ordinal, prompt, written)
        work.completions = await self._inference.generate(request)
        return work.completions

    def add(self, group: TrajectoryGroup) -> None:
        """A group is scored: the parts of its answers are of no more use."""
        ordinal = group.ordinal
        newest = self._newest(chain.from_iterable(each.versions for each in group.trajectories))
        self._scored(ScoredGroup(group, self.policy_version(ordinal), newest))
        self.forget({ordinal})

    def forget(self, ordinals: Collection[int]) -> None:
        """Nothing of these is written any more."""
        self._open = {request_id: work for request_id, work in self._open.items() if work.ordinal not in ordinals}
        for ordinal in ordinals:
            self._versions.pop(ordinal, None)

    def tokens_of(self, ordinals: Collection[int]) -> int:
        """How many tokens there are of answers to these, which are not scored."""
        return sum(
            len(beginning.tokens)
            for request_id, _, beginning in self._known()
            if (work := self._open.get(request_id)) and work.ordinal in ordinals
        )

    def new_parts(self) -> list[Record]:
        """Parts of answers that are not written yet, of groups that are not scored."""
        if not self._open:
            return []
        records = []
        for request_id, sample, beginning in self._known():
            work_of = self._open.get(request_id)  # none: not a prompt of the stream
            if work_of is None or len(beginning.tokens) <= (written := work_of.written.get(sample, 0)):
                continue
            records.append(
                part_record(
                    work_of.ordinal,
                    self.policy_version(work_of.ordinal),
                    self._newest(beginning.versions[written:]),
                    (work_of.request.key, work_of.prompt, sample),
                    written,
                    beginning,
                    self._lineage,
                )
            )
            work_of.written[sample] = len(beginning.tokens)
        return records

    def _newest(self, versions: Iterable[int]) -> int:
        """Of the weights behind tokens of these versions: the first replicas sample by the next ones while the last
        still get them, and until then those are not the inference's."""
        return max(self._inference.policy_version, max(versions, default=0))

    def _known(self) -> list[tuple[str, int, AnswerPrefix]]:
        """By request and sample, what there is of the answers of groups that are not scored."""
        found = [(each.request_id, each.sample, each.prefix) for each in self._inference.partial_answers()]
        for request_id, work in self._open.items():
            for sample, one in enumerate(work.completions or []):
                found.append((request_id, sample, AnswerPrefix(one.tokens, one.logprobs, one.versions)))
        return found
