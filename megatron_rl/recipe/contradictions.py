"""Sections of a recipe that contradict one another. Pure, no torch: a run's configuration asks when it is read."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.recipe.architectures.rows import ARCHITECTURES
from megatron_rl.recipe.distill import DistillConfig
from megatron_rl.recipe.engine_limits import against_engine
from megatron_rl.recipe.evaluation_limits import against_evaluation
from megatron_rl.recipe.fixed_models import VLLM_SECTIONS, fixed_models
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.hf_config import architecture_of, features, names_of
from megatron_rl.recipe.inference import pages_of
from megatron_rl.recipe.lora_section import EXPERT_LINEARS
from megatron_rl.recipe.row_limits import against_rows
from megatron_rl.recipe.sections import Sections


def contradictions(config: Sections) -> Iterator[str]:
    """Yield the reason for each contradiction, with its keys and what to do. Later ones rely on earlier ones."""
    yield from _of_environments(config)
    yield from _of_architecture(config)
    yield from _of_transformer_engine(config)
    yield from _of_overlap(config)
    yield from _of_adapters(config)
    yield from _of_objective(config)
    yield from against_rows(config)
    yield from _of_router_replay(config)
    yield from _of_teacher(config)
    yield from _of_fixed_models(config)
    if against := against_engine(config):
        yield against
    yield from _of_profile(config)
    yield from _of_placement(config)
    yield from _of_batch(config)
    yield from _of_lengths(config)
    yield from against_evaluation(config)


def _of_environments(config: Sections) -> Iterator[str]:
    if not config.generates and not config.supervised:
        yield "environment is missing: give one, or a list of several under environments"
    if config.environment is not None and config.environments is not None:
        yield "environments and environment are both given: set one of them to null"
    members = config.environment.args.get("environments") if config.environment is not None else None
    for number, one in enumerate(members if isinstance(members, list) else ()):
        for key in ("grpo", "distill"):
            if isinstance(one, dict) and one.get(key) is not None:
                yield (
                    f"environment.args.environments.{number}.{key} has no effect there: list the environments under "
                    "the key `environments` of the recipe"
                )
    for number, one in enumerate(config.environments or ()):
        if one.grpo is not None and config.supervised:
            yield (
                f"environments.{number}.grpo is set, and training.objective supervised samples no answers: leave it out"
            )
        elif one.grpo is not None and (reason := one.grpo.against(config.grpo)):
            yield f"environments.{number}.grpo: {reason}"
        if one.distill is not None and config.supervised:
            yield (
                f"environments.{number}.distill is set, and training.objective supervised samples no answers: leave it "
                "out"
            )
        elif one.distill is not None and (reason := one.distill.against(config.distill)):
            yield f"environments.{number}.distill: {reason}"


def _of_architecture(config: Sections) -> Iterator[str]:
    asked = config.model.architecture
    if asked is None or architecture_of(config.model) is not None:
        return
    known = sorted({kind for row in ARCHITECTURES for kind in (row.model_type, *row.also)})
    if asked not in known:
        yield f"model.architecture {asked} is not one of {', '.join(known)}"
    else:
        yield f"model.architecture is {asked}, which has no model with {features(config.model)}"


def _of_transformer_engine(config: Sections) -> Iterator[str]:
    training, against = config.training, config.without_transformer_engine
    if training.transformer_impl == "transformer_engine" and against:
        yield f"training.transformer_impl is transformer_engine, but {against}"
    if training.fp8 == "none":
        return
    if training.transformer_impl == "local":
        against = "training.transformer_impl is local, and FP8 needs Transformer Engine"
    elif config.model.lora is not None:
        against = "model.lora is set, and FP8 needs Transformer Engine, whose linears have no adapters: set fp8 to none"
    elif training.recompute == "full":
        against = "training.recompute is full, which would recompute layers in another precision"
    if against:
        yield f"training.fp8 is {training.fp8}, but {against}"


def _of_overlap(config: Sections) -> Iterator[str]:
    if not config.optimizer.overlap_param_gather:
        return
    updates = 1 if config.supervised else config.grpo.updates_per_step
    if updates == 1:
        yield (
            "optimizer.overlap_param_gather is set, and a step has one update, after which the weights are read at "
            "once: leave it out, or make several updates per step (grpo.global_batch, grpo.iterations)"
        )
    if config.model.num_experts is not None:
        yield (
            "optimizer.overlap_param_gather is set, and model.num_experts too: experts are multiplied all at once, "
            "which waits for all of their weights; leave it out"
        )


def _of_router_replay(config: Sections) -> Iterator[str]:
    replay, grpo = config.model.router_replay, config.grpo
    if replay == "off":
        return
    if config.supervised:
        yield f"model.router_replay is {replay}, and supervised training samples nothing to replay: set off"
    if replay == "old" and grpo.iterations > 1 and grpo.updates_per_pass > 1:
        yield (
            f"model.router_replay is old with grpo.iterations {grpo.iterations} and {grpo.updates_per_pass} updates "
            "per pass, and old log-probs are computed for the micro-batches of the first pass alone: set rollout, one "
            "iteration, or one update per pass (grpo.global_batch)"
        )


def _of_adapters(config: Sections) -> Iterator[str]:
    """Adapters of weights that no later start or export can read, and layers whose recomputation drops other inputs."""
    init, lora = config.model.init, config.model.lora
    if lora is None:
        return
    experts = [name for name in lora.targets if name in EXPERT_LINEARS]
    if experts and names_of(config.model).stacked_experts:
        others = ", ".join(name for name in lora.targets if name not in experts) or "q_proj, v_proj"
        yield (
            f"model.lora.targets has {experts[0]}, but the experts of this model share tensors, which have no "
            f"adapters: set model.lora.targets to [{others}]"
        )
    if lora.dropout and config.training.recompute == "full" and config.placement.training.pp > 1:
        yield (
            f"model.lora.dropout {lora.dropout} with training.recompute full needs "
            "placement.training.pp 1: a stage recomputes the layers of one micro-batch during another, and would "
            "drop other inputs. Set training.recompute to selective, or dropout to 0"
        )
    if init in ("huggingface", "checkpoint"):
        return
    if config.job.device == "cuda" and init == "supervised":
        yield (
            "model.lora with model.init supervised needs job.device cpu: each start teaches the base again, and a "
            "GPU may round it differently. Start from model.init=checkpoint or huggingface"
        )


def _of_objective(config: Sections) -> Iterator[str]:
    if not config.supervised:
        if config.data is not None:
            yield (
                "data is given, and training.objective is grpo, which trains on sampled answers: set "
                "training.objective to supervised, or leave data out"
            )
        return
    if not config.rows.paths and not config.generates:
        yield (
            "data.path is missing: training.objective supervised needs a data set, several in data.sets, or an "
            "environment whose worked examples it trains on"
        )
    default = GrpoConfig()
    if changed := [name for name in GrpoConfig.model_fields if getattr(config.grpo, name) != getattr(default, name)]:
        yield (
            f"grpo.{changed[0]} is set, and training.objective supervised samples no answers: leave out the "
            "section, or set grpo to null if an extended recipe has it; data.examples_per_step sizes a batch"
        )
    if config.placement.mode == "partitioned":
        yield (
            "placement.mode is partitioned, and training.objective supervised needs no replicas: set colocated; "
            "all ranks train, and evaluations are answered in between"
        )
    if config.inference.own_vllm is not None:
        yield (
            f"inference.engine is {config.inference.engine}, which training.objective supervised does not use: leave "
            "it out; the training ranks answer evaluations"
        )
    if config.curriculum is not None:
        yield "curriculum is set, and training.objective supervised has no pass rates: leave it out"
    if config.asynchronous.max_lag > 0:
        yield (
            f"async.max_lag is {config.asynchronous.max_lag}, and training.objective supervised generates nothing "
            "ahead of training: leave it out"
        )


def _taught(config: Sections) -> Iterator[tuple[str, DistillConfig, GrpoConfig]]:
    """Yield the key, the teacher and the algorithm of each environment with a teacher."""
    if config.supervised:
        return
    entries = enumerate(config.environments) if config.environments else [(0, None)]
    trained = [(number, one) for number, one in entries if one is None or one.trained_on]
    for (number, one), distill in zip(trained, config.teachings.by_id.values(), strict=True):
        if distill is not None:
            own = one is not None and one.distill is not None
            key = f"environments.{number}.distill" if own else "distill"
            yield key, distill, config.algorithms.by("" if one is None else one.id)


def _of_teacher(config: Sections) -> Iterator[str]:
    if config.distill is not None and config.supervised:
        yield (
            "distill is given, and training.objective is supervised: a teacher judges sampled answers; set "
            "training.objective to grpo, or leave distill out"
        )
    for place, distill, grpo in _taught(config):
        if grpo.dynamic_sampling.enabled:
            yield (
                f"{place} is given, and grpo.dynamic_sampling is enabled, which passes over prompts whose rewards are "
                "equal: the teacher gives them a signal; leave one of both out"
            )
        key = f"{place}.server" if distill.server else "distill.replicas"
        if distill.is_served and config.sampling.temperature != 1:
            yield (
                f"{key} is given, and sampling.temperature is {config.sampling.temperature:g}: servers report "
                f"log-probs of a text at temperature 1 only; set 1, or leave out {key}"
            )
        divergence = distill.divergence
        if distill.is_served and divergence is not None and divergence.temperature not in (None, 1):
            yield (
                f"{key} is given, and {place}.divergence.temperature is {divergence.temperature:g}: servers report "
                "log-probs of a text at temperature 1 only; set 1, or leave it out"
            )
    if config.distill is None or config.supervised:
        return
    teachings = config.teachings.each
    if not teachings:
        yield "distill is given, and distill.weight is 0 in every environment: leave distill out"
    if config.distill.replicas is None:
        return
    if not any(one.replicas is not None for one in teachings):
        yield "distill.replicas is given, and every environment has a teacher elsewhere: leave it out"


def _of_fixed_models(config: Sections) -> Iterator[str]:
    if config.reward is not None and config.supervised:
        yield (
            "reward is given, and training.objective is supervised, which scores no answers to train on: set "
            "training.objective to grpo, or leave reward out"
        )
    for one in fixed_models(config.distill, config.reward):
        if config.job.fewest_nodes < config.job.most_nodes:
            yield f"job.nodes {config.job.nodes} is a range, and {one.key} needs one number: each node has a fixed role"
    images = {kind: str(one.image) for kind, one in config.started_vllms.items()}
    if len({*images.values()}) > 1:
        keys = " and ".join(f"{VLLM_SECTIONS[kind]}.image" for kind in images)
        yield f"{keys} are {' and '.join(sorted({*images.values()}))}: a run has one image with vLLM"


def _of_profile(config: Sections) -> Iterator[str]:
    if (profile := config.profile) is None:
        return
    (first, last), layout = profile.steps, config.placement.training
    if last > config.training.steps:
        yield (f"profile.steps [{first}, {last}] are not all made: training.steps is {config.training.steps}")
    ranks = config.data_parallel_size * layout.tp * layout.pp * layout.cp
    if profile.ranks is not None and max(profile.ranks) >= ranks:
        yield f"profile.ranks has {max(profile.ranks)}, and the training ranks are 0 to {ranks - 1}"
    if profile.generation and not config.generates:
        yield ("profile.generation is true, and the run generates nothing without an environment: set it to false")


def _of_placement(config: Sections) -> Iterator[str]:
    if config.asynchronous.max_lag > 0 and config.resume.partial == "regenerate":
        yield (
            f"async.max_lag is {config.asynchronous.max_lag} and resume.partial is regenerate, which needs the same "
            "answers again; with max_lag they depend on when new weights arrive: set resume.partial to keep"
        )
    if config.harvest is not None and config.placement.mode != "partitioned":
        yield (
            "harvest adds inference replicas on other nodes, and placement.mode is colocated, where generation waits "
            "for training: set partitioned"
        )
    if config.harvest is not None and (gpus := config.placement.gpus_per_replica) > config.job.gpus_per_node:
        yield (
            f"harvest adds replicas in jobs of one node, and a replica has {gpus} GPUs, more than job.gpus_per_node "
            f"{config.job.gpus_per_node}: leave it out, or make placement.inference smaller"
        )
    if config.placement.mode == "partitioned" and config.job.fewest_nodes < config.job.most_nodes:
        yield (
            f"job.nodes {config.job.nodes} is a range, and placement.mode partitioned needs one number: each node "
            "has a fixed role"
        )


def _of_batch(config: Sections) -> Iterator[str]:
    if config.groups_per_step < config.data_parallel_size:
        key, unit = ("data.examples_per_step", "row") if config.supervised else ("grpo.prompts_per_step", "prompt")
        yield (
            f"{key} {config.groups_per_step} is smaller than the {config.data_parallel_size} "
            f"data-parallel replicas (job.nodes * job.gpus_per_node / (tp * pp * cp)): each needs a {unit}"
        )
    for one in [config.environment] if config.environment else config.environments or ():
        if not getattr(one, "trained_on", True) or one.reward_weights is not None:
            continue
        if config.algorithms.by(getattr(one, "id", "")).baseline == "per_reward":
            yield (
                f"grpo.baseline per_reward needs reward_weights of environment {one.name!r}: the components of "
                "its reward, each with a weight"
            )


def _of_lengths(config: Sections) -> Iterator[str]:
    if config.sequence_length > config.model.max_position_embeddings:
        yield (
            f"training.sequence_length {config.sequence_length} exceeds "
            f"model.max_position_embeddings {config.model.max_position_embeddings}"
        )
    if config.sampling.max_new_tokens >= config.sequence_length:
        limit = "training.sequence_length" if config.training.sequence_length else "model.max_position_embeddings"
        yield (
            f"sampling.max_new_tokens {config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"{limit} {config.sequence_length}"
        )
    pages, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    if pages * page_tokens < config.sequence_length:
        yield (
            f"inference.cache_tokens {config.inference.cache_tokens} holds {pages * page_tokens} tokens in pages of "
            f"{page_tokens}, and the longest sequence has {config.sequence_length}: raise it, or leave it out "
            "to hold inference.max_batch sequences"
        )
    most, overlong = config.sampling.max_new_tokens, [each.overlong for each in config.algorithms.each]
    if (buffer := max((each.buffer for each in overlong if each.mode == "penalty"), default=0)) > most:
        yield (
            f"grpo.overlong.buffer {buffer} is larger than sampling.max_new_tokens {most}: even an empty answer would "
            f"be penalised. A fifth, as in DAPO, is {-(-most // 5)}"
        )
