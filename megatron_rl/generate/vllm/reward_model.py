"""vLLM behind a replica that holds the reward model: the front starts it on published weights, and passes on scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.contract.paths import REWARD
from megatron_rl.generate.replica.lifecycle import RankWork, ReplicaRank
from megatron_rl.generate.replica.scoring_service import ClassifyingService
from megatron_rl.generate.vllm.client import MODEL_NAME
from megatron_rl.generate.vllm.command import Served, classifier_command
from megatron_rl.generate.vllm.fixed_vllm import FixedVllm
from megatron_rl.generate.vllm.replica import opened_vllm
from megatron_rl.generate.vllm.start import version_here
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import local_folder


@contextmanager
def open_reward_model(here: ReplicaRank) -> Iterator[RankWork]:
    """Start a vLLM with the reward model. Raises ConfigurationError if its files are not here, and VllmGone if it has
    ended."""
    config = here.config
    assert config.reward is not None
    replicas = config.reward.replicas
    try:
        weights = local_folder(config.reward.model, "reward.model", CONFIG_FILE).absolute()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error

    def command(folder: Path, seed: int) -> tuple[Served, Sequence[str]]:
        served = Served(weights, folder)
        return served, classifier_command(config, served, sys.executable, seed)

    version = version_here(config.started_vllms[REWARD])
    with opened_vllm(here, version, command, "reward.replicas.vllm.args") as vllm:
        if vllm is None:
            yield None
            return
        classifier = VllmClassifier(vllm, replicas.answer_limit_s)
        yield ClassifyingService(classifier, here.replica, here.address(replicas.tp), here.token)


class VllmClassifier(FixedVllm):
    """Classes of texts by one vLLM. Implements `Classifier`."""

    async def classify(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = {**body, "model": MODEL_NAME}
        return await self.answered(self.vllm.client.post("/classify", asked, limit_s=self.limit_s))
