"""Every policy loss, importance weight and reduction gives the loss and gradient of one batch on one rank, however the
tokens are packed, cut into micro-batches and split over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_helpers import Ranks
from core_helpers import ALPHABET, batch_of, here_of, random_groups, tiny_model, tiny_run, trajectory
from layout_helpers import Layout, boxes, sharpen, whole
from torch import Tensor

from megatron_rl.agent.api import build_environment
from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import Trajectory, TrajectoryGroup
from megatron_rl.algorithms.loss_terms import answer_log_ratios
from megatron_rl.learn.distill.assigned_teachers import judges_of
from megatron_rl.learn.distill.on_ranks import TeacherOnRanks
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.learn.training.objective import FirstPass, JudgedBatch, Scores, objective_of
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.learn.training.training_batch import agree, training_batch, update_batch, update_part
from megatron_rl.model.parallel import copy_part, groups_of_one
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import CharacterTokenizer, Tokenizer, build_tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.stats import EnvironmentStats, Tally
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY, DistillConfig
from megatron_rl.run.models import build_models, build_part

pytestmark = pytest.mark.slow

OWN = """
def loss(tokens, config):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return -tokens.sequence_mean(ratio) * ratio * tokens.advantages * tokens.weights
"""
OF_ANSWERS = {"level": "sequence", "upper": 3.0}
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual clip": {"dual_clip": 1.5},
    "gspo": {"policy_loss": "gspo", "reduction": "sequence", "eps_low": 0.03, "eps_high": 0.04},
    "gspo token": {"policy_loss": "gspo_token", "reduction": "sequence", "eps_low": 0.03, "eps_high": 0.04},
    "cispo": {"policy_loss": "cispo", "eps_high": 0.2},
    "sapo": {"policy_loss": "sapo", "reduction": "sequence"},
    "dppo": {"policy_loss": "dppo"},
    "reinforce": {"policy_loss": "reinforce"},
    "own": {"policy_loss": "OWN"},
    "Dr. GRPO": {"reduction": "constant", "advantage_std": "none"},
    "importance of tokens": {"importance": {"lower": 0.5, "upper": 2.0}},
    "rejected answers": {
        "importance": OF_ANSWERS,
        "rejection": {"level": "geometric", "lower": 0.5, "upper": 1.5},
    },
    "geometric importance": {"importance": {"level": "geometric", "lower": 0.5, "upper": 1.5}},
    "kl weighed": {"kl_beta": 0.3, "kl_importance": True},
    "kl in the reward": {"kl_beta": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "entropy": {"entropy_coefficient": 0.3},
    "forward divergence": {"divergence": {"kind": "forward"}},
    "divergence of likeliest tokens": {"divergence": {"kind": "js", "beta": 0.3, "top_k": 5, "temperature": 1.1}},
    "a teacher for each environment": {
        "distill": {"teacher": "/t", "weight": 0.7, "divergence": {"kind": "forward"}},
        "environments": [
            {"name": "arithmetic", "id": "turns"},
            {
                "name": "arithmetic",
                "id": "plain",
                "distill": {"teacher": "policy", "divergence": {"kind": "js", "top_k": 5}, "reward_weight": 0.5},
            },
        ],
    },
    "by environment and turn": {
        "environments": [
            {"name": "arithmetic", "id": "turns", "grpo": {"turn_discount": 0.9, "importance": {"upper": 2.0}}},
            {
                "name": "arithmetic",
                "id": "plain",
                "grpo": {"kl_beta": 0.3, "importance": {"level": "sequence", "upper": 3}},
            },
        ]
    },
}
LAYOUTS = {"micro-batches": Layout(), "DP2": Layout(dp=2), "TP2": Layout(tp=2), "CP2": Layout(cp=2)}
ONE_BATCH = "one batch"
CLOSE = 1e-6
IN_EVERY_LAYOUT = (
    *("clip", "rejected answers", "own", "kl weighed", "by environment and turn"),
    *("forward divergence", "divergence of likeliest tokens", "a teacher for each environment"),
)
"""A loss of each kind: of tokens, of whole answers, somebody's own, with a reference, two in one step, and with a
teacher's distributions."""
ALSO = {
    "CP2": ("gspo", "gspo token", "sapo", "geometric importance"),  # sums over answers, which CP splits
    "DP2": ("dual clip", "cispo", "Dr. GRPO", "importance of tokens"),
    "TP2": ("dppo", "reinforce", "entropy", "kl in the reward"),
}


def is_quick(layout: str, name: str) -> bool:
    """Whether `make test` has this pair: each loss in micro-batches and in one way to split them over ranks."""
    return layout == "micro-batches" or name in IN_EVERY_LAYOUT or name in ALSO[layout]


def chosen(layout: str, quick: bool) -> list[str]:
    """Losses that run in a layout, all in the same world."""
    return [name for name in LOSSES if layout == ONE_BATCH or is_quick(layout, name) == quick]


class Seen(NamedTuple):
    loss: float
    """Loss of the global batch."""
    gradient: Any


def recipe(layout: Layout, keys: dict[str, Any], microbatch: int) -> RunConfig:
    if listed := keys.get("environments"):
        values = recipe(layout, {}, microbatch).model_dump() | {"environment": None, "environments": listed}
        return RunConfig.model_validate(values | ({"distill": distill} if (distill := keys.get("distill")) else {}))
    if divergence := keys.get("divergence"):
        values = recipe(layout, {}, microbatch).model_dump()
        values |= {"distill": {"teacher": "/t", "weight": 0.7, "divergence": divergence}}
        return RunConfig.model_validate(values)
    return tiny_run(
        model=tiny_model(qk_norm=True).model_dump(),
        placement={"training": layout.config.model_dump()},
        job={"gpus_per_node": layout.ranks},
        grpo={"prompts_per_step": 4, "group_size": 4, **keys},
        sampling={"max_new_tokens": 7, "temperature": 0.8},
        optimizer={"learning_rate": 1e-3, "distributed": False},
        training={"tokens_per_microbatch": microbatch},
    )


def seen(layout: Layout, microbatch: int, own: str, losses: list[str]) -> dict[str, Seen]:
    """Loss and gradient of each of these policy losses for one model, whose weights before the step were others."""
    groups = layout.groups()
    config = recipe(layout, {"kl_beta": 0.1}, microbatch)
    here = here_of(select(config.job), groups)
    tokenizer = build_tokenizer(config.tokenizer)
    environment = build_environment(config.task, tokenizer)
    models, _ = build_models(config, here, tokenizer, environment, resumes=False)
    sharpen(models.policy)
    models.optimizer.megatron.reload_model_params()
    models.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite, so that it is not applied
    found = {}
    for name in losses:
        keys = {key: own if value == "OWN" else value for key, value in LOSSES[name].items()}
        config = recipe(layout, keys, microbatch)
        reference = models.reference if config.algorithms.penalise_kl else None
        teacher_of = partial(teacher, config, models.policy, here, tokenizer)
        judges = judges_of(config, groups.control, tokenizer.encode, teacher_of)
        objective = objective_of(config, models.policy, reference, judges)
        trainer = Trainer(models.policy, models.optimizer, objective, config, here)
        found[name] = one_update(trainer, groups)
    return found


def teacher(
    config: RunConfig, policy: Policy, here: Here, tokenizer: Tokenizer, distill: DistillConfig
) -> TeacherOnRanks:
    """A random teacher with other sizes than the policy's, the same in every layout; or the policy itself."""
    if distill.teacher == POLICY:
        return TeacherOnRanks.of(policy, policy, config, distill)
    assert distill.divergence is not None
    larger = {"hidden_size": 48, "ffn_hidden_size": 40, "vocab_size": tokenizer.vocab_size + 13, "init_seed": 5}
    larger["tied_embeddings"] = distill.divergence.top_k is not None
    model = config.model.model_copy(update=larger)
    here.platform.seed(model.init_seed)
    whole_teacher = build_policy(model, tokenizer.vocab_size, here.platform, groups=groups_of_one())
    sharpen(whole_teacher)
    part = build_part(config, tokenizer, here.platform, model=model)
    copy_part(whole_teacher, part)
    return TeacherOnRanks.of(part.requires_grad_(False), policy, config, distill)


NOTHING = EnvironmentStats(0, 0, 0, 0, 0)


def in_environments(group: TrajectoryGroup) -> TrajectoryGroup:
    """Every second group has answers of two turns, each with its reward."""

    def in_turns(one: Trajectory, number: int) -> Trajectory:
        (whole,) = one.turns
        middle = whole.start + len(whole) // 2
        turns = [range(whole.start, middle), range(middle, whole.stop)]
        scores = TurnScore(number % 3 / 2, number=0), TurnScore(number % 2, str(number // 2), number=1)
        return replace(one, turns=turns).with_turn_scores(scores)

    if group.ordinal % 2:
        problem = replace(group.problem, environment="plain", prompt="1+2=", teacher_prompt="12+3+1+2=")
        return replace(group, problem=problem, trajectories=[*map(asked, group.trajectories)])
    trajectories = [in_turns(one, number) for number, one in enumerate(group.trajectories)]
    return replace(group, problem=replace(group.problem, environment="turns"), trajectories=trajectories)


def asked(one: Trajectory) -> Trajectory:
    """The same answer to 1+2=, which is what the environment has asked."""
    prompt = CharacterTokenizer(ALPHABET).encode("1+2=")
    answer = one.tokens[one.prompt_length :]
    return trajectory(prompt, answer, one.reward, logprobs=one.logprobs[one.prompt_length :])


def one_update(trainer: Trainer, groups: Groups) -> Seen:
    config, grpo = trainer.config, trainer.config.grpo
    recorded = random_groups(grpo.prompts_per_step, grpo.group_size)
    if config.environments:
        recorded = [*map(in_environments, recorded)]
    share = shares(0, len(recorded), groups.data.size())[groups.data.rank()]
    answers = batch_of(recorded, share.start, share.stop).groups
    batch = training_batch(answers, trainer.objective.credit(answers), config, 0, trainer.platform.device)
    part = update_part(batch, range(len(batch.sequences)), config, trainer.platform.kernels)
    (agreed,) = agree([part], trainer.groups)
    update = trainer._input(batch, update_batch(part, agreed), trainer.replays())
    # Log-probs before the step and those of the sampler differ from the present ones by values of the token alone.
    noise = 1e3 * batch.inference_logprobs
    before = trainer.score(trainer.policy, batch, update.inputs) + 0.5 * noise.sin()
    batch = replace(batch, inference_logprobs=before + 0.3 * noise.cos())
    of_answers, tokens = None, None
    if config.algorithms.compare_answers:
        of_answers, tokens = answer_log_ratios(before - batch.inference_logprobs, batch.trajectory_lengths)
    reference = trainer.score(kept, batch, update.inputs) if (kept := trainer.objective.reference) else None
    judged = JudgedBatch(torch.zeros(0))
    if trainer.objective.judges:
        micro = update_batch(part, agreed).microbatches
        first_pass = FirstPass(batch, micro, update.inputs, groups.context, trainer.score, trainer._packed)
        judged = trainer.objective.judges(first_pass)
    teacher = judged.logprobs if len(judged.logprobs) else None
    losses: list[Any] = []
    scores = Scores(before, of_answers, tokens, reference, teacher, judged.teaching, judged.distributions)
    trainer._update(batch, update, scores, losses, None, lambda: None)
    of_all, _ = trainer._loss_stats(losses, dict.fromkeys(config.environment_ids, NOTHING), trained=True)
    assert of_all is not None
    tally = Tally()
    tally.add("loss", of_all.loss)
    return Seen(tally.reduce(groups.control).total["loss"], boxes(trainer.policy, lambda weight: weight.main_grad))


def layouts_of(rank: int, ranks: int, own: str, quick: bool) -> dict[tuple[str, str], Seen]:
    """Observations of this rank by layout of this number of ranks and loss; one rank also has all tokens at once."""
    sizes = [(name, layout, 40) for name, layout in LAYOUTS.items() if layout.ranks == ranks]
    if ranks == 1:
        sizes.append((ONE_BATCH, Layout(), 10_000))
    return {
        (name, loss): found
        for name, layout, microbatch in sizes
        for loss, found in seen(layout, microbatch, own, chosen(name, quick)).items()
    }


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[tuple[str, str], Any]]:
    """Layout and policy loss -> loss and whole gradient, of the quick or of the other pairs."""

    @functools.cache
    def observed(quick: bool) -> dict[tuple[str, str], tuple[float, dict[str, Tensor]]]:
        folder = tmp_path_factory.mktemp("ranks")
        own = folder / "own_loss.py"
        own.write_text(OWN)
        found = {}
        for ranks in (1, 2):
            of_ranks = Ranks(folder, ranks, layouts_of, f"{own}:loss", quick).results(timeout_s=240)
            for pair, one in of_ranks[0].items():
                found[pair] = (one.loss, whole(each[pair].gradient for each in of_ranks))
        return found

    return observed


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=() if is_quick(layout, name) else pytest.mark.slow)
        for layout in LAYOUTS
        for name in LOSSES
    ],
)
def test_loss_and_gradient_are_those_of_one_batch_on_one_rank(observed: Any, layout: str, name: str) -> None:
    pairs = observed(is_quick(layout, name))
    (loss, gradient), (expected, of_one) = pairs[layout, name], pairs[ONE_BATCH, name]
    norm = math.hypot(*(float(each.norm()) for each in of_one.values()))
    assert norm > 0.01
    assert loss == pytest.approx(expected, rel=CLOSE, abs=CLOSE)
    differences = [float((gradient[key] - of_one[key]).norm()) for key in of_one]
    assert math.hypot(*differences) < CLOSE * norm
