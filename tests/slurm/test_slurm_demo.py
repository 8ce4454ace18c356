"""The demo, trained for real on two nodes."""

from __future__ import annotations

from typing import Any

from login import Login, Run

from json_files import read_json_lines

STEPS = 6
DEMO = (
    *("demo", "--cluster", "real", "job.nodes=2", "job.gpus_per_node=1"),
    *(f"training.steps={STEPS}", "evaluation.every=3", "save.every=3", "model.supervised.steps=5"),
)
LIMIT = 280.0


def reproducible(run: Run) -> list[dict[str, Any]]:
    noisy = ("time/", "throughput/", "system/")
    return [{key: value for key, value in line.items() if not key.startswith(noisy)} for line in run.metrics()]


def test_the_demo_trains_the_same_however_it_was_submitted(login: Login) -> None:
    submitted = login.submit(*DEMO)
    script = login.home / "job.sbatch"
    done = login.call("mrl-submit", *DEMO, "--run-dir", login.share / "plain run", "--dry-run", "--script")
    script.write_text(done.stdout)
    plain = login.adopt(login.share / "plain run", login.sbatch(script))
    for run in (submitted, plain):
        assert run.wait(limit=LIMIT) == "COMPLETED", run.log()
        assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
        assert run.ends() == [("finished", None)]
        assert run.dir.checkpoint_steps() == [6, 3]
        assert [line["step"] for line in read_json_lines(run.dir.evaluations)] == [0, 3, 6]
    assert reproducible(submitted) == reproducible(plain)
