"""A step with a teacher compared with policy and teacher in `transformers`, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import PADDED_VOCAB, batch_of, build_run, random_groups, tiny_run, trajectory
from hf_helpers import PUBLISHED, publish
from published_twin import published, published_twin
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.rank.metrics.stats import StepStats, Tally
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.state import Run

GROUPS = random_groups(4, 4, seed=2)
WEIGHT, TEMPERATURE = 0.7, 0.8


@pytest.fixture
def teacher(tmp_path: Path) -> tuple[Path, Any]:
    """A published teacher, whose rows are the tokens of the tests' alphabet, and its model in `transformers`."""
    twin = publish(tmp_path / "teacher", PUBLISHED["Qwen2"] | {"vocab_size": PADDED_VOCAB})
    (tmp_path / "teacher" / "tokenizer.json").unlink()  # that of another alphabet
    return tmp_path / "teacher", twin.double()


def run_with(
    teacher: Path, platform: Any, groups: Any, environments: list[dict[str, Any]] | None = None, **sections: Any
) -> Run:
    config = tiny_run(
        distill={"teacher": str(teacher), "weight": WEIGHT} | sections.pop("distill", {}),
        sampling={"max_new_tokens": 7, "temperature": TEMPERATURE},
        tokenizer={"alphabet": "0123456789+-=*"},
        training={"tokens_per_microbatch": 40} | sections.pop("training", {}),
        **sections,
    )
    if environments is not None:
        values = config.model_dump() | {"environment": None, "environments": environments}
        config = RunConfig.model_validate(values)
    return build_run(config, platform, groups)


def step(run: Run, groups: list[TrajectoryGroup]) -> StepStats:
    stats = run.trainer.train(batch_of(groups, 0, len(groups)), 1)
    tally = Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total)


def logprobs(twin: Any, tokens: list[int]) -> Tensor:
    """[tokens - 1] log-probs of every token but the first."""
    logits = twin(torch.tensor([tokens])).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def naive(twin: Any, teacher: Any, reward_weight: float) -> tuple[Tensor, float]:
    """Loss at its first update, and the mean k1 divergence, written from the definition, sequence by sequence."""
    total, divergence, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for group in GROUPS:
        rewards = torch.tensor([one.reward for one in group.trajectories], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
        for one, advantage in zip(group.trajectories, advantages, strict=True):
            own, mask = logprobs(twin, one.tokens), torch.tensor(one.loss_mask[1:])
            with torch.no_grad():
                judged = logprobs(teacher, one.tokens) - own
            value = reward_weight * advantage + WEIGHT * judged
            total = total - (value * (own - own.detach()).exp())[mask].sum()
            divergence -= judged[mask].sum().item()
            count += int(mask.sum())
    return total / count, divergence / count


@pytest.mark.parametrize("reward_weight", [1.0, 0.0])
def test_loss_gradients_and_recorded_divergence_are_those_of_the_definition(
    reward_weight: float, teacher: tuple[Path, Any], platform: Any, groups: Any
) -> None:
    folder, teachers_twin = teacher
    run = run_with(folder, platform, groups, distill={"reward_weight": reward_weight})
    twin = published_twin(run.trainer.policy, run.config.model).double()
    expected, divergence = naive(twin, teachers_twin, reward_weight)
    expected.backward()
    run.trainer.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite: nothing is updated
    seen = step(run, GROUPS)
    assert seen.loss is not None and seen.loss.teacher_kl is not None
    assert seen.loss.teacher_kl / seen.loss.tokens == pytest.approx(divergence, rel=1e-5)
    assert seen.loss.loss == pytest.approx(expected.item(), rel=1e-5)
    ours = published(run.trainer.policy, run.config.model, lambda weight: weight.main_grad)
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(ours[name].double(), weight.grad, rtol=2e-4, atol=2e-5, msg=name)


DIVERGENCES = {
    "forward": {"kind": "forward", "temperature": 1.3},
    "js": {"kind": "js", "beta": 0.3},
    "reverse of the likeliest": {"kind": "reverse", "top_k": 3},
}


def divergence_of(twin: Any, teacher: Any, tokens: list[int], divergence: dict[str, Any]) -> Tensor:
    """[tokens - 1] divergences at every token but the first, from the definition."""
    temperature = divergence.get("temperature", TEMPERATURE)
    of_policy = (twin(torch.tensor([tokens])).logits[0, :-1] / temperature).softmax(-1)
    with torch.no_grad():
        of_teacher = (teacher(torch.tensor([tokens])).logits[0, :-1] / temperature).softmax(-1)
    if count := divergence.get("top_k"):
        best = of_teacher.topk(count).indices
        of_policy, of_teacher = (
            torch.cat((chosen, 1 - chosen.sum(-1, keepdim=True)), dim=-1)
            for chosen in (of_policy.gather(1, best), of_teacher.gather(1, best))
        )
    if divergence["kind"] == "forward":
        return (of_teacher * (of_teacher / of_policy).log()).sum(-1)
    if divergence["kind"] == "reverse":
        return (of_policy * (of_policy / of_teacher).log()).sum(-1)
    beta = divergence["beta"]
    mixed = beta * of_teacher + (1 - beta) * of_policy
    of_both = beta * of_teacher * (of_teacher / mixed).log() + (1 - beta) * of_policy * (of_policy / mixed).log()
    return of_both.sum(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_loss_and_gradients_with_a_divergence_are_those_of_the_definition(
    name: str, teacher: tuple[Path, Any], platform: Any, groups: Any
) -> None:
    folder, teachers_twin = teacher
    divergence = DIVERGENCES[name]
    run = run_with(folder, platform, groups, distill={"reward_weight": 0.0, "divergence": divergence})
    twin = published_twin(run.trainer.policy, run.config.model).double()
    answers = [one for group in GROUPS for one in group.trajectories]
    masks = [torch.tensor(one.loss_mask[1:]) for one in answers]
    found = [divergence_of(twin, teachers_twin, one.tokens, divergence) for one in answers]
    mean = torch.cat([each[mask] for each, mask in zip(found, masks, strict=True)]).mean()
    (WEIGHT * mean).backward()
    run.trainer.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite: nothing is updated
    seen = step(run, GROUPS)
    assert seen.loss is not None and seen.loss.teacher_divergence is not None
    assert seen.loss.teacher_divergence / seen.loss.tokens == pytest.approx(mean.item(), rel=1e-5)
    assert seen.loss.loss == pytest.approx(WEIGHT * mean.item(), rel=1e-5)
    ours = published(run.trainer.policy, run.config.model, lambda weight: weight.main_grad)
    for weight_name, weight in twin.named_parameters():
        torch.testing.assert_close(ours[weight_name].double(), weight.grad, rtol=2e-4, atol=2e-5, msg=weight_name)


def test_a_divergence_is_added_to_what_rewards_teach(teacher: tuple[Path, Any], platform: Any, groups: Any) -> None:
    found = {}
    for weight, reward_weight in ((1.0, 1.0), (1.0, 0.0), (3.0, 1.0)):
        keys = {"weight": weight, "reward_weight": reward_weight, "divergence": {"kind": "forward"}}
        seen = step(run_with(teacher[0], platform, groups, distill=keys), GROUPS).loss
        assert seen is not None
        found[weight, reward_weight] = seen.loss, seen.teacher_divergence / seen.tokens  # type: ignore[operator]
    of_rewards = found[1.0, 1.0][0] - found[1.0, 0.0][0]
    assert found[1.0, 0.0][0] == pytest.approx(found[1.0, 0.0][1], rel=1e-6)
    assert found[3.0, 1.0][0] == pytest.approx(of_rewards + 3 * found[1.0, 1.0][1], rel=1e-5)


def test_answers_whose_rewards_are_equal_are_trained_on(teacher: tuple[Path, Any], platform: Any, groups: Any) -> None:
    equal = [group for group in random_groups(12, 2) if len({one.reward for one in group.trajectories}) == 1][:2]
    run = run_with(teacher[0], platform, groups)
    assert step(run, equal).loss.tokens > 0  # type: ignore[union-attr]


def test_a_teacher_with_another_vocabulary_is_refused_by_the_ranks(tmp_path: Path, platform: Any, groups: Any) -> None:
    publish(tmp_path / "other", PUBLISHED["Qwen2"])
    with pytest.raises(ValueError, match=r"of the 14 tokens of the policy are others in the teacher's tokenizer"):
        run_with(tmp_path / "other", platform, groups)


def by_environment(folder: Path, others: Path) -> list[dict[str, Any]]:
    """Environments of which each has another teacher: one that judges tokens, one whose distributions are
    learned, the policy with the right answer before it, and none."""
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(f'{{"problem": "{n}+{n}", "answer": "{n + n}"}}\n' for n in range(1, 9)))
    hinted = {"train": str(rows), "prompt": "{question}=", "teacher_prompt": "{answer}*{question}=", "chat": "never"}
    divergence = {"kind": "forward"}
    return [
        {"name": "arithmetic", "id": "judged"},
        {"name": "arithmetic", "id": "whole", "distill": {"teacher": str(others), "divergence": divergence}},
        {
            "name": "math",
            "id": "hinted",
            "args": hinted,
            "distill": {"teacher": "policy", "weight": 0.4, "reward_weight": 0.0},
        },
        {"name": "arithmetic", "id": "free", "distill": {"weight": 0.0}},
    ]


def test_each_environment_has_its_teacher_and_the_policy_may_read_a_hint(
    teacher: tuple[Path, Any], tmp_path: Path, platform: Any, groups: Any
) -> None:
    folder, judges_twin = teacher
    whole_twin = publish(tmp_path / "other", PUBLISHED["Qwen2"] | {"vocab_size": PADDED_VOCAB}, seed=3).double()
    (tmp_path / "other" / "tokenizer.json").unlink()
    run = run_with(folder, platform, groups, by_environment(folder, tmp_path / "other"))
    environment = run.material.scoring
    assert environment is not None
    hinted = next(its for its in environment.training_sets() if its.environment == "hinted").problems[0]
    tokenizer = run.material.lesson.tokenizer
    assert (hinted.prompt, hinted.teacher_prompt) == ("1+1=", "2*1+1=")
    prompt, hint = tokenizer.encode(hinted.prompt), tokenizer.encode(hinted.teacher_prompt)

    def asked(one: Trajectory) -> Trajectory:
        answer = one.tokens[one.prompt_length :]
        return trajectory(prompt, answer, one.reward, logprobs=[-1.0] * len(answer))

    recorded = [
        replace(group, problem=Problem("", {}, id))
        for group, id in zip(GROUPS, ("judged", "whole", "hinted", "free"), strict=True)
    ]
    recorded[2] = replace(recorded[2], problem=hinted, trajectories=[*map(asked, recorded[2].trajectories)])

    twin = published_twin(run.trainer.policy, run.config.model).double()
    total, count, divergence = torch.zeros((), dtype=torch.float64), 0, 0.0
    kls = {}
    for group in recorded:
        rewards = torch.tensor([one.reward for one in group.trajectories], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
        judged_of_group = []
        for one, advantage in zip(group.trajectories, advantages, strict=True):
            own, mask = logprobs(twin, one.tokens), torch.tensor(one.loss_mask[1:])
            value = advantage.expand(len(own))
            match group.problem.environment:
                case "judged":
                    judged_of_group.append((logprobs(judges_twin, one.tokens) - own).detach()[mask])
                    value = value + WEIGHT * (logprobs(judges_twin, one.tokens) - own).detach()
                case "whole":
                    judged_of_group.append((logprobs(whole_twin, one.tokens) - own).detach()[mask])
                    found = divergence_of(twin, whole_twin, one.tokens, {"kind": "forward"})[mask]
                    divergence += found.sum().item()
                    total = total + WEIGHT * found.sum()
                case "hinted":
                    with_hint = logprobs(twin, [*hint, *one.tokens[len(prompt) :]])[-len(own[mask]) :]
                    judged = torch.zeros_like(own).masked_scatter(mask, with_hint) - own
                    judged_of_group.append(judged.detach()[mask])
                    value = 0.4 * judged.detach()
            total = total - (value * (own - own.detach()).exp())[mask].sum()
            count += int(mask.sum())
        if judged_of_group:
            kls[group.problem.environment] = -torch.cat(judged_of_group).mean().item()
    (total / count).backward()

    run.trainer.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite: nothing is updated
    seen = step(run, recorded)
    assert seen.loss is not None and seen.loss.diverged is not None and seen.loss.teacher_divergence is not None
    assert seen.loss.loss == pytest.approx((total / count).item(), rel=1e-5)
    assert seen.loss.teacher_divergence == pytest.approx(divergence, rel=1e-5)
    assert seen.loss.diverged == sum(one.loss_mask.count(True) for one in recorded[1].trajectories)
    of_environments = {
        id: its.teacher_kl / its.judged for id, its in seen.environments.items() if its.teacher_kl is not None
    }
    assert of_environments == pytest.approx(kls, rel=1e-5)
    ours = published(run.trainer.policy, run.config.model, lambda weight: weight.main_grad)
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(ours[name].double(), weight.grad, rtol=2e-4, atol=2e-5, msg=name)


def test_a_step_without_answers_that_diverge_reports_the_same_sums_as_others(
    teacher: tuple[Path, Any], tmp_path: Path, platform: Any, groups: Any
) -> None:
    folder, _ = teacher
    publish(tmp_path / "other", PUBLISHED["Qwen2"] | {"vocab_size": PADDED_VOCAB}, seed=3)
    (tmp_path / "other" / "tokenizer.json").unlink()
    run = run_with(folder, platform, groups, by_environment(folder, tmp_path / "other"))
    seen = step(run, [replace(group, problem=Problem("", {}, "judged")) for group in GROUPS])
    assert seen.loss is not None and seen.loss.judged == seen.loss.tokens
    # Ranks that count nothing report these fields in every step, and all ranks must report the same ones.
    assert (seen.loss.teacher_divergence, seen.loss.diverged) == (0.0, 0.0)
