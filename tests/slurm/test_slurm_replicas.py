"""The replicas of a job: one that is killed, one that hangs, and one whose node dies are started again beside the
training."""

from __future__ import annotations

import json
import signal

import pytest
from json_files import read_json
from lab import wait_until
from login import Login, Run
from records import kill_rank

from megatron_rl.contract.heartbeat_files import read_heartbeat

LIMIT_S = 200.0
SHAPE = ("placement.mode=partitioned", "job.nodes=3", "job.gpus_per_node=1", "placement.inference.nodes=2")


def submit(login: Login, *words: str) -> Run:
    return login.submit("demo", "--cluster", "stub", *SHAPE, *words, stub={"steps": 4000, "seconds": 0.1})


def starts(run: Run, step: str) -> int:
    """How often a step had been started before it was started last; -1: never."""
    seen = run.seen().get(f"{step}.0")
    return -1 if seen is None else int(seen["environment"]["MRL_START"])


def wait_for_start(run: Run, step: str, start: int) -> None:
    wait_until(f"start {start} of {step}", lambda: starts(run, step) >= start, LIMIT_S)


def ends_in_order(login: Login, run: Run) -> None:
    """Check that the run ends undisturbed by the faults of its replicas."""
    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED")
    assert run.ends() == [("stopped", "cancelled")], run.log()
    assert {line["attempt"] for line in run.metrics()} == {1}
    assert not login.lab.run("squeue", "--noheader", "--steps", "--jobs", run.job).strip()


@pytest.mark.slow
def test_replicas_of_the_teacher_restart_beside_the_training_and_the_others(login: Login) -> None:
    login.confine(1, 3)
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 16, "hidden_act": "silu"}
    teacher = login.share / "teacher"
    teacher.mkdir(parents=True)
    (teacher / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **shape}))
    run = submit(login, "placement.inference.nodes=1", f"distill.teacher={teacher}", "distill.replicas.nodes=1")
    wait_for_start(run, "teacher-0", 0)
    wait_for_start(run, "infer-0", 0)
    seen = run.seen()["teacher-0.0"]
    assert (seen["host"], seen["replica"]) == ("node03", None), "it is no replica that generates"
    assert kill_rank(run, 0, "teacher-0", signal.SIGKILL)
    wait_for_start(run, "teacher-0", 1)
    assert starts(run, "infer-0") == 0
    lines = login.call("mrl", "status", run.dir.root).stdout
    assert "teacher-0: starts on node03" in lines and "SIGKILL" in lines
    ends_in_order(login, run)


@pytest.mark.slow
def test_a_killed_follower_of_a_vllm_over_two_nodes_ends_its_step_alone(login: Login) -> None:
    login.confine(1, 3)
    large = ("inference.engine=vllm", "placement.inference.tp=2", "placement.tp_across_nodes=true")
    heads = ("model.num_attention_heads=2", "model.num_query_groups=2")  # a size that vLLM has on CPUs
    run = submit(login, *large, *heads, f"inference.vllm.python={login.python_with_vllm()}", "resume.partial=keep")
    wait_until("both of its nodes", lambda: {"infer-0.0", "infer-0.1"} <= run.seen().keys(), LIMIT_S)
    assert [run.seen()[f"infer-0.{rank}"]["host"] for rank in (0, 1)] == ["node02", "node03"]
    assert kill_rank(run, 1, "infer-0", signal.SIGKILL)
    wait_for_start(run, "infer-0", 1)
    lines = login.call("mrl", "status", run.dir.root).stdout
    assert "infer-0: starts on node02, node03" in lines
    assert "infer-0 rank 1 on node03" in lines and "SIGKILL" in lines
    ends_in_order(login, run)


@pytest.mark.slow
def test_hanging_replica_is_ended_by_slurm_and_restarted(login: Login) -> None:
    login.confine(1, 3)
    run = submit(login, "job.silence_limit_s=10")
    wait_for_start(run, "infer-1", 0)
    wait_until("its heartbeat", lambda: read_heartbeat(run.dir.attempt(1).replica(1).heartbeats, 0), LIMIT_S)
    assert kill_rank(run, 0, "infer-1", signal.SIGSTOP)
    wait_for_start(run, "infer-1", 1)
    assert starts(run, "infer-0") == 0
    assert "infer-1 rank 0 on node03: silent for" in run.dir.batch_log.read_text()
    lines = login.call("mrl", "status", run.dir.root).stdout
    assert "infer-1: starts on node03" in lines
    assert "2 starts; the last one ended: infer-1 rank 0 on node03: silent for" in lines
    ends_in_order(login, run)


@pytest.mark.slow  # Slurm takes its time to find out
@pytest.mark.parametrize("spare", [1, 0])
def test_training_continues_after_the_death_of_a_replicas_node(login: Login, spare: int) -> None:
    login.confine(1, 3 + spare)
    run = submit(login, f"job.spare_nodes={spare}")
    wait_for_start(run, "infer-1", 0)
    wait_for_start(run, "infer-0", 0)
    run.wait_for_step(3)
    lost = read_json(run.dir.attempt(1).nodes)["steps"]["infer-1"][0]
    login.lab.kill_node(lost)
    try:
        if spare:
            wait_for_start(run, "infer-1", 1)
            assert run.seen()["infer-1.0"]["host"] == "node04"
            assert read_json(run.dir.attempt(1).nodes)["steps"]["infer-1"] == ["node04"]
        else:
            state = run.dir.attempt(1).replica(1).state
            wait_until("it cannot be started", lambda: (read_json(state) or {})["starts"] > 2, LIMIT_S)
            assert "srun: " in read_json(state)["why"], "the reason must be Slurm's message"
        step = len(run.metrics())
        run.wait_for_step(step + 3)
        assert starts(run, "infer-0") == 0
        ends_in_order(login, run)
    finally:
        login.lab.restart_node(lost)
