"""Which request is answered in which row of the cache, and what all ranks of a replica compute next.

    submit() -> waiting -> admit(): one prefill per prompt, a row per sample -> decode(): all rows together
                                     ^                                                      |
                                     +------------------ retire(): freed rows --------------+

Rows 0..n-1 are being decoded. Where no waiting request takes the row of an ended sample, the last row moves into its
place with the next plan, so a step computes on no row that is known to have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_rl.inference.api import Beginning, Completion, FinishReason, GenerationRequest, PartialAnswer
from megatron_rl.inference.config import InferenceConfig, Sampling


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


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What a row of the cache has sampled, an earlier attempt's tokens included."""

    row: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class _Job:
    """A request that is not answered yet."""

    request: GenerationRequest
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _Branch:
    """Samples of a request that wait and begin with the same tokens: new ones with the prompt, a resumed one with its
    own."""

    job: _Job
    samples: list[int]
    known: Beginning | None = None


@dataclass(slots=True)
class _Row:
    """What is decoded in one row."""

    job: _Job
    sample: int
    versions: list[int]
    """Of its first tokens; all later ones are sampled by the present weights."""


class Scheduler:
    """Requests by id on their way through the rows of one replica. Knows no tensor, no clock and no model."""

    def __init__(self, config: InferenceConfig, end_token: int) -> None:
        self.policy_version = 0
        self._config = config
        self._end_token = end_token
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Branch] = deque()
        self._rows: dict[int, _Row] = {}
        self._freed: list[int] = []  # rows that ended since the last plan
        self.answered: dict[str, list[Completion]] = {}
        """Completions, in sample order, by id of the request; whoever takes one removes it."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._waiting or self._rows)

    @property
    def rows(self) -> list[int]:
        """Those being decoded."""
        return list(self._rows)

    def submit(self, request: GenerationRequest) -> None:
        """Queue all samples of a request; those that are known to their end are finished at once."""
        job = self._jobs[request.id] = _Job(request)
        fresh = [sample for sample in range(request.num_samples) if sample not in request.known]
        if fresh:
            self._waiting.append(_Branch(job, fresh))
        for sample, known in request.known.items():
            if self._finish_reason(request, known.tokens) is None:
                self._waiting.append(_Branch(job, [sample], known))
            else:
                self._finish(job, sample, known)

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
            versions = branch.known.versions if branch.known else []
            for sample in samples:
                self._rows[len(self._rows)] = _Row(branch.job, sample, versions)
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
            self._rows[target] = self._rows.pop(source)
        return moves

    # Answers

    def retire(self, ended: Sequence[RowAnswer]) -> None:
        """Take over the answers of rows that have sampled their last token."""
        for answer in ended:
            row = self._rows[answer.row]
            self._finish(row.job, row.sample, self._beginning(row, answer))
        self._free([answer.row for answer in ended])

    def partial_answers(self, rows: Iterable[RowAnswer]) -> list[PartialAnswer]:
        """All samples of unanswered requests that have tokens; `rows` is what the rows have sampled so far."""
        decoded = [
            PartialAnswer(row.job.request.id, row.sample, self._beginning(row, answer))
            for answer in rows
            for row in [self._rows[answer.row]]
        ]
        finished = [
            PartialAnswer(request_id, sample, Beginning(answer.tokens, answer.logprobs, answer.versions))
            for request_id, job in self._jobs.items()
            for sample, answer in job.completions.items()
        ]
        return decoded + finished

    def publish(self, policy_version: int, rows: Iterable[RowAnswer]) -> None:
        """From here on the weights are those of `policy_version`; `rows` is what the ones before have sampled."""
        for answer in rows:
            row = self._rows[answer.row]
            row.versions = self._beginning(row, answer).versions
        self.policy_version = policy_version

    def _beginning(self, row: _Row, answer: RowAnswer) -> Beginning:
        new = len(answer.tokens) - len(row.versions)
        return Beginning(answer.tokens, answer.logprobs, row.versions + [self.policy_version] * new)

    def _finish(self, job: _Job, sample: int, answer: Beginning) -> None:
        """A sample has its last token. With the last sample the request is answered."""
        request = job.request
        reason = self._finish_reason(request, answer.tokens)
        assert reason is not None
        job.completions[sample] = Completion(answer.tokens, answer.logprobs, reason, answer.versions)
        if len(job.completions) == request.num_samples:
            del self._jobs[request.id]
            self.answered[request.id] = [job.completions[sample] for sample in range(request.num_samples)]

    def _finish_reason(self, request: GenerationRequest, tokens: list[int]) -> FinishReason | None:
        if tokens[-1] == self._end_token:
            return "stop"
        return "length" if len(tokens) == request.sampling.max_new_tokens else None

    def _free(self, rows: Iterable[int]) -> None:
        for row in rows:
            del self._rows[row]
            self._freed.append(row)


def _prefill(branch: _Branch, samples: list[int]) -> Prefill:
    request, known = branch.job.request, branch.known
    return Prefill(
        prompt_tokens=request.prompt_tokens,
        answer_tokens=known.tokens if known else [],
        answer_logprobs=known.logprobs if known else [],
        samples=samples,
        key=request.key,
        sampling=request.sampling,
    )
