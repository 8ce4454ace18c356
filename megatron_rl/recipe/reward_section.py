"""Recipe keys of the reward model that a run starts on replicas."""

from __future__ import annotations

from megatron_rl.recipe.section import HubPath, PositiveFloat, PositiveInt, Section
from megatron_rl.recipe.vllm import VllmConfig


class RewardReplicas(Section):
    """Replicas that hold the reward model on separate nodes, each a `vllm serve`: no other engine has classifiers. The
    run starts, watches, restarts and ends them like inference replicas, and they never get other weights."""

    nodes: PositiveInt
    """Nodes of the job that only hold the reward model, the last ones. All others train and generate as `placement`
    says."""
    tp: PositiveInt = 1
    """GPUs of one replica, which must divide job.gpus_per_node. A node holds job.gpus_per_node / tp replicas, and an
    answer goes to the one with the fewest outstanding requests."""
    vllm: VllmConfig | None = None
    """How to start vLLM; default: image and Python of `inference.vllm`. A run has one image with vLLM."""
    sequence_length: PositiveInt | None = None
    """Longest text, in tokens of the reward model; an answer whose text is longer is lost. Default: as long as the
    model allows."""
    answer_limit_s: PositiveFloat = 120.0
    """Longest wait for the score of one answer, in seconds; then another replica is asked. Replicas that are away are
    waited for until job.silence_limit_s, and environment.reward_timeout_s limits the wait for one answer."""


class RewardConfig(Section):
    """Reward model that the run starts, a sequence classifier. The environment `judge` asks it, if its `reward_model`
    has no url."""

    model: HubPath
    """Reward model: name on the hub, or directory of Hugging Face weights with the tokenizer. It is computed in
    model.dtype."""
    replicas: RewardReplicas
