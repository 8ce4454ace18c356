"""Generation by replicas on other ranks, in a partitioned run: the part of the training ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.packing import pack
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT, PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import digest_of, read_token
from megatron_rl.learn.rollout.agent_loop import AgentThread, TrainingDriver
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward
from megatron_rl.model.platform.transport import offered
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.run.standalone.first_rows import Lesson
from megatron_rl.run.state import Generation

logger = logging.getLogger("megatron_rl")


def open_pool(config: RunConfig, here: Here) -> ReplicaPool:
    """Open the pool of replicas that this rank's driver queries. Called early, because replicas wait for it.

    Raises ConfigurationError if the run has no token.
    """
    role = TrainingDriver.of(here.groups)
    dispatch = Dispatch(
        here.attempt,
        digest_of(here.run_dir.resolved),
        read_token(here.run_dir.token),
        role.index,
        resumes=config.resume.partial == "keep",
        limit_s=config.job.silence_limit_s,
    )
    pool = ReplicaPool(dispatch)
    if role.drives:
        pool.start()
    return pool


def generate_elsewhere(config: RunConfig, here: Here, lesson: Lesson, policy: Policy, pool: ReplicaPool) -> Generation:
    """Set up the refit of the replicas, which generate with the weights of `policy` once they are published.
    Collective.

    pool: opened by `open_pool`.
    """
    prober = None
    if capabilities_of(config.inference.engine).probed:
        prompts = (problem.prompt for problem in lesson.sets[0].problems)
        prober = Prober(policy, probe_text(prompts, lesson.tokenizer, config.sequence_length), here.groups)
    platform, safe_points = here.platform, here.safe_points
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    transfer = TransferRefit(
        Sender(weights_by_box(policy)),
        dist.new_group(backend="gloo", timeout=timeout, group_desc="refit"),
        offered(platform.backend),
        PoolControl(pool, timeout) if dist.get_rank() == 0 else None,
        safe_points.poll,
        min(timeout, TRANSFER_TIMEOUT),
        no_replica_timeout=timedelta(seconds=config.job.silence_limit_s),
    )
    refit = OverlappedRefit(transfer, pool, platform, safe_points, prober.measure if prober else None)
    loop = AgentThread(TrainingDriver.of(here.groups), pool, safe_points, refit)

    def end() -> None:
        refit.close()
        pool.close(end=dist.get_rank() == 0)

    def metrics() -> dict[str, float]:
        return pool.metrics() | refit.metrics()

    return Generation(pool, refit, loop, end, metrics if dist.get_rank() == 0 else dict)


TOKENS = 64
"""Most tokens of a probe: enough that all layers and positions have an effect, and as cheap as a short prompt."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Mean absolute differences of log-probs, in nats, that rounding explains, by the model's dtype.

Two right implementations in fp32 differ by 1e-5. In bf16 a logit between 16 and 32 is rounded to a multiple of 1/8:
log-probs of SmolLM2 by two kernels of attention differ by 0.06 in the mean and by 0.22 at most, which is why the mean
counts. Wrong weights of a tensor, such as those of another layer, differ by nats."""


def probe_text(prompts: Iterable[str], tokenizer: Tokenizer, longest: int) -> list[int]:
    """Tokens of a probe: those of the first prompts, repeated if they are few.

    longest: tokens of the longest sequence; one is left for an engine that must sample.
    """
    found: list[int] = []
    for prompt in islice(prompts, TOKENS):
        found += tokenizer.encode(prompt)
        if len(found) >= TOKENS:
            break
    return (found * TOKENS)[: min(TOKENS, longest - 1)]


class Prober:
    """Measures log-probs of a short text under the trainer's weights, with which engines are probed."""

    def __init__(self, policy: Policy, tokens: Sequence[int], groups: Groups) -> None:
        """
        policy: the trainer's.
        tokens: see `probe_text`; equal on all ranks.
        """
        self._policy, self._tokens, self._groups = policy, tuple(tokens), groups
        self._pipeline = Pipeline(groups)
        (batch,) = pack([[*tokens]], [[False, *[True] * (len(tokens) - 1)]], [0], len(tokens))
        self._input = ModelInput.of(policy, batch, groups.context)

    def measure(self) -> Probe | None:
        """Measure the probe of the current weights; None if their log-probs are not finite, which no engine causes.
        Collective over all ranks, and equal on all."""
        logprobs = self._logprobs().tolist()
        try:
            return Probe(self._tokens, tuple(logprobs), TOLERANCES[self._policy.config.params_dtype])
        except ValueError as error:
            logger.warning("engines are not probed with these weights: %s", error)
            return None

    def _logprobs(self) -> Tensor:
        """[tokens - 1] on every rank."""
        scores = torch.zeros(len(self._tokens) - 1, device=self._policy.device)
        output = self._policy.output() if self._pipeline.last else None

        def receive(hidden: Tensor, read: ModelInput) -> None:
            assert output is not None
            scores[read.trained], _ = predicted_logprobs(hidden, output, read.targets, 1.0, entropy="none")

        forward(self._policy, [self._input], receive, self._pipeline, stop=lambda: False)
        for group in (self._groups.context, self._groups.pipeline):  # each token is predicted on one of these ranks
            if group.size() > 1:
                dist.all_reduce(scores, group=group)
        return scores
