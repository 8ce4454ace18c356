"""Requests on their way through an engine: which samples wait, from which tokens they start, which are finished."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megatron_rl.inference.api import Beginning, Completion, FinishReason, GenerationRequest


@dataclass(slots=True)
class Job:
    """One request."""

    request: GenerationRequest
    end_token: int
    done: asyncio.Future[list[Completion]]
    completions: dict[int, Completion] = field(default_factory=dict)

    def branches(self) -> list[Branch]:
        """The samples to be sampled, by where they start; those known to their end are finished at once."""
        request = self.request
        fresh = [index for index in range(request.num_samples) if index not in request.known]
        branches = [Branch(self, fresh)] if fresh else []
        for index, known in request.known.items():
            if self._finish_reason(known.tokens) is None:
                branches.append(Branch(self, [index], known))
            else:
                self.finish(index, known)
        return branches

    def finish(self, index: int, answer: Beginning) -> None:
        """Sample `index` has its last token. With the last sample the caller has its answer."""
        reason = self._finish_reason(answer.tokens)
        assert reason is not None
        self.completions[index] = Completion(answer.tokens, answer.logprobs, reason, answer.policy_version)
        if len(self.completions) == self.request.num_samples and not self.done.done():
            self.done.set_result([self.completions[i] for i in range(self.request.num_samples)])

    def _finish_reason(self, tokens: list[int]) -> FinishReason | None:
        if tokens[-1] == self.end_token:
            return "stop"
        return "length" if len(tokens) == self.request.sampling.max_new_tokens else None


@dataclass(slots=True)
class Branch:
    """Samples of a request that start from the same tokens: new ones from the prompt, a resumed one from its own."""

    job: Job
    samples: list[int]
    known: Beginning | None = None

    @property
    def tokens(self) -> list[int]:
        prompt = self.job.request.prompt_tokens
        return [*prompt, *self.known.tokens] if self.known else prompt

    def rows(self, policy_version: int) -> list[Row]:
        """Its samples as rows, from now on sampled by `policy_version`."""
        oldest = min(policy_version, self.known.policy_version) if self.known else policy_version
        return [Row(self.job, index, oldest) for index in self.samples]


@dataclass(frozen=True, slots=True)
class Row:
    """What is decoded in one row of the cache."""

    job: Job
    sample: int
    policy_version: int
    """Of the oldest weights that sampled any of it."""
