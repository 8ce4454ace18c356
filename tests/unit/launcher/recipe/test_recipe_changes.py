"""Keys that a run may change after its start: a documented set, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.recipe.changes import changes, with_remarks
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.config import RunConfig

BASE = ("training.steps=800", "training.seed=0", "grpo.group_size=16", "evaluation.every=0", "save.every=100")


def between(*overrides: str) -> dict[str, bool]:
    found = changes(load_recipe("demo", BASE).config, load_recipe("demo", [*BASE, *overrides]).config)
    return {change.key: change.allowed for change in found}


def test_equal_values_are_no_change():
    assert between("training.seed=0") == {}


def test_the_documented_set_may_change():
    overrides = {
        "training.steps": 900,
        "evaluation.every": 7,
        "save.every": 3,
        "save.keep": 9,
        "logging.samples": 2,
        "optimizer.learning_rate": 0.5,
        "optimizer.min_learning_rate": 0.1,
        "optimizer.warmup_steps": 4,
        "optimizer.decay": "cosine",
        "grpo.kl_beta": 0.1,
    }
    assert between(*(f"{key}={value}" for key, value in overrides.items())) == dict.fromkeys(overrides, True)


def test_anything_else_may_not():
    assert between("grpo.group_size=8", "training.seed=1", "optimizer.beta1=0.8", "job.gpus_per_node=1") == {
        "grpo.group_size": False,
        "training.seed": False,
        "optimizer.beta1": False,
        "job.gpus_per_node": False,
    }


def test_short_form_that_an_earlier_version_recorded_is_no_change(tmp_path: Path):
    (tmp_path / "reward.py").write_text("def reward(response): return 1.0\n")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    arguments = f"{{file: {tmp_path}/reward.py, train: {tmp_path}/mine.jsonl}}"
    config = load_recipe("demo", [f"environment={{name: python, args: {arguments}}}"]).config
    recorded = config.model_dump(by_alias=True)
    assert recorded["environment"]["args"]["train"] == {"path": f"{tmp_path}/mine.jsonl"}
    recorded["environment"]["args"]["train"] = f"{tmp_path}/mine.jsonl"
    assert changes(RunConfig.model_validate(recorded), config) == []


def test_cluster_and_nodes_may_change_freely():
    assert between("cluster=elsewhere") == {}
    assert between("job.nodes=2-4", "job.spare_nodes=1") == {}
    assert between("job.nodes=3", "placement.mode=partitioned", "placement.inference.nodes=1") == {}


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_more_steps_of_a_decayed_run_report_the_higher_learning_rate(decay):
    asked = [*BASE, "optimizer.learning_rate=1e-3", "optimizer.min_learning_rate=1e-4", f"optimizer.decay={decay}"]
    old = load_recipe("demo", asked).config

    def remark(reached: int, *overrides: str) -> str:
        new = load_recipe("demo", [*asked, *overrides]).config
        return "".join(one.remark for one in with_remarks(changes(old, new), old, new, reached))

    said = remark(800, "training.steps=1600")
    assert ("raises the learning rate from 0.0001" in said) == (decay != "constant")
    kept = re.findall(r"optimizer\.\S+", said)
    assert not remark(800, "training.steps=1600", *kept) and len(kept) == (0 if decay == "constant" else 2)
    assert not remark(0, "training.steps=1600") and not remark(400, "save.every=7")
    assert not remark(400, "training.steps=500"), "it falls faster"


def test_nested_sections_are_compared_key_by_key():
    assert between("grpo.overlong.mode=mask") == {"grpo.overlong.mode": False}
