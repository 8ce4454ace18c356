"""A policy outside a run: what a path names, and that it is given those weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import full_forward
from hf_helpers import PUBLISHED, SENTENCE, publish
from run_helpers import make_run
from transformers import PreTrainedModel

from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.errors import ConfigurationError
from megatron_rl.standalone import find_source, load_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published") / "tiny-qwen"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedModel:
    return publish(folder, PUBLISHED["Qwen2, tied"])


@torch.inference_mode()
def test_published_weights_and_a_checkpoint_made_of_them_compute_what_transformers_does(
    tmp_path: Path, theirs: PreTrainedModel, folder: Path, platform: Any, groups: Any
) -> None:
    checkpoint = tmp_path / "converted"
    to_megatron(folder, checkpoint, platform, shard_bytes=10**9)
    reference = theirs(torch.tensor([SENTENCE])).logits[0]
    for path, kind in ((folder, "huggingface"), (checkpoint, "checkpoint")):
        source = find_source(str(path))
        assert (source.name, source.kind, source.step, source.model.dtype) == (path.name, kind, None, "fp32")
        policy, digest, version = load_policy(source, platform, groups)
        assert version == 0 and len(digest) == 64
        assert not any(weight.requires_grad for weight in policy.parameters())
        ours = full_forward(policy, SENTENCE)
        assert torch.allclose(ours, reference[:, : ours.shape[1]], atol=1e-4)


def test_the_type_of_the_weights_is_the_published_one_or_what_was_asked_for(
    theirs: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for said, dtype in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "bf16")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": said}))
        assert find_source(str(tmp_path)).model.dtype == dtype
    assert find_source(str(tmp_path), "fp32").model.dtype == "fp32"


def test_what_cannot_be_opened_says_what_it_is_and_what_it_would_have_to_be(
    tmp_path: Path, theirs: PreTrainedModel, folder: Path
) -> None:
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
        (stranger, "is neither a checkpoint of a run"),
        (tmp_path / "nothing", "no such directory"),
        (unread, "has no checkpoint yet"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            find_source(str(path))
