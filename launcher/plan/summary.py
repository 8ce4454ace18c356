"""Plan of a recipe: its placement, with the batches, memory and checkpoints that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from launcher.cluster.profile import Profile
from launcher.plan.gpu_memory import (
    checkpoint_bytes,
    incoming_bytes,
    offloaded_bytes,
    offloaded_weights,
    rank_memories,
)
from launcher.plan.parameters import trained, vocabulary, weights
from launcher.plan.placement import Plan, place
from launcher.plan.replayed_choices import choice_bytes
from launcher.plan.sizes import LayoutError, Sizes
from launcher.recipe.load import Recipe, refusal
from megatron_rl.contract.shapes import to_json
from megatron_rl.recipe.cards import find_card, without_fp8
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.fixed_models import fixed_models
from megatron_rl.recipe.job import Offload
from megatron_rl.recipe.model import too_small_head

ASSUMED_VOCABULARY = 152064
"""Rows of the embedding if the recipe does not say: those of Qwen2.5."""
TIGHT = 0.95
"""Share of a GPU's memory above which an estimate is too close to rely on."""


@dataclass(frozen=True, slots=True)
class Batch:
    prompts: int
    group_size: int
    answers: int
    prompts_per_replica: tuple[int, int]
    """Smallest and largest number of prompts whose answers one data-parallel replica trains on."""
    prompts_per_engine: tuple[int, int]
    """Smallest and largest number of prompts that one inference replica answers."""
    updates: int
    answers_per_update: int
    sequence_length: int
    tokens_per_microbatch: int
    microbatches: int
    """Micro-batches of one data-parallel replica per update, if every answer had full length."""


def make_plan(recipe: Recipe, profile: Profile | None) -> Plan:
    """Place the ranks of a recipe.

    Args:
        profile: of the cluster; None: this machine.

    Raises:
        BadInput: the layout is impossible, or GPUs cannot do what the recipe asks of them. Each problem names its file
            and line, or its override.
    """
    config = recipe.config
    try:
        node_gpus = profile.gpus_per_node if profile else None
        plan = place(
            config.job,
            config.placement,
            node_gpus,
            config.model,
            config.inference.engine,
            fixed_models(config.distill, config.reward),
        )
    except LayoutError as error:
        raise refusal(recipe, error.problems) from error
    if config.job.device == "cuda" and (against := too_small_head(config.model.head_size)):
        raise refusal(recipe, [against])
    card = find_card(profile.gpu_type) if profile else None
    if card and config.training.fp8 != "none" and (against := without_fp8(card.name, card.capability)):
        raise refusal(recipe, [f"training.fp8 is {config.training.fp8}, but {against}"])
    return plan


def batch(config: RunConfig, plan: Plan) -> Batch:
    grpo, training = config.grpo, config.training
    length, replicas = config.sequence_length, plan.sizes.dp
    prompts, answers = config.groups_per_step, 1 if config.supervised else grpo.group_size
    tokens = plan.sizes.cp * training.tokens_per_microbatch  # of the cp ranks that share a micro-batch
    return Batch(
        prompts=prompts,
        group_size=answers,
        answers=prompts * answers,
        prompts_per_replica=_share(prompts, replicas),
        prompts_per_engine=_share(prompts, plan.sizes.replicas),
        updates=grpo.updates_per_step,
        answers_per_update=prompts if config.supervised else grpo.samples_per_update,
        sequence_length=length,
        tokens_per_microbatch=tokens,
        microbatches=-(-config.answers_of_replica(replicas) // max(1, tokens // length)),
    )


def _share(prompts: int, replicas: int) -> tuple[int, int]:
    return prompts // replicas, -(-prompts // replicas)


def with_offload(config: RunConfig, plan: Plan, profile: Profile | None) -> RunConfig:
    """Return the recipe with `placement.offload` set. If the recipe leaves it open, the optimizer state is off-loaded
    only if it does not fit in the tightest layout of the plan, since moving it takes time."""
    limit = gpu_bytes(config, profile)
    if config.placement.offload is not None or limit is None:
        return config

    def with_value(offload: Offload) -> RunConfig:
        return config.model_copy(update={"placement": config.placement.model_copy(update={"offload": offload})})

    def needed(offload: Offload) -> int:
        vocab = vocabulary(config) or ASSUMED_VOCABULARY
        return max(memory.total for memory in rank_memories(with_value(offload), tightest, vocab))

    tightest = (plan, *plan.smaller)[-1].sizes
    kept, moved = needed("buffers"), needed("optimizer")
    return with_value("optimizer" if kept > TIGHT * limit and moved < kept else "buffers")


def plan_json(config: RunConfig, plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """Return what a plan amounts to. plan.json also has the surroundings of the ranks (`launcher.job.steps`). All sizes
    are in bytes.

    roles            of the nodes, for any number of them
    smaller          numbers of nodes of a range `job.nodes` that have a layout too
    memory           terms of the fullest phase of each role; `gpu_bytes` is the part of a GPU that the role may take
    host_bytes       copy of the checkpoint that each training node writes from its memory
    offloaded_...    optimizer state, and weights, that each training node keeps in its memory
    incoming_bytes   new weights that each inference node collects in its memory, partitioned
    choices          of experts that an engine returns: of a token, in a training node's memory, and sent for a step
    """
    config = with_offload(config, plan, profile)
    rows = vocabulary(config)
    vocab = rows or ASSUMED_VOCABULARY
    one, kept = checkpoint_bytes(config, vocab), config.save.most_kept(config.training)
    return {
        "mode": plan.mode,
        "gpus_per_node": plan.gpus_per_node,
        "spare_nodes": plan.spare_nodes,
        "roles": [to_json(role) for role in plan.roles],
        "smaller": [smaller.nodes for smaller in plan.smaller],
        **_of_count(config, plan, vocab, gpu_bytes(config, profile)),
        "model": {
            "parameters": weights(config.model, vocab).all,
            "trained": trained(config.model, vocab).all,
            "vocabulary": vocab,
            "assumed": rows is None,
        },
        "checkpoint": {
            "bytes": one,
            "keep": kept,
            "bytes_kept": one * kept,
            "bytes_while_saving": one * (kept + 1),
            "host_bytes": -(-one // plan.sizes.training_nodes),
            "seconds": one / (profile.fs_bandwidth * 1e9) if profile and profile.fs_bandwidth else None,
        },
        "offload": config.offload,
    }


def summarize(config: RunConfig, plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """Return `plan_json` with the `alternatives`: smaller plans of a range `job.nodes`, in what may differ."""
    found = plan_json(config, plan, profile)
    config, limit = with_offload(config, plan, profile), gpu_bytes(config, profile)
    vocab = found["model"]["vocabulary"]
    return found | {"alternatives": [_of_count(config, smaller, vocab, limit) for smaller in plan.smaller]}


def gpu_bytes(config: RunConfig, profile: Profile | None) -> int | None:
    """Bytes of one GPU of the cluster; None if unknown, and for CPU processes."""
    return int(profile.gpu_memory_gib * 2**30) if profile and config.job.device == "cuda" else None


def fullest_gpu(config: RunConfig, sizes: Sizes) -> int | None:
    """Bytes that the fullest GPU needs; None for CPU processes."""
    if config.job.device != "cuda":
        return None
    return max(one.total for one in rank_memories(config, sizes, vocabulary(config) or ASSUMED_VOCABULARY))


def _of_count(config: RunConfig, plan: Plan, vocab: int, limit: int | None) -> dict[str, Any]:
    sizes = plan.sizes
    return {
        "nodes": plan.nodes,
        "training": {
            "nodes": sizes.training_nodes,
            "ranks": sizes.training_world,
            "tp": sizes.tp,
            "pp": sizes.pp,
            "cp": sizes.cp,
            "cp_crosses_nodes": sizes.cp_crosses_nodes,
            "ep": sizes.ep,
            "dp": sizes.dp,
        },
        "inference": {
            "nodes": sizes.inference_nodes or sizes.training_nodes,
            "ranks": sizes.generating,
            "replicas": sizes.replicas,
            "tp": sizes.inference_tp,
            "pp": sizes.inference_pp,
            "dp": sizes.inference_dp,
            "ep": sizes.inference_ep,
            "nodes_per_replica": sizes.replica_nodes,
        },
        **{
            one.kind: {
                "nodes": one.nodes,
                "ranks": one.nodes * sizes.gpus_per_node,
                "replicas": one.replicas(sizes.gpus_per_node),
                "tp": one.tp,
            }
            for one in sizes.fixed
        },
        "batch": asdict(batch(config, plan)),
        "memory": [
            {
                "role": each.role,
                "stage": each.stage,
                "phase": each.fullest.name,
                "terms": [asdict(term) for term in each.fullest.terms],
                "phases": {phase.name: phase.total for phase in each.phases},
                "bytes": each.total,
                "gpu_bytes": None if limit is None else int(limit * each.share),
                "gpu_share": each.share,
            }
            for each in rank_memories(config, sizes, vocab)
        ],
        "offloaded_bytes": offloaded_bytes(config, sizes, vocab) * plan.gpus_per_node,
        "offloaded_weight_bytes": offloaded_weights(config, sizes, vocab) * plan.gpus_per_node,
        "incoming_bytes": incoming_bytes(config, sizes, vocab) * plan.gpus_per_node,
        "choices": asdict(choices) if (choices := choice_bytes(config, sizes)) else None,
    }
