"""One step on recorded trajectories, compared with a padded implementation in plain torch and `transformers`; and the
guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import CPU, VOCAB, batch_of, build_run, random_groups, tiny_model, tiny_run
from core_helpers import (
    trajectory as scored,
)
from published_twin import published, published_twin
from thread_ranks import on_threads
from torch import Tensor

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.learn.training import trainer as trainer_module
from megatron_rl.learn.training.trainer import GradientsNotFinite
from megatron_rl.learn.training.training_batch import (
    Agreed,
    TrainingBatch,
    UpdateBatch,
    agree,
    training_batch,
    update_batch,
    update_part,
)
from megatron_rl.model.platform.device import DeviceUse
from megatron_rl.model.policy import Policy
from megatron_rl.rank.control import Control
from megatron_rl.rank.metrics.stats import StepStats, Tally
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import training_flops
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.run.state import Run

GROUPS = random_groups(4, 4)

OPTIONS = {
    "token mean": {},
    "sequence mean": {"reduction": "sequence"},
    "no division by std": {"advantage_std": "none"},
    "cut answers masked": {"overlong": {"mode": "mask"}},
    "overlong penalty": {"overlong": {"mode": "penalty", "buffer": 4, "penalty": 0.5}},
    "importance weights": {"importance": {"upper": 1.5}},
    "tokens rejected": {"rejection": {"lower": 1 / 3, "upper": 3.0}},
    "importance of answers": {"importance": {"level": "sequence", "upper": 1.5}},
    "kl": {"kl_beta": 0.3},
    "answers rejected": {"rejection": {"level": "geometric", "lower": 0.1, "upper": 1.1}},
    "tokens weighed, answers rejected": {
        "importance": {"upper": 1.5},
        "rejection": {"level": "geometric", "lower": 0.1, "upper": 1.1},
        "kl_beta": 0.3,
        "entropy_coefficient": 0.2,
    },
    "constant": {"reduction": "constant", "reduction_length": 5},
    "entropy": {"entropy_coefficient": 0.2},
    "kl weighed": {"kl_beta": 0.3, "kl_importance": True},
    "kl in the reward": {"kl_beta": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "all at once": {"reduction": "sequence", "importance": {"upper": 2.0}, "kl_beta": 0.1, "kl_estimator": "k2"},
}


def trained(run: Run, groups: list[TrajectoryGroup], step: int = 1) -> StepStats:
    """Statistics of `Trainer.train` on one batch, as floats."""
    stats = run.trainer.train(batch_of(groups, 0, len(groups)), step)
    tally = Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total)


def training_batch_of(groups: list[TrajectoryGroup], config: RunConfig) -> TrainingBatch:
    return training_batch(groups, assign_credit(groups, config), config, 0, CPU)


def of_loss(stats: StepStats) -> Any:
    assert stats.loss is not None
    return stats.loss


def sequences_of(groups: list[TrajectoryGroup]) -> list[Branch]:
    return [sequence for group in groups for trajectory in group.trajectories for sequence in trajectory.sequences]


def padded(groups: list[TrajectoryGroup], of_tokens: Callable[[Branch], list[Any]]) -> Tensor:
    """[sequences, longest - 1] a value for every token but the first, right-padded with 0."""
    rows = [of_tokens(sequence)[1:] for sequence in sequences_of(groups)]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def padded_logprobs(twin: Any, groups: list[TrajectoryGroup], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[sequences, longest - 1] log-probs and entropies of every token but the first, and the trained ones; prompts
    repeated."""
    targets = padded(groups, lambda each: each.tokens)
    firsts = torch.tensor([[sequence.tokens[0]] for sequence in sequences_of(groups)])
    logits = twin(torch.cat((firsts, targets), dim=1)).logits[:, :-1, :VOCAB] / temperature
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(2, targets[..., None]).squeeze(2)
    return logprobs, -(every.exp() * every).sum(2), padded(groups, lambda each: each.loss_mask).float()


def naive_loss(
    twin: Any,
    reference: Any,
    groups: list[TrajectoryGroup],
    config: RunConfig,
    policy_version: int = 0,
    of_tokens: Tensor | None = None,
) -> Tensor:
    """Loss of one update at weights of this version, written from the papers.

    of_tokens: [sequences, longest - 1] advantages; None: those of the answers.
    """
    grpo = config.grpo
    logprobs, entropy, mask = padded_logprobs(twin, groups, config.sampling.temperature)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    owner = torch.tensor([i for i, each in enumerate(trajectories) for _ in each.sequences])  # [sequences]
    advantages = []
    for group in groups:
        rewards = []
        for trajectory in group.trajectories:
            longest = max(len(sequence.turns[-1]) for sequence in trajectory.sequences)
            over = longest - (config.sampling.max_new_tokens - grpo.overlong.buffer)
            penalised = grpo.overlong.mode == "penalty" and over > 0
            rewards.append(
                trajectory.reward - (grpo.overlong.penalty * over / grpo.overlong.buffer if penalised else 0)
            )
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        advantages += [
            (reward - mean) / (std + 1e-4 if grpo.advantage_std == "population" else 1) for reward in rewards
        ]
    if grpo.overlong.mode == "mask":
        mask = mask * torch.tensor([[float(each.finish_reason == "stop")] for each in trajectories])[owner]

    engine = padded(groups, lambda each: each.logprobs)
    sampled_now = padded(groups, lambda each: each.versions) == policy_version
    corrects = grpo.importance is not None or grpo.rejection is not None
    old = torch.where(sampled_now | corrects, logprobs.detach(), engine)
    ratio, advantage = (logprobs - old).exp(), torch.tensor(advantages)[owner, None]
    if of_tokens is not None:
        advantage = of_tokens
    if grpo.kl_beta:
        with torch.no_grad():
            theirs, _, _ = padded_logprobs(reference, groups, config.sampling.temperature)
        if grpo.kl_in == "reward":
            advantage = advantage - grpo.kl_beta * (old - theirs)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.2) * advantage)
    of_answers = sums_over(owner, ((old - engine) * mask).sum(1))[:, None]
    lengths = sums_over(owner, mask.sum(1)).clamp(min=1)[:, None]
    ratios = {"token": old - engine, "sequence": of_answers, "geometric": of_answers / lengths}
    if grpo.importance is not None:
        loss = loss * ratios[grpo.importance.level].exp().clamp(grpo.importance.lower or 0.0, grpo.importance.upper)
    if grpo.kl_beta and grpo.kl_in == "loss":
        d = theirs - logprobs
        kl = d**2 / 2 if grpo.kl_estimator == "k2" else (d.exp() - d - 1).clamp(max=10)
        loss = loss + grpo.kl_beta * (kl * ratio if grpo.kl_importance else kl)
    loss = loss - grpo.entropy_coefficient * entropy
    if grpo.rejection is not None:
        ratio = ratios[grpo.rejection.level].exp()
        loss = loss * ((ratio >= (grpo.rejection.lower or 0.0)) & (ratio <= grpo.rejection.upper))
    counted = (mask.sum(1) > 0).float()
    share = counted / sums_over(owner, counted).clamp(min=1) if grpo.branches == "mean" else counted
    if grpo.reduction == "token":
        return (loss * mask).sum(1) @ share / (mask.sum(1) @ share)
    length = mask.sum(1).clamp(min=1) if grpo.reduction == "sequence" else grpo.reduction_length
    per_answer = (loss * mask).sum(1) / length
    return per_answer @ share / share.sum()


def sums_over(owner: Tensor, values: Tensor) -> Tensor:
    """[sequences] sum of the values of all sequences with the same owner."""
    return torch.zeros(len(owner)).index_add(0, owner, values)[owner]


def in_two_turns(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Trajectories of two answers with some words of the environment between them. The first turn of one in three is
    not trained on, and nothing of one in four."""
    result = []
    for group in groups:
        trajectories = []
        for i, one in enumerate(group.trajectories):
            said, more = [i % 3, 4][: 1 + i % 2], one.tokens[: 1 + i % 4]
            second = range(len(one.tokens) + len(said), len(one.tokens) + len(said) + len(more))
            mask = [*one.loss_mask, *[False] * len(said), *[True] * len(more)]
            untrained = len(mask) if i % 4 == 3 else one.prompt_length if i % 3 else len(one.tokens)
            trajectories.append(
                replace(
                    one,
                    tokens=[*one.tokens, *said, *more],
                    loss_mask=[False] * untrained + mask[untrained:],
                    logprobs=[*one.logprobs, *[0.0] * len(said), *[-0.3 * (k + 1) for k in range(len(more))]],
                    versions=[*one.versions, *[-1] * len(said), *[0] * len(more)],
                    turns=[*one.turns, second],
                )
            )
        result.append(replace(group, trajectories=trajectories))
    return result


def with_branches(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Two of three trajectories get a branch that goes on after their tokens, and half of these another one, with
    another beginning and two turns."""

    def branched(one: Trajectory, number: int) -> Trajectory:
        context, more = len(one.tokens), [5, 1, 4, 2][: 1 + number % 4]
        on = Branch(
            tokens=[*one.tokens, 3, *more],
            loss_mask=[False] * (context + 1) + [True] * len(more),
            logprobs=[0.0] * (context + 1) + [-0.4 * (k + 1) for k in range(len(more))],
            versions=[-1] * (context + 1) + [0] * len(more),
            turns=[range(context + 1, context + 1 + len(more))],
        )
        apart = Branch(
            tokens=[6, 2, 1, 7, 3, 3],
            loss_mask=[False, False, True, True, False, True],
            logprobs=[0.0, 0.0, -1.0, -2.0, 0.0, -0.5],
            versions=[-1, -1, 0, 0, -1, 0],
            turns=[range(2, 4), range(5, 6)],
        )
        return replace(one, branches=((), (on,), (on, apart))[number % 3])

    return [
        replace(group, trajectories=[branched(one, number) for number, one in enumerate(group.trajectories)])
        for group in groups
    ]


def sampled_in_part_by_older_weights(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Mark tokens as sampled by version 3, every second token and every third trajectory by version 2."""

    def aged(one: Trajectory, number: int) -> Trajectory:
        versions = [v if v < 0 else 2 if number % 3 == 0 or place % 2 else 3 for place, v in enumerate(one.versions)]
        return replace(one, versions=versions)

    return [
        replace(group, trajectories=[aged(one, number) for number, one in enumerate(group.trajectories)])
        for group in groups
    ]


Loss = Callable[[Any, Any], Tensor]  # of the twins of the policy and of the reference


def assert_like_padded(
    run: Run, groups: list[TrajectoryGroup], config: RunConfig, policy_version: int = 0, loss: Loss | None = None
) -> StepStats:
    """Assert that one update has the loss and gradients of the padded implementation."""
    twin = published_twin(run.trainer.policy, config.model)
    reference = published_twin(run.models.reference, config.model) if run.models.reference is not None else None
    expected = loss(twin, reference) if loss else naive_loss(twin, reference, groups, config, policy_version)
    expected.backward()

    run.trainer.policy_version = policy_version
    stats = trained(run, groups)
    assert of_loss(stats).loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    theirs = {name: weight.grad for name, weight in twin.named_parameters()}
    ours = published(run.trainer.policy, config.model, lambda weight: weight.main_grad)
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in theirs.values()))
    assert stats.update.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, norm))
    return stats


def one_update(grpo: dict[str, Any], temperature: float = 1.0) -> RunConfig:
    return tiny_run(
        grpo=grpo,
        sampling={"max_new_tokens": 7, "temperature": temperature},
        optimizer={"clip_grad": 0.0, "distributed": False},
        training={"tokens_per_microbatch": 40},  # several micro-batches
    )


@pytest.mark.parametrize("grpo", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradient_equal_those_of_a_padded_implementation(
    platform: Any, groups: Any, grpo: dict[str, Any]
) -> None:
    """Uses a temperature other than 1."""
    config = one_update(grpo, temperature=0.7)
    assert_like_padded(build_run(config, platform, groups), GROUPS, config)


@pytest.mark.parametrize("name", ["token mean", "overlong penalty", "importance of answers", "constant"])
def test_only_the_models_turns_within_the_mask_are_trained_on(platform: Any, groups: Any, name: str) -> None:
    config, conversations = one_update(OPTIONS[name]), in_two_turns(GROUPS)
    stats = assert_like_padded(build_run(config, platform, groups), conversations, config)
    batch = training_batch_of(conversations, config)
    assert of_loss(stats).tokens == batch.lengths[torch.tensor(batch.credit.has_gradient)].sum()
    assert stats.batch.answer_tokens > batch.lengths.sum() > 0


@pytest.mark.parametrize("branches", ["mean", "sum"])
@pytest.mark.parametrize("name", ["token mean", "sequence mean", "cut answers masked", "importance of answers"])
def test_all_branches_of_a_rollout_are_trained_with_its_advantage(
    platform: Any, groups: Any, name: str, branches: str
) -> None:
    config, branched = one_update({**OPTIONS[name], "branches": branches}), with_branches(GROUPS)
    stats = assert_like_padded(build_run(config, platform, groups), branched, config)
    assert (stats.batch.answers, stats.batch.sequences) == (16, len(sequences_of(branched)))
    assert stats.batch.turns == sum(len(sequence.turns) for sequence in sequences_of(branched))
    assert stats.batch.answer_tokens == sum(sequence.sampled_length for sequence in sequences_of(branched))
    assert stats.batch.reward == sum(one.reward for group in branched for one in group.trajectories)


@pytest.mark.parametrize("name", ["token mean", "no division by std"])
def test_tokens_of_older_weights_have_a_ratio_to_their_logprobs(platform: Any, groups: Any, name: str) -> None:
    config, stale = one_update(OPTIONS[name]), sampled_in_part_by_older_weights(GROUPS)
    stats = assert_like_padded(build_run(config, platform, groups), stale, config, policy_version=3)
    assert of_loss(stats).ratio_max > 1.5
    assert of_loss(stats).clip_high > 0
    assert (stats.batch.staleness, stats.batch.staleness_max) == (sum(staleness(stale)), 1)


@pytest.mark.parametrize("name", ["importance weights", "tokens rejected", "importance of answers", "all at once"])
def test_importance_weights_clip_around_the_weights_before_the_step(platform: Any, groups: Any, name: str) -> None:
    config, stale = one_update(OPTIONS[name]), sampled_in_part_by_older_weights(GROUPS)
    stats = assert_like_padded(build_run(config, platform, groups), stale, config, policy_version=3)
    assert of_loss(stats).ratio_max == 1.0
    assert stats.batch.staleness_max == 1


def test_dropout_of_adapters_leaves_the_policy_before_the_step_as_it_samples(platform: Any, groups: Any) -> None:
    """The pass of an update drops inputs; the engine, and so the policy before the step, does not."""
    plain = one_update({"importance": {"upper": 2.0}})
    lora = LoraConfig(rank=4, dropout=0.3)
    config = plain.model_copy(update={"model": plain.model.model_copy(update={"lora": lora})})
    run = build_run(config, platform, groups)
    with torch.no_grad():  # adapters begin with B = 0, which nothing that is dropped can change
        for weight in run.trainer.policy.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.sin(torch.arange(weight.numel()).view_as(weight)))
    score = run.trainer.score
    scored: list[Tensor] = []

    def as_the_engine(policy: Policy, batch: TrainingBatch, inputs: Any) -> Tensor:
        scored.append(score(policy, batch, inputs))
        batch.inference_logprobs.copy_(scored[0])
        return scored[0]

    run.trainer.score = as_the_engine  # type: ignore[method-assign]
    loss = of_loss(trained(run, GROUPS))
    assert len(scored) == 1
    assert (loss.inference_difference_max, loss.importance_weight) == (0, loss.tokens)
    assert loss.ratio_max > 1.001, "the update compares its own pass with the policy that sampled"


def staleness(groups: list[TrajectoryGroup]) -> list[int]:
    return [3 - min(v for v in one.versions if v >= 0) for group in groups for one in group.trajectories]


def test_an_empty_micro_batch_adds_nothing_and_has_all_statistics(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a smaller share of an update than another runs such micro-batches."""
    config = one_update({"kl_beta": 0.1, "importance": {"upper": 2.0}, "entropy_coefficient": 0.1})
    plain, filled = build_run(config, platform, groups), build_run(config, platform, groups)
    expected = trained(plain, GROUPS)
    alone = trainer_module.update_batch

    def beside_a_rank_with_more(*args: Any) -> UpdateBatch:
        update = alone(*args)
        return replace(update, microbatches=[*update.microbatches, MicroBatch.empty()])

    monkeypatch.setattr(trainer_module, "update_batch", beside_a_rank_with_more)
    assert trained(filled, GROUPS) == expected
    pairs = zip(plain.trainer.policy.parameters(), filled.trainer.policy.parameters(), strict=True)
    assert all(torch.equal(one.main_grad, other.main_grad) for one, other in pairs)


def test_updates_and_policy_version_are_counted(platform: Any, groups: Any) -> None:
    config = tiny_run(grpo={"iterations": 2, "global_batch": 8})  # 4 x 4 answers: 2 updates a pass
    run = build_run(config, platform, groups)
    versions: list[int] = []
    stats = run.trainer.train(batch_of(GROUPS, 0, 4), 1, lambda: versions.append(run.trainer.policy_version))
    assert stats.update.updates == stats.update.applied == 4
    assert run.trainer.policy_version == 4
    assert versions == [0, 1, 2, 3], "readers of the weights are notified before each update"


def test_old_logprobs_are_those_before_the_first_of_several_updates(platform: Any, groups: Any) -> None:
    """So the ratio is exactly 1 for a single update and differs from the second update on."""
    single = trained(build_run(tiny_run(), platform, groups), GROUPS)
    assert of_loss(single).ratio_max == 1
    rate = {"learning_rate": 1e-2}
    several = of_loss(trained(build_run(tiny_run(grpo={"iterations": 3}, optimizer=rate), platform, groups), GROUPS))
    assert several.ratio_max > 1.01
    assert several.clip_high + several.clip_low > 0


def test_without_kl_there_is_no_reference_and_no_second_forward(platform: Any, groups: Any) -> None:
    run = build_run(tiny_run(), platform, groups)
    assert run.models.reference is None
    forwards = []
    hook = run.trainer.policy.decoder.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    stats = trained(run, GROUPS)
    hook.remove()
    assert forwards == [True]  # one micro-batch with a backward pass, and nothing else
    assert of_loss(stats).kl is None


def test_the_reference_does_not_change(platform: Any, groups: Any) -> None:
    run = build_run(tiny_run(grpo={"kl_beta": 0.1}), platform, groups)
    assert run.models.reference is not None
    before = [weight.detach().clone() for weight in run.models.reference.parameters()]
    assert of_loss(trained(run, GROUPS)).kl > 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.models.reference.parameters(), strict=True))


def test_groups_without_signal_do_not_change_the_weights(platform: Any, groups: Any) -> None:
    equal = [replace(each, trajectories=[replace(r, reward=0.5) for r in each.trajectories]) for each in GROUPS]
    run = build_run(tiny_run(), platform, groups)
    before = [weight.detach().clone() for weight in run.trainer.policy.parameters()]
    stats = trained(run, equal)
    assert (stats.batch.groups_with_signal, stats.batch.packed_tokens, stats.loss) == (0, 0, None)
    assert stats.update.applied == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("grpo", "passes"),
    [
        ({}, 1),
        ({"reduction": "sequence"}, 1),
        ({"overlong": {"mode": "mask"}}, 1),
        ({"importance": {"upper": 1.5}, "iterations": 2, "global_batch": 8}, 3),
    ],
    ids=["token mean", "sequence mean", "cut answers masked", "scored once, trained twice"],
)
def test_skipping_answers_without_advantage_does_not_change_loss_and_gradient(
    platform: Any, groups: Any, grpo: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean includes them. Log-probs of old weights are not scored for them either."""
    settings = one_update(grpo)
    still = settings.optimizer.model_copy(update={"learning_rate": 1e-12})  # otherwise Adam amplifies rounding
    config, batch = settings.model_copy(update={"optimizer": still}), with_equal_rewards_in_every_second(GROUPS)
    spared, whole = build_run(config, platform, groups), build_run(config, platform, groups)
    run_tokens = []
    predictors = Policy.predictors

    def counting(policy: Policy, hidden: torch.Tensor, select: torch.Tensor) -> torch.Tensor:
        if policy is spared.trainer.policy:
            run_tokens.append(select.numel())
        return predictors(policy, hidden, select)

    monkeypatch.setattr(Policy, "predictors", counting)
    ours = trained(spared, batch)
    found = training_batch_of(batch, config)
    monkeypatch.setattr(GrpoConfig, "trains_all_answers", property(lambda _: True))
    theirs = trained(whole, batch)

    assert of_loss(ours).loss == pytest.approx(of_loss(theirs).loss, rel=1e-6, abs=1e-6)
    assert ours.update.grad_norm == pytest.approx(theirs.update.grad_norm, rel=1e-6)
    for one, other in zip(spared.trainer.policy.parameters(), whole.trainer.policy.parameters(), strict=True):
        torch.testing.assert_close(one.main_grad, other.main_grad, rtol=1e-6, atol=1e-6)

    tokens = int(found.lengths[torch.tensor(found.credit.has_gradient)].sum())
    assert 0 < tokens < found.lengths.sum() / 1.5
    assert sum(run_tokens) == passes * tokens
    assert of_loss(ours).tokens == config.grpo.iterations * tokens
    assert ours.batch.packed_tokens < ours.batch.unpacked_tokens < theirs.batch.unpacked_tokens


def with_equal_rewards_in_every_second(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [
        replace(each, trajectories=[replace(one, reward=0.5) for one in each.trajectories]) if number % 2 else each
        for number, each in enumerate(groups)
    ]


def test_each_environment_has_the_loss_and_the_metrics_of_its_algorithm(platform: Any, groups: Any) -> None:
    own = {
        "advantage_std": "none",
        "kl_beta": 0.3,
        "entropy_coefficient": 0.1,
        "importance": {"upper": 1.5},
        "overlong": {"mode": "mask"},
    }
    listed = [{"name": "arithmetic", "id": "sums", "grpo": own}, {"name": "arithmetic", "id": "plain"}]
    alone = one_update({"eps_low": 0.2})
    config = RunConfig.model_validate(alone.model_dump() | {"environment": None, "environments": listed})
    batch = [
        replace(each, problem=replace(each.problem, environment=("sums", "plain")[number % 2]))
        for number, each in enumerate(sampled_in_part_by_older_weights(GROUPS))
    ]
    parts = [(batch[0::2], one_update({"eps_low": 0.2} | own)), (batch[1::2], alone)]
    tokens = [
        sum(
            each.loss_mask.count(True)
            for each in sequences_of(its)
            if settings.grpo.overlong.mode == "none" or not isinstance(each, Trajectory) or each.finish_reason == "stop"
        )
        for its, settings in parts
    ]

    def loss(twin: Any, reference: Any) -> Tensor:
        of_parts = [
            naive_loss(twin, reference, its, settings, 3) * count / sum(tokens)
            for (its, settings), count in zip(parts, tokens, strict=True)
        ]
        return torch.stack(of_parts).sum()

    stats = assert_like_padded(build_run(config, platform, groups), batch, config, 3, loss)
    sums, plain = stats.environments["sums"], stats.environments["plain"]
    assert (sums.kl or 0) > 0 and plain.kl is None
    assert (sums.tokens or 0) + (plain.tokens or 0) == of_loss(stats).tokens
    assert (sums.entropy or 0) + (plain.entropy or 0) == pytest.approx(of_loss(stats).entropy)
    assert (sums.clipped or 0) + (plain.clipped or 0) == of_loss(stats).clip_low + of_loss(stats).clip_high


def test_each_token_is_trained_with_the_advantage_of_its_turn(platform: Any, groups: Any) -> None:
    def scored(one: Trajectory, number: int) -> Trajectory:
        count = sum(len(each.turns) for each in one.sequences)
        turns = [TurnScore((number + at) % 3 / 2, f"{(number + at) % 2}", number=count - at) for at in range(count)]
        return replace(one, turn_scores=tuple(turns))

    batch = [
        replace(each, trajectories=[scored(one, number) for number, one in enumerate(each.trajectories)])
        for each in with_branches(in_two_turns(GROUPS))
    ]
    config = one_update({"turn_discount": 0.9})
    found = training_batch_of(batch, config).advantages
    assert found is not None
    of_turns = iter(found.tolist())
    of_tokens = padded(batch, lambda each: [next(of_turns) if trained else 0.0 for trained in each.loss_mask])
    assert len({round(value, 4) for value in found.tolist()}) > 10

    def loss(twin: Any, reference: Any) -> Tensor:
        return naive_loss(twin, reference, batch, config, 0, of_tokens)

    assert_like_padded(build_run(config, platform, groups), batch, config, 0, loss)


def test_a_batch_without_answers_is_no_error(platform: Any, groups: Any) -> None:
    empty = [TrajectoryGroup(each.ordinal, each.problem, [], {"timeout": 4}) for each in GROUPS]
    stats = trained(build_run(tiny_run(grpo={"kl_beta": 0.1}), platform, groups), empty)
    assert (stats.batch.answers, stats.batch.failed, stats.loss) == (0, 16, None)


# Device use


def test_flops_of_a_step_cover_all_its_passes(platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers share nothing: each token of a sequence but the last is an input, and sees those up to itself."""
    config = tiny_run(grpo={"iterations": 3, "kl_beta": 0.1}, training={"tokens_per_microbatch": 1})
    run = build_run(config, platform, groups)
    assert trained(run, GROUPS).device is None
    monkeypatch.setattr(platform, "device_use", lambda: DeviceUse(peak_memory=5, power=None))
    monkeypatch.setattr(platform, "peak_flops", lambda dtype: 1e12)
    device = trained(run, GROUPS, 2).device
    assert device is not None
    assert (device.peak_memory, device.powers, device.peak_flops) == (5, 0, 1e12)
    lengths = [len(one.tokens) - 1 for group in GROUPS for one in group.trajectories]
    once = training_flops(
        config.model,
        run.trainer.policy.vocab_size,
        tokens=sum(lengths),
        pairs=sum(n * (n + 1) // 2 for n in lengths),
        predictions=sum(sum(one.loss_mask) for group in GROUPS for one in group.trajectories),
    )
    assert device.flops == pytest.approx(3 * once)


# Non-finite gradients


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_non_finite_gradient_skips_the_update(platform: Any, groups: Any, distributed: bool, dtype: str) -> None:
    """The update is counted, and neither weights nor Adam's state change: the next one equals one without it."""
    config = tiny_run(
        model=tiny_model(dtype=dtype).model_dump(), optimizer={"distributed": distributed, "learning_rate": 1e-2}
    )
    disturbed, undisturbed = (build_run(config, platform, groups) for _ in range(2))
    for run in (disturbed, undisturbed):
        trained(run, GROUPS, 1)
    before = [weight.detach().clone() for weight in disturbed.trainer.policy.parameters()]
    update = poisoned(disturbed).update
    assert (update.updates, update.applied, update.grad_norm) == (1, 0, 0)
    assert disturbed.trainer.policy_version == 1
    assert all(torch.equal(a, b) for a, b in zip(before, disturbed.trainer.policy.parameters(), strict=True))
    for run in (disturbed, undisturbed):
        trained(run, GROUPS, 2)
    assert not all(torch.equal(a, b) for a, b in zip(before, disturbed.trainer.policy.parameters(), strict=True))
    pairs = zip(disturbed.trainer.policy.parameters(), undisturbed.trainer.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_too_many_skipped_updates_in_a_row_stop_the_run(platform: Any, groups: Any) -> None:
    run = build_run(tiny_run(optimizer={"max_nonfinite_updates": 3}), platform, groups)
    poisoned(run)
    poisoned(run)
    trained(run, GROUPS)  # a good update resets the count
    poisoned(run)
    poisoned(run)
    with pytest.raises(GradientsNotFinite, match="3 updates in a row"):
        poisoned(run)


def poisoned(run: Run) -> StepStats:
    """Run a training step whose gradient has one NaN."""
    weight = run.trainer.policy.decoder.layers[0].mlp.linear_fc1.weight
    hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.nan))
    try:
        return run.trainer.train(batch_of(GROUPS, 0, 4), 1)
    finally:
        hook.remove()


def test_all_ranks_agree_on_the_normaliser_and_length_of_an_update(platform: Any) -> None:
    """Otherwise the gradient would depend on the number of ranks, and one rank would wait for another forever."""
    config = tiny_run(training={"tokens_per_microbatch": 1000})
    batch = training_batch_of(GROUPS, config)
    part = update_part(batch, range(len(batch.sequences)), config, platform.kernels)

    def agreed_of(control: Control) -> list[Agreed]:
        """Agreement of two replicas of two ranks. The second has three times as much."""
        times = (1, 1, 3, 3)[control.rank]
        own = replace(part, normaliser=times * part.normaliser, bins=times * [*part.bins])
        groups: Any = SimpleNamespace(control=control, reports=control.rank in (0, 2))
        return agree([own], groups)

    (agreed,), *others = on_threads(4, agreed_of)
    assert others == 3 * [[agreed]]
    assert len(part.bins) == 1
    assert agreed.normaliser == 4 * part.normaliser > 0
    update = update_batch(part, agreed)
    assert update.normaliser == agreed.normaliser
    whole, *_ = update_batch(part, replace(agreed, microbatches=1)).microbatches
    sizes = [len(micro.tokens) for micro in update.microbatches]
    assert len(sizes) == 3
    assert max(sizes) < len(whole.tokens) / 2, "spread evenly over those that are run anyway, none left empty"


def test_micro_batches_are_larger_if_attention_gathers_nothing(platform: Any) -> None:
    """64 answers of 12 tokens to a prompt of 500: 1,268 packed tokens, and 32,768 gathered."""
    trajectories = [scored([1] * 500, [2 + answer % 3, answer] * 6, float(answer % 2)) for answer in range(64)]
    config = tiny_run(training={"tokens_per_microbatch": 2048}, sampling={"max_new_tokens": 12})
    batch = training_batch_of([TrajectoryGroup(0, Problem("", {}), trajectories, {})], config)

    def microbatches(*, gathers: bool) -> int:
        kernels: Any = SimpleNamespace(gathers_branches=lambda dtype, in_parts, sinks: gathers)
        return len(update_part(batch, range(64), config, kernels).bins)

    assert microbatches(gathers=False) == 1 < microbatches(gathers=True)
    assert microbatches(gathers=True) == len(update_part(batch, range(64), config, platform.kernels).bins)


def test_a_rank_with_too_few_trajectories_runs_empty_micro_batches(platform: Any, groups: Any) -> None:
    config = tiny_run()
    batch = training_batch_of(GROUPS[:1], config)
    part = update_part(
        batch, [index for index, run in enumerate(batch.credit.has_gradient) if run][:2], config, platform.kernels
    )
    (agreed,) = agree([part], groups)
    update = update_batch(part, replace(agreed, microbatches=5))
    assert [len(micro.targets) > 0 for micro in update.microbatches] == [True, True, False, False, False]
    assert update.packed_tokens == sum(len(micro.tokens) for micro in update.microbatches[:2])
