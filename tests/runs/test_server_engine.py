"""A run whose answers come from a separate server, which is lost and comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from hf_helpers import PUBLISHED, model_of, publish
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare
from safetensors.torch import load_file
from server_helpers import byte_backend

from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED, EXIT_FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.inference.api import GenerationRequest
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.openai import OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint

LIMIT_S = 120.0
STEPS = 8


class Setting:
    """A prepared run, and its server, which has not started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        publish_with_text(root / "published")
        self.token = root / "token"
        self.token.write_text("0123456789abcdef\n")
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.folder = root / "weights"
        self.servers: list[Command] = []

    def run(self, name: str, **sections: dict[str, Any]) -> RunDir:
        server = {"kind": "mrl", "urls": self.url, "folder": str(self.folder), "token_file": str(self.token)}
        defaults: dict[str, dict[str, Any]] = {
            "model": model_of(self.root / "published").model_dump(),
            "tokenizer": {"type": "huggingface", "alphabet": "", "path": str(self.root / "published")},
            "inference": {"engine": "server", "server": server},
            "training": {"steps": STEPS},
            "evaluation": {"every": 0},
            "resume": {"partial": "keep"},
            # a random model is never right, so nothing else would change the weights
            "grpo": {"entropy_coefficient": 0.05, "kl_beta": 0.0, "iterations": 1},
            "optimizer": {"learning_rate": 1e-2},
            "save": {"every": 0, "keep": 1},
        }
        return prepare(self.root / name, loop_recipe(**defaults | sections))

    def serve(self) -> Command:
        current = self.folder / "current"
        until(current.exists, "the first version")
        words = ("--weights-from", self.folder, "--name", "policy", "--port", str(self.port), "--json")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        server = Command(["mrl", "serve", current, *words, "--token-file", self.token], env=environment)
        self.servers.append(server)
        return server

    def kill_server(self) -> None:
        """End the server as a lost node would."""
        server = self.servers.pop()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        for pid in (*map(int, children), server.pid):
            os.kill(pid, signal.SIGKILL)
        server.communicate(LIMIT_S)

    def answer(self) -> Any:
        """Return the server's greedy answers."""

        async def ask() -> Any:
            endpoint = Endpoint(self.url, "policy", "mrl", token_file=self.token)
            async with OpenAIInference(endpoint) as inference:
                (one,) = await inference.generate(
                    GenerationRequest([1, 2, 3], 1, Sampling(temperature=0, max_new_tokens=5), key=0)
                )
                return one

        return asyncio.run(ask())


def publish_with_text(folder: Path) -> None:
    """A model whose tokenizer knows all bytes and no token that the model lacks."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<end>")
    Qwen2Config().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokens = len(AutoTokenizer.from_pretrained(folder))  # transformers would add one by the model's type
    publish(folder, PUBLISHED["Qwen2"] | {"vocab_size": tokens})
    tokenizer.save_pretrained(folder)


def until(what: Callable[[], object], why: str) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < give_up, f"not within {LIMIT_S} s: {why}"
        time.sleep(0.02)


def asks_again_soon(rank: int) -> None:
    """Pauses of the client, which would grow to half a minute."""
    from megatron_rl.inference import served

    served.LONGEST_PAUSE_S = 1.0


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    found = Setting(tmp_path)
    yield found
    while found.servers:
        found.kill_server()


@pytest.mark.slow  # almost a minute
def test_run_waits_for_its_server_updates_it_and_survives_its_loss(setting: Setting) -> None:
    run = setting.run("run")
    attempt = Attempt(run, setting.root / "cache", sabotage=asks_again_soon)
    setting.serve()
    attempt.wait_for_step(3)
    setting.kill_server()
    setting.serve()
    assert attempt.exit_codes(LIMIT_S) == [EXIT_FINISHED] * 2, attempt.logs()
    assert "waiting for the server, which `mrl serve " in attempt.logs()

    lines = lines_of(run.metrics)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert all(line["staleness_max"] == 0 for line in lines), "each token must be of the weights that it is trained on"
    # The log-probs of the server equal those of the trainer: it has the trainer's weights.
    assert max(line["inference_logprob_difference_max"] for line in lines) < 1e-3
    last = lines[-1]["policy_version"]
    assert sorted(path.name for path in setting.folder.iterdir()) == ["current", "owner.json", f"version-{last:06d}"]
    assert all(line["time/probe_s"] > 0 for line in lines)
    assert set(setting.answer().versions) == {last}
    index = json.loads((setting.folder / "current" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["policy_version"] == last
    before, after = (load(folder) for folder in (setting.root / "published", setting.folder / "current"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_run_that_waits_for_its_server_leaves_on_request(setting: Setting) -> None:
    run = setting.run("run")
    attempt = Attempt(run, setting.root / "cache")
    until((setting.folder / "current").exists, "the first version")
    os.kill(attempt.processes[0].pid or 0, signal.SIGUSR1)
    assert attempt.exit_codes(LIMIT_S) == [EXIT_DRAINED] * 2, attempt.logs()
    outcome = outcome_of(attempt.files)
    assert outcome and outcome.outcome == DRAINED


@pytest.mark.slow
def test_answers_may_be_ahead_of_training(setting: Setting) -> None:
    run = setting.run("ahead", **{"async": {"max_lag": 1}}, training={"steps": 6})
    attempt = Attempt(run, setting.root / "cache")
    setting.serve()
    assert attempt.exit_codes(LIMIT_S) == [EXIT_FINISHED] * 2, attempt.logs()
    lines = lines_of(run.metrics)
    assert len(lines) == 6
    assert max(line["staleness_max"] for line in lines) == 1


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
