"""Engines that answer the requests: this project's, transformers' `generate` on batches in order of arrival, and
transformers' continuous batching. Each returns the number of generated tokens.

Lengths are forced on every side: only the limit ends an answer, never a token. `generate` has one limit for a batch, so
rows of shorter answers run along with the longest one, as rows do after their end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.recipe.model import ModelConfig

ANSWER_TIMEOUT_S = 600.0
END_IDS = frozenset([0])

transformers.logging.set_verbosity_error()  # deliberately, no token ends an answer
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Asked:
    """A prompt, and the lengths of its answers."""

    prompt: list[int]
    length: int
    samples: int = 1


class Answerer(Protocol):
    name: str

    def answer(self, asked: Sequence[Asked]) -> int: ...


class Ours:
    """The engine, decoding `rows` sequences together."""

    def __init__(
        self, policy: Policy, model: ModelConfig, rows: int, longest: int, share_prefixes: bool = False
    ) -> None:
        """share_prefixes: false recomputes prompts that the next turn repeats."""
        self.name = "mrl"
        config = InferenceConfig(max_batch=rows, share_prefixes=share_prefixes)
        self.engine = Engine(policy, model, config, END_IDS, longest)

    def answer(self, asked: Sequence[Asked]) -> int:
        ids = [
            self.engine.submit(GenerationRequest(one.prompt, one.samples, exactly(one.length), key=number))
            for number, one in enumerate(asked)
        ]
        while self.engine.busy:
            self.engine.step()
        return sum(len(each.tokens) for id in ids for each in self.engine.take(id) or [])


def exactly(length: int) -> Sampling:
    """Answers of exactly this length, without an earlier end token."""
    return Sampling(max_new_tokens=length, min_new_tokens=length)


class Generate:
    """Requests answered by transformers' `generate`."""

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self.name = "transformers generate"
        self._model = model
        self._batch = batch

    @torch.inference_mode()
    def answer(self, asked: Sequence[Asked]) -> int:
        assert len({len(one.prompt) for one in asked}) == 1, "prompts of one length need no padding"
        rows = [one for one in asked for _ in range(one.samples)]
        for first in range(0, len(rows), self._batch):
            batch = rows[first : first + self._batch]
            prompts = torch.tensor([one.prompt for one in batch])
            longest = max(one.length for one in batch)
            made: Tensor = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=sampled(longest),
            )
            assert made.shape == (len(batch), prompts.shape[1] + longest)
        return sum(one.length for one in rows)


class Continuous:
    """Requests answered by transformers' continuous batching, each with its own limit."""

    def __init__(self, model: PreTrainedModel, rows: int, longest: int) -> None:
        self.name = "transformers continuous"
        self._model = model
        page = 32
        self._config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=rows * (-(-longest // page) + 1),
            max_batch_tokens=1024,
            max_requests_per_batch=rows,
        )

    def answer(self, asked: Sequence[Asked]) -> int:
        made = 0
        with self._model.continuous_batching_context_manager(
            generation_config=sampled(max(one.length for one in asked)),
            continuous_batching_config=self._config,
            timeout=ANSWER_TIMEOUT_S,
        ) as manager:
            waited_for = [
                manager.add_request(one.prompt, max_new_tokens=one.length) for one in asked for _ in range(one.samples)
            ]
            while waited_for:
                result = manager.get_result(timeout=ANSWER_TIMEOUT_S)
                if result is None:
                    raise RuntimeError("transformers' continuous batching ended before it had answered")
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching: {result.error}")
                if result.is_finished():
                    waited_for.pop()
                    made += len(result.generated_tokens)
        return made


def sampled(longest: int) -> GenerationConfig:
    """Sampling from the full distribution, ended only by the limit."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0
    )


def load_theirs(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
