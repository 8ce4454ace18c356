"""Each command says something sensible of a run directory in which any file was damaged or replaced: no traceback, no
hang, and an exit code that its help names."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from examples import examples
from furnished_run import ID, JOB, make_furnished_run, name_run
from hostile import KINDS_OF_PLACE, damaged, replace_place
from hypothesis import given
from hypothesis import strategies as st
from reported_run import make_reported_run
from slurm_text import squeue_record

from launcher.backends import child
from launcher.backends.slurm import jobs
from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.host.record.identity import comment_of
from launcher.host.slurm import call
from launcher.host.slurm.call import CommandOutput
from megatron_rl.contract import records
from megatron_rl.contract.paths import RunDir

LIMIT_S = 20.0  # of processor time of one command, before it counts as hanging
HERE = "here"  # stands for the run in a command
COMMANDS = f"""
status {HERE}
status {HERE} --json
status --all
ls
ls --json
logs {HERE}
logs {HERE} --list
logs {HERE} --role infer-0
logs {HERE} --rank 1 --attempt 1 --json
report {HERE}
report {HERE} good
report good {HERE} --json
explain {HERE}
explain {HERE} --json
rollouts {HERE}
rollouts {HERE} --step 1: -n 3 --json
rollouts {HERE} --step 1: --reward 0 --full
replay {HERE} 12 22
replay {HERE} 12 22 --no-sample
fork {HERE} --dry-run
fork {HERE}@12 --dry-run
resume {HERE} --dry-run
resume {HERE} training.steps=20 --dry-run
cancel {HERE}
cancel {HERE} --drain
requeue {HERE}
requeue {HERE} --now
attach {HERE}
evaluate {HERE} --k 2
evaluate {HERE} --keep
evaluate {HERE} --cluster lab --dry-run
chat {HERE}
serve {HERE}
push {HERE} me/mine
convert megatron-to-hf {HERE} hf
data filter {HERE}/evaluations/x.json --out kept.jsonl
plan {HERE}/resolved.yaml
mrl-submit {HERE}/resolved.yaml --dry-run
mrl-submit demo --run-dir {HERE} --dry-run
""".strip().splitlines()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A login node with two runs to damage, and a whole one. Slurm's answers are those of the test; child processes
    fail."""
    folder = tmp_path_factory.mktemp("home")
    lab = f"lab: {{gpus_per_node: 8, container: null, run_root: {folder}/root}}\n"
    (folder / "clusters.yaml").write_text(lab)
    environ = {"XDG_STATE_HOME": f"{folder}/state", "MRL_CLUSTERS": f"{folder}/clusters.yaml", "PATH": "/usr/bin:/bin"}
    before = Path.cwd()
    with mock.patch.dict(os.environ, environ), pytest.MonkeyPatch.context() as patch:
        os.environ.pop("MRL_CLUSTER", None)
        os.chdir(folder)
        patch.setattr(records, "PATIENCE_S", 0.0)
        patch.setattr(os, "execvpe", lambda *_: None)  # mrl attach becomes srun
        patch.setattr(child, "module_command", lambda module: ["/bin/false"])
        make_reported_run(folder / "good", steps=12)
        make_furnished_run(folder / "slurm")
        make_furnished_run(folder / "local", job_id=None)
        yield folder
        os.chdir(before)


def tried(words: list[str]) -> None:
    program, words = (mrl_submit, words[1:]) if words[0] == "mrl-submit" else (main, words)
    began = time.process_time()
    done = CliRunner().invoke(program, words)
    assert time.process_time() - began < LIMIT_S, words
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2, 3), (words, done.exit_code)
    if done.exit_code in (1, 2):
        assert done.stderr.lower().rpartition("error:")[2].strip(), (words, done.output)


def answer(state: str) -> CommandOutput:
    listed = squeue_record(JobID=JOB, State=state, Comment=comment_of(ID), BatchFlag="1", NodeList="n[1-2]")
    return CommandOutput(0, listed, "")


@examples(40)
@given(
    command=st.sampled_from(COMMANDS),
    chance=st.randoms(use_true_random=False),
    local=st.booleans(),
    finished=st.booleans(),
    state=st.sampled_from(["RUNNING", "PENDING", "FAILED", "CANCELLED"]),
)
def test_a_damaged_run(home, command, chance, local, finished, state):
    source = home / ("local" if local else "slurm")
    with TemporaryDirectory(dir=home) as folder, pytest.MonkeyPatch.context() as patch:
        for module in (call, jobs):
            patch.setattr(module, "run", lambda *_, **__: answer(state))
        patch.setattr(time, "sleep", lambda seconds: None)
        root = Path(folder) / "run"
        shutil.copytree(source, root)
        if finished:
            (root / "DONE").touch()
        name_run(RunDir(root))
        places = sorted(path.relative_to(root) for path in root.rglob("*"))
        for place in chance.sample(places, k=chance.randint(1, 2)):
            spoil(root / place, chance)
        tried([word.replace(HERE, str(root)) for word in command.split()])


def spoil(path: Path, chance: Any) -> None:
    if not path.is_file() or chance.random() < 0.1:
        if path.parent.is_dir():  # it was not spoilt first
            replace_place(path, chance.choice(KINDS_OF_PLACE))
    else:
        path.write_bytes(damaged(path.name, path.read_bytes(), chance))
