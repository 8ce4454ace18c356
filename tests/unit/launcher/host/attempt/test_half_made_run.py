"""A start of the job that died while it made the run directory: the next one finishes what it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.attempt.begin import create
from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.slurm_steps import Script
from megatron_rl.contract.paths import RunDir

DOCUMENTS = ["sources_json", "script", "recipe_yaml", "plan_json", "resolved_yaml"]


def document(name: str) -> str:
    return "[]" if name == "sources_json" else f"{name}\n"


def context_in(tmp_path: Path) -> JobContext:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    return JobContext(run, "lab", "7", ["n1"])


def made(run: RunDir) -> list[str]:
    return [path.read_text() for path in (run.script, run.recipe, run.plan, run.resolved)]


@pytest.mark.parametrize("last", DOCUMENTS)
def test_whenever_it_died_all_is_there_after_the_next(tmp_path: Path, last: str) -> None:
    context = context_in(tmp_path)

    def until(name: str) -> str:
        if name == last:
            raise KeyboardInterrupt
        return document(name)

    with pytest.raises(KeyboardInterrupt):
        create(context, until)
    assert not context.run.resolved.exists(), "with it the directory is a run's"
    create(context, document)
    assert made(context.run) == [f"{name}\n" for name in DOCUMENTS[1:]]
    assert context.run.code_record.is_file()


def test_what_a_shell_prints_at_its_start_is_no_part_of_a_document(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "profile").write_text("echo module loaded; cat() { echo mine; }\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "profile"))
    monkeypatch.setenv("BASH_FUNC_cat%%", "() { echo somebody's; }")
    script = tmp_path / "job.sbatch"
    script.write_text('plan_json() {\n    cat <<"end"\n{}\nend\n}\ncase $1 in document) "$2" ;; esac\n')
    assert Script(str(script)).document("plan_json") == "{}\n"


def test_a_document_that_cannot_be_read_is_the_fault_of_no_host(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match="submit the run again"):
        create(context_in(tmp_path), lambda name: "module loaded\n" + document(name))


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    context.run.recipe.write_text("asked for before\n")
    create(context, document)
    assert context.run.recipe.read_text() == "asked for before\n"
    before = {path: path.stat().st_mtime_ns for path in context.run.root.iterdir()}
    create(context, lambda name: pytest.fail(f"{name} is not needed any more"))
    assert {path: path.stat().st_mtime_ns for path in context.run.root.iterdir()} == before
