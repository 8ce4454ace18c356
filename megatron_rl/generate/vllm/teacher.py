"""vLLM behind a replica that holds the teacher: the front starts it on published weights, and passes on the log-probs
of prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.replica.lifecycle import RankWork, ReplicaRank
from megatron_rl.generate.replica.scoring_service import ScoringService
from megatron_rl.generate.vllm.command import Served, ServeSizes, teacher_command
from megatron_rl.generate.vllm.fixed_vllm import FixedVllm
from megatron_rl.generate.vllm.replica import opened_vllm
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.start import version_here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import ROWS
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, read_hf_config
from megatron_rl.recipe.hub import local_folder

PREFILL_TOKENS = 2048
"""Tokens computed at once. vLLM computes the logits of all of them together, 4 bytes per entry of the vocabulary."""
FURTHER = MappingProxyType({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
"""The token that follows a sequence of full length needs no position."""


@contextmanager
def open_teacher(here: ReplicaRank) -> Iterator[RankWork]:
    """Start a vLLM with the teacher's weights. Raises ConfigurationError if it cannot hold them here, and VllmGone if
    it has ended."""
    config = here.config
    assert config.teacher_replicas is not None
    weights, sizes = _weights(config)

    def command(folder: Path, seed: int) -> tuple[Served, Sequence[str]]:
        served = Served(weights, folder)
        return served, teacher_command(config, served, sizes, sys.executable, seed)

    version = version_here(config.teacher_vllm)
    with opened_vllm(here, version, command, "distill.replicas.vllm.args", FURTHER) as vllm:
        if vllm is None:
            yield None
            return
        scores = VllmScorer(vllm, config.teacher_replicas.answer_limit_s, sizes.model.vocab_size or 0)
        yield ScoringService(scores, here.replica, here.address(sizes.tp), here.token)


def _weights(config: RunConfig) -> tuple[Path, ServeSizes]:
    """Return the folder of the teacher's weights, and the sizes of the vLLM that holds them. Raises
    ConfigurationError."""
    assert config.distill is not None and config.teacher_replicas is not None
    try:
        folder = local_folder(config.distill.teacher, "distill.teacher", CONFIG_FILE)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = read_hf_config(folder).model(dtype=config.model.dtype)
    sizes = ServeSizes(
        model=model,
        cpu=config.job.device == "cpu",
        tp=config.teacher_replicas.tp,
        longest=config.sequence_length + 1,
        rows=ROWS,
        prefill_tokens=PREFILL_TOKENS,
        splits=True,
    )
    return folder.absolute(), sizes


class VllmScorer(FixedVllm):
    """Log-probs of prompts by one vLLM. Implements `Scorer`."""

    def __init__(self, vllm: RunningVllm, limit_s: float, vocabulary: int) -> None:
        """
        limit_s: seconds that the log-probs of one prompt may take.
        vocabulary: entries of the teacher's.
        """
        super().__init__(vllm, limit_s)
        self._vocabulary = vocabulary

    async def score(self, tokens: list[int], top: int) -> list[TokenScore]:
        if (largest := max(tokens)) >= self._vocabulary:  # without a tokenizer vLLM accepts it, and its engine ends
            raise ValueError(f"token {largest} is none of the teacher's, which has {self._vocabulary}")
        return await self.answered(self.vllm.client.score(tokens, top, self.limit_s))
