"""A run in an image with Transformer Engine that does not use it has the same modules as elsewhere, also on a CPU. A
run that uses it has the same weights, names and checkpoints. te_stand_in.py stands in for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = str(Path(__file__).parents[1] / "helpers")

INSTALLED = "import te_stand_in; te_stand_in.install()\n"

ALONE = """
import json
import torch, torch.distributed as dist
import megatron_rl.run.attempt  # as a rank does
from megatron.core import parallel_state
from core_helpers import VOCAB, tiny_model
from megatron_rl.model.policy import build_policy
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.select import select
from megatron_rl.recipe.job import JobConfig
from megatron_rl.recipe.training import OptimizerConfig
from megatron_rl.learn.training.optimizer import PolicyOptimizer

platform = select(JobConfig(device="cpu"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
platform.seed(1)
"""

UNUSED = (
    ALONE
    + """
policy = build_policy(tiny_model(), VOCAB, platform)
optimizer = PolicyOptimizer(policy, tiny_model(), OptimizerConfig(learning_rate=1e-3), 10)
optimizer.zero_grad()
layout = policy.layout(whole_sequences([4]))
optimizer.ddp(torch.arange(4), torch.arange(4), layout).logsumexp(-1).sum().backward()
applied = optimizer.update(0).applied
model = policy.sharded_state_dict()
print(json.dumps({
    "norm": type(policy.decoder.final_layernorm).__module__,
    "adam": type(optimizer._parts()[0].optimizer).__module__,
    "applied": applied,
    "keys": sorted([*model, *optimizer.sharded_state(model)]),
}))
import transformer_engine
"""
)

USED = (
    INSTALLED
    + "import transformer_engine.pytorch\n"
    + ALONE
    + """
from core_helpers import END
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.model.parallel import _boxes
from megatron_rl.model.platform.layer_kernels import TorchKernels
from megatron_rl.model.megatron_gpt import megatron_gpt
from megatron_rl.model.platform.implementation import TRANSFORMER_ENGINE, Implementation
from megatron_rl.model.platform.te_linears import NormedColumnLinear, RowLinear, te_linears

plain = platform.kernels.transformer_overrides

def fuses(fp8):
    platform.kernels.linears = lambda config: te_linears()
    platform.kernels.transformer_overrides = plain | Implementation(TRANSFORMER_ENGINE, "", fp8).transformer_overrides

def described(policy):
    state = policy.sharded_state_dict()
    boxes = {(box.key, box.global_shape, box.global_offset, box.dtype, box.replica_id) for box in _boxes(policy)}
    return boxes, {*state}

def trained(policy):
    \"\"\"Logits, summed gradients and weights over two updates of two micro-batches each; keys of Adam's state.\"\"\"
    optimizer = PolicyOptimizer(policy, model, OptimizerConfig(learning_rate=1e-2), 10)
    layout = policy.layout(whole_sequences([4, 3]))
    seen, state, weights = [], policy.sharded_state_dict(), dict(sorted(policy.named_parameters())).values()
    for update in range(2):
        optimizer.zero_grad()
        for microbatch in range(2):
            tokens = (torch.arange(7) * (2 + update) + microbatch) % VOCAB
            logits = optimizer.ddp(tokens, torch.arange(7) % 4, layout)
            logits.log_softmax(-1)[:, 1].sum().backward()
            seen.append(logits.detach())
        seen += [weight.main_grad.clone() for weight in weights]
        assert optimizer.update(update).applied
    adam = optimizer.sharded_state(state)
    return seen + [*weights], {*adam}, type(optimizer._parts()[0].optimizer).__module__

for name in ("none", "selective", "full"):
    model = tiny_model(qk_norm=name == "full", qkv_bias=name != "full", tied_embeddings=name == "none")
    platform.kernels.__dict__.pop("linears", None)
    platform.kernels.transformer_overrides = plain
    local = build_policy(model, VOCAB, platform, name)
    fuses(None)
    fused = build_policy(model, VOCAB, platform, name)
    kinds = {type(module) for module in fused.modules()}
    assert {NormedColumnLinear, RowLinear} <= kinds
    assert described(fused) == described(local)
    for one, other in ((local, fused), (fused, local)):
        with torch.no_grad():
            for weight in one.parameters():
                weight.normal_(0, 0.3)
        other.load_state_dict(one.state_dict())
        mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
        assert mine.keys() == theirs.keys() and len(mine) > 10
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    twin = dict(megatron_gpt(fused, model).named_parameters())  # of linears and norms apart
    assert twin.keys() == theirs.keys() | mine.keys()
    assert all(twin[key] is weight for key, weight in fused.named_parameters())
    (ours, keys, adam), (theirs, same, _) = trained(local), trained(fused)
    assert keys == same and adam.startswith("torch.")
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert max(weight.abs().max() for weight in theirs) < 1e3  # no NaN among them
gradients_in_place = te_stand_in.gradients_in_place

model = tiny_model(dtype="bf16", hidden_size=32, ffn_hidden_size=64, head_dim=16)
fuses(None)
half = build_policy(model, VOCAB, platform, "selective")
fuses("hybrid")
eight = build_policy(model, VOCAB, platform, "selective")
with torch.no_grad():
    for weight in half.parameters():
        weight.normal_(0, 0.3)
eight.load_state_dict(half.state_dict())
assert te_stand_in.products_in_fp8 == 0
(exact, keys, _), (rounded, same, _) = trained(half), trained(eight)
assert keys == same
products, platform.kernels.computes_on_host = te_stand_in.products_in_fp8, False
answers = []
for kernels in (None, TorchKernels("a test")):
    platform.kernels.layer_kernels = kernels
    engine = Engine(eight, model, InferenceConfig(), {END})
    request = GenerationRequest([1, 2, 3], 2, Sampling(max_new_tokens=5, min_new_tokens=5, temperature=0.0), 0)
    engine.submit(request)
    while engine.busy:
        engine.step()
    answers += [len(each.tokens) for each in engine.take(request.id)]
print(json.dumps({
    "generated": te_stand_in.products_in_fp8 - products,
    "answers": answers,
    "gradients in place": gradients_in_place,
    "products": te_stand_in.products_in_fp8,
    "apart": ((exact[0] - rounded[0]).float().norm() / exact[0].float().norm()).item(),
    "shapes": [[*each.shape] for each in rounded] == [[*each.shape] for each in exact],
}))
"""
)


SPLIT = (
    INSTALLED
    + """
import os
import transformer_engine.pytorch
import torch, torch.distributed as dist
import megatron_rl.run.attempt
from core_helpers import VOCAB, tiny_model
from megatron_rl.algorithms.packing import pack
from megatron_rl.model.parallel import _boxes
from megatron_rl.model.policy import build_policy
from megatron_rl.model.platform.implementation import TRANSFORMER_ENGINE, Implementation
from megatron_rl.model.platform.select import select
from megatron_rl.model.platform.te_linears import NormedColumnLinear, RowLinear, te_linears
from megatron_rl.recipe.job import JobConfig, TrainingLayout
from megatron_rl.rank.groups import cut
from megatron_rl.learn.training import overlap
from megatron_rl.recipe.training import OptimizerConfig
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.learn.training.schedule import Pipeline
from megatron_rl.learn.training.schedule import ModelInput, forward_backward
from datetime import timedelta

overlap.BUCKET_WEIGHTS = 200
rank, limit = int(os.environ["RANK"]), timedelta(seconds=120)
platform = select(JobConfig(device="cpu"))
dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=2, timeout=limit)
cut(TrainingLayout(tp=2, sequence_parallel=True), limit)
platform.seed(1)
model = tiny_model(qk_norm=True, qkv_bias=True, tied_embeddings=False)
plain = platform.kernels.transformer_overrides

def described(policy):
    return {(box.key, box.global_offset, box.local_shape, box.replica_id) for box in _boxes(policy)}

def trained(policy, options):
    \"\"\"Norms of the gradients of three updates of two micro-batches each, and the weights after them.\"\"\"
    optimizer = PolicyOptimizer(policy, model, OptimizerConfig(learning_rate=1e-2, **options), 10)
    seen = []
    for update in range(3):
        texts = [[*range(1 + number, 8 + number)] for number in range(2)]
        batches = [pack([[*each]], [[False] + [True] * 6], [0], 16)[0] for each in texts]
        optimizer.zero_grad()
        inputs = [ModelInput.of(policy, batch) for batch in batches]
        forward_backward(
            policy, inputs, lambda hidden, _: policy.output().logits(hidden).sin().sum(), Pipeline(),
            stop=lambda: False, partial_sums=optimizer.overlap.partial,
        )
        done = optimizer.update(update)
        assert done.applied
        seen.append(torch.tensor(done.grad_norm))
    return seen + [weight.detach() for _, weight in sorted(policy.named_parameters())]

compared = 0
for recompute, options in (("selective", {}), ("selective", {"overlap_grad_reduce": True})):
    platform.kernels.__dict__.pop("linears", None)
    platform.kernels.transformer_overrides = plain
    local = build_policy(model, VOCAB, platform, recompute, sequence_parallel=True)
    platform.kernels.linears = lambda config: te_linears()
    platform.kernels.transformer_overrides = plain | Implementation(TRANSFORMER_ENGINE, "").transformer_overrides
    fused = build_policy(model, VOCAB, platform, recompute, sequence_parallel=True)
    assert {NormedColumnLinear, RowLinear} <= {type(module) for module in fused.modules()}
    assert described(local) == described(fused)
    fused.load_state_dict(local.state_dict())
    for one, other in zip(trained(local, options), trained(fused, options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        compared += 1
print(json.dumps({"compared": compared, "gradients in place": te_stand_in.gradients_in_place}))
"""
).replace("import os\n", "import json, os\n", 1)


def run(program: str) -> tuple[Any, str]:
    environment = os.environ | {"PYTHONPATH": HELPERS}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_modules_and_checkpoint_are_the_same_with_and_without_transformer_engine() -> None:
    without, missing = run(UNUSED)
    beside, said = run(INSTALLED + UNUSED)
    assert "No module named 'transformer_engine'" in missing
    assert said == "", "who asks for it later finds it"
    assert beside == without
    assert without["norm"].startswith("megatron_rl.")
    assert without["adam"].startswith("torch.")
    assert without["applied"]


@pytest.mark.slow  # 20 s
def test_model_of_its_linears_has_the_weights_checkpoint_and_training_of_one_without() -> None:
    """Checkpoints load bit for bit in both directions; logits, summed gradients and updates agree to rounding with any
    recomputation. FP8 needs padded inputs: there are seven tokens, and the stand-in, like the kernels, refuses token
    counts that are not multiples of 16, and rounds to E4M3."""
    said, errors = run(USED)
    assert said["gradients in place"] == 3 * 2 * 4 * 4, errors  # models, layers, linears, micro-batches
    assert said["products"] == 2 * 4 * 4  # layers, linears, micro-batches
    assert said["generated"] == 0, "a decode step would round each weight again"
    assert said["answers"] == [5] * 2 * 2
    assert 0.005 < said["apart"] < 0.2
    assert said["shapes"]


@pytest.mark.slow  # 15 s
def test_its_linears_train_alike_on_two_tensor_parallel_ranks_with_sequence_parallelism(tmp_path: Path) -> None:
    """Also where gradients are reduced behind the passes, as the recipe for 64 GPUs does."""
    environment = os.environ | {"PYTHONPATH": HELPERS, "STORE": f"file://{tmp_path}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SPLIT],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, errors = rank.communicate(timeout=300)
        assert out, errors
        said = json.loads(out)
        assert said["compared"] > 40
        assert said["gradients in place"] == 2 * 2 * 4 * 2 * 3  # runs, layers, linears, micro-batches, updates
