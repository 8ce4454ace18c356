"""An inference interface whose work outlives the process: it resumes answers of earlier attempts, and can be written to
disk at any time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest, ResumableInference
from megatron_rl.generate.engine.transcript import NOTHING, Amount
from megatron_rl.learn.rollout.bank.bank_records import (
    AnswerKey,
    Lineage,
    answer_key,
    join,
    part_record,
    problem_checksum,
    prompt_checksum,
)
from megatron_rl.learn.rollout.bank.file import Entry, Record
from megatron_rl.learn.rollout.encoding import decode_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlierWork:
    """Reusable records of earlier attempts. Their bodies stay on disk until they are needed; work whose body is missing
    or damaged is generated again."""

    groups: dict[int, Entry]  # ordinal -> record of its scored group
    parts: dict[AnswerKey, list[Entry]]  # answer -> records of its parts, in the order in which they were written
    versions: dict[int, int]  # policy version under which an ordinal with parts was submitted

    @classmethod
    def index(cls, entries: Iterable[Entry], *, with_parts: bool) -> EarlierWork:
        """Index records; a later one takes precedence over an earlier one."""
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
        """Return the scored groups of these ordinals, as far as they are of the ordinal's present problem. Raises
        OSError: one cannot be read."""
        found = {}
        for ordinal in ordinals:
            entry = self.groups.get(ordinal)
            if entry is None:
                continue
            its = problem(ordinal)
            checksum = problem_checksum(its)
            if entry.head.get("problem", checksum) != checksum:  # older banks have no checksum
                continue
            if (body := entry.read()) is not None:
                found[ordinal] = decode_group(entry.head, body, its)
        return found

    def prefix(self, answer: AnswerKey) -> AnswerPrefix | None:
        return join((entry.head, _part(entry)) for entry in self.parts.get(answer, []))


def _part(entry: Entry) -> bytes | None:
    """Body of a part. One that cannot be read is generated again, with the same random numbers. An error would reach
    the agent, which may take it for a failed answer, and patience would stop the others."""
    try:
        return entry.read(patience=0.0)
    except OSError as error:
        logger.info("a part of an answer is generated again: %s", error)
    return None


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    group: TrajectoryGroup
    version: int
    newest: int  # newest policy version that sampled any of its tokens


@dataclass(slots=True)
class _OpenRequest:
    """A request whose group is not scored yet."""

    request: GenerationRequest
    ordinal: int
    prompt: int  # checksum of the prompt
    written: dict[int, Amount]  # sample -> what is on disk or being written
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
            earlier: returns the records of earlier attempts that are still reusable.
            scored: called with every scored group of this attempt.
            with_parts: whether interrupted answers resume from their tokens.
        """
        self._inference = inference
        self._earlier = earlier
        self._lineage = lineage
        self._scored = scored
        self._with_parts = with_parts
        self._versions: dict[int, int] = {}
        self._open: dict[str, _OpenRequest] = {}

    def policy_version(self, ordinal: int) -> int:
        """Return the policy version that an ordinal's keys depend on: the one under which it was first submitted."""
        earlier = self._earlier().versions.get(ordinal, self._inference.policy_version)
        return self._versions.setdefault(ordinal, earlier)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        ordinal = request.ordinal
        if ordinal is None or not self._with_parts or request.grammar:  # vLLM cannot go on within a grammar
            return await self._inference.generate(request)
        prompt = prompt_checksum(request)
        answers = ((sample, (request.key, prompt, sample)) for sample in range(request.num_samples))
        earlier = self._earlier()
        prefixes = ((sample, earlier.prefix(answer)) for sample, answer in answers)
        known = {sample: prefix for sample, prefix in prefixes if prefix is not None}
        request = replace(request, known=known)
        written = {sample: Amount(len(prefix.tokens), len(prefix.choices)) for sample, prefix in known.items()}
        work = self._open[request.id] = _OpenRequest(request, ordinal, prompt, written)
        work.completions = await self._inference.generate(request)
        return work.completions

    def add(self, group: TrajectoryGroup) -> None:
        """Record a scored group, and forget the parts of its answers."""
        ordinal = group.ordinal
        newest = self._newest(group.versions)
        self._scored(ScoredGroup(group, self.policy_version(ordinal), newest))
        self.forget({ordinal})

    def forget(self, ordinals: Collection[int]) -> None:
        self._open = {request_id: work for request_id, work in self._open.items() if work.ordinal not in ordinals}
        for ordinal in ordinals:
            self._versions.pop(ordinal, None)

    def tokens_of(self, ordinals: Collection[int]) -> int:
        """Return the number of tokens sampled so far for these ordinals, which are not scored."""
        return sum(
            len(prefix.tokens)
            for request_id, _, prefix in self._known()
            if (work := self._open.get(request_id)) and work.ordinal in ordinals
        )

    def new_parts(self) -> list[Record]:
        """Return the parts of unscored answers that are not written yet."""
        if not self._open:
            return []
        records = []
        for request_id, sample, prefix in self._known():
            work = self._open.get(request_id)  # None for requests outside the stream, such as an evaluation's
            if work is None or len(prefix.tokens) <= (written := work.written.get(sample, NOTHING)).tokens:
                continue
            records.append(
                part_record(
                    work.ordinal,
                    self.policy_version(work.ordinal),
                    self._newest(prefix.versions[written.tokens :]),
                    (work.request.key, work.prompt, sample),
                    written,
                    prefix,
                    self._lineage,
                )
            )
            work.written[sample] = Amount(len(prefix.tokens), len(prefix.choices))
        return records

    def _newest(self, versions: Iterable[int]) -> int:
        """Return the newest of these versions and the engine's own. Tokens may be newer than the engine's version:
        while weights are published, the first replicas sample with them before the last one has them."""
        return max(self._inference.policy_version, max(versions, default=0))

    def _known(self) -> list[tuple[str, int, AnswerPrefix]]:
        """Return the tokens so far of all unscored answers, as (request id, sample, prefix)."""
        found = [(each.request_id, each.sample, each.prefix) for each in self._inference.partial_answers()]
        for request_id, work in self._open.items():
            for sample, one in enumerate(work.completions or []):
                found.append((request_id, sample, AnswerPrefix(one.tokens, one.logprobs, one.versions, one.choices)))
        return found
