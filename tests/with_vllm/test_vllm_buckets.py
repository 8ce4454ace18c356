"""Weights of training ranks come to vLLM's workers in buckets, as on one device, while vLLM loads them."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from bucket_helpers import HALF, device_epoch
from checkpoint_helpers import Ranks
from core_helpers import answer_logprobs
from hf_helpers import publish
from layout_helpers import Layout
from torch import Tensor
from vllm_front import PYTHON_VARIABLE
from vllm_training import CLOSE, PROMPT, SERVED, prepare_run

from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.refit import bucket_sender
from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import Epoch, ReplicaLost
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.transfer import checksum
from megatron_rl.generate.vllm.client import VllmClient
from megatron_rl.generate.vllm.command import Served, replica_command, vllm_environment
from megatron_rl.generate.vllm.plugin import write_plugin, write_version
from megatron_rl.generate.vllm.private_folder import private_folder
from megatron_rl.generate.vllm.process import VllmRefused
from megatron_rl.generate.vllm.replica import write_served_model
from megatron_rl.generate.vllm.start import started, version_in
from megatron_rl.model.parallel import groups_of_one
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import build_policy
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.config import read_config
from megatron_rl.recipe.vllm_releases import release_of
from megatron_rl.run.models import share_weights

LIMIT = timedelta(seconds=120)
OF_RANKS_S = 240.0
MODEL = "Qwen2"
VERSIONS = 3
DAMAGED = 2
"""Version of which a part is damaged on its way."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Published weights of each version."""
    root = tmp_path_factory.mktemp("published")
    folders = [root / str(version) for version in range(VERSIONS)]
    for seed, folder in enumerate(folders):
        publish(folder, SERVED[MODEL], seed=seed)
    return folders


def wrong_from(number: int) -> Callable[[Tensor], Tensor]:
    """Checksum that is wrong from the call of this number on."""
    calls = itertools.count()
    return lambda packed: checksum(packed) + (next(calls) >= number)


def train(
    rank: int, _world: int, run: RunDir, layout: Layout, folders: Sequence[Path], epochs: Sequence[Epoch]
) -> list[tuple[list[float], str | None]]:
    """Send each version, in its epoch. Returns the log-probs of the prompt by the trainer's model, and the failure."""
    config, groups = read_config(run), layout.groups()
    platform, vocabulary = select(config.job), build_tokenizer(config.tokenizer).vocab_size
    policy = build_policy(config.model, vocabulary, platform)
    sender = BucketSender(weights_by_box(policy), groups.world, half=HALF)
    group, seen = None, []
    for version, (folder, epoch) in enumerate(zip(folders, epochs, strict=True), start=1):
        load_pretrained(policy, config.model, folder)
        share_weights(policy, groups)
        whole = build_policy(config.model, vocabulary, platform, groups=groups_of_one())
        load_pretrained(whole, config.model, folder)
        failure = None
        bucket_sender.checksum = wrong_from(20) if version == DAMAGED else checksum
        try:
            if group is None or group.epoch != epoch:
                if group is not None:
                    group.close()
                group = BucketGroup.join(epoch, rank, LIMIT, control=groups.control)
                sender.connect(group)
            sender.publish(version)
        except ReplicaLost as error:
            failure = str(error)
        seen.append((answer_logprobs(whole, PROMPT[:1], PROMPT[1:]).tolist(), failure))
        dist.barrier()
    return seen


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def vllm(request: pytest.FixtureRequest, folders: list[Path], tmp_path_factory: Any) -> Iterator[tuple[RunDir, Served]]:
    """A vLLM whose workers are beside the first ranks of training."""
    root = tmp_path_factory.mktemp("run")
    placement = {"mode": "partitioned", "inference": {"nodes": 1, "tp": request.param}}
    job = {"nodes": 2, "gpus_per_node": request.param, "device": "cpu", "threads_per_rank": 1}
    run = prepare_run(root / "run", folders[0], placement=placement, job=job)
    config, python = read_config(run), os.environ[PYTHON_VARIABLE]
    with private_folder() as folder:
        vocabulary = build_tokenizer(config.tokenizer).vocab_size
        served = Served(write_served_model(config.model, vocabulary, folder / "model"), folder)
        write_plugin(served.plugins)
        version = version_in(python, os.environ)
        write_version(served.plugins, version)
        command = replica_command(config, served, python, release_of(version), seed=1)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MRL"))}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        with started(command, vllm_environment(environment, served, cpu=True), served, sys.stdout, "args") as process:
            assert process is not None
            yield run, served


async def load(client: VllmClient, version: int, epoch: Epoch | None, setting: dict[str, Any]) -> list[float]:
    """Have vLLM load a version. Returns its log-probs of the prompt."""
    await client.pause()
    await client.begin_receive(version, None if epoch is None else epoch.to_json(), setting)
    await client.start_update()
    await client.update(version, load=False)
    await client.update(version, load=True)
    await client.finish_update(version)
    await client.forget_prefixes()
    scored = asyncio.ensure_future(client.score(PROMPT))
    await asyncio.sleep(0.05)
    await client.resume()
    return await scored


def test_vllm_scores_as_the_trainer_after_each_version_and_after_one_that_failed(
    vllm: tuple[RunDir, Served], folders: list[Path], tmp_path: Path
) -> None:
    run, served = vllm
    config = read_config(run)
    workers = config.placement.inference.tp or 1
    setting = {
        "replica": 0,
        "start": 0,
        "timeout_s": LIMIT.total_seconds(),
        "model": config.model.model_dump(mode="json"),
        "vocabulary": build_tokenizer(config.tokenizer).vocab_size,
    }
    first, second = (device_epoch(2, [0], workers, number) for number in (1, 2))
    ranks = Ranks(tmp_path, 2, train, run, Layout(tp=2), folders, [first, first, second])

    async def use() -> list[list[float]]:
        client = VllmClient(served.socket)
        found = [await load(client, 1, first, setting)]
        with pytest.raises(VllmRefused, match=r"round \d+ was overwritten before it was copied, or damaged"):
            await load(client, DAMAGED, None, setting)
        found.append(await load(client, 3, second, setting))
        await client.close()
        return found

    found = asyncio.run(use())
    (right, failed), (_, why), (right_again, failed_again) = ranks.results(OF_RANKS_S)[0]
    assert failed is failed_again is None
    assert why is not None and "was overwritten before it was copied, or damaged" in why
    assert found[0] == pytest.approx(right, abs=CLOSE)
    assert found[1] == pytest.approx(right_again, abs=CLOSE)
    assert right != pytest.approx(right_again, abs=10 * CLOSE)
