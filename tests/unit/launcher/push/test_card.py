"""A model card says what was trained, from what and how well, and nothing about the machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from optional import needs
from run_helpers import make_run

from launcher.push.card import MARK, ModelCard, text_of
from launcher.push.card_facts import licence_of, read_card
from launcher.report.run_report import ResultRow
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.evaluation_records import EvaluationResult, MeanScore, SetResult
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import CodeSnapshot, CodeSource

QWEN = "Qwen/Qwen2.5-0.5B"


def cached_base(home: Path, card: str) -> None:
    folder = home / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "1a2b"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(card)


def card_of(run: RunDir, step: int = 30, adapters: bool = False, licence: str | None = None) -> ModelCard:
    homes = [run.root.parent / "home"]
    return read_card(run, step, "1.2", homes, name="mine", adapters=adapters, licence=licence)


def head_of(card: ModelCard) -> dict[str, object]:
    found = yaml.safe_load(text_of(card).split("---\n")[1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    secret = "/lustre/me/answers.jsonl"
    run = make_run(tmp_path / "run", "grpo.kl_beta=0.25", f"environment={{name: math, args: {{train: {secret}}}}}")
    for step in range(1, 41):
        append(run.metrics, MetricsLine(step, {"mean_reward": step / 100, "answers": 8, "answer_length": 10.0}))
    for step in (0, 30, 40):
        append(run.evaluations, MetricsLine(step, {"eval/held_out/greedy_accuracy": step / 40}))
    return run


def test_card_of_a_step_has_its_curves_evaluations_and_recipe(run: RunDir) -> None:
    scored = SetResult(80, 320, {}, {}, {"pass@4": MeanScore(value=0.625, standard_error=0.05, problems=80)})
    run.evaluation_results.mkdir()
    for step in (30, 40):
        result = EvaluationResult({"checkpoint": {"step": step}}, {"gsm8k": scored}, "answers.jsonl")
        write(run.evaluation_results / f"{step}.json", result)
    text = text_of(card_of(run))
    assert MARK in text
    assert "trained for 30 steps by GRPO on math with mrl 1.2" in text
    assert "| gsm8k | pass@4 | 0.625 ± 0.05 | 80 |" in text and "| held_out | greedy_accuracy | 0.75 |" in text
    curve = [line for line in text.splitlines() if line.startswith("| 30 |")]
    assert curve == ["| 30 | 0.3 | 10 | 0.75 |"]
    assert "| 40 |" not in text, "later than the step"
    assert "| generated tokens | 2,400 |" in text
    assert "grpo.kl_beta: 0.25\n" in text
    assert "answers.jsonl" in text and "/lustre" not in text
    assert text == text_of(card_of(run)), "a second push changes nothing"


def test_card_has_all_scores_of_the_evaluation_during_training(run: RunDir) -> None:
    shares = {"pass@1": 0.5, "pass@1_low": 0.4, "pass@1_high": 0.6, "pass@16": 0.75, "pass@16_low": 0.6, "tokens": 9.0}
    values = {f"eval/hard/{name}": value for name, value in shares.items()} | {"eval/held_out_rows/loss": 1.5}
    append(run.evaluations, MetricsLine(50, values))
    rows = [(row.set, row.score, row.value) for row in card_of(run, step=50).results]
    assert rows == [("hard", "pass@1", 0.5), ("hard", "pass@16", 0.75), ("held_out_rows", "loss", 1.5)]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "[model](https://evil.example)",
    "https://evil.example/weights",
    "www.evil.example",
    "x\n---\nlicense: mit\n---\n# Mine",
    "`` `<b>",
    "a\n```\n<script>alert(1)</script>\n```",
    "a | <b>",
]


@needs("markdown_it")
def test_no_name_of_a_recipe_a_model_or_a_data_set_becomes_a_link_or_a_tag_of_the_card(run: RunDir) -> None:
    from markdown_it import MarkdownIt

    plain = card_of(run)
    for hostile in HOSTILE:
        row = ResultRow("final", hostile, hostile, 0.5, None, 10)
        card = replace(plain, name=hostile, base=hostile, datasets=[hostile], environments=[hostile], results=[row])
        text = text_of(replace(card, recipe={"environment.args.train": hostile}))
        front, body = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n")), text.partition(MARK)[2]
        assert (front["model-index"][0]["name"], front["datasets"]) == (hostile, [hostile])
        assert "license" not in front
        rendered = MarkdownIt("commonmark").enable("table").parse(body)
        tokens = [token for block in rendered for token in [block, *(block.children or [])]]
        assert not {token.type for token in tokens} & {"html_block", "html_inline", "link_open", "image", "hr"}
        assert len([token for token in tokens if token.type == "code_inline"]) == 6, hostile
        (recipe,) = [token for token in tokens if token.type == "fence"]
        assert yaml.safe_load(recipe.content) == {"environment.args.train": hostile}


def test_card_of_a_mix_names_the_data_sets_that_it_trained_on(tmp_path: Path) -> None:
    sets = "[{path: me/talk}, {path: me/sums, held_out: {split: test}}, {path: /home/me/own.jsonl}]"
    recipe = ("training.objective=supervised", "environment=null", "grpo=null", f"data.sets={sets}")
    card = card_of(make_run(tmp_path / "run", *recipe, "model.init=from-scratch"))
    assert [*card.datasets] == ["me/talk", "me/sums"]


def test_base_on_the_hub_gives_the_card_its_name_and_licence(tmp_path: Path) -> None:
    cached_base(tmp_path / "home", "---\nlicense: other\nlicense_name: qwen\ntags: [a]\n---\n# Qwen\n")
    run = make_run(tmp_path / "run", "model.init=huggingface", "model.huggingface=/models/none")
    run.resolved.write_text(run.resolved.read_text().replace("/models/none", QWEN))
    head = head_of(card_of(run, adapters=True))
    assert (head["license"], head["license_name"], head["base_model"]) == ("other", "qwen", QWEN)
    assert (head["library_name"], head["base_model_relation"]) == ("peft", "adapter")
    mine = head_of(card_of(run, licence="mit"))
    assert (mine["license"], "license_name" in mine, mine["base_model_relation"]) == ("mit", False, "finetune")


def test_licence_is_absent_if_it_is_unknown(run: RunDir) -> None:
    assert "license" not in head_of(card_of(run)) and "base_model" not in head_of(card_of(run))


@pytest.mark.parametrize("card", ["# no metadata", "---\nlicense: [a, b]\n---\n", "---\n{broken\n---\n", "---\n"])
def test_card_of_a_base_without_a_licence_gives_none(card: str, tmp_path: Path) -> None:
    cached_base(tmp_path, card)
    assert licence_of(QWEN, [tmp_path]) == {}


def test_commit_is_that_of_the_snapshot_that_ran(run: RunDir) -> None:
    run.code.mkdir()
    source = CodeSource("/clone", "mrl", "package", commit="ab" * 20, dirty=True)
    write(run.code_record, CodeSnapshot(1, 0.0, [source], []))
    assert card_of(run).commit == "abababababab with changes"
