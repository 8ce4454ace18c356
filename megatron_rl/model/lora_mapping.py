"""Pure: the adapters of each linear of megatron-core, and PEFT's tensors in them.

megatron-core fuses the query, key and value projections into one linear, gate and up projections into another, and the
projections of a delta net's inputs into a third, but each of these modules has its own adapter, as in PEFT, so that a
recipe trains the same set of functions with either, and may name any of them as a target:

    lora_A [targeted modules * rank, inputs]    A of each targeted module, one after another
    lora_B [outputs, rank]                      B of all modules, in the order of the rows of the linear's weight; the
                                                rows of the other modules stay 0

So B is split between tensor-parallel ranks as the weight is, and A only if the weight is split along its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_rl.model.hf_mapping import Assembly, HfTensor, Source, Weight, matrices_of
from megatron_rl.model.hf_weights import layer_weights
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig

LORA_A, LORA_B = "lora_A", "lora_B"


def is_adapter(name: str) -> bool:
    """Whether a weight of megatron-core, or a tensor of its sharded state, is part of an adapter. Adam's state contains
    the name of its weight."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def adapted_weight(name: str) -> str:
    """Name of the weight that a matrix of an adapter belongs to; any other name as it is."""
    linear, _, kind = name.rpartition(".")
    return f"{linear}.weight" if kind in (LORA_A, LORA_B) else name


def adapters(model: ModelConfig) -> dict[str, Weight]:
    """Return all adapters by megatron-core's names, with layers and experts numbered over the whole model. Their
    sources are named as the modules of transformers: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    return {
        name: weight for number in range(model.num_layers) for name, weight in layer_adapters(model, number).items()
    }


def layer_adapters(model: ModelConfig, number: int) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for name, weight in layer_weights(model, number, names_of(model)).items() if model.lora else ():
        linear, _, kind = name.rpartition(".")
        if model.lora and kind == "weight" and (pair := _pair(weight, model.lora)):
            found[f"{linear}.{LORA_A}"], found[f"{linear}.{LORA_B}"] = pair
    return found


def _pair(weight: Weight, lora: LoraConfig) -> tuple[Weight, Weight] | None:
    if any(source.number is not None for source in weight.sources):  # one of several experts in a tensor
        return None
    modules = [module_of(source.tensor.name) for source in weight.sources]
    targeted = [module for module in dict.fromkeys(modules) if is_target(module, lora)]
    if not targeted:
        return None
    inputs = weight.sources[0].shape[-1]
    a = tuple(Source(HfTensor(f"{module}.{LORA_A}.weight", (lora.rank, inputs))) for module in targeted)
    b = tuple(
        replace(source, tensor=HfTensor(f"{module}.{LORA_B}.weight", (source.tensor.shape[0], lora.rank)))
        for module, source in zip(modules, weight.sources, strict=True)
    )
    by_inputs = weight.split == 1
    return Weight(a, split=1 if by_inputs else None), Weight(b, None if by_inputs else weight.split, weight.blocks)


def is_target(module: str, lora: LoraConfig) -> bool:
    return module.rpartition(".")[2] in lora.targets


def module_of(source: str) -> str:
    """Module of a tensor: model.layers.0.self_attn.q_proj.lora_A.weight -> model.layers.0.self_attn.q_proj."""
    return source.removesuffix(".weight").removesuffix(f".{LORA_A}").removesuffix(f".{LORA_B}")


def matrices(weight: Weight, matrix: Tensor) -> dict[str, Tensor]:
    """Matrices of the modules in one of megatron-core's, which is whole: [rank, inputs] of lora_A, [outputs, rank] of
    lora_B, by their names in `lora_mapping`."""
    return assembled(weight, matrices_of(weight, matrix))


def assembled(weight: Weight, found: Sequence[Tensor]) -> dict[str, Tensor]:
    """Put the matrices of the modules together. found: the sources of one of megatron-core's matrices."""
    assembly = Assembly({"": weight})
    return {
        name: whole
        for source, matrix in zip(weight.sources, found, strict=True)
        for name, whole in assembly.add(source, matrix)
    }


def merged(
    weight: Weight, found: Sequence[Tensor], a: Mapping[str, Tensor], b: Mapping[str, Tensor], lora: LoraConfig
) -> list[Tensor]:
    """Add the adapters of a linear to the sources of its weight, in fp32, each rounded once to its dtype.

    found: the sources. a, b: `matrices` of the linear.
    """
    result = [*found]
    for number, source in enumerate(weight.sources):
        module = module_of(source.tensor.name)
        if (into := a.get(f"{module}.{LORA_A}.weight")) is not None:
            rows = source.taken(b[f"{module}.{LORA_B}.weight"][source.box(0, range(source.shape[0]))])
            delta = lora.scale * (rows.reshape(source.shape[0], -1).float() @ into.float())
            result[number] = (found[number].float() + delta).to(found[number].dtype)
    return result
