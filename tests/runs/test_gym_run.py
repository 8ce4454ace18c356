"""A run trains on an environment of gymnasium that its recipe alone configures."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run
from loop_helpers import lines_of
from optional import needs

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts

pytestmark = [pytest.mark.slow, needs("gymnasium")]

STEPS = 3
RECIPE = (
    "environment={name: gym/Blackjack-v1, args: {actions: {s: 0, h: 1}, instruction: '', episodes: 8, held_out: 2}}",
    'tokenizer.alphabet="0123456789(), sh\\n"',
    "sampling={max_new_tokens: 1, stop: [s, h]}",
    "grpo={prompts_per_step: 8, group_size: 8}",
    "model.supervised.steps=40",
    "model.max_position_embeddings=160",
    "job.gpus_per_node=1",
    f"training.steps={STEPS}",
    "logging={samples_every: 1, samples: 8}",
)


def test_episodes_of_several_turns_are_played_rewarded_and_trained_on(tmp_path: Path) -> None:
    ended = run(["mrl-submit", "demo", "--run-dir", tmp_path / "run", *RECIPE], timeout=240)
    assert ended.returncode == 0, ended.stderr
    run_dir = RunDir(tmp_path / "run")
    steps = lines_of(run_dir.metrics)
    assert [line["failed_rollouts"] for line in steps] == [0] * STEPS
    assert all(line["turns_mean"] == line["answer_length"] > 1 for line in steps), "a turn is one token"
    # A token that was not sampled has version -1. Training on one would count as stale.
    assert all(line["staleness_max"] == 0 and line["inference_logprob_difference_max"] < 1e-3 for line in steps)
    assert all(line["grad_norm"] > 0 for line in steps)
    for step, line in enumerate(steps, 1):
        rewards = [played(*episode) for episode in episodes_of(run_dir, step)]
        assert sum(rewards) / len(rewards) == pytest.approx(line["mean_reward"], abs=1e-6)


def episodes_of(run_dir: RunDir, step: int) -> list[tuple[str, list[str]]]:
    """First observation and responses of each episode of a step."""
    groups = read_rollouts(run_dir, step, step)
    return [(group.prompt.strip(), answer.text.split("\n")) for group in groups for answer in group.answers]


def played(first: str, responses: list[str]) -> float:
    """Reward that gymnasium itself gives for the responses in an episode with this first observation."""
    import gymnasium

    episode = gymnasium.make("Blackjack-v1")
    seed = next(seed for seed in range(8) if str(episode.reset(seed=seed)[0]) == first)
    episode.reset(seed=seed)
    paid = 0.0
    for response in responses:
        if response not in ("s", "h"):
            return paid - 1.0
        paid += float(episode.step("sh".index(response))[1])
    return paid
