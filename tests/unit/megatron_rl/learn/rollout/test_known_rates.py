"""Pass rates from before a run: where its curriculum starts, and which problems it trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from core_helpers import tiny_run

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.problem_digest import prompt_digest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.evaluation_records import PassRate
from megatron_rl.contract.records import encode_line
from megatron_rl.learn.rollout.curriculum import Curriculum, prompts_of
from megatron_rl.learn.rollout.known_rates import read_rates, with_known_rates
from megatron_rl.recipe.errors import ConfigurationError

PROBLEMS = [Problem(f"{number}+1=", {}) for number in range(20)]


def written(path: Path, rates: Sequence[tuple[int, float, int]]) -> str:
    """rates: problem, its pass rate, and the number of its answers."""
    lines = [PassRate("", prompt_digest(PROBLEMS[number]), rate, answers) for number, rate, answers in rates]
    path.write_text("".join(f"{encode_line(line)}\n" for line in lines))
    return str(path)


def test_problems_that_teach_nothing_are_left_out_of_the_first_pass(tmp_path: Path) -> None:
    rates = [(number, [0.0, 1.0, 0.5][number % 3], 4) for number in range(12)]
    config = tiny_run(curriculum={"start": written(tmp_path / "rates.jsonl", rates), "least": 1e-6})
    one = prompts_of(config, [TrainingSet("", 1.0, PROBLEMS)])
    assert isinstance(one, Curriculum)
    one.assign(0, 12)  # a pass without the eight problems of a pass rate of 0 or 1
    assert Counter(one.problem(ordinal).prompt for ordinal in range(12)) == Counter(
        problem.prompt for number, problem in enumerate(PROBLEMS) if number >= 12 or number % 3 == 2
    )
    assert one.report() == {"curriculum_left_out": 8, "curriculum_known": 12, "curriculum_pass_rate": 0.5}


def test_lines_of_one_problem_count_as_one_with_all_their_answers(tmp_path: Path) -> None:
    known = read_rates(written(tmp_path / "rates.jsonl", [(3, 0.0, 1), (3, 1.0, 3)]))
    assert known == {("", prompt_digest(PROBLEMS[3])): 0.75}


def test_only_problems_with_a_pass_rate_remain(tmp_path: Path) -> None:
    known = read_rates(written(tmp_path / "rates.jsonl", [(3, 0.25, 4), (1, 0.5, 4)]))
    (one,) = with_known_rates([TrainingSet("", 1.0, PROBLEMS)], known)
    assert one.problems == [PROBLEMS[1], PROBLEMS[3]]


def test_rates_of_other_prompts_or_of_no_problem_are_refused(tmp_path: Path) -> None:
    known = read_rates(written(tmp_path / "rates.jsonl", [(3, 0.25, 4)]))
    with pytest.raises(ConfigurationError, match="none of the 2 training problems of environment 'sums'"):
        with_known_rates([TrainingSet("sums", 1.0, PROBLEMS[:2])], known)
    (tmp_path / "answers.jsonl").write_text('{"event": "answers", "set": "a"}\n')
    with pytest.raises(ConfigurationError, match=r"answers.jsonl is not a file of .* line 1"):
        read_rates(str(tmp_path / "answers.jsonl"))
