"""Difference of log-probs that 8 bits in an engine make, beside that of wrong weights.

    python tests/benchmarks/eight_bits.py MODEL        folder of SmolLM2-135M or another Llama

Rounds weights of the linear layers, their inputs, and keys and values to fewer bits and back, as vLLM does, and
compares log-probs of two texts with those of the model in bf16: mean and largest difference in nats. The tolerances of
probes (megatron_rl/run/probe_tolerance.py) follow from these figures. A minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # of e4m3
BLOCK, GROUP = 128, 32
TOKENS = 64
SUM = "<|im_start|>user\nWhat is {} + {} - {}? Think step by step.<|im_end|>\n<|im_start|>assistant\n"
TEXTS = {
    "prompts": "".join(SUM.format(*numbers) for numbers in ((8, 8, 2), (6, 9, 8), (6, 5, 9), (6, 2, 4))),
    "prose": "The committee met on Tuesday to discuss the harbour, whose walls had been built in 1871 and repaired "
    "twice. Nobody could say who owned the land on which the old customs house stands, and the engineer asked for two "
    "more weeks before he would sign. In the meantime the fishermen moved their boats to the eastern quay.",
}
FUSED = (
    ("self_attn", "q_proj k_proj v_proj"),
    ("self_attn", "o_proj"),
    ("mlp", "gate_proj up_proj"),
    ("mlp", "down_proj"),
)
"""Linear layers that vLLM multiplies at once, so that they share a scale per tensor."""

Rounding = Callable[[Tensor], Tensor]


def scaled(values: Tensor, largest: Tensor) -> Tensor:
    scale = (largest.float() / LARGEST).clamp_min(1e-12)
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale


def per_tensor(values: Tensor) -> Tensor:
    return scaled(values, values.abs().amax())


def per_row(values: Tensor) -> Tensor:
    """Per output channel of a weight, and per token of an input."""
    return scaled(values, values.abs().amax(-1, keepdim=True))


def per_block(weight: Tensor) -> Tensor:
    rows = [torch.cat([per_tensor(one) for one in row.split(BLOCK, dim=1)], dim=1) for row in weight.split(BLOCK)]
    return torch.cat(rows)


def per_segment(inputs: Tensor) -> Tensor:
    """Per token and 64 inputs, which divide the widths of SmolLM2."""
    return per_row(inputs.reshape(*inputs.shape[:-1], -1, 64)).reshape(inputs.shape)


def mxfp8(weight: Tensor) -> Tensor:
    groups, scale = grouped(weight, exponent=8)
    return ((groups / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale).reshape(weight.shape)


def mxfp4(weight: Tensor) -> Tensor:
    groups, scale = grouped(weight, exponent=2)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = grid[((groups / scale).abs().clamp(max=6.0).unsqueeze(-1) - grid).abs().argmin(-1)]
    return (torch.sign(groups) * nearest * scale).reshape(weight.shape)


def grouped(weight: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Groups of GROUP weights, and their scales, which are powers of 2."""
    groups = weight.float().reshape(-1, GROUP)
    largest = groups.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return groups, torch.exp2(torch.floor(torch.log2(largest)) - exponent)


@torch.no_grad()
def round_linears(model: Any, of_weights: Rounding, of_inputs: Rounding | None = None) -> None:
    for layer in model.model.layers:
        for part, names in FUSED:
            linears = [getattr(getattr(layer, part), name) for name in names.split()]
            whole = of_weights(torch.cat([linear.weight for linear in linears])).to(linears[0].weight.dtype)
            for linear, rounded in zip(linears, whole.split([len(one.weight) for one in linears]), strict=True):
                linear.weight.copy_(rounded)
                if of_inputs is not None:
                    linear.register_forward_pre_hook(
                        lambda _, given, of_inputs=of_inputs: (of_inputs(given[0]).to(given[0].dtype),)
                    )


def round_cache(model: Any, dtype: torch.dtype) -> None:
    """Round keys, before their rotation, and values, with the scale 1 that vLLM uses without scales in the weights."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.register_forward_hook(
                lambda _module, _inputs, out: out.float().clamp(-LARGEST, LARGEST).to(dtype).to(out.dtype)
            )


@torch.no_grad()
def take_from(model: Any, layer: int, other: int, name: str) -> None:
    own, theirs = (dict(model.model.layers[number].named_parameters())[name] for number in (layer, other))
    own.copy_(theirs)


@torch.no_grad()
def logprobs(model: Any, tokens: list[int]) -> Tensor:
    text = torch.tensor([tokens])
    return torch.log_softmax(model(text).logits[0, :-1].float(), -1).gather(1, text[0, 1:, None])[:, 0]


def changes() -> Iterator[tuple[str, Callable[[Any], object]]]:
    yield "nothing", lambda model: None
    for name, of_weights, of_inputs in (
        ("per tensor", per_tensor, per_row),
        ("per channel", per_row, per_row),
        ("per block", per_block, per_segment),
    ):
        yield f"weights {name}", lambda model, each=of_weights: round_linears(model, each)
        yield f"weights {name}, and inputs", lambda model, w=of_weights, i=of_inputs: round_linears(model, w, i)
    yield "weights in mxfp8", lambda model: round_linears(model, mxfp8)
    yield "weights in mxfp4", lambda model: round_linears(model, mxfp4)
    yield "cache in e4m3", lambda model: round_cache(model, E4M3)
    yield "cache in e5m2", lambda model: round_cache(model, E5M2)
    yield (
        "weights per channel, inputs, cache",
        lambda model: (round_linears(model, per_row, per_row), round_cache(model, E4M3)),
    )
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        yield f"{name} of a neighbour", lambda model, name=name: take_from(model, 10, 11, f"{name}.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    folder = parser.parse_args().model
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = {name: tokenizer(text).input_ids[:TOKENS] for name, text in TEXTS.items()}

    def model(dtype: torch.dtype = torch.bfloat16) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    expected = {name: logprobs(model(), tokens) for name, tokens in texts.items()}
    for what, change in (*changes(), ("fp32", None)):
        changed = model(torch.float32 if change is None else torch.bfloat16)
        if change is not None:
            change(changed)
        found = {name: (logprobs(changed, tokens) - expected[name]).abs() for name, tokens in texts.items()}
        print(what, *(f"| {name}: {each.mean():.3f} {each.max():.2f}" for name, each in found.items()), flush=True)


if __name__ == "__main__":
    main()
