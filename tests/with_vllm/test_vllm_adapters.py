"""A run that trains adapters, whose replica has vLLM: its workers merge the adapters of each version."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from core_helpers import ALPHABET, VOCAB
from hf_helpers import export, publish
from loop_helpers import Attempt, lines_of
from vllm_front import START_S, Front
from vllm_training import CLOSE, SERVED, greedily, prepare_run, record_answers

STEPS = 3
LIMIT_S = 2 * START_S  # a start, and the run after it


def test_vllm_answers_with_the_adapters_of_each_version(tmp_path: Path) -> None:
    """Answers of the third step are sampled after two updates. The last evaluation follows the third one, whose weights
    are exported: merged in files, as vLLM has merged them in memory."""
    base, heard = tmp_path / "base", tmp_path / "heard"
    publish(base, SERVED["Qwen2"])
    run = prepare_run(
        tmp_path / "run",
        base,
        job={"silence_limit_s": int(START_S)},
        model={"lora": {"rank": 8}},
        tokenizer={"type": "characters", "alphabet": ALPHABET, "path": None},
        environment={"args": {"evaluation_problems": 4}},
        sampling={"max_new_tokens": 8},
        # A random model gives hardly a right answer, so the entropy bonus moves the weights.
        grpo={"prompts_per_step": 4, "group_size": 4, "entropy_coefficient": 0.1},
        optimizer={"learning_rate": 0.03},
        training={"steps": STEPS},
        evaluation={"every": 0},
        save={"every": 0},
    )
    training = Attempt(run, tmp_path / "cache", ranks=1, sabotage=partial(record_answers, heard))
    with Front(run) as front:
        assert training.exit_codes(LIMIT_S) == [0], training.logs() + front.text()
    lines = lines_of(run.metrics)
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    assert max(line["inference_logprob_difference_max"] for line in lines) < CLOSE
    answers = [json.loads(line) for line in heard.read_text().splitlines()]
    last = [answer for answer in answers if answer["temperature"] == 0 and {*answer["versions"]} == {STEPS}]
    assert last
    export(run, tmp_path / "trained")
    for answer in last:
        tokens, logprobs = continued(tmp_path / "trained", answer)
        assert answer["tokens"] == tokens
        assert answer["logprobs"] == pytest.approx(logprobs, abs=CLOSE)
    assert any(abs(continued(base, answer)[1][0] - answer["logprobs"][0]) > 100 * CLOSE for answer in last)


def continued(folder: Path, answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Continue the prompt of an answer with transformers, as far as the answer goes."""
    return greedily(folder, answer["prompt_tokens"], len(answer["tokens"]), VOCAB)
