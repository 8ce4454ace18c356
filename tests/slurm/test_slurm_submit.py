"""mrl-submit: a recipe becomes a job, which leaves a finished run behind."""

from __future__ import annotations

import json
from pathlib import Path

from login import Login

from megatron_rl.run_dir import read_json

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


def test_a_submitted_run_finishes(login: Login) -> None:
    run = login.submit(*DEMO)
    assert run.wait() == "COMPLETED"
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert run.ends() == [("finished", None)]
    assert read_json(run.dir.done)["step"] == 5
    owner = read_json(run.dir.job)
    assert owner["job_id"] == run.job
    assert f"ClusterName={owner['slurm_cluster']}\n" in login.lab.conf.read_text()
    assert "finished after step 5" in run.dir.batch_log.read_text()


def test_every_rank_runs_the_snapshot_on_its_own_node(login: Login) -> None:
    run = login.submit(*DEMO)
    run.wait("COMPLETED")
    seen = run.seen()
    assert set(seen) == {"train.0", "train.1"}
    assert len({rank["host"] for rank in seen.values()}) == 2
    for rank in seen.values():
        assert rank["module"] == "megatron_rl.rank_main"
        assert Path(rank["code"]).resolve().is_relative_to(run.dir.code.resolve())
        environment = rank["environment"]
        assert environment["MRL_RUN_DIR"] == str(run.dir.root)
        assert (environment["MRL_ATTEMPT"], environment["MRL_STEP"]) == ("1", "train")
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["OMP_NUM_THREADS"] == "1"


def test_a_secret_reaches_the_ranks_and_no_file(login: Login) -> None:
    secret = "hunter2-5f1d"
    login.profiles["stub"]["secrets"] = ["MY_TOKEN"]
    done = login.call("mrl-submit", *DEMO, "--run-dir", login.share / "run", MY_TOKEN=secret)
    run = login.adopt(login.share / "run")
    run.wait("COMPLETED")
    assert run.seen()["train.1"]["environment"].pop("MY_TOKEN") == secret
    for file in (run.dir.attempt(1).folder / "seen").iterdir():  # the stub writes its environment down
        file.unlink()
    texts = [done.stdout, done.stderr, run.dir.batch_log.read_text()]
    texts += [file.read_text(errors="replace") for file in run.dir.root.rglob("*") if file.is_file()]
    assert not [text for text in texts if secret in text]


def test_a_finished_run_is_not_submitted_again(login: Login) -> None:
    run = login.submit(*DEMO, "--run-dir", login.share / "run")
    run.wait("COMPLETED")
    done = login.call("mrl-submit", *DEMO, "--run-dir", login.share / "run")
    assert "already finished" in done.stdout
    assert read_json(run.dir.job)["job_id"] == run.job


def test_the_shell_overrules_nothing_that_the_script_says(login: Login) -> None:
    shell = {
        "SBATCH_PARTITION": "high",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_OPEN_MODE": "truncate",
        "SBATCH_EXPORT": "NONE",
    }
    said = login.call("mrl-submit", *DEMO, "--json", **shell)
    run = login.adopt(json.loads(said.stdout)["run_dir"])
    login.jobs.append(run.job)
    assert (run.field("Partition"), run.field("Requeue")) == ("low", "1")
    run.wait("COMPLETED")
