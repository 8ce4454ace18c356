"""Answers that are forced into a grammar: they match it, their log-probs are over the tokens that it allows, and
training computes the same ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import ALPHABET, END, VOCAB, batch_of, build_run, full_forward, tiny_model, tiny_policy, tiny_run
from optional import needs
from test_engine import PROMPTS, answer, ask, tokens_of
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryBuilder, TrajectoryGroup
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest, Unsupported
from megatron_rl.learn.rollout.encoding import decode_group, encode_group
from megatron_rl.model.grammar import GrammarError, Grammars
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytestmark = needs("llguidance")

TOKENIZER = CharacterTokenizer(ALPHABET)
SUM = f'start: /[0-9]{{1,2}}/ "+" /[4-6]{{2,3}}/ <[{END}]>\n'
SUM_OR_PART = re.compile(r"\d{1,2}\+[4-6]{2,3}|\d{0,2}|\d{1,2}\+[4-6]{0,3}")
LONG = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15)


def engine_of(policy: Policy, **config: int) -> Engine:
    inference = InferenceConfig(**({"max_batch": 16} | config))
    engine = Engine(policy, tiny_model(), inference, {END})
    engine.grammars.source = Grammars(TOKENIZER)
    return engine


def forced(request: GenerationRequest, grammar: str = SUM) -> GenerationRequest:
    return replace(request, grammar=grammar)


def allowed_after(text: str) -> str:
    """The characters that SUM allows behind a text; = stands for the end."""
    digits, plus, rest = text.partition("+")
    if not plus:
        return ("0123456789" if len(digits) < 2 else "") + ("+" if digits else "")
    return ("456" if len(rest) < 3 else "") + ("=" if len(rest) >= 2 else "")


def exact_logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> Tensor:
    """[answer] log-probs over the tokens that SUM allows, in float64."""
    logits = full_forward(policy, [*prompt, *answer])[len(prompt) - 1 : -1].double() / temperature
    for at, row in enumerate(logits):
        may = allowed_after(TOKENIZER.decode(answer[:at]))
        ids = [END if each == "=" else TOKENIZER.encode(each)[0] for each in may]
        row[[token for token in range(VOCAB) if token not in ids]] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)


@pytest.mark.parametrize(
    "cut", [{}, {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.1}, {"temperature": 0.0}]
)
def test_answers_match_their_grammar_with_logprobs_over_what_it_allows(policy: Policy, cut: dict[str, float]) -> None:
    requests = [forced(ask(prompt, 4, LONG, key, **cut)) for key, prompt in enumerate(PROMPTS)]
    requests.append(forced(ask(PROMPTS[0], 4, Sampling(max_new_tokens=3), 9, **cut)))
    for request, completions in zip(requests, answer(engine_of(policy), *requests), strict=True):
        for one in completions:
            text = TOKENIZER.decode(one.tokens)
            assert SUM_OR_PART.fullmatch(text), text
            assert one.finish_reason == ("stop" if one.tokens[-1] == END else "length")
            assert one.grammar == SUM
            expected = exact_logprobs(policy, request.prompt_tokens, one.tokens, request.sampling.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(one.logprobs).double(), expected, rtol=1e-5, atol=1e-5)
    assert any(one.finish_reason == "length" for one in completions)


def test_tokens_are_as_frequent_as_they_are_likely_among_the_allowed(policy: Policy) -> None:
    draws = 3000
    request = forced(ask(PROMPTS[0], draws, Sampling(max_new_tokens=1), key=17), f"start: /[4-8]/ <[{END}]>")
    (completions,) = answer(engine_of(policy, max_batch=512), request)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=VOCAB)
    assert counts.sum() == counts[4:9].sum()
    expected = draws * full_forward(policy, PROMPTS[0])[-1][4:9].softmax(-1)
    assert ((counts[4:9] - expected) ** 2 / expected).sum().item() < 23.5  # probability 1e-4 at 4 degrees of freedom


def test_answers_do_not_depend_on_neighbours_with_another_grammar_or_none(policy: Policy) -> None:
    """Rows move, wait for pages and begin again."""
    free = [ask(prompt, 3, LONG, key) for key, prompt in enumerate(PROMPTS)]
    bound = [forced(ask(prompt, 3, LONG, 50 + key)) for key, prompt in enumerate(PROMPTS)]
    alone = [*answer(engine_of(policy), *free), *(answer(engine_of(policy), one)[0] for one in bound)]
    small = engine_of(policy, max_batch=7, cache_tokens=96, page_tokens=4)
    mixed = answer(small, *(one.again() for pair in zip(free, bound, strict=True) for one in pair))
    assert [*map(tokens_of, mixed[::2] + mixed[1::2])] == [*map(tokens_of, alone)]


def test_an_interrupted_answer_resumes_within_its_grammar(policy: Policy) -> None:
    request = forced(ask(PROMPTS[1], 3, LONG, 4))
    (whole,) = answer(engine_of(policy), request)
    known = {n: AnswerPrefix(one.tokens[:2], one.logprobs[:2], one.versions[:2]) for n, one in enumerate(whole)}
    (again,) = answer(engine_of(policy), replace(request.again(), known=known))
    assert tokens_of(again) == tokens_of(whole)


def test_the_likeliest_tokens_are_among_the_allowed(policy: Policy) -> None:
    request = replace(forced(ask(PROMPTS[1], 1, LONG, 4)), top_logprobs=3)
    ((one,),) = answer(engine_of(policy), request)
    assert one.top_logprobs is not None
    for at, likeliest in enumerate(one.top_logprobs):
        may = [
            END if each == "=" else TOKENIZER.encode(each)[0]
            for each in allowed_after(TOKENIZER.decode(one.tokens[:at]))
        ]
        assert likeliest and likeliest.keys() <= {*may}


def test_grammars_that_cannot_be_used_are_refused_with_the_reason(policy: Policy) -> None:
    engine = engine_of(policy)
    for grammar, why in (("start: /(?=1)1/", "regex"), ('start: "木"', "no token"), ("start: nothing", "nothing")):
        with pytest.raises(GrammarError, match=why):
            engine.check(forced(ask([1]), grammar))
    with pytest.raises(ValueError, match="min_tokens"):
        forced(ask([1], sampling=Sampling(max_new_tokens=4, min_new_tokens=2)))
    without = Engine(policy, tiny_model(), InferenceConfig(max_batch=4), {END})
    with pytest.raises(Unsupported, match="no tokenizer"):
        without.check(forced(ask([1])))


def test_where_no_token_can_go_on_the_answer_ends(policy: Policy) -> None:
    """The vocabulary has no letter, which the grammar asks for behind the digit."""
    ((one,),) = answer(engine_of(policy), forced(ask([1], 1, LONG), 'start: /[0-9]/ "x"'))
    assert TOKENIZER.decode(one.tokens) in {*"0123456789"} and one.finish_reason == "stop"


# Training


def sampled_groups(run: Any, requests: Sequence[GenerationRequest]) -> list[TrajectoryGroup]:
    """Groups of two turns each, the first one forced, with rewards that differ. As a driver sends them to its ranks."""

    def scored(prompt: list[int], first: Completion, second: Completion, reward: float) -> Trajectory:
        builder = TrajectoryBuilder(prompt)
        builder.add_turn(first)
        builder.add_observation([10])
        builder.add_turn(second)
        return builder.scored("", reward)

    found = []
    for number, request in enumerate(requests):
        (firsts,) = answer(run.engine, request)
        seconds = [
            answer(run.engine, ask([*request.prompt_tokens, *one.tokens, 10], 1, request.sampling, 7))[0][0]
            for one in firsts
        ]
        prompt = request.prompt_tokens
        answers = [
            scored(prompt, one, other, n % 2) for n, (one, other) in enumerate(zip(firsts, seconds, strict=True))
        ]
        group = TrajectoryGroup(number, Problem("", {}), answers, {})
        found.append(decode_group(*encode_group(group), group.problem))
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_the_ratio_is_one(platform: Any, groups: Any, temperature: float) -> None:
    """The log-probs of the engine are those of the trainer, for forced and free turns of one trajectory."""
    sampling = {"max_new_tokens": 12, "temperature": temperature}
    grpo = {"prompts_per_step": 3, "group_size": 4, "kl_beta": 0.1, "entropy_coefficient": 0.1}
    run = build_run(tiny_run(sampling=sampling, grpo=grpo), platform, groups, scale=0.15)
    requests = [forced(ask(prompt, 4, Sampling(**sampling), key)) for key, prompt in enumerate(PROMPTS[:3])]
    batch = sampled_groups(run, requests)
    assert {each for group in batch for one in group.sequences for each in one.grammars} == {SUM, ""}
    run.engine.end_phase()
    loss = trained(run, batch)
    assert loss.inference_difference_max < 1e-5
    free = [TrajectoryGroup(g.ordinal, g.problem, [replace(t, grammars=[]) for t in g.trajectories], {}) for g in batch]
    run = build_run(run.config, platform, groups, scale=0.15)
    assert trained(run, free).inference_difference_max > 0.5  # over all tokens they would be others


def trained(run: Any, batch: list[TrajectoryGroup]) -> Any:
    stats = run.trainer.train(batch_of(batch, 0, len(batch)), 1)
    tally = Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total).loss
