"""A run on a GPU: one rank, no patches, bf16 and fp32. Skipped without a GPU; run by hand with

pytest tests/gpu
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def recipe(**overrides: object) -> dict:
    config = {
        "name": "gpu",
        "job": {"nodes": 1, "gpus_per_node": 1, "device": "cuda"},
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "max_position_embeddings": 32,
            "vocab_multiple": 16,
            "rope_base": 10000.0,
            "tied_embeddings": True,
            "dtype": "fp32",
            "init": "supervised",
            "supervised": {"steps": 150},
        },
        "tokenizer": {"type": "characters", "alphabet": "0123456789+-="},
        "environment": {"name": "arithmetic"},
        "sampling": {"max_new_tokens": 3},
        "grpo": {"prompts_per_step": 16, "group_size": 16, "kl_beta": 0.001, "importance": {"upper": 2.0}},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 20},
        "training": {"steps": 60, "seed": 0},
        "save": {"every": 20},
    }
    for path, value in overrides.items():
        section, key = path.split("__")
        config[section][key] = value
    return config


def start_rank(root: Path, attempt: int, expected: int = 0) -> None:
    command = [sys.executable, "-m", "megatron_rl.rank_main", "--run-dir", str(root), "--attempt", str(attempt)]
    environment = os.environ | {"MRL_CACHE": str(root.parent / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-3000:]


def metrics(root: Path) -> list[dict]:
    return [json.loads(line) for line in RunDir(root).metrics.read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_on_the_gpu_trains_and_its_engine_agrees_with_the_trainer(tmp_path: Path, dtype: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    RunDir(root).resolved.write_text(yaml.safe_dump(recipe(model__dtype=dtype)))
    start_rank(root, 1)
    lines = metrics(root)
    assert [line["step"] for line in lines] == list(range(1, 61))
    first, last = (sum(line["mean_reward"] for line in part) / 10 for part in (lines[:10], lines[-10:]))
    assert last > first + 0.05
    # bf16 keeps 8 bits: a log-prob near 3 is off by about 0.01.
    assert max(line["inference_logprob_difference"] for line in lines) < (1e-5 if dtype == "fp32" else 2e-2)
    assert all(line["skipped_updates"] == 0 for line in lines)


def test_a_resumed_run_on_the_gpu_has_the_same_prompts_and_rewards(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for root, steps in ((whole, 40), (cut, 20)):
        root.mkdir()
        RunDir(root).resolved.write_text(yaml.safe_dump(recipe(training__steps=steps)))
        start_rank(root, 1)
    RunDir(cut).resolved.write_text(yaml.safe_dump(recipe(training__steps=40)))
    start_rank(cut, 2)
    for a, b in zip(metrics(whole), metrics(cut), strict=True):
        assert a["first_ordinal"] == b["first_ordinal"]
        assert a["mean_reward"] == pytest.approx(b["mean_reward"], abs=0.1)


def test_nothing_is_patched_on_cuda() -> None:
    code = (
        "import sys, torch; before = torch.Tensor.type, torch.Tensor.cuda;"
        "from megatron_rl.rank.config import JobConfig; from megatron_rl.platform.select import select;"
        "import megatron.core.optimizer.optimizer as optimizer;"
        "platform = select(JobConfig(gpus_per_node=1, device='cuda'));"
        "assert (torch.Tensor.type, torch.Tensor.cuda) == before;"
        "assert optimizer.torch is torch;"
        "assert 'megatron_rl.platform.cpu' not in sys.modules;"
        "print(platform.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "cuda:0"
