"""Files of a run are damaged as crashes damage them, all of them are covered, and a run recovers from it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from commands import Command
from json_files import read_json_lines
from loop_helpers import reproducible
from processes import LIMIT_S, environment, processes, wait_for_step
from torn_records import ANY, RECORDS, TAILS, Record, damage, leave_debris

from megatron_rl.contract.paths import RunDir

SYNCED = {
    *("recipe", "resolved", "identity", "changes", "plan", "script", "code", "code_record", "kept_files"),
    *("kept_files_record", "job", "fork", "token", "done", "evaluation_request", "evaluation", "evaluation_results"),
    *("exports", "report", "drain", "outcome", "image", "replica_image", "hang", "requeued", "nodes"),
}
"""Written whole, flushed and then renamed, so that no crash damages them."""
OF_OTHERS = {"wandb_files", "mlflow_store", "srun", "packages", "profile", "fabric"}
"""Files of Slurm and of trackers, and links."""
LOCKS = {"lock", "job_lock"}


def test_every_damage_changes_a_file(tmp_path: Path) -> None:
    chance = random.Random(1)
    for harmful in {*ANY, *TAILS}:
        file = tmp_path / harmful.__name__
        file.write_bytes(before := b'{"step": 1}\n{"step": 2}\n')
        harmful(file, chance)
        assert not file.is_file() or file.read_bytes() != before, harmful


def test_every_file_of_a_run_is_damaged_or_synced(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    run.checkpoint(4).mkdir(parents=True)
    files = {name: path for each in (run, attempt) for name, path in vars(each).items() if isinstance(path, Path)}
    for name in ("folder", "logs", "latest_logs", "checkpoints"):
        del files[name]
    for path in (*files.values(), run.checkpoint(4) / "manifest.json", attempt.address("train"), attempt.stacks(0)):
        file = path if path.suffix or path == run.latest_checkpoint else path / "file.bank"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    covered = {file for record in RECORDS for file in record.files(run)}
    missed = {name for name, path in files.items() if not {path, *path.rglob("*")} & covered}
    assert missed == SYNCED | OF_OTHERS | LOCKS
    assert [record.name for record in RECORDS if not record.files(run)] == []


def harm(run: RunDir, records: list[Record], chance: random.Random) -> None:
    """Kill the ranks, and damage a file of each record."""
    for rank in processes(run.root, "megatron_rl.rank_main"):
        os.kill(rank, signal.SIGKILL)
    for record in records:
        damage(run, record, chance)
    leave_debris(run, chance)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_run_whose_records_are_torn_at_each_crash_ends_as_if_undisturbed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    recipe = ("demo", "--cluster", "local", "job.nodes=1", "job.gpus_per_node=1", "training.steps=60", "save.every=5")
    alone, harmed = RunDir(tmp_path / "alone"), RunDir(tmp_path / "harmed")
    left = chance.sample(RECORDS, len(RECORDS))
    for run in (alone, harmed):
        while not run.done.exists():
            command = Command(["mrl-submit", *recipe, "--run-dir", run.root], env=environment(tmp_path))
            try:
                if run is harmed and left:
                    wait_for_step(run, len(read_json_lines(run.metrics)) + 8, command)
                    harm(run, [left.pop() for _ in range(min(4, len(left)))], chance)
                out, err = command.communicate(timeout=LIMIT_S)
            finally:
                command.kill()
            assert "Traceback" not in out + err, out + err
            assert command.returncode in (0, 1), out + err
    assert reproducible(harmed) == reproducible(alone)
