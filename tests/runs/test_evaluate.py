"""`mrl evaluate`, on this machine and as a job, resumes after any kill with the result of an undisturbed evaluation."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from checkpoint_helpers import ended
from hf_helpers import PUBLISHED, publish
from loop_helpers import Attempt, loop_recipe, outcome_of, prepare
from waiting import until

from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, FINISHED
from megatron_rl.contract.paths import RunDir

ALONE = {"gpus_per_node": 1, "device": "cpu"}
LIMIT_S = 120.0
ROWS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("evaluated")
    recipe = loop_recipe(
        job=ALONE,
        training={"steps": 2},
        save={"every": 2},
        evaluation={"every": 0},
        inference={"max_batch": ROWS},
        environment={"args": {"evaluation_problems": 64}},
    )
    run_dir = prepare(folder / "run", recipe)
    attempt = Attempt(run_dir, folder, ranks=1)
    assert attempt.exit_codes() == [EXIT_FINISHED], attempt.logs()
    return run_dir


class Evaluating:
    """Run `python -m megatron_rl.run.evaluate`, forked from a process that has imported what it needs."""

    def __init__(self, request: dict[str, Any], folder: Path) -> None:
        self.said = folder / "said"
        asked = folder / "asked"
        asked.write_text(json.dumps(request))
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_evaluate, args=(asked, self.said), daemon=True)
        self.process.start()

    def code(self) -> int | None:
        (code,) = ended([self.process], LIMIT_S)
        return code


def _evaluate(asked: Path, said: Path) -> None:
    os.environ["MRL_PARENT_PID"] = str(os.getppid())
    sys.stdin = asked.open()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    from megatron_rl.run.evaluate.__main__ import main

    sys.exit(main())


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def request(checkpoint: Path, out: Path) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint),
        "k": 4,
        "out": str(out),
        "threads": 1,
        "environment": {"name": "arithmetic", "args": {"evaluation_problems": 64}},
        "sampling": {"max_new_tokens": 3},
    }


def found(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out.read_text())
    del result["answers"]
    return result


@pytest.fixture(scope="module")
def undisturbed(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    evaluating = Evaluating(request(run.root, folder / "r.json"), folder)
    assert evaluating.code() == EXIT_FINISHED, evaluating.said.read_text()
    return found(folder / "r.json")


def test_result_contains_its_settings(run: RunDir, undisturbed: dict[str, Any]) -> None:
    settings = undisturbed["settings"]
    checkpoint = settings["checkpoint"]
    assert (checkpoint["step"], checkpoint["policy_version"]) == (2, 4), "there are two updates per step"
    assert checkpoint["path"] == str(run.checkpoint(2)) and len(checkpoint["digest"]) > 8
    assert settings["sampling"]["temperature"] == 1.0 and settings["environment"]["name"] == "arithmetic"
    assert set(undisturbed["sets"]) == {"trained", "held_out"}
    for scores in undisturbed["sets"].values():
        assert (scores["problems"], scores["answers"], scores["failures"]) == (
            scores["problems"],
            4 * scores["problems"],
            {},
        )
        assert scores["scores"].keys() >= {"greedy", "pass@1", "pass@2", "pass@4", "avg@4", "maj@4"}
        assert 0 < scores["scores"]["pass@4"]["value"] < 1, "otherwise the comparison below proves nothing"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_interrupted_evaluation_resumes_with_the_same_result(
    run: RunDir, undisturbed: dict[str, Any], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "r.json"
    kept = out.with_suffix(".answers.jsonl")
    evaluating = Evaluating(request(run.root, out), tmp_path)
    until(lambda: lines(kept) > 1, "the first answers", LIMIT_S)
    os.kill(evaluating.process.pid or 0, number)
    assert evaluating.code() == (EXIT_INTERRUPTED if number == signal.SIGTERM else -number), evaluating.said.read_text()
    assert not out.exists()
    before = kept.read_bytes()
    before = before[: before.rindex(b"\n", 0, -1) + 1]  # lose one answer of a block
    kept.write_bytes(before + b'{"torn')
    evaluating = Evaluating(request(run.root, out), tmp_path)
    assert evaluating.code() == EXIT_FINISHED, evaluating.said.read_text()
    assert kept.read_bytes().startswith(before), "kept answers are not computed again"
    assert found(out) == undisturbed


def test_pass_rates_of_training_problems_are_kept_for_a_curriculum(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    asked = request(run.root, out) | {"keep": True, "prompts": 24, "greedy": False}
    assert (evaluating := Evaluating(asked, tmp_path)).code() == EXIT_FINISHED, evaluating.said.read_text()
    result = found(out)
    rates = [json.loads(line) for line in Path(result["pass_rates"]).read_text().splitlines()]
    assert len({one["prompt"] for one in rates}) == 24 and {one["answers"] for one in rates} == {4}
    mean = sum(one["rate"] for one in rates) / 24
    assert mean == pytest.approx(result["sets"]["training"]["scores"]["pass@1"]["value"])


@pytest.mark.slow
def test_tensor_parallel_ranks_have_the_same_result_up_to_rounding(
    run: RunDir, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(run, tmp_path, tp=2)
    attempt = Attempt(job, tmp_path, ranks=2)
    assert attempt.exit_codes() == [EXIT_FINISHED] * 2, attempt.logs()
    together = found(job.evaluation)
    assert together["settings"] == undisturbed["settings"]
    for name, scores in undisturbed["sets"].items():
        for kind, score in scores["scores"].items():
            assert together["sets"][name]["scores"][kind]["value"] == pytest.approx(score["value"], abs=0.05)


def job_of(run: RunDir, folder: Path, **asked: int) -> RunDir:
    """Directory of a job that evaluates a run on two ranks."""
    recipe = loop_recipe(job=ALONE | {"gpus_per_node": 2}, environment={"args": {"evaluation_problems": 64}})
    job = prepare(folder / "job", recipe)
    job.evaluation_request.write_text(json.dumps(request(run.root, folder) | {"out": None, **asked}))
    return job


def test_job_leaves_on_request_and_its_next_attempt_resumes(
    run: RunDir, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(run, tmp_path, replicas=2)
    kept = job.evaluation.with_suffix(".answers.jsonl")
    attempt = Attempt(job, tmp_path, ranks=2)
    until(lambda: lines(kept) > 1, "the first answers", LIMIT_S)
    os.kill(attempt.processes[1].pid or 0, signal.SIGUSR1)  # one rank gets the signal, and all leave
    assert set(attempt.exit_codes()) <= {EXIT_DRAINED, EXIT_FINISHED}, attempt.logs()
    outcome = outcome_of(attempt.files)
    assert outcome and outcome.outcome == DRAINED and outcome.step == lines(kept) - 1
    attempt = Attempt(job, tmp_path, ranks=2)
    assert attempt.exit_codes() == [EXIT_FINISHED] * 2, attempt.logs()
    outcome = outcome_of(attempt.files)
    assert outcome and outcome.outcome == FINISHED
    assert found(job.evaluation) == undisturbed


def test_errors_found_while_opening_are_one_line_too(run: RunDir, tmp_path: Path) -> None:
    for changed, said in (
        ({"checkpoint": str(tmp_path / "none")}, "no such directory"),
        ({"sets": ["tested"]}, "--set tested: the environment has no such set; there are held_out, trained"),
    ):
        asked = request(run.root, tmp_path / "r.json")
        evaluating = Evaluating(asked | changed, tmp_path)
        assert evaluating.code() == EXIT_USAGE
        assert said in evaluating.said.read_text().splitlines()[-1]


def mrl(*words: str | Path, cwd: Path) -> tuple[int, str, str]:
    done = commands.run(["mrl", "evaluate", *words], LIMIT_S, cwd=cwd, env={**os.environ, "MRL_CLUSTER": "local"})
    return done.returncode, done.stdout, done.stderr


def test_published_weights_are_evaluated_with_a_table(tmp_path: Path) -> None:
    publish(tmp_path / "hf", PUBLISHED["Qwen2"])
    asked = ("hf", "--env", "arithmetic", "--env-args", "held_out=0.5", "--set", "held_out", "--prompts", "3")
    code, said, errors = mrl(*asked, "--k", "2", "--max-new-tokens", "4", cwd=tmp_path)
    assert code == EXIT_FINISHED, errors
    assert "held_out: 3 problems, 6 answers" in said and "pass@2 " in said
    result = Path(said.splitlines()[-1])
    assert result.parent == Path("evaluations") and (tmp_path / result).is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--env", "arithmetik"], "did you mean 'arithmetic'?"),
        (["RUN", "--env-args", "max_term=3"], "--env-args max_term: max_term: unknown key (did you mean max_terms?)"),
        (["RUN", "--env-args", "3"], "expected KEY=VALUE"),
        (["RUN", "--temperature", "-1"], "'--temperature': -1.0 is not in the range"),
        (["RUN", "--k", "0"], "'--k': 0"),
        (["RUN", "--dry-run"], "--dry-run: this option needs a job"),
        (
            ["RUN", "--out", "/dev/null/found.json"],
            "the folder /dev/null cannot be created",
        ),
        (["."], "is neither a run directory"),
        (["no/where"], "no such directory"),
    ],
)
def test_unusable_input_is_one_error_with_exit_code_2(run: RunDir, tmp_path: Path, words: list[str], said: str) -> None:
    code, out, errors = mrl(*(run.root if word == "RUN" else word for word in words), cwd=tmp_path)
    assert (code, out) == (EXIT_USAGE, "")
    assert errors.startswith("error: ") and said in errors and "Traceback" not in errors
    assert not list(tmp_path.iterdir())
