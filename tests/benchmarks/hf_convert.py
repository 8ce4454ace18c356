"""Conversion of published weights beside a plain copy of the same files: GB/s and peak memory.

    python tests/benchmarks/hf_convert.py [--gigabytes 2] [--shard-size 500MB] [--folder /scratch]

Each conversion is a separate process, as `mrl convert` starts it; its start (about 3 s) is reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BYTES_OF_LAYER = 2 * (2048 * (2048 * 2 + 512 * 2) + 3 * 2048 * 8192)


def publish(folder: Path, gigabytes: float, shard_bytes: int) -> int:
    """Write random bf16 weights in files of a layer or more. Returns their bytes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.hf.to_megatron import batches
    from megatron_rl.model.hf_mapping import sources, weights
    from megatron_rl.recipe.hf_config import read_hf_config, shape
    from megatron_rl.recipe.model import ModelConfig

    folder.mkdir(parents=True)
    layers = max(1, round((gigabytes * 1e9 - 2 * 32000 * 2048) / BYTES_OF_LAYER))
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    model = ModelConfig(**shape(read_hf_config(folder)), init="from-scratch")
    wanted = sources(weights(model))
    sizes = {name: 2 * torch.Size(source.shape).numel() for name, source in wanted.items()}
    files = list(batches(sizes, shard_bytes))
    places = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: torch.randn(wanted[name].shape, dtype=torch.bfloat16) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    tokenizer = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return sum(sizes.values())


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy that ends on the disk, as a conversion does."""
    started = time.monotonic()
    shutil.copytree(source, target)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - started


def convert(*arguments: str) -> dict[str, float]:
    started = time.monotonic()
    command = [sys.executable, "-m", "megatron_rl.checkpoint.hf", *arguments]
    done: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return done | {"all_s": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the measured disk (default: a temporary one)")
    options = parser.parse_args()
    shard = options.shard_megabytes * 10**6
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        size = publish(root / "hf", options.gigabytes, shard)
        print(f"{size / 1e9:.2f} GB of bf16 in files of {shard / 1e6:.0f} MB; best of {options.repeats}")
        seconds, peaks, starts = {}, {}, {}
        for _ in range(options.repeats):
            took = copy(root / "hf", root / "copy")
            seconds["plain copy"] = min(took, seconds.get("plain copy", took))
            for label, arguments in {
                "hf-to-megatron": ("hf-to-megatron", root / "hf", root / "m"),
                "megatron-to-hf": ("megatron-to-hf", root / "m", root / "back"),
                "hf-to-megatron --format torch --tp 8": ("hf-to-megatron", root / "hf", root / "lm", *TORCH),
                "megatron-to-hf of these shards": ("megatron-to-hf", root / "lm", root / "back2"),
            }.items():
                done = convert(*map(str, arguments), "--shard-bytes", str(shard))
                seconds[label] = min(done["seconds"], seconds.get(label, done["seconds"]))
                peaks[label] = max(done["peak_memory_bytes"], peaks.get(label, 0))
                starts[label] = done["all_s"] - done["seconds"]
            for made in ("copy", "m", "back", "lm", "back2"):
                shutil.rmtree(root / made)
        for label, took in seconds.items():
            memory = f", {peaks[label] / 1e9:.2f} GB of memory at most" if label in peaks else ""
            start = f", and {starts[label]:.1f} s to start" if label in starts else ""
            print(f"{label:<38} {size / took / 1e9:.2f} GB/s, {took:.2f} s{start}{memory}")


TORCH = ("--format", "torch", "--tp", "8")

if __name__ == "__main__":
    main()
