"""A partitioned run that replays choices of experts loses none when a replica dies in the middle of answers."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from loop_helpers import Attempt, lines_of, prepare
from test_partitioned import AHEAD_STEPS, PROMPTS, ahead, die_at, wait_for_both
from waiting import until

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32, "tied_embeddings": False}


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_answers_of_a_killed_replica_continue_with_the_choices_it_made(
    tmp_path: Path, cache: Path, max_lag: int
) -> None:
    """Some answers consist of tokens of two versions with a lag of 1, each with the choices that its version made."""
    recipe = ahead(max_lag)
    recipe["model"] |= EXPERTS | {"router_replay": "rollout"}
    run_dir = prepare(tmp_path / "replayed", recipe)
    attempt = Attempt(run_dir, cache, sabotage=partial(wait_for_both, run_dir))
    (killed,) = attempt.start_replica(0, sabotage=partial(die_at, 3))
    attempt.start_replica(1)
    until(lambda: not killed.is_alive(), "the first replica has killed itself while it generated")
    assert killed.exitcode == -signal.SIGKILL
    attempt.start_replica(0, start=1)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    steps = lines_of(run_dir.metrics)
    assert [line["first_ordinal"] for line in steps] == [PROMPTS * index for index in range(AHEAD_STEPS)]
    assert sum(line["failed_rollouts"] for line in steps) == 0
    assert sum(line["system/repeated_requests"] for line in steps) > 0
    assert [line["router_replay_missing"] for line in steps] == [0] * AHEAD_STEPS
    differ = max(line["router_replay_differing"] for line in steps)
    if max_lag:
        assert differ > 0
    else:  # one model in fp32 on both sides
        assert differ < 0.01
        assert max(line["inference_logprob_difference_max"] for line in steps) < 1e-4
