"""Whole runs that learn from a teacher alone: in every layout, interrupted, and while a replica or server is lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from commands import Command
from core_helpers import tiny_model, tiny_run
from hf_helpers import PUBLISHED, publish
from loop_helpers import Attempt, lines_of, prepare
from server_helpers import byte_backend

from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.paths import TEACHER, RunDir

pytestmark = pytest.mark.slow

STEPS, LIMIT_S = 24, 240.0
CLOSE = {"rel": 5e-3, "abs": 1e-3}
"""Tolerances: Adam amplifies rounding, since it divides by the size of the gradient."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random teacher, whose tokenizer the policy shares."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    root = tmp_path_factory.mktemp("distillation")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<end>")
    Qwen2Config().save_pretrained(root / "teacher")
    tokenizer.save_pretrained(root / "teacher")
    tokens = len(AutoTokenizer.from_pretrained(root / "teacher"))  # transformers would add one by the model's type
    publish(root / "teacher", PUBLISHED["Qwen2"] | {"vocab_size": tokens})
    tokenizer.save_pretrained(root / "teacher")
    return root


def recipe(folder: Path, ranks: int, layout: dict[str, Any], **distill: Any) -> dict[str, Any]:
    teacher = str(folder / "teacher")
    config = tiny_run(
        job={"gpus_per_node": ranks, "collective_timeout_s": 60, "silence_limit_s": 100},
        model=tiny_model(max_position_embeddings=64, vocab_size=None, lora=None).model_dump(),
        tokenizer={"type": "huggingface", "alphabet": "", "path": teacher},
        sampling={"max_new_tokens": 6},
        grpo={"prompts_per_step": 6, "group_size": 8},
        distill={"teacher": teacher, "reward_weight": 0.0} | distill,
        optimizer={"learning_rate": 1e-2},
        training={"steps": STEPS},
        placement={"training": layout},
        save={"every": 4},
        resume={"partial": "regenerate"},
        evaluation={"every": 0, "prompts": 1},
    )
    return config.model_dump()


def finished(run_dir: RunDir, folder: Path, ranks: int) -> RunDir:
    attempt = Attempt(run_dir, folder / "cache", ranks=ranks)
    assert attempt.exit_codes() == [0] * ranks, attempt.logs()
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunDir:
    return finished(prepare(folder / "undisturbed", recipe(folder, 2, {})), folder, 2)


def test_the_divergence_from_the_teacher_falls(undisturbed: RunDir) -> None:
    found = [line["teacher_kl"] for line in lines_of(undisturbed.metrics)]
    assert sum(found[-4:]) < 0.7 * sum(found[:4])
    assert all(line["mean_reward"] < 0.2 for line in lines_of(undisturbed.metrics))  # nothing else teaches


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, {"tp": 2}, id="TP2"),
        pytest.param(1, {}, id="one rank", marks=pytest.mark.slow),
        pytest.param(2, {"cp": 2}, id="CP2", marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2}, id="PP2", marks=pytest.mark.slow),
    ],
)
def test_the_first_steps_are_the_same_in_every_layout(
    folder: Path, undisturbed: RunDir, ranks: int, layout: dict[str, Any]
) -> None:
    of_layout = recipe(folder, ranks, layout)
    of_layout["training"]["steps"] = 3  # later, rounding changes sampled tokens
    run_dir = finished(prepare(folder / ("-".join(layout) or "alone"), of_layout), folder, ranks)
    for mine, other in zip(lines_of(run_dir.metrics), lines_of(undisturbed.metrics), strict=False):
        for name in ("teacher_kl", "loss", "grad_norm", "answer_length"):
            assert mine[name] == pytest.approx(other[name], **CLOSE), (name, mine["step"])


@pytest.mark.parametrize(
    ("ranks", "layout", "divergence"),
    [
        pytest.param(2, {"pp": 2}, {"kind": "forward"}, id="forward, PP2"),
        pytest.param(2, {"cp": 2}, {"kind": "js", "top_k": 8}, id="js of top tokens, CP2", marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_from_a_divergence(
    folder: Path, ranks: int, layout: dict[str, Any], divergence: dict[str, Any]
) -> None:
    of_layout = recipe(folder, ranks, layout, divergence=divergence)
    run_dir = finished(prepare(folder / divergence["kind"], of_layout), folder, ranks)
    lines = lines_of(run_dir.metrics)
    found = [line["teacher_divergence"] for line in lines]
    assert sum(found[-4:]) < 0.7 * sum(found[:4])
    assert min(found) > 0


def several_teachers(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """A recipe with two teachers: one for plain sums, and the policy, which reads the answers of others."""
    rows = folder / "sums.jsonl"
    rows.write_text("".join(f'{{"problem": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(40)))
    hinted = {"train": str(rows), "prompt": "{question}=", "teacher_prompt": "{question}={answer}. {question}="}
    of_policy = {"teacher": "policy", "divergence": {"kind": "reverse"}, "reward_weight": 0.0}
    config = recipe(folder, 2, layout)
    config["environment"] = None
    config["environments"] = [
        {"name": "arithmetic", "id": "sums"},
        {"name": "math", "id": "hinted", "args": hinted | {"chat": "never"}, "distill": of_policy},
    ]
    config["training"]["steps"] = 3
    return config


def test_each_environment_has_its_teacher_in_every_layout(folder: Path) -> None:
    found = []
    for name, layout in (("several", {}), ("several-tp", {"tp": 2})):
        run_dir = finished(prepare(folder / name, several_teachers(folder, layout)), folder, 2)
        found.append(lines_of(run_dir.metrics))
    names = ("environments/sums/teacher_kl", "environments/hinted/teacher_kl", "teacher_divergence", "loss")
    for one, other in zip(*found, strict=True):
        for name in names:
            assert one[name] == pytest.approx(other[name], **CLOSE), (name, one["step"])
    assert found[0][0]["environments/sums/teacher_kl"] != found[0][0]["environments/hinted/teacher_kl"]


def process_of_teacher(run_dir: RunDir) -> psutil.Process | None:
    """Process of the first replica of the teacher, while it runs."""
    wanted = ["--run-dir", str(run_dir.root), "--attempt", "1", "--teacher", "0"]
    found = (each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-6:] == wanted)
    return next(found, None)


@pytest.mark.slow
def test_a_replica_of_the_teacher_says_the_same_and_its_death_only_costs_time(folder: Path) -> None:
    divergence, steps = {"kind": "forward", "top_k": 8}, 8
    held = recipe(folder, 1, {}, divergence=divergence)
    held["training"]["steps"] = 3
    on_ranks = finished(prepare(folder / "held", held), folder, 1)
    apart = recipe(folder, 1, {}, replicas={"nodes": 1}, divergence=divergence)
    apart["job"]["nodes"] = 2
    apart["training"]["steps"] = steps
    file, run_dir = folder / "apart.yaml", RunDir(folder / "apart")
    file.write_text(yaml.safe_dump(apart))
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "MRL_CACHE": str(folder / "cache")}
    run = Command(["mrl-submit", file, "--run-dir", run_dir.root], env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not run_dir.metrics.exists() or len(lines_of(run_dir.metrics)) < 3:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate(1.0)
            time.sleep(0.01)
        teacher = process_of_teacher(run_dir)
        assert teacher is not None
        teacher.kill()
        said = run.communicate(LIMIT_S)
    finally:
        run.kill()
    assert run.returncode == 0, said
    (state,) = read_replicas(run_dir.attempt(1), TEACHER)
    assert state.starts == 2 and "SIGKILL" in (state.why or "")
    assert process_of_teacher(run_dir) is None
    lines = lines_of(run_dir.metrics)
    assert len(lines) == steps
    for mine, other in zip(lines[:3], lines_of(on_ranks.metrics), strict=True):
        for name in ("teacher_kl", "teacher_divergence"):
            assert mine[name] == pytest.approx(other[name], **CLOSE)


class Server:
    """`mrl serve` of the teacher, at an address that stays."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "token"
        self.token.write_text("0123456789abcdef\n")
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._words = ["mrl", "serve", str(folder / "teacher"), "--name", "teacher", "--port", str(self.port)]
        self._words += ["--json", "--dtype", "fp32", "--token-file", str(self.token)]
        self.start()

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "urls": f"http://127.0.0.1:{self.port}/v1",
            "model": "teacher",
            "token_file": str(self.token),
        }

    def start(self) -> None:
        self.command = Command(self._words, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    def kill(self) -> None:
        """End the server as a lost node would."""
        children = Path(f"/proc/{self.command.pid}/task/{self.command.pid}/children").read_text().split()
        for pid in (*map(int, children), self.command.pid):
            os.kill(pid, signal.SIGKILL)
        self.command.communicate(LIMIT_S)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    found = Server(folder)
    yield found
    found.kill()


@pytest.mark.slow
def test_a_served_teacher_says_the_same_and_its_loss_is_survived(
    folder: Path, undisturbed: RunDir, server: Server
) -> None:
    run_dir = prepare(folder / "served", recipe(folder, 2, {}, server=server.keys))
    attempt = Attempt(run_dir, folder / "cache")
    attempt.wait_for_step(3)
    server.kill()
    server.start()
    assert attempt.exit_codes(LIMIT_S) == [0, 0], attempt.logs()
    lines = lines_of(run_dir.metrics)
    assert len(lines) == STEPS
    for mine, other in zip(lines[:3], lines_of(undisturbed.metrics), strict=False):
        assert mine["teacher_kl"] == pytest.approx(other["teacher_kl"], **CLOSE)
    found = [line["teacher_kl"] for line in lines]
    assert sum(found[-4:]) < 0.7 * sum(found[:4])
