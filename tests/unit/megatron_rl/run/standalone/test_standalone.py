"""A policy outside a run: the meaning of its path, and its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from core_helpers import full_forward, quiet_safe_points, stir, tiny_run
from hf_helpers import PUBLISHED, SENTENCE, publish
from run_helpers import make_run

from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.checkpoint.source import find_source
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.opened_policy import load_policy
from megatron_rl.rank.here import Here
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run.setup import set_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published") / "tiny-qwen"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return publish(folder, PUBLISHED["Qwen2, tied"])


@torch.inference_mode()
def test_published_weights_and_their_checkpoint_compute_what_transformers_does(
    tmp_path: Path, theirs: Any, folder: Path, platform: Any, groups: Any
) -> None:
    to_megatron(folder, tmp_path / "converted", platform)
    reference = theirs(torch.tensor([SENTENCE])).logits[0]
    for path, kind in ((folder, "huggingface"), (tmp_path / "converted", "checkpoint")):
        source = find_source(str(path))
        assert (source.name, source.kind, source.step, source.model.dtype) == (path.name, kind, None, "fp32")
        policy, digest, version = load_policy(source, platform, groups)
        assert version == 0 and len(digest) == 64
        assert not any(weight.requires_grad for weight in policy.parameters())
        ours = full_forward(policy, SENTENCE)
        assert torch.allclose(ours, reference[:, : ours.shape[1]], atol=1e-4)


def test_run_is_its_newest_good_checkpoint_with_tokenizer_and_policy_version(
    tmp_path: Path, platform: Any, groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, config = RunDir(tmp_path / "mine"), tiny_run()
    attempt = run_dir.attempt(1)
    attempt.folder.mkdir(parents=True)
    run_dir.resolved.write_text(yaml.safe_dump(config.model_dump()))
    run = set_up(config, Here(run_dir, attempt, platform, groups, quiet_safe_points()))
    for step in (2, 4):
        stir(run.trainer.policy, 0.3, seed=step)
        run.step, run.trainer.policy_version = step, step + 1
        run.checkpointer.save(step, run.models.sharded_state(), run.counters())
        run.checkpointer.wait(final=True)
    source = find_source(str(run_dir.root))
    assert (source.name, source.kind, source.step, source.recipe) == ("mine", "checkpoint", 4, config)
    policy, _, version = load_policy(source, platform, groups)
    assert version == 5 and source.tokenizer.encode("1+1") == [1, 10, 1]
    for ours, trained in zip(policy.parameters(), run.trainer.policy.parameters(), strict=True):
        assert torch.equal(ours, trained)
    next(run_dir.checkpoint(4).glob("*.distcp")).unlink()
    assert find_source(str(run_dir.root)).step == find_source(str(run_dir.checkpoint(2))).step == 2
    assert "checkpoint of step 4 passed over" in caplog.text


def test_dtype_of_the_weights_is_the_published_or_the_requested_one(theirs: Any, folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for said, dtype in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "bf16")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": said}))
        assert find_source(str(tmp_path)).model.dtype == dtype
    assert find_source(str(tmp_path), "fp32").model.dtype == "fp32"


def test_error_says_what_a_path_is_and_what_it_should_be(tmp_path: Path, theirs: Any, folder: Path) -> None:
    run = make_run(tmp_path / "run")
    run.checkpoint(40).mkdir(parents=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "manifest.json").write_text("{}")
    unread = tmp_path / "unread"
    unread.mkdir()
    (unread / "resolved.yaml").write_text("name: [")
    (unread / "checkpoints").mkdir()
    for path, said in (
        (make_run(tmp_path / "young").root, "has no checkpoint yet"),
        (run.root, "has no good checkpoint: checkpoint of step 40 passed over"),
        (run.checkpoint(40), "is neither a run directory"),
        (empty, "is neither a run directory"),
        (stranger, "is neither a checkpoint in the directory of its run"),
        (tmp_path / "nothing", "no such directory"),
        (unread, "has no checkpoint yet"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            find_source(str(path))
