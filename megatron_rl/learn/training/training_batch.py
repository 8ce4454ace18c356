"""A rank's trajectories as the input of updates: tensors and micro-batches, equally many on every rank.

chosen sequences -> UpdatePart -> (all ranks agree on normaliser and number of micro-batches) -> UpdateBatch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress

import numpy as np
import torch
from torch import Tensor

from megatron_rl.agent.scoring import UNDECIDED
from megatron_rl.agent.trajectories import UNSAMPLED, Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.allowed_tokens import AllowedTokens, allowed_tokens
from megatron_rl.algorithms.bins import ROWS_ARE_FREE, BinLimit
from megatron_rl.algorithms.credit import Credit
from megatron_rl.algorithms.evaluation_scores import RIGHT
from megatron_rl.algorithms.packing import MicroBatch, Packing
from megatron_rl.algorithms.reduction import local_normaliser, sequence_weights
from megatron_rl.algorithms.turn_credit import spans
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.core_config import DTYPES
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.platform.device import Kernels
from megatron_rl.model.platform.host_tensors import floats, int64
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.metrics.stats import BY_ENVIRONMENT, BatchStats, EnvironmentStats, LossStats
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import rows_per_token


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A rank's share of a step's batch. [trained tokens] are those in the loss masks of all sequences, concatenated, on
    the device; all else is on the CPU."""

    trajectories: Sequence[Trajectory]
    problems: Sequence[Problem]  # of each trajectory
    credit: Credit
    sequences: Sequence[Branch]  # sequences of the first trajectory, then of the next ones
    trajectory: Tensor  # [sequences] index of the trajectory
    lengths: Tensor  # [sequences] trained tokens
    weights: Tensor  # [sequences] see `sequence_weights`; 0 if masked as overlong
    sequence_of_token: Tensor  # [trained tokens]
    inference_logprobs: Tensor  # [trained tokens] log-probs of the engine
    current: Tensor | None
    """[trained tokens] whether the current weights sampled the token; None if they sampled all, or nothing is
    sampled."""
    advantages: Tensor | None  # [trained tokens], with credit by turn; None: those of the trajectories
    environments: Tensor | None
    """[trained tokens] int64 index of the environment in `RunConfig.environment_ids`; None if there is only one."""
    allowed: AllowedTokens | None
    """Tokens that each trained token was drawn among; None if each was drawn among all."""

    @property
    def trajectory_lengths(self) -> Tensor:
        """[trajectories] trained tokens in all sequences."""
        return torch.zeros(len(self.trajectories), dtype=torch.long).index_add(0, self.trajectory, self.lengths)

    def allowed_at(self, index: Tensor) -> AllowedTokens | None:
        """index: [tokens] indices into the trained tokens."""
        return None if self.allowed is None else self.allowed.at(index)


def training_batch(
    groups: Sequence[TrajectoryGroup],
    credit: Credit,
    config: RunConfig,
    policy_version: int,
    device: torch.device,
    grammars: Grammars | None = None,
) -> TrainingBatch:
    """Return the trained tokens of these groups, whose credit is given.

    policy_version: of the weights to train.
    grammars: see `allowed_tokens`.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    of = torch.repeat_interleave(int64([1 + len(trajectory.branches) for trajectory in trajectories]))
    lengths = int64([s.loss_mask.count(True) for s in sequences])
    trained = list(chain.from_iterable(s.loss_mask for s in sequences))
    logprobs = list(compress(chain.from_iterable(s.logprobs for s in sequences), trained))
    versions = list(compress(chain.from_iterable(s.versions for s in sequences), trained))
    return TrainingBatch(
        trajectories=trajectories,
        problems=[group.problem for group in groups for _ in group.trajectories],
        credit=credit,
        sequences=sequences,
        trajectory=of,
        lengths=lengths,
        weights=sequence_weights(lengths, of, credit.carries_loss, config.grpo.branches),
        sequence_of_token=torch.repeat_interleave(lengths).to(device),
        inference_logprobs=floats(logprobs, np.float32).to(device),
        current=None
        if set(versions) <= {policy_version, UNSAMPLED}
        else torch.tensor([version == policy_version for version in versions], device=device),
        advantages=None if credit.of_spans is None else _of_tokens(trajectories, credit.of_spans).to(device),
        environments=_environments(groups, credit, of, lengths, config.environment_ids, device),
        allowed=allowed_tokens(sequences, grammars, device),
    )


def trained_index(lengths: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return the indices of some sequences' trained tokens among those of the batch, on the CPU.

    lengths: [sequences] trained tokens. chosen: ascending.
    """
    stays = torch.zeros(len(lengths), dtype=torch.bool)
    stays[int64(chosen)] = True
    return stays.repeat_interleave(lengths).nonzero().squeeze(1)


def _of_tokens(trajectories: Sequence[Trajectory], of_spans: Tensor) -> Tensor:
    """Return the advantage of each trained token. of_spans: see `Credit.of_spans`."""
    parts = [part for trajectory in trajectories for part in spans(trajectory)]
    return of_spans.repeat_interleave(
        int64([sequence.loss_mask[its.start : its.stop].count(True) for sequence, its in parts])
    )


def _environments(
    groups: Sequence[TrajectoryGroup],
    credit: Credit,
    trajectory: Tensor,
    lengths: Tensor,
    ids: Sequence[str],
    device: torch.device,
) -> Tensor | None:
    if not ids:
        return None
    of_groups = int64([ids.index(group.problem.environment) for group in groups])
    return of_groups[credit.group][trajectory].repeat_interleave(lengths).to(device)


def batch_stats(batch: TrainingBatch, rollouts: RolloutBatch, policy_version: int, packed_tokens: int) -> BatchStats:
    answer_lengths = [t.answer_length for t in batch.trajectories]
    staleness = [0]
    if batch.current is not None:
        staleness = [policy_version - min(_trained_versions(t), default=policy_version) for t in batch.trajectories]
    rewards = batch.credit.rewards.double()
    return BatchStats(
        answers=len(batch.trajectories),
        groups=len(rollouts.groups),
        groups_with_signal=int(batch.credit.signal.sum()),
        reward=float(rewards.sum()),
        reward_squared=float(rewards.square().sum()),
        right=int((batch.credit.accuracy == RIGHT).sum()),
        answer_tokens=sum(answer_lengths),
        answer_length_max=max(answer_lengths, default=0),
        answer_length_min=min(answer_lengths, default=float("inf")),
        prompt_tokens=sum(t.prompt_length for t in batch.trajectories),
        packed_tokens=packed_tokens,
        unpacked_tokens=sum(
            len(s.tokens) for t in compress(batch.trajectories, batch.credit.has_gradient) for s in t.sequences
        ),
        sequences=len(batch.sequences),
        turns=sum(len(s.turns) for s in batch.sequences),
        tool_calls=sum(t.tool_calls or 0 for t in batch.trajectories),
        with_tools=sum(t.tool_calls is not None for t in batch.trajectories),
        with_components=sum(bool(t.components) for t in batch.trajectories),
        undecided=sum(UNDECIDED in t.components for t in batch.trajectories),
        truncated=sum(t.finish_reason == "length" for t in batch.trajectories),
        failed=sum(rollouts.failures.values()),
        dropped=len(rollouts.dropped),
        overdue_tokens=rollouts.dropped_tokens,
        staleness=sum(staleness),
        staleness_max=max(staleness),
    )


def _trained_versions(trajectory: Trajectory) -> Iterator[int]:
    return chain.from_iterable(compress(s.versions, s.loss_mask) for s in trajectory.sequences)


def environment_stats(
    batch: TrainingBatch, groups: Sequence[TrajectoryGroup], ids: Sequence[str]
) -> dict[str, EnvironmentStats]:
    """Statistics of each environment's groups; for recipes with several environments."""
    found = {}
    for id in ids:
        its = [group.problem.environment == id for group in groups]  # [groups]
        of_answers = torch.tensor(its, dtype=torch.bool)[batch.credit.group]  # [trajectories]
        found[id] = EnvironmentStats(
            answers=int(of_answers.sum()),
            groups=sum(its),
            groups_with_signal=int(batch.credit.signal[torch.tensor(its, dtype=torch.bool)].sum()),
            reward=float(batch.credit.rewards.double()[of_answers].sum()),
            failed=sum(sum(group.failures.values()) for group in compress(groups, its)),
        )
    return found


def with_losses(
    found: Mapping[str, EnvironmentStats], loss: LossStats, config: RunConfig
) -> dict[str, EnvironmentStats]:
    """Return statistics of environments with their parts of the loss's. loss: of this rank, which may count nothing."""
    of_all = (
        loss.by_environment if isinstance(loss.by_environment, Tensor) else torch.zeros(len(found), len(BY_ENVIRONMENT))
    )
    complete, teaching_of = {}, config.teachings.by_id
    for (id, stats), row in zip(found.items(), of_all.unbind() if found else (), strict=True):
        part, grpo = dict(zip(BY_ENVIRONMENT, row.unbind(), strict=True)), config.algorithms.by(id)
        complete[id] = replace(
            stats,
            tokens=part["tokens"],
            entropy=part["entropy"],
            clipped=part["clip_low"] + part["clip_high"] if grpo.is_bounded else None,
            kl=part["kl"] if grpo.kl_beta > 0 else None,
            teacher_kl=part["teacher_kl"] if teaching_of[id] else None,
            judged=part["judged"] if teaching_of[id] else None,
        )
    return complete


@dataclass(frozen=True, slots=True)
class UpdatePart:
    packing: Packing  # packing of the chosen sequences with a gradient; the others count as zeros in the mean
    bins: Sequence[Sequence[int]]  # fewest bins found for them: see `Packing.bins`
    room: BinLimit
    normaliser: float  # this rank's part of the normaliser (`local_normaliser`), over all chosen sequences


def update_part(batch: TrainingBatch, chosen: Sequence[int], config: RunConfig, kernels: Kernels) -> UpdatePart:
    tokens = [sequence.tokens for sequence in batch.sequences]
    masks = [sequence.loss_mask for sequence in batch.sequences]
    has_gradient = [batch.credit.has_gradient[of] for of in batch.trajectory.tolist()]
    choices = None
    if config.model.router_replay == "rollout":
        choices = ChoiceForm.of(config.model), [sequence.choices for sequence in batch.sequences]
    packing = Packing(tokens, masks, (each for each in chosen if has_gradient[each]), choices)
    index = int64(chosen)
    room = microbatch_room(config, kernels)
    return UpdatePart(
        packing,
        packing.bins(room),
        room,
        local_normaliser(batch.lengths[index], batch.weights[index], config.grpo.reduction),
    )


@dataclass(frozen=True, slots=True)
class Agreed:
    microbatches: int  # largest number that any rank needs
    normaliser: float  # normaliser of the global batch


def agree(parts: Sequence[UpdatePart], groups: Groups) -> list[Agreed]:
    """Agree on normaliser and number of micro-batches of each update. Collective over all ranks; waits for no
    device."""
    # The loss is a mean over the global batch, but micro-batches and ranks only add up: the divisor must be known
    # before the first micro-batch. Example: of two ranks, one has 300 trained tokens and the other 100. A mean on each
    # rank, and then of the two, would weigh the 100 three times as much; with the normaliser 400 all weigh 1/400.
    # The number of micro-batches must be known too, because ranks wait for one another within each: a rank that needs
    # fewer runs empty ones.
    # All ranks of a replica have the same parts of the batch, so one of them counts for all.
    own = [part.normaliser if groups.reports else 0.0 for part in parts] + [float(len(part.bins)) for part in parts]

    def combine(rows: Tensor) -> Tensor:
        return torch.cat((rows[:, : len(parts)].sum(0), rows[:, len(parts) :].amax(0)))

    whole = groups.control.reduce(torch.tensor(own, dtype=torch.float64), combine).tolist()
    normalisers, counts = whole[: len(parts)], whole[len(parts) :]
    return [Agreed(int(count), normaliser) for count, normaliser in zip(counts, normalisers, strict=True)]


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    microbatches: Sequence[MicroBatch]  # equally many on every rank, padded with empty ones
    normaliser: float  # normaliser of the global batch

    @property
    def packed_tokens(self) -> int:
        return sum(len(micro.tokens) for micro in self.microbatches if len(micro.targets))

    @property
    def missing_choices(self) -> int:
        """Packed tokens whose experts the routers choose, because no engine returned its choices."""
        return sum(micro.choices.missing for micro in self.microbatches if micro.choices)


def update_batch(part: UpdatePart, agreed: Agreed) -> UpdateBatch:
    """Form the agreed number of micro-batches. A rank that needs fewer spreads its sequences evenly over them."""
    bins = part.bins
    if len(bins) < agreed.microbatches:
        bins = part.packing.bins(part.room, agreed.microbatches)
    empty = [MicroBatch.empty()] * (agreed.microbatches - len(bins))
    return UpdateBatch([*map(part.packing.microbatch, bins), *empty], agreed.normaliser)


def microbatch_room(config: RunConfig, kernels: Kernels) -> BinLimit:
    """Capacity of a micro-batch over its context-parallel ranks. Counts gathered prefixes if attention gathers them."""
    cp = config.placement.training.cp
    dtype, sinks = DTYPES[config.model.dtype], config.model.attention_sinks
    gathers = kernels.gathers_branches(dtype, in_parts=cp > 1, sinks=sinks) or config.model.delta_net
    return BinLimit(
        cp * config.training.tokens_per_microbatch, rows_per_token(config.model) if gathers else ROWS_ARE_FREE
    )
