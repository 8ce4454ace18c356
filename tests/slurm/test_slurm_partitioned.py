"""Training on nodes of its own, with answers from a replica on another one that is killed meanwhile, is that of ranks
which do both."""

from __future__ import annotations

from login import Login
from loop_helpers import Attempt, prepare
from records import OVERRIDES, finish, kill_rank, record

from launcher.host.record.evidence import read_replicas
from launcher.recipe.load import load_recipe

SHORT = (*OVERRIDES, "training.steps=8", "job.nodes=3")


def test_a_partitioned_job_whose_replica_is_killed_has_the_record_of_a_colocated_run(login: Login) -> None:
    apart = ("job.nodes=4", "placement.mode=partitioned", "placement.inference.nodes=1")
    login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(login.lab.cache)}}
    run = login.submit("demo", "--cluster", "real", *SHORT, *apart)
    colocated = prepare(login.home / "colocated", load_recipe("demo", SHORT).config.model_dump())
    ranks = Attempt(colocated, login.lab.cache, ranks=3)
    run.wait_for_step(2, limit=300)
    assert kill_rank(run, 0, "infer-0")
    finish(run)
    assert ranks.exit_codes() == [0, 0, 0], ranks.logs()
    assert record(run.dir) == record(colocated)
    assert run.ends() == [("finished", None)]
    (replica,) = read_replicas(run.dir.attempt(1))
    assert replica.starts == 2, run.log()
    assert "killed by SIGKILL" in replica.why
