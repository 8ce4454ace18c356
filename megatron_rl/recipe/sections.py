"""Sections of a recipe, and what follows from several of them. Each room defines its keys, defaults and their meaning
in its own `config.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.contract.paths import INFER, REWARD, TEACHER
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.distill import DistillConfig, TeacherReplicas, Teachings
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.environment_grpo import Algorithms
from megatron_rl.recipe.environment_section import MULTI_TASK, EnvironmentConfig, Environments, member_of
from megatron_rl.recipe.evaluation_section import EvaluationConfig
from megatron_rl.recipe.fixed_models import fixed_models
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.inference import PAGE_TOKENS, InferenceConfig, Sampling
from megatron_rl.recipe.job import HarvestConfig, JobConfig, Offload, PlacementConfig, ProfileConfig, data_parallel_size
from megatron_rl.recipe.logs import LoggingConfig, NotifyConfig
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.reward_section import RewardConfig
from megatron_rl.recipe.rollout import AsyncConfig, CurriculumConfig, ResumeConfig
from megatron_rl.recipe.save_section import SaveConfig
from megatron_rl.recipe.section import FilePath, PathMark, Section
from megatron_rl.recipe.tokenizer_section import TokenizerConfig
from megatron_rl.recipe.training import OptimizerConfig, TrainingConfig
from megatron_rl.recipe.vllm import VllmConfig, as_policy

NAME_WORDS = "letters, digits, dots, dashes and underscores, the first a letter or digit"


class ImageConfig(Section):
    """Container image, on clusters with containers."""

    reference: Annotated[str, PathMark("image")] | None = None
    """[REGISTRY#]IMAGE[:TAG], or path of a squashfs file; default: that of the cluster profile."""
    import_on: Literal["login", "compute"] = "compute"
    """Machine that imports the image, once, into the shared cache. login: the one where mrl-submit is typed. compute:
    the first node of the job."""


class OwnCodeConfig(Section):
    """Code of yours that runs beside mrl, such as an environment."""

    include: list[FilePath] | None = None
    """Directories from which the ranks import, on Slurm their snapshot; relative ones start at the recipe's file.
    Default on Slurm: the git repository of the current directory, if the recipe lies in it."""


class Sections(Section):
    """A recipe with every default written out, its sections not yet compared with one another."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", json_schema_extra={"words": NAME_WORDS})]
    """Name of the recipe, part of run directory and job names."""
    cluster: str | None = None
    """Cluster profile that the recipe is meant for; `local` runs on this machine."""
    job: JobConfig = JobConfig()
    placement: PlacementConfig = PlacementConfig()
    harvest: HarvestConfig | None = None
    """Additional replicas in another partition (placement.mode partitioned, on Slurm); default: none."""
    image: ImageConfig = ImageConfig()
    code: OwnCodeConfig = OwnCodeConfig()
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
    reward: RewardConfig | None = None
    """Reward model that the run starts; default: none."""
    asynchronous: AsyncConfig = Field(default=AsyncConfig(), alias="async")  # a keyword of Python
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    curriculum: CurriculumConfig | None = None
    """Problems chosen by their recent pass rate; default: each pass has every problem once."""
    save: SaveConfig = SaveConfig()
    resume: ResumeConfig = ResumeConfig()
    logging: LoggingConfig = LoggingConfig()
    notify: NotifyConfig | None = None
    """Notifications by a command or a webhook; default: none."""
    profile: ProfileConfig | None = None
    """Profiles of a few steps (torch.profiler); default: none."""

    @property
    def supervised(self) -> bool:
        """Whether the run trains on rows of data instead of sampled answers."""
        return self.training.objective == "supervised"

    @property
    def scores_first(self) -> bool:
        """Whether a step runs the policy once before its updates, without dropout. A single update without dropout
        needs no such pass: its own forward pass is that of the policy before the step."""
        drops = self.model.lora is not None and self.model.lora.dropout > 0
        return not self.supervised and (drops or self.grpo.updates_per_step > 1 or self.algorithms.compare_answers)

    @property
    def teachings(self) -> Teachings:
        if self.supervised:
            return Teachings({})
        own = [one.distill for one in self.environments or () if one.trained_on]
        teachings = [self.distill if its is None else its.over(self.distill) for its in own or [None]]
        return Teachings(dict(zip(self.environment_ids or [""], teachings, strict=True)))

    @property
    def algorithms(self) -> Algorithms:
        trained = [] if self.supervised else [one for one in self.environments or () if one.trained_on]
        return Algorithms.of(self.grpo, {one.id: one.grpo for one in trained})

    @property
    def keeps_initial_weights(self) -> bool:
        """Whether each start needs the initial weights, also with a checkpoint: for the KL penalty, or below
        adapters."""
        return self.algorithms.penalise_kl or self.model.lora is not None

    @property
    def generates(self) -> bool:
        """Whether the run samples answers, to train or to evaluate on: it has an environment."""
        return self.environment is not None or self.environments is not None

    @property
    def task(self) -> EnvironmentConfig:
        """The environment, or several combined into one. Only if the run `generates`."""
        if self.environment is not None:
            return self.environment
        # Teachers change no answer, so the bank of another teacher's run is as good.
        members = [one.model_dump(exclude={"distill"}) for one in self.environments or ()]
        return EnvironmentConfig(name=MULTI_TASK, args={"environments": members})

    def environment_of(self, id: str) -> EnvironmentConfig:
        """Return the keys of the environment with this id, which is empty where there is only one."""
        if self.environment is not None:
            return member_of(self.environment, id)
        return next(one for one in self.environments or () if one.id == id)

    @property
    def environment_ids(self) -> list[str]:
        return [] if self.supervised else [one.id for one in self.environments or () if one.trained_on]

    @property
    def rows(self) -> DataConfig:
        """Data of supervised training; by default the worked examples of the environment."""
        return self.data or DataConfig()

    @property
    def groups_per_step(self) -> int:
        """Prompts of a step, each with its answers, or rows of data."""
        return self.rows.examples_per_step if self.supervised else self.grpo.prompts_per_step

    def answers_of_replica(self, replicas: int) -> int:
        """Largest number of answers, or rows, that one data-parallel replica has in an optimizer update."""
        return -(-self.groups_per_step // replicas) if self.supervised else self.grpo.answers_of_replica(replicas)

    @property
    def sequence_length(self) -> int:
        return self.training.sequence_length or self.model.max_position_embeddings

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel replicas of the training ranks on the most nodes."""
        layout, apart = self.placement.training, self.placement.inference.nodes or 0
        nodes = self.job.most_nodes - (apart if self.placement.mode == "partitioned" else 0)
        nodes -= sum(one.nodes for one in fixed_models(self.distill, self.reward))
        return data_parallel_size(nodes * self.job.gpus_per_node, layout.tp, layout.pp, layout.cp)

    @property
    def teacher_replicas(self) -> TeacherReplicas | None:
        return self.distill.replicas if self.distill else None

    @property
    def teacher_vllm(self) -> VllmConfig | None:
        """Settings of the vLLM that holds the teacher; None: the run starts none."""
        replicas = self.teacher_replicas
        if replicas is None or not capabilities_of(replicas.engine).starts_workers:
            return None
        return replicas.vllm or as_policy(self.inference.own_vllm)

    @property
    def started_vllms(self) -> dict[str, VllmConfig]:
        """Settings of the vLLM of each kind of replica (`contract.paths`) that has it."""
        reward = (self.reward.replicas.vllm or as_policy(self.inference.own_vllm)) if self.reward else None
        found = {INFER: self.inference.own_vllm, TEACHER: self.teacher_vllm, REWARD: reward}
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
        if self.model.latent_attention is not None:
            return "model.latent_attention is set, whose down projections share a norm"
        if self.model.norms == "behind":
            return "model.norms is behind, and Transformer Engine's linears have a norm before them"
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
        return self.inference.page_tokens or PAGE_TOKENS[self.job.device]
