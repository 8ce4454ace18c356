"""A vLLM over two nodes, pretended by processes of this machine, with a stand-in for vLLM that only waits: the members
of a start meet, and the death of one ends them all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from core_helpers import tiny_run
from run_helpers import FAKE_RANK
from waiting import until

from launcher.host.attempt.local_ranks import LocalReplicas
from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.paths import INFER, RunDir
from megatron_rl.contract.records import write

LIMIT_S = 180.0
WAITS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(1).folder.mkdir(parents=True)
    config = tiny_run(
        job={"nodes": 3},
        placement={"mode": "partitioned", "inference": {"nodes": 2, "tp": 2}, "tp_across_nodes": True},
        inference={"engine": "vllm"},
        resume={"partial": "keep"},
        model={"head_dim": 32},
    )
    run.resolved.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run.token.write_text("a-token-of-a-run-with-32-characters-or-more\n")
    return run


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for vLLM, on the path of Python."""
    folder = tmp_path / "packages"
    program = folder / "vllm" / "entrypoints" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    program.write_text(WAITS)
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


def served(run: RunDir) -> dict[int, psutil.Process]:
    """Processes of vLLM, by the rank of their node."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "vllm.entrypoints.cli.main" in words[:4] and process.parent() is not None:
            place = process.environ()
            if place.get("MRL_TEST_RUN") == str(run.root):
                found[int(option(words, "node-rank"))] = process
    return found


def option(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


@pytest.mark.slow
def test_a_killed_follower_ends_its_start_and_the_next_one_meets_at_other_ports(
    run: RunDir, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRL_TEST_RUN", str(run.root))
    kept = LocalReplicas(INFER, 1, 2, 2, [sys.executable, "-m", "megatron_rl.replica_main"])
    command = [sys.executable, "-m", "launcher.host.supervise", "--run-dir", str(run.root), "--attempt", "1"]
    command += ["--ranks", "1", "--device", "cpu", "--grace", "0.5", "--silence-limit", "300"]
    command += ["--replicas", json.dumps(kept), "--", sys.executable, FAKE_RANK, "long"]
    supervisor = subprocess.Popen(command, start_new_session=True)
    try:
        first = until(lambda: len(found := served(run)) == 2 and found, "both nodes start vLLM", LIMIT_S)
        assert "--headless" in first[1].cmdline()
        assert "--headless" not in first[0].cmdline()
        ports = {option(process.cmdline(), "master-port") for process in first.values()}
        assert len(ports) == 1
        first[1].kill()

        second = until(
            lambda: len(found := served(run)) == 2 and not {*found.values()} & {*first.values()} and found,
            "both nodes start again",
            LIMIT_S,
        )
        assert not first[0].is_running()
        assert ports.isdisjoint(option(process.cmdline(), "master-port") for process in second.values())
        (replica,) = read_replicas(run.attempt(1))
        assert replica.starts == 2
        assert "rank 1" in (replica.why or "")
        assert "SIGKILL" in (replica.why or "")
        assert supervisor.poll() is None, "training continues"
    finally:
        write(run.attempt(1).drain, Drain("test", "the test", time.time(), deadline=time.time() + LIMIT_S))
        try:
            supervisor.wait(LIMIT_S)
        finally:
            supervisor.kill()
