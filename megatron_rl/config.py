"""Typed, frozen configuration of a run, composed of sections. Each room defines its keys, defaults and their meaning in
its own `config.py`.

The launcher validates recipes with these classes before anything starts, and the ranks read the same classes from
`resolved.yaml`. None of them imports torch or megatron-core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from megatron_rl.agent.config import MULTI_TASK, EnvironmentConfig, Environments
from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.checkpoint.config import SaveConfig
from megatron_rl.contract.paths import INFER, TEACHER, RunDir
from megatron_rl.distill.config import DistillConfig, TeacherReplicas
from megatron_rl.errors import ConfigurationError
from megatron_rl.evaluate.config import EvaluateConfig
from megatron_rl.inference.capabilities import capabilities_of
from megatron_rl.inference.config import PAGE_TOKENS, InferenceConfig, Sampling, pages_of
from megatron_rl.inference.engine_limits import against_engine
from megatron_rl.metrics.config import LoggingConfig, NotifyConfig
from megatron_rl.model.config import ModelConfig, TokenizerConfig
from megatron_rl.rank.config import (
    HarvestConfig,
    JobConfig,
    Offload,
    PlacementConfig,
    ProfileConfig,
    data_parallel_size,
)
from megatron_rl.recipe.section import FilePath, PathMark, Section
from megatron_rl.rollout.config import AsyncConfig, CurriculumConfig, EvaluationConfig, ResumeConfig
from megatron_rl.supervised.config import DataConfig
from megatron_rl.training.config import OptimizerConfig, TrainingConfig
from megatron_rl.vllm.config import VllmConfig

NAME_WORDS = "letters, digits, dots, dashes and underscores, the first a letter or digit"


class ImageConfig(Section):
    """Container image, on clusters with containers."""

    reference: Annotated[str, PathMark("image")] | None = None
    """[REGISTRY#]IMAGE[:TAG], or path of a squashfs file; default: that of the cluster profile."""
    import_on: Literal["login", "compute"] = "compute"
    """Machine that imports the image, once, into the shared cache. login: the one where mrl-submit is typed. compute:
    the first node of the job."""


class CodeConfig(Section):
    """Code of yours that runs beside mrl, such as an environment."""

    include: list[FilePath] | None = None
    """Directories from which the ranks import, on Slurm their snapshot; relative ones start at the recipe's file.
    Default on Slurm: the git repository of the current directory, if the recipe lies in it."""


class RunConfig(Section):
    """A recipe with every default written out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", json_schema_extra={"words": NAME_WORDS})]
    """Name of the recipe, part of run directory and job names."""
    cluster: str | None = None
    """Cluster profile that the recipe is meant for; `local` runs on this machine."""
    job: JobConfig = JobConfig()
    placement: PlacementConfig = PlacementConfig()
    harvest: HarvestConfig | None = None
    """Additional replicas in another partition (placement.mode partitioned, on Slurm); default: none."""
    image: ImageConfig = ImageConfig()
    code: CodeConfig = CodeConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig | None = None
    """Data set to train on, with `training.objective: supervised`."""
    environment: EnvironmentConfig | None = None
    """Environment to train on; with `training.objective: supervised` the one to evaluate on, if any."""
    environments: Environments | None = None
    """Several environments with weights, instead of `environment`: a list, or the path of a YAML file with one."""
    sampling: Sampling
    inference: InferenceConfig = InferenceConfig()
    grpo: GrpoConfig = GrpoConfig()
    distill: DistillConfig | None = None
    """Teacher of the policy, in addition to rewards or alone; default: none."""
    asynchronous: AsyncConfig = Field(default=AsyncConfig(), alias="async")  # a keyword of Python
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    curriculum: CurriculumConfig | None = None
    """Choice of problems by their recent pass rate; default: each pass has every problem once."""
    save: SaveConfig = SaveConfig()
    resume: ResumeConfig = ResumeConfig()
    logging: LoggingConfig = LoggingConfig()
    notify: NotifyConfig | None = None
    """Notifications by a command or a webhook; default: none."""
    profile: ProfileConfig | None = None
    """Profiles of a few steps (torch.profiler); default: none."""
    evaluate: EvaluateConfig | None = None
    """Written by `mrl evaluate --cluster`: the job evaluates and trains nothing."""

    @property
    def supervised(self) -> bool:
        """Whether the run trains on rows of data instead of sampled answers."""
        return self.training.objective == "supervised"

    @property
    def generates(self) -> bool:
        """Whether the run samples answers, to train or to evaluate on: it has an environment."""
        return self.environment is not None or self.environments is not None

    @property
    def task(self) -> EnvironmentConfig:
        """The environment, or several combined into one. Only if the run `generates`."""
        if self.environment is not None:
            return self.environment
        members = [one.model_dump() for one in self.environments or ()]
        return EnvironmentConfig(name=MULTI_TASK, args={"environments": members})

    def environment_of(self, id: str) -> EnvironmentConfig:
        """Return the keys of the environment with this id, which is empty where there is only one."""
        if self.environment is not None:
            return self.environment
        return next(one for one in self.environments or () if one.id == id)

    @property
    def environment_ids(self) -> list[str]:
        """Ids of the environments to train on, where there are several."""
        return [] if self.supervised else [one.id for one in self.environments or () if one.trained_on]

    @property
    def rows(self) -> DataConfig:
        """Data of supervised training; by default the worked examples of the environment."""
        return self.data or DataConfig()

    @property
    def groups_per_step(self) -> int:
        """Prompts of a step, each with its answers, or rows of data."""
        return self.rows.examples_per_step if self.supervised else self.grpo.prompts_per_step

    @property
    def loss_temperature(self) -> float:
        """Temperature of the distributions whose log-probs the loss reads."""
        return 1.0 if self.supervised else self.sampling.temperature

    def answers_of_replica(self, replicas: int) -> int:
        """Largest number of answers, or rows, that one data-parallel replica has in an optimizer update."""
        return -(-self.groups_per_step // replicas) if self.supervised else self.grpo.answers_of_replica(replicas)

    @property
    def sequence_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.training.sequence_length or self.model.max_position_embeddings

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel replicas of the training ranks on the most nodes."""
        layout, apart = self.placement.training, self.placement.inference.nodes or 0
        nodes = self.job.most_nodes - (apart if self.placement.mode == "partitioned" else 0)
        if self.teacher_replicas is not None:
            nodes -= self.teacher_replicas.nodes
        return data_parallel_size(nodes * self.job.gpus_per_node, layout.tp, layout.pp, layout.cp)

    @property
    def teacher_replicas(self) -> TeacherReplicas | None:
        """Replicas of the run that hold its teacher; None: it has none."""
        return self.distill.replicas if self.distill else None

    @property
    def teacher_vllm(self) -> VllmConfig | None:
        """Settings of the vLLM that holds the teacher; None: the run starts none."""
        replicas = self.teacher_replicas
        if replicas is None or not capabilities_of(replicas.engine).starts_workers:
            return None
        own = self.inference.own_vllm
        return replicas.vllm or (own.model_copy(update={"args": {}}) if own else VllmConfig())

    @property
    def started_vllms(self) -> dict[str, VllmConfig]:
        """Settings of the vLLM of each kind of replica (`contract.paths`) that has it."""
        found = {INFER: self.inference.own_vllm, TEACHER: self.teacher_vllm}
        return {kind: vllm for kind, vllm in found.items() if vllm is not None}

    @property
    def without_transformer_engine(self) -> str | None:
        """Reason why layers cannot use Transformer Engine, even where it is installed; None if they can."""
        if self.job.device == "cpu":
            return "job.device is cpu, and Transformer Engine needs GPUs"
        if self.model.dtype == "fp32":
            return "model.dtype is fp32, which Transformer Engine multiplies as TF32"
        if self.model.num_experts is not None:
            return "model.num_experts is set, and experts use megatron-core's own layers"
        if self.model.lora is not None:
            return (
                "model.lora is set, and adapters need the output of each norm, which Transformer Engine's linears hide"
            )
        return None

    @property
    def offload(self) -> Offload:
        """Data that leaves the device's memory while it is unused."""
        return self.placement.offload or ("buffers" if self.job.device == "cuda" else "none")

    @property
    def page_tokens(self) -> int:
        """Tokens per page of the engine's cache."""
        return self.inference.page_tokens or PAGE_TOKENS[self.job.device]

    @model_validator(mode="before")
    @classmethod
    def _without_answers(cls, values: Any) -> Any:
        """Fill in what a supervised recipe does not need: `grpo`, and `sampling` without an environment. Null removes
        the section of a recipe that is extended."""
        training = values.get("training") if isinstance(values, Mapping) else None
        if not isinstance(training, Mapping) or training.get("objective") != "supervised":
            return values
        changed = dict(values)
        if changed.get("grpo", {}) is None:
            del changed["grpo"]
        if not any(changed.get(key) for key in ("environment", "environments")):
            changed["sampling"] = changed.get("sampling") or {"max_new_tokens": 1}
        return changed

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if not self.generates and not self.supervised:
            raise ValueError("environment is missing: give one, or a list of several under environments")
        if self.environment is not None and self.environments is not None:
            raise ValueError("environments and environment are both given: set one of them to null")
        self._transformer_engine_fits()
        self._overlap_fits()
        self._adapters_fit()
        if reason := next(itertools.chain(self._against_objective(), self._against_teacher()), None):
            raise ValueError(reason)
        if against := against_engine(self):
            raise ValueError(against)
        if self.asynchronous.max_lag > 0 and self.resume.partial == "regenerate":
            raise ValueError(
                f"async.max_lag is {self.asynchronous.max_lag} and resume.partial is regenerate, which needs the same "
                "answers again; with max_lag they depend on when new weights arrive: set resume.partial to keep"
            )
        if self.profile is not None:
            self._profile_fits(self.profile)
        if self.harvest is not None and self.placement.mode != "partitioned":
            raise ValueError(
                "harvest adds inference replicas, and placement.mode is colocated, which has none: set partitioned"
            )
        if self.placement.mode == "partitioned" and self.job.fewest_nodes < self.job.most_nodes:
            raise ValueError(
                f"job.nodes {self.job.nodes} is a range, and placement.mode partitioned needs one number: each node "
                "has a fixed role"
            )
        if self.groups_per_step < self.data_parallel_size:
            key, unit = ("data.examples_per_step", "row") if self.supervised else ("grpo.prompts_per_step", "prompt")
            raise ValueError(
                f"{key} {self.groups_per_step} is smaller than the {self.data_parallel_size} "
                f"data-parallel replicas (job.nodes * job.gpus_per_node / (tp * pp * cp)): each needs a {unit}"
            )
        if self.grpo.baseline == "per_reward":
            for one in [self.environment] if self.environment else self.environments or ():
                if one.reward_weights is None and getattr(one, "trained_on", True):
                    raise ValueError(
                        f"grpo.baseline per_reward needs reward_weights of environment {one.name!r}: the components of "
                        "its reward, each with a weight"
                    )
        if self.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"training.sequence_length {self.sequence_length} exceeds "
                f"model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        if self.sampling.max_new_tokens >= self.sequence_length:
            limit = "training.sequence_length" if self.training.sequence_length else "model.max_position_embeddings"
            raise ValueError(
                f"sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"{limit} {self.sequence_length}"
            )
        pages, page_tokens = pages_of(self.inference, self.page_tokens, self.sequence_length)
        if pages * page_tokens < self.sequence_length:
            raise ValueError(
                f"inference.cache_tokens {self.inference.cache_tokens} holds {pages * page_tokens} tokens in pages of "
                f"{page_tokens}, and the longest sequence has {self.sequence_length}: raise it, or leave it out "
                "to hold inference.max_batch sequences"
            )
        if self.grpo.overlong.buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"grpo.overlong.buffer {self.grpo.overlong.buffer} is larger than "
                f"sampling.max_new_tokens {self.sampling.max_new_tokens}: even an empty answer would be penalised"
            )
        return self

    def _against_objective(self) -> Iterator[str]:
        """Yield the reason for each key that contradicts `training.objective`."""
        if not self.supervised:
            if self.data is not None:
                yield (
                    "data is given, and training.objective is grpo, which trains on sampled answers: set "
                    "training.objective to supervised, or leave data out"
                )
            return
        if self.rows.path is None and not self.generates:
            yield (
                "data.path is missing: training.objective supervised needs a data set, or an environment whose worked "
                "examples it trains on"
            )
        default = GrpoConfig()
        if changed := [name for name in GrpoConfig.model_fields if getattr(self.grpo, name) != getattr(default, name)]:
            yield (
                f"grpo.{changed[0]} is set, and training.objective supervised samples no answers: leave out the "
                "section, or set grpo to null if an extended recipe has it; data.examples_per_step sizes a batch"
            )
        if self.placement.mode == "partitioned":
            yield (
                "placement.mode is partitioned, and training.objective supervised needs no replicas: set colocated; "
                "all ranks train, and evaluations are answered in between"
            )
        if self.inference.engine not in ("native", "megatron"):
            yield (
                f"inference.engine is {self.inference.engine}, which training.objective supervised does not use: leave "
                "it out; the training ranks answer evaluations"
            )
        if self.curriculum is not None:
            yield "curriculum is set, and training.objective supervised has no pass rates: leave it out"
        if self.asynchronous.max_lag > 0:
            yield (
                f"async.max_lag is {self.asynchronous.max_lag}, and training.objective supervised generates nothing "
                "ahead of training: leave it out"
            )

    def _against_teacher(self) -> Iterator[str]:
        """Yield the reason for each key that contradicts `distill`."""
        if (distill := self.distill) is None:
            return
        if self.supervised:
            yield (
                "distill is given, and training.objective is supervised: a teacher judges sampled answers; set "
                "training.objective to grpo, or leave distill out"
            )
        if self.grpo.dynamic_sampling.enabled:
            yield (
                "distill is given, and grpo.dynamic_sampling is enabled, which passes over prompts whose rewards are "
                "equal: the teacher gives them a signal; leave one of both out"
            )
        if distill.is_served and self.sampling.temperature != 1:
            key = "distill.server" if distill.server else "distill.replicas"
            yield (
                f"{key} is given, and sampling.temperature is {self.sampling.temperature:g}: servers report "
                f"log-probs of a text at temperature 1 only; set 1, or leave out {key}"
            )
        if distill.replicas is None:
            return
        if self.job.fewest_nodes < self.job.most_nodes:
            yield (
                f"job.nodes {self.job.nodes} is a range, and distill.replicas needs one number: each node has a fixed "
                "role"
            )
        images = {one.image for one in self.started_vllms.values()}
        if len(images) > 1:
            names = " and ".join(sorted(map(str, images)))
            yield f"inference.vllm.image and distill.replicas.vllm.image are {names}: a run has one image with vLLM"

    def _transformer_engine_fits(self) -> None:
        training, against = self.training, self.without_transformer_engine
        if training.transformer_impl == "transformer_engine" and against:
            raise ValueError(f"training.transformer_impl is transformer_engine, but {against}")
        if training.fp8 == "none":
            return
        if training.transformer_impl == "local":
            against = "training.transformer_impl is local, and FP8 needs Transformer Engine"
        elif self.model.lora is not None:
            against = (
                "model.lora is set, and FP8 needs Transformer Engine, whose linears have no adapters: set fp8 to none"
            )
        elif training.recompute == "full":
            against = "training.recompute is full, which would recompute layers in another precision"
        if against:
            raise ValueError(f"training.fp8 is {training.fp8}, but {against}")

    def _profile_fits(self, profile: ProfileConfig) -> None:
        (first, last), layout = profile.steps, self.placement.training
        if last > self.training.steps:
            raise ValueError(
                f"profile.steps [{first}, {last}] are not all made: training.steps is {self.training.steps}"
            )
        ranks = self.data_parallel_size * layout.tp * layout.pp * layout.cp
        if profile.ranks is not None and max(profile.ranks) >= ranks:
            raise ValueError(f"profile.ranks has {max(profile.ranks)}, and the training ranks are 0 to {ranks - 1}")
        if profile.generation and (not self.generates or self.placement.mode == "partitioned"):
            raise ValueError(
                "profile.generation is true, and the training ranks generate nothing (placement.mode partitioned, or "
                "no environment): set it to false"
            )

    def _overlap_fits(self) -> None:
        if not self.optimizer.overlap_param_gather:
            return
        updates = 1 if self.supervised else self.grpo.updates_per_pass * self.grpo.iterations
        if updates == 1:
            raise ValueError(
                "optimizer.overlap_param_gather is set, and a step has one update, after which the weights are read at "
                "once: leave it out, or make several updates per step (grpo.global_batch, grpo.iterations)"
            )
        if self.model.num_experts is not None:
            raise ValueError(
                "optimizer.overlap_param_gather is set, and model.num_experts too: experts are multiplied all at once, "
                "which waits for all of their weights; leave it out"
            )

    def _adapters_fit(self) -> None:
        """Raise ValueError if adapters would belong to weights that no later start or export of the run can read, or if
        a recomputed layer could not repeat what was dropped."""
        init = self.model.init
        if self.model.lora is None:
            return
        if self.model.lora.dropout and self.training.recompute == "full" and self.placement.training.pp > 1:
            raise ValueError(
                f"model.lora.dropout {self.model.lora.dropout} with training.recompute full needs "
                "placement.training.pp 1: a stage recomputes the layers of one micro-batch during another, and would "
                "drop other inputs. Set training.recompute to selective, or dropout to 0"
            )
        if init in ("huggingface", "checkpoint"):
            return
        if self.job.device == "cuda" and init == "supervised":
            raise ValueError(
                "model.lora with model.init supervised needs job.device cpu: each start teaches the base again, and a "
                "GPU may round it differently. Start from model.init=checkpoint or huggingface"
            )
        if self.save.export_hf_every > 0:
            raise ValueError(
                f"save.export_hf_every merges the adapters of model.lora with their base, and with model.init {init} "
                "no file has the base: set it to 0, or start from model.init=checkpoint or huggingface"
            )


def read_config(run_dir: RunDir) -> RunConfig:
    """Read the configuration that a run was submitted with. Raises ConfigurationError."""
    try:
        return RunConfig.model_validate(yaml.safe_load(run_dir.resolved.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigurationError(f"{run_dir.resolved}: {error}") from error
