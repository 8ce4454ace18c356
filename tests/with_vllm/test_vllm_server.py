"""A vLLM that somebody else started reads a run's weights between two tokens and samples by them alone, and the probe
finds one that does not (`inference.engine: server`)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hf_helpers import SIZES, publish

from megatron_rl.checkpoint.hf.staging import staged
from megatron_rl.inference.api import Completion, GenerationRequest
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.inference.served import inference_of
from megatron_rl.refit.external import ServerReload, reload_all
from megatron_rl.refit.probe import Probe
from megatron_rl.refit.served_folder import ReloadFailed, ServedFolder

START_S = 600.0
"""Seconds in which a server must answer."""
MODEL = SIZES | {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
"""Heads of 32, the smallest that vLLM has on a CPU."""
TEXT = [3, 10, 4, 60, 7, 13, 1, 14, 2, 44, 21, 5]
OTHERWISE = {"repetition_penalty": 5.0, "temperature": 0.3, "top_k": 2, "top_p": 0.5}
"""Sampling parameters of the model's own configuration, which must have no effect."""


class Served:
    """A model of transformers, and a vLLM that reads its weights."""

    def __init__(self, root: Path, *, tied: bool) -> None:
        self.model: Any = publish(root / "published", MODEL | {"tie_word_embeddings": tied})
        self.model.generation_config.update(**OTHERWISE, do_sample=True)
        self.model.generation_config.save_pretrained(root / "published")
        self.folder = ServedFolder(root / "weights", root / "published")
        self.folder.own()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.port}/v1", "policy", "vllm")
        self.write(0)
        with self.folder.pointing(0):
            pass
        self._reload = ServerReload(self.endpoint, self.folder)

    def write(self, version: int) -> None:
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        with staged(self.folder.version(version), 0, replace=True) as folder:
            self.folder.describe(folder, self.folder.write(folder, 0, tensors.items()), version)

    def change(self) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.1 * torch.randn_like(weight)

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-prob of each token after the first."""
        logits = self.model(torch.tensor([tokens])).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    async def update(self, version: int) -> None:
        self.write(version)
        probe = Probe((*TEXT,), tuple(self.logprobs(TEXT)), 1e-3)
        await reload_all([self._reload], self.folder, version, probe)

    async def generate(self, samples: int = 1, **sampling: Any) -> list[Completion]:
        async with inference_of(self.endpoint) as inference:
            return await inference.generate(GenerationRequest(TEXT, samples, Sampling(**sampling), key=1))


@contextmanager
def server(served: Served, log: Path) -> Iterator[None]:
    """A vLLM without `--generation-config vllm`, so that only its requests keep the configuration of the model out."""
    current, python = served.folder.current, os.environ["MRL_VLLM_PYTHON"]
    options = f"--host 127.0.0.1 --port {served.port} --served-model-name policy --max-model-len 256 --dtype float32 "
    options += "--enforce-eager --kv-cache-memory-bytes 64M --max-num-batched-tokens 2048"
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(current), *options.split()]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until_up(served.port, process, log)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_up(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < give_up, log.read_text()[-5000:]
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        time.sleep(0.5)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("untied")
    served = Served(root, tied=False)
    with server(served, root / "log"):
        yield served


def test_a_version_is_read_and_an_answer_under_way_continues_with_it(untied: Served) -> None:
    before = untied.logprobs(TEXT)

    async def run() -> Completion:
        task = asyncio.ensure_future(untied.generate(max_new_tokens=200, min_new_tokens=200))
        await asyncio.sleep(0.5)
        assert not task.done(), "the answer must be under way"
        untied.change()
        await untied.update(1)
        (one,) = await task
        return one

    answer = asyncio.run(run())
    assert untied.logprobs(TEXT) != before
    found = torch.tensor(answer.logprobs)
    expected = torch.tensor(untied.logprobs([*TEXT, *answer.tokens])[len(TEXT) - 1 :])
    agrees = (found - expected).abs() < 1e-3
    assert agrees[-20:].all(), "the last tokens must be of the new weights, with their keys and values"
    assert not agrees.all(), "the first tokens must be those of the old weights"


def test_the_configuration_of_the_model_changes_no_sample(untied: Served) -> None:
    asyncio.run(untied.update(2))
    (greedy,) = asyncio.run(untied.generate(max_new_tokens=30, min_new_tokens=30, temperature=0.0))
    tokens = [*TEXT]
    for token in greedy.tokens:
        with torch.no_grad():
            assert token == untied.model(torch.tensor([tokens])).logits[0, -1].argmax(), "a penalty acts"
        tokens.append(token)
    sampled = asyncio.run(untied.generate(200, max_new_tokens=1))
    first = [one.tokens[0] for one in sampled]
    likeliest = torch.softmax(untied.model(torch.tensor([TEXT])).logits[0, -1].detach(), -1).topk(2)
    outside = sum(token not in likeliest.indices for token in first) / len(first)
    assert abs(outside - (1 - float(likeliest.values.sum()))) < 0.15, "only the likeliest tokens are sampled"


def test_a_server_that_keeps_an_old_output_head_is_found_out(tmp_path: Path) -> None:
    """vLLM's CPU build packs a head that is tied to the embedding when it starts, and a reload leaves it as it is."""
    served = Served(tmp_path, tied=True)
    with server(served, tmp_path / "log"):
        asyncio.run(served.update(1))
        served.change()
        with pytest.raises(ReloadFailed, match="has read version 2, but samples by other weights"):
            asyncio.run(served.update(2))
    assert served.folder.current.resolve() == served.folder.version(1)
