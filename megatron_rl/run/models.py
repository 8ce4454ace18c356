"""The models of a run: the policy and its frozen reference, built, initialised and restored, and the teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_rl.agent.api import Environment
from megatron_rl.checkpoint.initial_weights import read_initial_weights, weights_checksum
from megatron_rl.checkpoint.load import VerifiedCheckpoint, read, read_weights
from megatron_rl.contract.paths import TEACHER
from megatron_rl.learn.distill.assigned_teachers import judges_of
from megatron_rl.learn.distill.on_ranks import TeacherOnRanks
from megatron_rl.learn.training import warm_up
from megatron_rl.learn.training.objective import Judges, Teacher
from megatron_rl.learn.training.offload import HostWeights
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.parallel import copy_part, groups_of_one
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.sharded_names import PREDICTION
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.model.trainable import Trainable, fill_adapters, load_part
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.recipe.adapters import check_adapters
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY, DistillConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.model import ModelConfig, Recompute
from megatron_rl.recipe.teacher_files import VOCABULARY_FILE, TeacherFiles, against_teacher, teacher_files

if TYPE_CHECKING:
    from megatron_rl.generate.engine.openai import Endpoint
    from megatron_rl.generate.replicas.fixed_replicas import Running


@dataclass(frozen=True, slots=True)
class Models:
    """Policy, optimizer and reference of a run. A checkpoint holds the tensors of the first two."""

    policy: Policy
    trainable: Trainable
    optimizer: PolicyOptimizer
    reference: Policy | None
    """Initial policy, for the KL penalty: a copy, or `policy` if it still contains the initial weights."""
    weights: HostWeights | None
    """Weights of policy and reference, which leave the device while an engine generates there; None: they stay."""
    platform: Device
    groups: Groups

    def sharded_state(self) -> dict[str, Any]:
        """Trained weights, optimizer and random numbers in megatron-core's sharded form."""
        from megatron_rl.checkpoint.saving_ranks import (
            sharded_weights,  # slow to import, and a run trains before it saves
        )

        model = sharded_weights(self.policy, self.groups.data_context, self.groups.expert_data, self.trainable.trained)
        rng = ShardedObject("rng", self.platform.rng_state(), (dist.get_world_size(),), (dist.get_rank(),))
        if self.weights is None:
            return {"model": model, "optimizer": self.optimizer.sharded_state(model), "rng": rng}
        for item in nested_values(model):
            if isinstance(item, ShardedTensor | ShardedTensorFactory):
                item.data = self.weights.held(item.data)
        return {"model": model, "optimizer": self.optimizer.sharded_state(model, self.weights.held), "rng": rng}

    def restore(self, checkpoint: VerifiedCheckpoint) -> None:
        """Load a checkpoint of this run, written by any number of ranks. Collective. Raises ConfigurationError if its
        adapters are not those of the recipe."""
        check_adapters(checkpoint.folder, checkpoint.manifest.meta, self.trainable.lora)
        wanted = self.sharded_state()
        if checkpoint.manifest.world_size != dist.get_world_size():
            # The random states belong to other ranks. Sampling does not use them: see inference/sampling.
            del wanted["rng"]
        state, _ = read(checkpoint, wanted, self.groups.data_context, self.groups.expert_data)
        load_part(self.policy, state["model"])
        self.optimizer.load_state(state["optimizer"])
        if "rng" in state:
            self.platform.set_rng_state(state["rng"])

    @contextmanager
    def weights_of(self, checkpoint: VerifiedCheckpoint) -> Iterator[None]:
        """Let the policy have the weights of another checkpoint of this run for a while. Its own wait in host memory.
        Collective."""
        state = self.policy.state_dict()
        own = {name: value.to("cpu", copy=True) for name, value in state.items() if isinstance(value, torch.Tensor)}
        data, expert_data = self.groups.data_context, self.groups.expert_data
        read_weights(self.policy, checkpoint, self.trainable.trained, data, expert_data)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    state[name].copy_(value)


def build_models(
    config: RunConfig, here: Here, tokenizer: Tokenizer, environment: Environment | None, *, resumes: bool
) -> tuple[Models, str | None]:
    """Build the models before the first step, and return them with the digest of their initial weights, if read.
    Collective.

    resumes: whether they are about to be restored. Then only the KL penalty and adapters need the initial weights;
        without them, the run no longer depends on their source.
    """
    platform, groups = here.platform, here.groups
    platform.seed(initial_seed(config.model))
    policy = build_part(config, tokenizer, platform, config.training.recompute)
    trainable, penalised = Trainable.of(config.model), config.algorithms.penalise_kl
    digest = None
    if not resumes or config.keeps_initial_weights:
        digest = load_initial_weights(policy, config, here, tokenizer, environment)
    fill_adapters(policy, config.model, config.training.seed)
    here.safe_points.agree()
    share_weights(policy, groups)  # before the reference and the optimizer copy them
    reference = None
    if penalised:
        reference = policy
        if trainable.everything:
            reference = build_part(config, tokenizer, platform, model=config.model.trunk)
            state = policy.state_dict()
            load_part(reference, {name: held for name, held in state.items() if not name.startswith(PREDICTION)})
            reference.requires_grad_(False)
    trainable.mark(policy)
    updates = config.training.steps * config.grpo.updates_per_step
    optimizer = PolicyOptimizer(policy, config.model, config.optimizer, updates, config.offload)
    weights = None
    if config.shares_devices and config.offload == "optimizer":
        weights = HostWeights([policy] if reference is None else [policy, reference], platform)
    torch.manual_seed(config.training.seed)
    return Models(policy, trainable, optimizer, reference, weights, platform, groups), digest


def load_initial_weights(
    policy: Policy, config: RunConfig, here: Here, tokenizer: Tokenizer, environment: Environment | None
) -> str | None:
    """Replace the random weights by the initial weights of training, except adapters. Return the digest of the
    checkpoint or files that they come from, or for adapters a checksum of the weights; None for random weights or those
    trained from them by supervised learning, without adapters.

    Random weights and supervised ones are made as on a single rank, all of them on each rank, so that a run starts with
    the same weights in every layout.
    """
    model, groups, safe_points, digest = config.model, here.groups, here.safe_points, None
    if model.init in ("from-scratch", "supervised"):
        whole = policy
        if groups.in_step or policy.adapters:
            here.platform.seed(initial_seed(model))
            base = model.model_copy(update={"lora": None})
            whole = build_policy(base, tokenizer.vocab_size, here.platform, groups=groups_of_one())
        if model.init == "supervised":
            safe_points.activity.enter("teaching the base model", 0)
            warm_up.teach(whole, config, environment, tokenizer, safe_points, writer=dist.get_rank() == 0)
        if whole is not policy:
            copy_part(whole, policy)
    else:
        safe_points.activity.enter("reading the initial weights", 0)
        digest = read_initial_weights(policy, model, groups)
    return weights_checksum(policy, model, groups.control) if policy.adapters else digest


def share_weights(policy: Policy, groups: Groups) -> None:
    """Copy each weight from the first of the ranks that hold it to the others. Collective.

    Ranks may have made their own weights, and a GPU sums in any order: a difference at the start would never vanish.
    """
    for weight in policy.parameters():
        # The attributes are megatron-core's: `allreduce` is false for experts that only some replicas hold.
        holders = [groups.data_context if getattr(weight, "allreduce", True) else groups.expert_data]
        if not getattr(weight, "tensor_model_parallel", False):
            holders.append(groups.tensor)
        if getattr(weight, "shared_embedding", False):
            holders.append(policy.pg_collection.embd)
        for group in holders:
            dist.broadcast(weight.detach(), group=group, group_src=0)


def initial_seed(model: ModelConfig) -> int:
    return model.supervised.seed if model.init == "supervised" else model.init_seed


def build_part(
    config: RunConfig,
    tokenizer: Tokenizer,
    platform: Device,
    recompute: Recompute = "none",
    model: ModelConfig | None = None,
) -> Policy:
    """Build this rank's part of a model, by default one of the recipe's shape, with random weights.

    Raises ConfigurationError if the layout does not fit the model.
    """
    model = model or config.model
    sequence_parallel = config.placement.training.sequence_parallel
    if model.num_experts is not None and config.placement.training.tp > 1 and not sequence_parallel:
        raise ConfigurationError(
            f"placement.training.tp {config.placement.training.tp} with model.num_experts needs "
            "placement.training.sequence_parallel: otherwise every tensor-parallel rank sends the experts all tokens"
        )
    ends = config.placement.training.stage_ends
    return build_policy(
        model, tokenizer.vocab_size, platform, recompute, sequence_parallel=sequence_parallel, stage_ends=ends
    )


def build_judges(config: RunConfig, policy: Policy, here: Here, tokenizer: Tokenizer) -> Judges | None:
    """Load the teachers, or connect to their replicas or servers; None without `distill`. Collective.

    Raises ConfigurationError if a teacher cannot judge the policy's tokens, its files are missing, or servers refuse;
    FixedModelLost if all replicas are given up; and LeaveAgreed if a rank is asked to leave while servers are awaited.
    """
    held: dict[str, Policy] = {}  # several teachings may share a teacher

    def teacher_of(distill: DistillConfig) -> Teacher:
        files = _files(distill)
        if problem := next(against_teacher(config, distill, files, _tokenizer_folder(config)), None):
            raise ConfigurationError(problem)
        if distill.is_served:
            return _served_teacher(config, distill, here, tokenizer)
        if distill.teacher == POLICY:
            return TeacherOnRanks.of(policy, policy, config, distill)
        if distill.teacher not in held:
            assert files is not None  # only servers may know more than this machine
            held[distill.teacher] = _load_teacher(config, files, here, tokenizer)
        return TeacherOnRanks.of(held[distill.teacher], policy, config, distill)

    return judges_of(config, here.groups.control, tokenizer.encode, teacher_of)


def _load_teacher(config: RunConfig, files: TeacherFiles, here: Here, tokenizer: Tokenizer) -> Policy:
    groups, safe_points = here.groups, here.safe_points
    safe_points.activity.enter("reading the teacher's weights", 0)
    source = {"init": "checkpoint", "checkpoint": str(files.folder)}
    if not files.is_checkpoint:
        source = {"init": "huggingface", "huggingface": str(files.folder)}
    own = config.model
    model = files.model.model_copy(
        update={"dtype": own.dtype, "vocab_multiple": own.vocab_multiple, "lora": None, **source}
    ).trunk
    teacher = build_part(config, tokenizer, here.platform, model=model)
    read_initial_weights(teacher, model, groups, "distill.teacher")
    safe_points.agree()
    share_weights(teacher, groups)
    return teacher.requires_grad_(False)


def _served_teacher(config: RunConfig, distill: DistillConfig, here: Here, tokenizer: Tokenizer) -> Teacher:
    from megatron_rl.generate.replicas.fixed_replicas import running_replicas
    from megatron_rl.learn.distill import served  # its HTTP client is slow to import, and most runs have no teacher

    servers: Sequence[Endpoint] | Running
    if distill.replicas is not None:
        servers = running_replicas(here.run_dir, here.attempt, TEACHER, distill.replicas.answer_limit_s)
    else:
        assert distill.server is not None
        servers = served.endpoints_of(distill.server)
    here.safe_points.activity.enter("waiting for the teacher", 0)
    top_k = distill.divergence.top_k if distill.divergence else None
    limit_s = config.job.silence_limit_s
    teacher = served.ServedTeacher(servers, tokenizer, here.groups, here.safe_points, limit_s, top_k=top_k)
    teacher.check()
    return teacher


def _files(distill: DistillConfig) -> TeacherFiles | None:
    """Return the teacher's files; None if its servers or replicas have the only ones, or for the policy itself."""
    if distill.teacher == POLICY:
        return None
    try:
        return teacher_files(local_folder(distill.teacher, "distill.teacher", CONFIG_FILE))
    except ValueError as error:
        if distill.is_served and not isinstance(error, ConfigurationError):
            return None
        raise ConfigurationError(str(error)) from error


def _tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the policy's tokenizer, which the ranks have loaded; None for one of characters."""
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    return None if path is None else local_folder(path, "tokenizer.path", VOCABULARY_FILE)
