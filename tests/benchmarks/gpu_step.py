"""Seconds per GRPO step and generated tokens/s on one GPU, a 0.5 B Qwen2.5-shaped model in bf16.

    python tests/benchmarks/gpu_step.py

Random weights: the lengths are those of the limit. Skipped, with exit code 0, where there is no GPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from megatron_rl.contract.paths import RunDir

STEPS = 8
WARM_UP = 3

RECIPE = {
    "name": "gpu-step",
    "job": {"nodes": 1, "gpus_per_node": 1, "device": "cuda", "threads_per_rank": 4},
    "model": {
        "num_layers": 24,
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
        "max_position_embeddings": 544,
        "tied_embeddings": True,
        "init": "from-scratch",
    },
    "tokenizer": {"type": "characters", "alphabet": "0123456789+-="},
    "environment": {"name": "arithmetic"},
    "sampling": {"max_new_tokens": 512},
    "inference": {"max_batch": 256},
    # Random weights earn no rewards that differ; with a bonus their answers are trained on all the same.
    "grpo": {"prompts_per_step": 16, "group_size": 16, "entropy_coefficient": 1e-6},
    "optimizer": {"learning_rate": 1e-6},
    "training": {"steps": STEPS, "tokens_per_microbatch": 32768},
    "save": {"every": 0},
}


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: skipped")
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(folder)
        run_dir.resolved.write_text(yaml.safe_dump(RECIPE))
        command = [sys.executable, "-m", "megatron_rl.rank_main", "--run-dir", folder, "--attempt", "1"]
        subprocess.run(
            command, env=os.environ | {"MRL_CACHE": folder}, timeout=540, check=True, stdout=subprocess.DEVNULL
        )
        lines = [json.loads(line) for line in Path(run_dir.metrics).read_text().splitlines()][WARM_UP:]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; 0.5 B, 256 answers, medians of {len(lines)} steps"
    )
    for name in (
        "time/step_s",
        "time/generate_s",
        "time/train_s",
        "throughput/tokens_per_s",
        "throughput/generated_tokens_per_s",
        "answer_length",
        "inference_logprob_difference",
    ):
        print(f"  {name:36} {statistics.median(line[name] for line in lines):.4g}")


if __name__ == "__main__":
    main()
