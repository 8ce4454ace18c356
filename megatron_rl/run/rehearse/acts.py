"""Acts of a rehearsed rank: it generates, publishes its weights, and scores answers, as far as memory shows it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.training.schedule import ModelInput
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.learn.training.training_batch import Agreed, training_batch, update_batch, update_part
from megatron_rl.model.platform.phantom import HeldMemory
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_bucket import HALF_BYTES
from megatron_rl.recipe.flops import fullest_microbatch
from megatron_rl.recipe.inference import Sampling
from megatron_rl.run.rehearse.phantom_world import LoneBuckets, LoneSender


def generate(engine: Engine, config: RunConfig, memory: HeldMemory) -> None:
    """Fill all rows, one of them with a sequence of full length, and decode a token for each. Log-probs of prompts are
    left out, since the host reads their values."""
    length, answer = config.sequence_length, config.sampling.max_new_tokens
    fresh = Sampling(temperature=config.sampling.temperature, max_new_tokens=answer)
    requests = [engine.submit(GenerationRequest([0] * (length - 1), 1, Sampling(max_new_tokens=1), key=0))]
    for key in range(1, config.inference.max_batch):  # all prompts differ
        prompt = [key % engine.policy.vocabulary] * max(1, length - answer)
        requests.append(engine.submit(GenerationRequest(prompt, 1, fresh, key)))
    engine.step()
    assert engine.runner.cache is not None
    memory.assign("KV cache", (engine.runner.cache.keys, engine.runner.cache.values))
    engine.step()
    for request in requests:
        engine.cancel(request)
    engine.end_phase()


def publish(trainer: Trainer) -> None:
    """Send all weights of this rank, as a replica that needs them all gets them."""
    sender = Sender(weights_by_box(trainer.policy))
    group: Any = LoneSender(trainer.platform.device)
    sender.connect(group)
    sender.publish(0)


def send(trainer: Trainer) -> None:
    """Give all weights of this rank to a worker on its device, as much at a time as on a GPU."""
    world: Any = dist.group.WORLD
    sender = BucketSender(weights_by_box(trainer.policy), world, half=HALF_BYTES["cuda"])
    group: Any = LoneBuckets(world.size())
    sender.connect(group)
    sender.publish(0)


def score(trainer: Trainer) -> None:
    config, policy = trainer.config, trainer.policy
    groups = rollouts(config, 1, trainer.groups.data.size()).groups
    batch = training_batch(groups, trainer.objective.credit(groups), config, 0, trainer.platform.device)
    part = update_part(batch, range(len(batch.sequences)), config, trainer.platform.kernels)
    (fullest, *_) = update_batch(part, Agreed(len(part.bins), part.normaliser)).microbatches
    trainer.score(policy, batch, [ModelInput.of(policy, fullest, trainer.groups.context)])


def rollouts(config: RunConfig, microbatches: int, replicas: int) -> RolloutBatch:
    """A batch of `microbatches` of the fullest micro-batches, and at least two, as far as a data-parallel replica has
    answers. Prompts differ and half of the answers are right."""
    lengths = fullest_microbatch(config, replicas) * max(2, microbatches)
    lengths = lengths[: max(2, config.answers_of_replica(replicas))]
    trajectories = []
    for number, tokens in enumerate(lengths):
        answer = min(config.sampling.max_new_tokens, tokens - 1)
        completion = Completion([2] * answer, [0.0] * answer, "length", [0] * answer)
        trajectories.append(Trajectory.single([number] * (tokens - answer), completion, "", float(number % 2)))
    problem = Problem("", {}, next(iter(config.environment_ids), ""))
    return RolloutBatch([TrajectoryGroup(0, problem, trajectories, {})], [0], 0, 1)
