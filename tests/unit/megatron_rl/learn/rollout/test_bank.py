"""The bank in whole runs: interrupted work is resumed, also with another number of ranks, and not repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bank_helpers import bank_in, collect, drive
from core_helpers import answer_of, build_run, tiny_run
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix, GenerationRequest, PartialAnswer
from megatron_rl.generate.engine.model_runner import ModelRunner
from megatron_rl.generate.engine.scheduler import RowAnswer, StepPlan
from megatron_rl.learn.rollout.bank import bank as bank_module
from megatron_rl.learn.rollout.bank import file as file_module
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.bank.file import bank_file, bank_files, scan
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.rollout import ResumeConfig
from megatron_rl.run.state import Run

KEEP = ResumeConfig(partial="keep")
REGENERATE = ResumeConfig(partial="regenerate")
PROMPTS, SAMPLES = 4, 4


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once at what is damaged."""
    monkeypatch.setattr(file_module, "LOOK_AGAIN_S", 0.0)


@pytest.fixture(scope="module")
def run(platform: Any, groups: Any) -> Iterator[Run]:
    """A run with long answers, and an engine that decodes six at a time."""
    config = tiny_run(
        sampling={"max_new_tokens": 16},
        inference={"max_batch": 6},
        grpo={"prompts_per_step": PROMPTS, "group_size": SAMPLES},
    )
    built = build_run(config, platform, groups, scale=0.15)
    yield built
    built.generation.loop.close()


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> list[TrajectoryGroup]:
    run.engine.policy_version = 0
    return collect(run)


def bank_of(run: Run, folder: Path, attempt: int, resume: ResumeConfig = KEEP, version: int = 0, **where: int) -> Bank:
    """Open the bank of an attempt that resumes with weights of this version, which the engine gets too."""
    run.engine.policy_version = version
    return bank_in(folder, attempt, resume, version, **where)


def tokens(groups: list[TrajectoryGroup]) -> list[list[list[int]]]:
    return [[answer_of(answer) for answer in group.trajectories] for group in groups]


def assert_equal(groups: list[TrajectoryGroup], expected: list[TrajectoryGroup]) -> None:
    """Assert equal answers; log-probs may differ by the rounding of a batch of another shape."""
    assert [group.ordinal for group in groups] == [group.ordinal for group in expected]
    assert tokens(groups) == tokens(expected)
    for group, other in zip(groups, expected, strict=True):
        for one, two in zip(group.trajectories, other.trajectories, strict=True):
            assert one.logprobs == pytest.approx(two.logprobs, rel=1e-6, abs=2e-6)
            assert (one.reward, one.finish_reason, one.text) == (two.reward, two.finish_reason, two.text)


def banked_tokens(folder: Path) -> int:
    """Tokens of unfinished answers in the bank."""
    heads = [entry.head for path in bank_files(folder) for entry in scan(path)[0]]
    return sum(head["count"] for head in heads if head["kind"] == "part")


# resume.partial: keep


@examples(5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(1, 15), max_size=6))
def test_a_step_interrupted_many_times_resumes_to_the_same_answers(
    run: Run, undisturbed: list[TrajectoryGroup], tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("bank")
    for attempt, stop_after in enumerate(stops, start=1):
        groups = collect(run, bank_of(run, folder, attempt), stop_after=stop_after)
        if groups:
            break
    assert_equal(collect(run, bank_of(run, folder, len(stops) + 1)), undisturbed)


def test_no_token_is_generated_twice(run: Run, undisturbed: list[TrajectoryGroup], tmp_path: Path) -> None:
    """Except those that the engine decodes while the driver stops."""
    sampled = 0
    execute = ModelRunner.execute

    def counted(runner: ModelRunner, plan: StepPlan) -> list[RowAnswer]:
        nonlocal sampled
        sampled += len(plan.rows)
        return execute(runner, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "execute", counted)
        for attempt, stop_after in enumerate((5, 9, 13, None), start=1):
            collect(run, bank_of(run, tmp_path, attempt), stop_after=stop_after)
    needed = sum(len(answer) for group in tokens(undisturbed) for answer in group)
    assert needed <= sampled <= needed + 3 * 3 * 6


@pytest.mark.parametrize("resume", [KEEP, REGENERATE], ids=["keep", "regenerate"])
def test_a_finished_step_is_neither_generated_nor_scored_again(
    run: Run,
    undisturbed: list[TrajectoryGroup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: ResumeConfig,
) -> None:
    first = collect(run, bank_of(run, tmp_path, 1, resume))
    assert first == undisturbed  # with the same neighbours, bits are equal

    def refuses(*_: Any) -> None:
        raise AssertionError("generated or scored again")

    monkeypatch.setattr(run.environment, "get_reward", refuses)
    monkeypatch.setattr(run.engine, "generate", refuses)
    assert collect(run, bank_of(run, tmp_path, 2, resume)) == undisturbed


def test_unfinished_answers_are_written_regularly(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass of the loop flushes here, and each step waits for the writer, so the clock decides nothing."""
    bank = bank_of(run, tmp_path, 1, ResumeConfig(flush_s=1e-9))
    seen = []
    step = run.engine.step

    def watched() -> None:
        step()
        assert bank._file.wait(60)
        seen.append(banked_tokens(tmp_path))

    monkeypatch.setattr(run.engine, "step", watched)
    collect(run, bank)
    assert 0 < seen[len(seen) // 2] < seen[-1]


def test_evaluation_leaves_nothing_in_the_bank(run: Run, tmp_path: Path) -> None:
    bank = bank_of(run, tmp_path, 1)
    drive(run, bank)
    run.evaluate()
    run.driver.close()
    assert banked_tokens(tmp_path) == 0


# Damage and other ranks


@pytest.fixture(scope="module")
def torn_bank(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Name and content of the bank file of an interrupted step."""
    folder = tmp_path_factory.mktemp("torn")
    collect(run, bank_of(run, folder, 1, ResumeConfig(flush_s=0.001)), stop_after=25)
    (path,) = bank_files(folder)
    return path.name, path.read_bytes()


@examples(5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_bank_costs_nothing_but_time(
    run: Run,
    undisturbed: list[TrajectoryGroup],
    torn_bank: tuple[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    name, content = torn_bank
    damaged = bytearray(content)
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3), label="flipped"):
        damaged[position] ^= 255
    folder = tmp_path_factory.mktemp("bank")
    (folder / name).write_bytes(damaged[: data.draw(st.integers(0, len(content)), label="length")])
    assert_equal(collect(run, bank_of(run, folder, 2)), undisturbed)


def test_another_number_of_ranks_resumes_all_work(run: Run, undisturbed: list[TrajectoryGroup], tmp_path: Path) -> None:
    """Two drivers write and one reads, then one writes and three read."""
    two, one = tmp_path / "two", tmp_path / "one"
    for driver in (0, 1):
        share = range(2 * driver, 2 * driver + 2)
        assert collect(run, bank_of(run, two, 1, driver=driver, drivers=2), share, stop_after=12) == []
    assert len(bank_files(two)) == 2
    known = banked_tokens(two)
    assert_equal(collect(run, bank_of(run, two, 2)), undisturbed)
    assert known > 20

    assert collect(run, bank_of(run, one, 1), stop_after=20) == []
    for driver, share in enumerate((range(1), range(1, 2), range(2, 4))):
        groups = collect(run, bank_of(run, one, 2, driver=driver, drivers=3), share)
        assert_equal(groups, undisturbed[share.start : share.stop])


# resume.partial: regenerate


def test_regenerated_answers_are_bit_equal(run: Run, undisturbed: list[TrajectoryGroup], tmp_path: Path) -> None:
    """Groups of a share are used all together or not at all."""
    for attempt, stop_after in enumerate((3, 12, 18), start=1):
        assert collect(run, bank_of(run, tmp_path, attempt, REGENERATE), stop_after=stop_after) == []
    entries = [entry for path in bank_files(tmp_path) for entry in scan(path)[0]]
    scored = {entry.head["ordinal"] for entry in entries if entry.head["kind"] == "group"}
    assert 0 < len(scored) < PROMPTS
    assert not any(entry.head["kind"] == "part" for entry in entries)
    assert collect(run, bank_of(run, tmp_path, 4, REGENERATE)) == undisturbed


# Checkpoints


def test_groups_of_newer_weights_are_generated_again_or_reused(run: Run, tmp_path: Path) -> None:
    newer = collect(run, bank_of(run, tmp_path, 1, version=7))
    run.engine.policy_version = 5
    expected = collect(run)
    assert tokens(expected) != tokens(newer)  # other keys
    assert collect(run, bank_of(run, tmp_path, 2, ResumeConfig(newer="reuse"), version=5)) == newer
    assert collect(run, bank_of(run, tmp_path, 2, version=5)) == expected


def test_tokens_of_a_replica_that_has_the_next_weights_are_newer(tmp_path: Path) -> None:
    """The pool's version changes when the last replica has the weights; tokens of the first may be on disk by then."""
    request = GenerationRequest([1, 2], 1, Sampling(max_new_tokens=4), key=3, ordinal=0)
    part = PartialAnswer(request.id, 0, AnswerPrefix([5, 6], [-1.0, -1.0], [6, 7]))

    async def generate(_: GenerationRequest) -> None:
        await asyncio.Event().wait()

    inference: Any = SimpleNamespace(policy_version=6, partial_answers=lambda: [part], generate=generate)

    async def flush() -> None:
        bank = bank_in(tmp_path, 1, KEEP, 6)
        recording = bank.recording(inference)
        asked = asyncio.ensure_future(recording.generate(request))
        await asyncio.sleep(0)
        bank.flush(recording)
        asked.cancel()
        bank.close()

    asyncio.run(flush())
    found = [entry.head for path in bank_files(tmp_path) for entry in scan(path)[0]]
    assert [head["newest"] for head in found if head["kind"] == "part"] == [7]


def test_an_answer_resumes_under_its_first_key(run: Run, tmp_path: Path) -> None:
    """If generation runs ahead of training, the checkpoint may be newer than an unfinished answer."""
    collect(run, bank_of(run, tmp_path, 1, version=3), stop_after=4)
    begun = {entry.head["ordinal"] for path in bank_files(tmp_path) for entry in scan(path)[0][1:]}
    expected = []
    for version in (3, 4):
        run.engine.policy_version = version
        expected.append(tokens(collect(run)))
    groups = collect(run, bank_of(run, tmp_path, 2, version=4))
    for group in groups:
        assert tokens([group])[0] == expected[group.ordinal not in begun][group.ordinal]
    assert begun
    assert {min(answer.versions[answer.prompt_length :]) for group in groups for answer in group.trajectories} == {3, 4}


def test_short_steps_are_written_together(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(run, tmp_path, 1)
    drive(run, bank)
    monkeypatch.setattr(bank_module, "WORTH_WRITING_S", 1000.0)
    run.driver.collect(0)
    assert not bank_files(tmp_path)
    bank.begin_checkpoint(9, next_ordinal=2, policy_version=0)
    bank.end_checkpoint(9)
    bank.close()
    (path,) = bank_files(tmp_path)
    heads = [entry.head for entry in scan(path)[0]]
    assert [head["ordinal"] for head in heads if head["kind"] == "group"] == [2, 3]  # the others were never written


@pytest.mark.parametrize(
    ("newer", "saved", "kept"),
    [("discard", 0, [1, 3]), ("discard", 1, [1, 2, 3]), ("reuse", 0, [1, 2, 3])],
)
def test_trained_groups_that_no_checkpoint_could_need_are_not_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: Any, saved: int, kept: list[int]
) -> None:
    """A killed run needs the groups that the newest checkpoint's weights sampled; one that leaves, the last ones."""
    bank = bank_of(run, tmp_path, 1, ResumeConfig(newer=newer))
    drive(run, bank)
    monkeypatch.setattr(bank_module, "WORTH_WRITING_S", 1000.0)
    for step in (1, 2, 3):
        run.engine.policy_version = step - 1
        run.driver.collect((step - 1) * PROMPTS)
        if step == 1 and saved:
            bank.begin_checkpoint(1, PROMPTS, policy_version=saved)
    bank.close()
    (path,) = bank_files(tmp_path)
    groups = [entry.head["ordinal"] for entry in scan(path)[0] if entry.head["kind"] == "group"]
    assert {1 + ordinal // PROMPTS for ordinal in groups} == {*kept}


def test_a_long_step_is_written_at_its_end(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(run, tmp_path, 1)
    drive(run, bank)
    monkeypatch.setattr(bank_module, "WORTH_WRITING_S", 0.0)
    run.driver.collect(0)
    assert bank._file.wait(20)
    (path,) = bank_files(tmp_path)
    assert [entry.head["kind"] for entry in scan(path)[0]] == ["attempt", *PROMPTS * ["group"]]


def test_a_failed_step_keeps_its_scored_groups(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(run, tmp_path, 1)
    drive(run, bank)
    monkeypatch.setattr(bank_module, "WORTH_WRITING_S", 1000.0)
    run.driver.collect(0)
    monkeypatch.setattr(run.engine, "step", fail)
    with pytest.raises(OSError, match="out of order"):
        run.driver.collect(PROMPTS)
    assert bank._file.wait(20)
    assert [entry.head["kind"] for entry in scan(bank_files(tmp_path)[0])[0]] == ["attempt", *PROMPTS * ["group"]]


def fail() -> None:
    raise OSError("out of order")


def test_the_first_driver_takes_over_earlier_files_and_the_others_find_the_records(
    run: Run, undisturbed: list[TrajectoryGroup], tmp_path: Path
) -> None:
    collect(run, bank_of(run, tmp_path, 1))
    collect(run, bank_of(run, tmp_path, 2), stop_after=1)
    (tmp_path / ".attempt-001.driver-00000.bank.x.tmp").touch()
    first, second = (bank_of(run, tmp_path, 3, driver=driver, drivers=2) for driver in (0, 1))
    for bank in (second, first):
        bank.flush()
        bank.begin_checkpoint(9, next_ordinal=2, policy_version=0)
        bank.end_checkpoint(9)
        assert bank._file.wait(20)
    assert sorted(tmp_path.iterdir()) == [bank_file(tmp_path, 3, driver) for driver in (0, 1)]
    for bank in (first, second):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(run.engine.__class__, "generate")
            assert collect(run, bank, range(2, 4)) == undisturbed[2:]
    assert collect(run, bank_of(run, tmp_path, 4), range(2, 4)) == undisturbed[2:]
