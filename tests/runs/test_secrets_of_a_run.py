"""Secrets of a real run stand in the environments of its own processes and in its token file, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import commands
import pytest
from optional import needs

SECRETS = {
    name: f"marker-{name.lower()}-5ec2e7" for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_TOKEN", "OPENAI_API_KEY")
}
RECIPE = """\
extends: demo
model: {init: from-scratch}
environment:
  name: program
  args: {command: ["{python}", agent.py, WITNESS], code: [agent.py], problems: problems.jsonl}
training: {steps: 3}
grpo: {prompts_per_step: 2, group_size: 2}
evaluation: {every: 3}
logging: {wandb: {project: p, mode: offline}}
"""
AGENT = """\
import json, os, sys
from urllib.request import Request, urlopen

problem = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": problem["prompt"], "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)))
with open(sys.argv[1], "a") as witness:
    witness.write(json.dumps(dict(os.environ)) + "\\n")
print(1.0 if len(problem["prompt"]) % 2 else 0.0)
"""
APART = ("placement.mode=partitioned", "job.nodes=2", "job.gpus_per_node=1", "placement.inference.nodes=1")

pytestmark = needs("wandb")


class Watched:
    """Arguments of all processes of this machine, from the moment it is entered."""

    def __init__(self) -> None:
        self.arguments: set[bytes] = set()
        self._ends = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.1):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.arguments.add(file.read_bytes())
                except OSError:
                    continue


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("home", "tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", "")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    work = tmp_path / "work"
    (work / "agent.py").write_text(AGENT)
    (work / "problems.jsonl").write_text("".join(f'{{"prompt": "{"1" * n}+1="}}\n' for n in range(1, 9)))
    (work / "mine.yaml").write_text(RECIPE.replace("WITNESS", str(tmp_path / "witness")))
    monkeypatch.chdir(work)
    yield tmp_path


@pytest.mark.parametrize("shape", [APART, pytest.param((), marks=pytest.mark.slow)], ids=["partitioned", "co-located"])
def test_no_file_log_argument_or_output_has_a_secret(home: Path, shape: tuple[str, ...]) -> None:
    run = home / "work" / "run"
    said = []
    with Watched() as watched:
        done = commands.run(["mrl-submit", "mine.yaml", "--run-dir", run, *shape], timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        said += [done.stdout, done.stderr]
        for words in (
            ("status", str(run), "--json"),
            ("logs", str(run)),
            ("rollouts", str(run)),
            ("explain", str(run)),
            ("report", str(run)),
        ):
            shown = commands.run(["mrl", *words], timeout=120)
            said += [shown.stdout, shown.stderr]
        said.append(commands.run(["mrl-submit", "mine.yaml", "--dry-run"], timeout=120).stdout)
    assert (run / "report.html").exists()
    environments = (home / "witness").read_text()
    keys = {line.partition('"OPENAI_API_KEY": "')[2].partition('"')[0] for line in environments.splitlines()}
    assert len(keys) >= 12 and all(len(key) > 30 for key in keys), "each rollout has a key of its own"
    assert not [value for value in SECRETS.values() if value in environments], "a program has no secret of the run"

    token = (run / "token").read_text().strip()
    secrets = {name: value.encode() for name, value in {**SECRETS, "token": token}.items()}
    secrets |= {f"key {number}": key.encode() for number, key in enumerate(keys)}
    files = [file for file in home.rglob("*") if file.is_file() and file not in (run / "token", home / "witness")]
    assert len(files) > 20
    found = [f"{name} in {file}" for file in files for name, value in secrets.items() if value in file.read_bytes()]
    assert found == []
    output, arguments = "\n".join(said).encode(), b"\n".join(watched.arguments)
    assert b"agent.py" in arguments, "the processes of the run were seen"
    assert [name for name, value in secrets.items() if value in output + arguments] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_sees_no_environment_of_a_process() -> None:
    """`ps` shows the arguments of other users' processes; their environments need their rights."""
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", f"/proc/{os.getpid()}/environ"]
    assert os.spawnvp(os.P_WAIT, other[0], other) != 0
