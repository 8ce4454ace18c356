"""A run on a GPU: one rank, no patches, bf16 and fp32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from gpu_helpers import DEVICE, NEEDS_CUDA, NEEDS_GPU, metrics, run_recipe

from megatron_rl.contract.paths import RunDir

pytestmark = NEEDS_GPU


def recipe(**overrides: object) -> dict[str, Any]:
    config: dict[str, Any] = {
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
        "training": {"steps": 40, "seed": 0},
        "save": {"every": 20},
    }
    for path, value in overrides.items():
        section, key = path.split("__")
        config[section][key] = value
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[RunDir]]]:
    """Runs of 20 steps by dtype, and one of 40. They go on at once, because starts take most of their time."""
    root = tmp_path_factory.mktemp("runs")

    def run(name: str, config: dict[str, Any]) -> RunDir:
        run_dir = RunDir(root / name)
        run_recipe(run_dir, config, 1, DEVICE)
        return run_dir

    with ThreadPoolExecutor() as pool:
        yield {
            "fp32": pool.submit(run, "fp32", recipe(training__steps=20)),
            "bf16": pool.submit(run, "bf16", recipe(training__steps=20, model__dtype="bf16")),
            "whole": pool.submit(run, "whole", recipe(training__steps=40)),
        }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_engine_of_a_run_on_the_gpu_agrees_with_its_trainer(runs: dict[str, Future[RunDir]], dtype: str) -> None:
    lines = metrics(runs[dtype].result())[:20]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["grad_norm"] > 0 for line in lines)
    # bf16 keeps 8 bits: a log-prob near 3 is off by about 0.01.
    assert max(line["inference_logprob_difference"] for line in lines) < (1e-5 if dtype == "fp32" else 2e-2)
    assert all(line["skipped_updates"] == 0 for line in lines)


def test_a_resumed_run_on_the_gpu_has_the_same_prompts_and_rewards(runs: dict[str, Future[RunDir]]) -> None:
    whole, cut = runs["whole"].result(), runs["fp32"].result()
    run_recipe(cut, recipe(training__steps=40), 2, DEVICE)
    for a, b in zip(metrics(whole), metrics(cut), strict=True):
        assert a["first_ordinal"] == b["first_ordinal"]
        assert a["mean_reward"] == pytest.approx(b["mean_reward"], abs=0.1)


@NEEDS_CUDA
def test_nothing_is_patched_on_cuda() -> None:
    code = (
        "import sys, torch; before = torch.Tensor.type, torch.Tensor.cuda;"
        "from megatron_rl.recipe.job import JobConfig; from megatron_rl.model.platform.select import select;"
        "import megatron.core.optimizer.optimizer as optimizer;"
        "platform = select(JobConfig(gpus_per_node=1, device='cuda'));"
        "assert (torch.Tensor.type, torch.Tensor.cuda) == before;"
        "assert optimizer.torch is torch;"
        "assert 'megatron_rl.model.platform.cpu' not in sys.modules;"
        "print(platform.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "cuda:0"
