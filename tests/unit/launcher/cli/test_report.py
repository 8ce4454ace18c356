"""The page of a run: one file that asks nothing of a network, in which no text of the run is code."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.report import command
from launcher.host.record.accounting import AttemptTrace, gpu_usage
from launcher.recipe.load import dump_resolved, load_recipe
from launcher.report.page import duration, json_block, visible
from launcher.report.read import attempt_rows, chosen_groups
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, MetricsLine, TimelineLine
from megatron_rl.contract.files import append_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.rollout_records import GroupLine, group_json, member, rollouts_file
from megatron_rl.contract.run_records import Fork, RecipeChange

pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202edcba\x00\x1b[31m\ud83d"


class Outline(HTMLParser):
    """Elements of a page: (tag, attributes) in order, and the text of those that are scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the demo that crashed at step 30."""
    found = RunDir(tmp_path / "mine")
    recipe = load_recipe("demo", ["grpo.group_size=8"])
    found.root.mkdir()
    found.resolved.write_text(dump_resolved(recipe.config), encoding="utf-8")
    found.recipe.write_text("# override: grpo.group_size=8\n" + recipe.text, encoding="utf-8")
    for step in range(1, 31):
        append(found.metrics, MetricsLine(step, {"mean_reward": step / 100, "answers": 8, "answer_length": 3.0}))
    append(found.evaluations, MetricsLine(0, {"eval/held_out/greedy_accuracy": 0.25}))
    append(found.attempts_ledger, AttemptStart(1, 1000.0, ranks=2))
    append(found.attempts_ledger, AttemptEnd(1, 1060.0, "crashed", seconds=60.0, step=30, error=HOSTILE[:-1]))
    timeline = found.attempt(1).timeline
    timeline.parent.mkdir(parents=True)
    append(timeline, TimelineLine(1010.0, 0, {"start-up": 20.0}, began=1000.0, ranks=2, resumed=0))
    append(timeline, TimelineLine(1060.0, 30, {"train": 60.0, "generate": 40.0}))
    return found


def page_of(run: RunDir, *options: str) -> Outline:
    result = CliRunner().invoke(command, [str(run.root), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert str(run.report) in result.output
    return Outline(run.report.read_text(encoding="utf-8"))


def test_the_page_shows_state_progress_time_and_recipe(run: RunDir):
    page = page_of(run)
    said = " ".join(page.text.split())
    for part in ("mine", "failed", "of 900", "0.055→0.26", "process-minutes", "# override: grpo.group_size=8", "720"):
        assert part in said, part
    assert "generate" in said
    curves = json.loads(re.search(r'id="data-curves">(.*?)</script>', run.report.read_text(encoding="utf-8"))[1])
    assert curves["groups"][0]["charts"][0]["title"] == "Reward"


def test_the_page_names_no_other_file_and_runs_only_its_own_scripts(run: RunDir):
    page = page_of(run)
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}, (tag, attributes)
        assert not attributes.get("src"), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)
    policy = next(one["content"] for one in page.named("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_has_the_notice_that_the_licence_of_its_library_asks_for(run: RunDir):
    CliRunner().invoke(command, [str(run.root)], catch_exceptions=False)
    text = (run.root / "report.html").read_text(encoding="utf-8")
    notice = re.search(r"<!--([^<]*?)-->", text)
    assert notice and "Leon Sorokin" in notice[1] and "Permission is hereby granted" in notice[1]


def test_text_of_a_run_is_neither_code_nor_invisible(run: RunDir):
    page = page_of(run)
    assert not page.named("img")
    assert len(page.named("script")) == len(re.findall(r"<script", run.report.read_text(encoding="utf-8")))
    assert "</script><script>alert(1)</script><img src=x onerror=alert(2)>\\u{202e}dcba\\u{0}\\u{1b}[31m" in page.text


def test_durations_have_the_unit_that_people_use():
    seconds = (0.0, 0.0004, 0.033, 0.9, 4.2, 59.0, 150.0, 9000.0, 400_000.0)
    assert "|".join(map(duration, seconds)) == "0 s|0.4 ms|33 ms|900 ms|4.2 s|59 s|2 min|2.5 h|4.6 days"


def test_data_cannot_end_its_element_and_comes_back_the_same():
    block = json_block({"text": HOSTILE, "&\u2028": ["<!--", "]]>"]})
    assert not set("<>&\u2028\u2029\ud83d") & set(block)
    assert json.loads(block) == {"text": HOSTILE, "&\u2028": ["<!--", "]]>"]}
    block.encode("utf-8")


def test_characters_that_hide_or_reorder_others_are_shown_as_escapes():
    assert visible("a\u202eb\u200bc\x07\x7f\ufeff") == "a\\u{202e}b\\u{200b}c\\u{7}\\u{7f}\\u{feff}"
    assert visible("Größe\t数\n🎉") == "Größe\t数\n🎉"


def test_a_run_without_a_step_has_a_page(run: RunDir):
    for file in (run.metrics, run.evaluations, run.attempts_ledger):
        file.unlink()
    said = " ".join(page_of(run).text.split())
    assert "Too early" in said


def test_damaged_records_leave_a_page_that_names_what_is_missing(run: RunDir):
    lines = run.metrics.read_text("utf-8").splitlines()
    run.metrics.write_text("\n".join([*lines[:9], '{"step": 10, "mean_reward": NaN}', *lines[10:], ""]), "utf-8")
    append(run.attempts_ledger, AttemptStart(2, 1e90, ranks=2))
    append(run.changes, RecipeChange(attempt=2, at=1e90, changes={"grpo.kl_beta": [0.1]}))
    write(run.fork, Fork("/nowhere", 10, {}, at=900.0))
    run.recipe.unlink()
    said = " ".join(page_of(run).text.split())
    assert f"Not read: {run.metrics}: 1 lines are left out: line 10" in said
    assert "an unknown time" in said and "forked from /nowhere at step 10" in said


def test_of_a_long_run_the_first_the_newest_and_some_groups_between_are_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    attempt = run.attempt(1)
    attempt.rollouts.mkdir(parents=True, exist_ok=True)
    for file in attempt.rollouts.iterdir():
        file.unlink()
    for step in range(50, 1050, 100):
        group = GroupLine(step, step, "p", "1+1=", [1.0], [0.0], [3], ["stop"], 0, 0)
        append_bytes(rollouts_file(attempt, 0, step), member(group_json(group) + "\n"))
    size = Path(rollouts_file(attempt, 0, 50)).stat().st_size

    def read(most: int, last: int = 2000) -> tuple[list[int], int]:
        monkeypatch.setattr("launcher.report.read.MOST_READ", most)
        groups, unread = chosen_groups(run, last)
        return [group.step for group in groups], unread

    assert read(20 * size) == ([*range(50, 1050, 100)], 0)
    assert read(20 * size, last=320) == ([50, 150, 250], 0), "the part of step 320 has its first group at 350"
    steps, unread = read(5 * size)
    assert (steps[0], steps[-2:], len(steps) + unread) == (50, [850, 950], 10)
    assert 2 < len(steps) <= 6


def test_a_page_of_several_runs_marks_the_best(run: RunDir):
    other = RunDir(run.root.with_name("other"))
    shutil.copytree(run.root, other.root)
    other.resolved.write_text(run.resolved.read_text("utf-8").replace("group_size: 8", "group_size: 4"), "utf-8")
    append(other.metrics, MetricsLine(31, {"mean_reward": 0.9}))
    file = run.root.parent / "both.html"
    result = CliRunner().invoke(command, [str(run.root), str(other.root), "--out", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said = " ".join(Outline(file.read_text(encoding="utf-8")).text.split())
    assert "Best by mean_reward (highest, mean of the last 10 steps): other, 0.324; next: mine, 0.255" in said
    assert "otherbest4failed310.324" in said.replace(" ", "")  # name, best, group_size, state, step, mean reward


def test_a_page_that_cannot_be_written_is_an_error(run: RunDir):
    result = CliRunner().invoke(command, [str(run.root), "--out", "/proc/none.html"])
    assert result.exit_code == 1
    assert "/proc/none.html: cannot be written" in result.output


LEDGER = [
    AttemptStart(1, 100.0, gpus=2, submitted_at=50.0, job_id="1", nodes=["a", "b"]),
    AttemptEnd(1, 200.0, "drained", seconds=100.0, step=3, cause="preempted", then="requeue"),
    AttemptStart(2, 900.0, gpus=2, submitted_at=880.0, job_id="2"),
    AttemptEnd(2, 980.0, "finished", seconds=80.0, step=9),
]
TRACES = {
    1: AttemptTrace(
        [
            TimelineLine(120.0, 0, {"start-up": 40.0}, began=100.0, ranks=2, resumed=0),
            TimelineLine(200.0, 3, {"train": 100.0, "generate": 60.0}),
        ],
        left=True,
    ),
    2: AttemptTrace(
        [
            TimelineLine(910.0, 3, {"load": 20.0}, began=900.0, ranks=2, resumed=3),
            TimelineLine(980.0, 9, {"train": 140.0}),
        ],
        left=True,
    ),
}
USAGE = gpu_usage(LEDGER, TRACES, 1000.0)


def test_attempts_say_how_they_ended_and_how_long_they_waited():
    first, second = attempt_rows(USAGE, LEDGER, 1000.0)
    assert (first.attempt, first.queued_s, first.seconds, first.nodes) == (1, 50.0, 100.0, ["a", "b"])
    assert "saved after step 3 (preempted)" in first.ending
    assert first.goodput == pytest.approx(0.8)
    assert second.ending == "finished after step 9"
    (running,) = attempt_rows(gpu_usage(LEDGER[:1], TRACES, 200.0, running=True), LEDGER[:1], 200.0)
    assert running.ending == ""
