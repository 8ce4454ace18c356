"""Record the losses of verl and their gradients for tests/unit/megatron_rl/algorithms/test_verl_losses.py:

    pip download verl==0.9.1 --no-deps && unzip verl-0.9.1-py3-none-any.whl -d verl-0.9.1
    python tests/helpers/record_verl_losses.py verl-0.9.1 > tests/unit/megatron_rl/algorithms/recorded/verl_losses.json

verl's functions run as they are, without the packages that verl itself imports.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LENGTHS = [6, 1, 4, 5]
WIDTH = 6
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
    "vanilla dual clip": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5},
    "gspo": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    "dppo_tv": {"clip_ratio_low": 0.04, "clip_ratio_high": 0.05},
    "dppo_kl": {"clip_ratio_low": 0.001, "clip_ratio_high": 0.1},
}
"""Name of the loss, and a remark -> its configuration."""


class Config(SimpleNamespace):
    """Configuration of an actor, of which the losses read attributes and items."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def functions_of(file: Path, names: set[str], **known: Any) -> dict[str, Any]:
    """Functions of a module by name, without its imports and decorators."""
    tree = ast.parse(file.read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in chosen:
        node.decorator_list = []
    found: dict[str, Any] = {"torch": torch, "Any": Any, **known}
    source = ast.Module([ast.parse("from __future__ import annotations").body[0], *chosen], [])
    exec(compile(ast.fix_missing_locations(source), str(file), "exec"), found)
    return found


def inputs() -> dict[str, torch.Tensor]:
    """[answers, WIDTH] float64; the ratios reach from 0.4 to 3."""
    draw = torch.Generator().manual_seed(5)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(len(LENGTHS), WIDTH, generator=draw, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.1
    return {
        "old_log_prob": old,
        "log_prob": (old + normal(0.4)).clamp(max=-0.02),
        "advantages": normal(1)[:, :1].expand(-1, WIDTH).contiguous(),
        "response_mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double(),
    }


def main() -> None:
    root = Path(sys.argv[1]) / "verl"
    means = functions_of(root / "utils" / "torch_functional.py", {"masked_mean", "masked_sum"})
    names = {f"compute_policy_loss_{name.split()[0]}" for name in CASES} | {"agg_loss"}
    losses = functions_of(
        root / "trainer" / "ppo" / "core_algos.py",
        names,
        verl_F=SimpleNamespace(**{name: means[name] for name in ("masked_mean", "masked_sum")}),
        ActorConfig=Config,
        AlgoConfig=int,
    )
    given = inputs()
    recorded = {}
    for name, keys in CASES.items():
        logprobs = given["log_prob"].clone().requires_grad_()
        config = Config(clip_ratio=0.2, global_batch_info={}, **keys)
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        loss, _ = losses[f"compute_policy_loss_{name.split()[0]}"](
            **{**given, "log_prob": logprobs}, loss_agg_mode=mode, config=config
        )
        loss.backward()
        assert logprobs.grad is not None
        recorded[name] = {"config": keys, "loss": loss.item(), "gradient": logprobs.grad.tolist()}
    values = {name: tensor.tolist() for name, tensor in given.items()}
    source = "verl 0.9.1 (PyPI), verl/trainer/ppo/core_algos.py"
    found = {"source": source, "lengths": LENGTHS, "inputs": values, "losses": recorded}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
