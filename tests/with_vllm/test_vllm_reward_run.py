"""A run that starts its reward model in vLLM: its rewards are those of transformers, whatever ends the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from exactly_once import fates
from loop_helpers import lines_of
from tiny_classifier import classified, write_classifier
from vllm_front import PYTHON_VARIABLE, START_S, LocalRun, is_there, until

from launcher.host.record.evidence import read_replicas
from launcher.host.record.ledger import ends_in, read_ledger
from launcher.runs.rollout_selection import recorded_groups
from megatron_rl.contract.paths import REWARD

CLOSE = 1e-3
STEPS, PROMPTS, SAMPLES = 14, 4, 4
TEXT = "'{question}{response}'"


@pytest.fixture
def started() -> Iterator[list[LocalRun]]:
    """Runs, which end with the test."""
    runs: list[LocalRun] = []
    yield runs
    for run in runs:
        for command in run.commands:
            command.kill()


def test_rewards_are_those_of_transformers_while_the_reward_model_dies_and_the_run_is_drained(
    tmp_path: Path, started: list[LocalRun]
) -> None:
    classifier = write_classifier(tmp_path / "classifier")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"problem": "{one}+{two}=", "answer": "0"}}\n' for one in "123" for two in "4567"))
    run = LocalRun(
        tmp_path / "run",
        *("demo", "placement.mode=partitioned", "job.nodes=3", "job.gpus_per_node=1", "placement.inference.nodes=1"),
        f"environment={{name: judge, args: {{train: {{path: {questions}}}, reward_model: {{text: {TEXT}}}}}}}",
        f"reward={{model: {classifier}, replicas: {{nodes: 1, vllm: {{python: {os.environ[PYTHON_VARIABLE]}}}}}}}",
        *(
            "model.init=from-scratch",
            f"grpo.prompts_per_step={PROMPTS}",
            f"grpo.group_size={SAMPLES}",
            "sampling.max_new_tokens=12",
        ),
        *(f"training.steps={STEPS}", "evaluation.every=0", "save.every=20", f"job.silence_limit_s={int(2 * START_S)}"),
        *(f"environment.reward_timeout_s={START_S}", "logging.samples_every=1", f"logging.samples={PROMPTS}"),
    )
    started.append(run)
    run.wait_for_step(3)
    engine = next(
        each for each in run.front(0, REWARD).children(recursive=True) if "EngineCore" in " ".join(each.cmdline())
    )
    engine.kill()
    until(lambda: not is_there(engine), "the end of the engine")
    run.wait_for_step(10)
    (state,) = read_replicas(run.dir.attempt(1), REWARD)
    assert state.starts == 2 and "VllmGone: vLLM has" in (state.why or ""), state
    run.drain()
    run.start("mrl", "resume", str(run.dir.root))
    assert run.end() == 0, run.log()
    assert [end.outcome for end in ends_in(read_ledger(run.dir))] == ["drained", "finished"]
    assert len(fates(run.dir)) == STEPS * PROMPTS
    assert not any(line.get("failed_rollouts") for line in lines_of(run.dir.metrics))
    answers = [
        (group.prompt + answer.text, reward, finish_reason)
        for group in recorded_groups(run.dir, (1, STEPS))
        for answer, reward, finish_reason in zip(group.answers, group.rewards, group.finish_reasons, strict=True)
    ]
    assert len(answers) == STEPS * PROMPTS * SAMPLES
    assert {finish_reason for *_, finish_reason in answers} == {"stop", "length"}
    texts, rewards, _ = zip(*answers, strict=True)
    assert list(rewards) == pytest.approx(classified(classifier, texts), abs=CLOSE)
