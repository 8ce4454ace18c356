"""A sequence classifier in vLLM: rewards beside the values of transformers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tiny_classifier import classified, write_classifier
from vllm_front import PYTHON_VARIABLE, START_S, until

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.judged.judged_arguments import JudgedConfig
from megatron_rl.agent.environments.judged.judged_environment import JudgedEnvironment
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.scripted_trial import CodePoints
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.generate.vllm.plugin import write_version
from megatron_rl.recipe.inference import Sampling

CLOSE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [os.environ[PYTHON_VARIABLE], "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "scorer", "--runner", "pooling"]
    words += ["--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "8"]
    space = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    shims = tmp_path_factory.mktemp("server")
    write_version(shims, "0.32.0+cpu")
    space["PYTHONPATH"] = str(shims)
    file = shims / "log"
    with file.open("w") as log:
        server = psutil.Popen(words, env={**os.environ, **space}, stdout=log, stderr=subprocess.STDOUT)

    def answers() -> bool:
        assert server.poll() is None, file.read_text()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        until(answers, file.read_text, START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        everything = [server, *server.children(recursive=True)] if server.is_running() else []
        for process in everything:
            process.kill()
        psutil.wait_procs(everything, 60)


@pytest.mark.parametrize("text", [None, "{question}={response}"])
def test_rewards_of_a_group_are_the_classifiers_values(folder: Path, url: str, text: str | None) -> None:
    config = JudgedConfig.model_validate({"reward_model": {"url": url, "model": "scorer", "text": text}})
    answers = ["2", "22", "B", "2"]

    async def group() -> list[float]:
        environment = JudgedEnvironment(config, CodePoints())
        problem = Problem("1+1", {"question": "1+1", "answer": "2"})
        inference = ScriptedInference(CodePoints(), answers)
        asked = GroupRolloutRequest(
            0, problem, len(answers), Sampling(max_new_tokens=9), 1, inference, RolloutLimits(60)
        )
        try:
            found = await environment.group_rollout(asked)
        finally:
            await environment.close()
        assert not found.failures
        return [each.reward for each in found.trajectories]

    shown = [f"u1+1a{answer}" if text is None else f"1+1={answer}" for answer in answers]
    assert asyncio.run(group()) == pytest.approx(classified(folder, shown), abs=CLOSE)
