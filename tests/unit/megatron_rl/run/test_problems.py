"""Training problems: those whose prompt leaves room for an answer, the same on all ranks and in every attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.contract.run_records import Fork
from megatron_rl.learn.supervised.early_stop import BestLoss
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.rank.metrics.names import STEP_METRICS
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run import problems as problems_module
from megatron_rl.run.problems import (
    HELD_OUT,
    check_alike,
    check_unchanged,
    choose_problems,
    digests_of,
    without_long_prompts,
)
from megatron_rl.run.state import Counters, best_so_far

BEFORE = {"sums": ProblemDigest(1500, "a"), "puzzles": ProblemDigest(10, "b")}
NOW = {"sums": ProblemDigest(1499, "c"), "puzzles": ProblemDigest(10, "b")}
STEP = 40


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "mine")


# Prompts that are too long


def words(text: str) -> list[int]:
    """Tokens of a text: fewer than its characters."""
    return [*range(len(text.split()))]


def training_set(*prompts: str, environment: str = "") -> TrainingSet:
    return TrainingSet(environment, 1.0, [Problem(prompt, {}, environment) for prompt in prompts])


@given(st.lists(st.text(max_size=30)), st.integers(1, 30))
def test_problems_that_fit_keep_their_order(prompts: list[str], longest: int) -> None:
    fitting = without_long_prompts(training_set(*prompts), longest, lambda text: [*text.encode()])
    assert [problem.prompt for problem in fitting.problems] == [
        prompt for prompt in prompts if len(prompt.encode()) <= longest
    ]


def test_a_prompt_with_fewer_bytes_than_the_limit_of_tokens_is_not_tokenised() -> None:
    tokenised: list[str] = []

    def encode(text: str) -> list[int]:
        tokenised.append(text)
        return words(text)

    whole = training_set("three words only", "é" * 20, "a b c")
    assert without_long_prompts(whole, 30, encode) is whole
    assert tokenised == ["é" * 20]


def test_the_number_of_tokenised_prompts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems_module, "MOST_TOKENISED", 2)
    assert len(without_long_prompts(training_set(*["a b c d"] * 5), 3, words).problems) == 3


def test_a_problem_whose_prompts_a_program_writes_is_not_tokenised() -> None:
    whole = TrainingSet("", 1.0, [Problem("a name of many words, none of which the model sees", {}, is_prompt=False)])
    assert without_long_prompts(whole, 1, lambda text: pytest.fail("tokenised")) is whole


class Environment:
    def __init__(self, *sets: TrainingSet, held_out: Sequence[Problem] = ()) -> None:
        self._sets, self._held_out = sets, held_out

    def training_sets(self) -> Sequence[TrainingSet]:
        return self._sets

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {"held_out": self._held_out}


def test_problems_left_out_are_counted_by_environment(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_run(training={"sequence_length": 14}, sampling={"max_new_tokens": 10})
    tokenizer = build_tokenizer(config.tokenizer)
    short, long = training_set("1+2=", environment="short"), training_set("1+2=", "12345+67=", environment="long")
    environment: Any = Environment(short, long)
    sets, left_out = choose_problems(environment, config, tokenizer)
    assert [[problem.prompt for problem in each.problems] for each in sets] == [["1+2="], ["1+2="]]
    assert left_out == {"long": 1}
    assert "environment 'long': 1 of 2 training problems left out, their prompts are longer than 4 " in caplog.text
    step: Any = SimpleNamespace(left_out=left_out)
    recorded = STEP_METRICS["filtered_prompts"].value
    assert recorded and recorded(step) == left_out

    environment = Environment(short, training_set("12345+67=", environment="long"))
    with pytest.raises(ConfigurationError, match="environment 'long': the prompts of all its 1 training problems are"):
        choose_problems(environment, config, tokenizer)


def test_a_character_that_the_tokenizer_lacks_is_an_error_of_the_recipe() -> None:
    config = tiny_run()
    tokenizer = build_tokenizer(config.tokenizer)
    fitting, foreign = training_set("1+2="), training_set("6*8=")
    for environment in (Environment(fitting, foreign), Environment(fitting, held_out=foreign.problems)):
        with pytest.raises(ConfigurationError, match=r"no token for the character '\*' of '6\*8=': add it to"):
            choose_problems(environment, config, tokenizer)  # type: ignore[arg-type]


# Problems that have changed


def forked_at(run_dir: RunDir, step: int) -> None:
    run_dir.root.mkdir()
    write(run_dir.fork, Fork("/runs/source", step, {}, 0.0))


def test_changed_problems_are_refused_with_the_change_and_two_remedies(run_dir: RunDir) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_unchanged(run_dir, STEP, BEFORE, NOW)
    message = str(refused.value)
    assert "differ from those that the run had up to step 40" in message
    assert "`mrl resume mine`" in message and "`mrl fork mine@40`" in message
    assert message.endswith("Changed: environment 'sums': 1,499 problems instead of 1,500")


def test_a_fork_accepts_changed_problems_only_at_its_first_step(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    forked_at(run_dir, STEP)
    check_unchanged(run_dir, STEP, BEFORE, NOW)
    assert caplog.messages == [
        "this fork trains on other problems than /runs/source: environment 'sums': 1,499 problems instead of 1,500"
    ]
    with pytest.raises(ConfigurationError, match="`mrl fork mine@48`"):
        check_unchanged(run_dir, STEP + 8, NOW, BEFORE)  # resumes from the fork's own checkpoint


def test_unchanged_problems_pass_in_silence(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    check_unchanged(run_dir, STEP, BEFORE, dict(reversed(BEFORE.items())))
    check_unchanged(run_dir, STEP, {}, NOW)  # an old checkpoint, which does not record its problems
    assert not caplog.messages


@pytest.mark.parametrize("reached", [STEP, STEP - 20], ids=["that of the fork", "an earlier one"])
def test_a_fork_knows_the_best_evaluation_only_with_its_checkpoint_and_rows(reached: int, run_dir: RunDir) -> None:
    held_out = {f"data{HELD_OUT}": ProblemDigest(5, "x")}
    best = BestLoss(1.5, reached, since=0)
    counters = Counters(step=STEP, problems=BEFORE | held_out, best=best._asdict())

    def found(now: Mapping[str, ProblemDigest]) -> BestLoss | None:
        control: Any = SimpleNamespace(rank=0, share=lambda value: value)
        return best_so_far(counters, now, run_dir, control)

    assert found(NOW | held_out) == best, "no fork"
    forked_at(run_dir, STEP)
    assert found(NOW | held_out) == (best if reached == STEP else None)
    assert found(BEFORE | {f"data{HELD_OUT}": ProblemDigest(5, "y")}) is None
    write(run_dir.fork, Fork("/runs/source", STEP - 30, {}, 0.0))
    assert found(NOW | held_out) == best, "it has saved since"


def test_a_checkpoint_records_its_training_problems() -> None:
    counters = Counters(step=STEP, problems=BEFORE)
    assert Counters.of(json.loads(json.dumps(asdict(counters)))) == counters
    assert Counters.of({"step": STEP}) == Counters(step=STEP), "an old checkpoint, which records none"


def test_a_single_environment_has_the_name_of_the_task() -> None:
    problem = Problem("1+2=", {})
    digest = ProblemDigest.of([problem])
    assert digests_of([TrainingSet("", 1.0, [problem])], "arithmetic") == {"arithmetic": digest}
    several = [TrainingSet(id, 1.0, [problem]) for id in ("sums", "puzzles")]
    assert digests_of(several, "multi-task") == {"sums": digest, "puzzles": digest}


def test_ranks_whose_problems_differ_from_most_ranks_fail() -> None:
    others = [BEFORE, BEFORE]

    def gather(mine: Any) -> list[Any]:
        return [mine, *(tuple(each.items()) for each in others)]

    control: Any = SimpleNamespace(gather=gather)
    with pytest.raises(
        RuntimeError, match=r"this rank has other training problems .*'sums': 1,499 problems instead of"
    ):
        check_alike(NOW, control)
    others = [NOW, BEFORE]
    check_alike(NOW, control)  # this rank agrees with most
