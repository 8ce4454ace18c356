"""A whole run: SmolLM2 in conversations of an environment of verifiers."""

from __future__ import annotations

import os

from commands import Command
from exactly_once import fates
from loop_helpers import lines_of
from smollm2 import exported_smollm2

from megatron_rl.contract.paths import RunDir

PROMPTS, SAMPLES, STEPS = 2, 4, 3
SMALL = (
    *(f"grpo.prompts_per_step={PROMPTS}", f"grpo.group_size={SAMPLES}", f"training.steps={STEPS}"),
    *("environment.args.env.taskset.num_tasks=20", "environment.args.evaluate.test.taskset.num_tasks=4"),
    "model.dtype=fp32",
)
LIMIT_S = 1500.0


def test_smollm2_is_trained_on_conversations_of_verifiers(verifiers_python, tmp_path):
    exported_smollm2()
    run = RunDir(tmp_path / "run")
    python = f"environment.args.python={verifiers_python}"
    command = Command(
        ["mrl-submit", "smollm2-135m-verifiers", "--run-dir", str(run.root), python, *SMALL],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    lines = lines_of(run.metrics)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        assert line["turns_mean"] == 2.0
        assert line["answers"] == PROMPTS * SAMPLES
        assert line["mean_reward"] == line["reward/right"]
    assert fates(run) == {ordinal: ordinal // PROMPTS + 1 for ordinal in range(PROMPTS * STEPS)}
