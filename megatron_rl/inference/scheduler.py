"""Which request is answered in which row of the cache, and what all ranks of a replica compute next.

    submit() -> waiting -> admit(): one prefill per prompt, a row per sample -> decode(): all rows together
                                     ^                                                      |
                                     +------------------ retire(): freed rows --------------+

Rows 0..n-1 are being decoded. Where no waiting request takes the row of an ended sample, the last row moves into its
place with the next plan, so a step computes on no row that is known to have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.inference.api import Completion, Delta, EngineLoad, GenerationRequest, PartialAnswer
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.inference.stops import Decode
from megatron_rl.inference.transcript import RowAnswer, Transcript


@dataclass(frozen=True, slots=True)
class Prefill:
    """New rows that begin with the same tokens."""

    prompt_tokens: list[int]
    answer_tokens: list[int]
    """What an earlier attempt has sampled already ..."""
    answer_logprobs: list[float]
    """... and its log-probs."""
    samples: list[int]
    """One for each row."""
    key: int
    sampling: Sampling
    top_logprobs: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of the model. It says everything that a rank does not know from the plans before."""

    moves: list[tuple[int, int]]
    """(from, to): rows that change their place before anything else."""
    rows: range
    """Those that get their next token."""
    prefills: list[Prefill]
    """What the rows begin with, in their order; empty where they are being decoded already."""


@dataclass(slots=True)
class _Job:
    """A request that is not answered yet."""

    request: GenerationRequest
    streamed: bool
    finished: dict[int, Transcript] = field(default_factory=dict)


@dataclass(slots=True)
class _Branch:
    """Samples of a request that wait and begin with the same tokens: new ones with the prompt, a resumed one with its
    own."""

    job: _Job
    samples: list[Transcript]


@dataclass(slots=True)
class _Row:
    """What is decoded in one row."""

    job: _Job
    answer: Transcript
    """As far as the host has seen it."""

    @property
    def followed(self) -> bool:
        return self.job.streamed or self.answer.followed


class Scheduler:
    """Requests by id on their way through the rows of one replica. Knows no tensor, no clock and no model."""

    def __init__(self, config: InferenceConfig, end_ids: Iterable[int], decode: Decode | None = None) -> None:
        """
        end_ids: tokens that end any answer.
        decode: to look for stop strings with.
        """
        self.policy_version = 0
        self._config = config
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Branch] = deque()
        self._rows: dict[int, _Row] = {}
        self._freed: list[int] = []  # rows that ended since the last plan
        self._followed: set[int] = set()  # rows whose tokens somebody waits for
        self.answered: dict[str, list[Completion]] = {}
        """Completions, in sample order, by id of the request; whoever takes one removes it."""
        self.deltas: list[tuple[str, Delta]] = []
        """What streamed requests have got, by their ids; whoever delivers them removes them."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._waiting or self._rows)

    @property
    def rows(self) -> list[int]:
        """Those being decoded."""
        return list(self._rows)

    @property
    def load(self) -> EngineLoad:
        """A row of the cache is a page."""
        waiting, pages = sum(len(branch.samples) for branch in self._waiting), self._config.max_batch
        return EngineLoad(len(self._rows), waiting, pages - len(self._rows), pages)

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> None:
        """Queue all samples of a request; those that are known to their end are finished at once.

        streamed: told of as deltas, instead of as completions.
        """
        end_ids = self._end_ids.union(request.sampling.stop_tokens)
        samples = [Transcript.begin(request, sample, end_ids, self._decode) for sample in range(request.num_samples)]
        job = self._jobs[request.id] = _Job(request, streamed)
        if fresh := [answer for answer in samples if not answer.tokens]:
            self._waiting.append(_Branch(job, fresh))
        for answer in samples:
            if answer.finish_reason is not None:
                self._finish(job, answer)
            elif answer.tokens:
                self._waiting.append(_Branch(job, [answer]))
                self._tell(job, answer)

    def cancel(self, request_id: str) -> None:
        """Forget a request: nobody waits for it any more. One that is answered or unknown is none."""
        job = self._jobs.pop(request_id, None)
        self.answered.pop(request_id, None)
        if job is None:
            return
        self._waiting = deque(branch for branch in self._waiting if branch.job is not job)
        self._free([row for row, content in self._rows.items() if content.job is job])

    def clear(self) -> None:
        """Forget everything."""
        for request_id in list(self._jobs):
            self.cancel(request_id)

    # Plans

    def decode(self) -> StepPlan | None:
        """The next token of every row; None where there is none."""
        if not self._rows:
            return None
        return StepPlan(self._close_gaps(), range(len(self._rows)), [])

    def admit(self) -> StepPlan | None:
        """Waiting samples for the free rows, and their next token; None where none waits or no row is free."""
        free, tokens = self._config.max_batch - len(self._rows), 0
        if not self._waiting or not free:
            return None
        moves = self._close_gaps()
        first = len(self._rows)
        prefills: list[Prefill] = []
        while self._waiting and free and tokens < self._config.prefill_tokens:
            branch = self._waiting[0]
            samples, branch.samples = branch.samples[:free], branch.samples[free:]
            if not branch.samples:
                self._waiting.popleft()
            prefills.append(_prefill(branch, samples))
            for answer in samples:
                self._fill(len(self._rows), _Row(branch.job, answer))
            free -= len(samples)
            tokens += len(prefills[-1].tokens)
        return StepPlan(moves, range(first, len(self._rows)), prefills)

    def _close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows into the places of those that ended, so that the rows are 0..n-1 again."""
        left = len(self._rows)
        movers = [row for row in range(left, left + len(self._freed)) if row in self._rows]
        moves = list(zip(movers, sorted(row for row in self._freed if row < left), strict=True))
        self._freed = []
        for source, target in moves:
            self._fill(target, self._rows.pop(source))
            self._followed.discard(source)
        return moves

    def _fill(self, number: int, row: _Row) -> None:
        self._rows[number] = row
        if row.followed:
            self._followed.add(number)

    # Answers

    def wanted(self, ended: Iterable[int]) -> dict[int, int]:
        """Rows whose tokens `retire` takes: those that have ended and those that somebody follows; and of each, how
        many are known already."""
        return {row: len(self._rows[row].answer.tokens) for row in sorted({*ended, *self._followed})}

    def retire(self, answers: Iterable[RowAnswer]) -> None:
        """Take over tokens of rows, and free those whose answers have their last one."""
        gone = []
        for each in answers:
            row = self._rows[each.row]
            row.answer.extend(each, self.policy_version)
            if row.answer.finish_reason is None:
                self._tell(row.job, row.answer)
            else:
                self._finish(row.job, row.answer)
                gone.append(each.row)
        self._free(gone)

    def partial_answers(self, answers: Iterable[RowAnswer]) -> list[PartialAnswer]:
        """All samples of unanswered requests that have tokens; `answers` is what all rows have sampled since."""
        self._take(answers)
        begun = [(row.job.request.id, row.answer) for row in self._rows.values()]
        finished = [(name, answer) for name, job in self._jobs.items() for answer in job.finished.values()]
        return [PartialAnswer(name, answer.sample, answer.beginning()) for name, answer in begun + finished]

    def publish(self, policy_version: int, answers: Iterable[RowAnswer]) -> None:
        """From here on the weights are those of `policy_version`; `answers` is what all rows have sampled since, by the
        ones before."""
        self._take(answers)
        self.policy_version = policy_version

    def _take(self, answers: Iterable[RowAnswer]) -> None:
        for each in answers:
            self._rows[each.row].answer.extend(each, self.policy_version)

    def _tell(self, job: _Job, answer: Transcript) -> None:
        if job.streamed and (answer.told < len(answer.tokens) or answer.finish_reason is not None):
            self.deltas.append((job.request.id, answer.delta()))

    def _finish(self, job: _Job, answer: Transcript) -> None:
        """A sample has its last token. With the last sample the request is answered."""
        self._tell(job, answer)
        job.finished[answer.sample] = answer
        if len(job.finished) == job.request.num_samples:
            del self._jobs[job.request.id]
            if not job.streamed:
                answers = (job.finished[sample] for sample in range(job.request.num_samples))
                self.answered[job.request.id] = [answer.completion() for answer in answers]

    def _free(self, rows: Iterable[int]) -> None:
        for row in rows:
            del self._rows[row]
            self._followed.discard(row)
            self._freed.append(row)


def _prefill(branch: _Branch, samples: list[Transcript]) -> Prefill:
    request = branch.job.request
    return Prefill(
        prompt_tokens=request.prompt_tokens,
        answer_tokens=[*samples[0].tokens],
        answer_logprobs=[*samples[0].logprobs],
        samples=[answer.sample for answer in samples],
        key=request.key,
        sampling=request.sampling,
        top_logprobs=request.top_logprobs,
    )
