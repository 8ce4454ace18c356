"""SmolLM2-135M-Instruct agrees with transformers: the same logits, and the same greedy text.

About half a minute on two cores, most of it transformers' generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import full_forward
from smollm2 import RECIPE, exported_smollm2
from torch import Tensor

from launcher.recipe.load import load_recipe
from megatron_rl.agent.environments.reasoning_gym import ReasoningGymEnvironment
from megatron_rl.agent.prompts import PromptConfig, render_prompt
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.inference import Sampling

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
TIE = 1e-4
"""Difference below which two logits may be swapped, because another order of summation rounds differently."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return exported_smollm2()


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_recipe(RECIPE, ["model.dtype=fp32", "training.sequence_length=null"]).config


@pytest.fixture(scope="module")
def tokenizer(folder: Path, config: RunConfig) -> Tokenizer:
    return build_tokenizer(config.tokenizer)


@pytest.fixture(scope="module")
def prompts(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    problems = ReasoningGymEnvironment(
        ReasoningGymEnvironment.Config(**config.environment.args), tokenizer
    ).training_problems()
    messages = ("Name three colours of the rainbow.", "Why is the sky blue?")
    prompts = (render_prompt(tokenizer, message, PromptConfig(chat="always")) for message in messages)
    return [*(problem.prompt for problem in problems[:4]), *prompts]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours(folder: Path, config: RunConfig, tokenizer: Tokenizer, platform: Any, groups: Any) -> Policy:
    policy = build_policy(config.model, tokenizer.vocab_size, platform)
    load_pretrained(policy, config.model, folder)
    return policy


def test_the_prompt_is_the_models_chat_template(prompts: list[str], tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    own = "Results may be negative, such as -3."
    assert prompts[0].startswith(f"<|im_start|>system\n{own}<|im_end|>\n"), "the recipe's system message"
    assert prompts[-1].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM"), "the template's"
    assert prompts[0].endswith("= ? Reply with the number only.<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode([tokenizer.eos_id]) == ""
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_id]
    assert len(tokenizer.encode("12")) == 2, "each digit is a token"


def test_a_conversation_is_continued_as_the_template_writes_it(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer)
    asked = {"role": "user", "content": "1+1?"}
    more = {"role": "user", "content": "And <|im_end|> 2+2?"}
    assert (chat.renderer, chat.why_not) == ("template", None)
    answer = [*tokenizer.encode("Two."), tokenizer.eos_id]
    whole = chat.prompt(conversation_of([asked, {"role": "assistant", "content": "Two."}, more]))
    assert chat.extend(chat.prompt(conversation_of([asked])), answer, conversation_of([more])) == whole


def test_logits_are_those_of_transformers(ours: Policy, theirs: Any, prompts: list[str], tokenizer: Tokenizer) -> None:
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(full_forward(ours, tokens), expected, rtol=1e-4, atol=1e-3)


def test_greedy_text_is_that_of_transformers(
    ours: Policy, theirs: Any, prompts: list[str], tokenizer: Tokenizer, config: RunConfig
) -> None:
    engine = Engine(ours, config.model, config.inference, tokenizer.end_ids, max_length=128)
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
    ids = [engine.submit(GenerationRequest(tokenizer.encode(prompt), 1, greedy, key=0)) for prompt in prompts]
    while engine.busy:
        engine.step()
    compared = 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        tokens = tokenizer.encode(prompt)
        [completion] = engine.take(request_id) or []
        answer, gaps = reference(theirs, tokens)
        certain = next((place for place, gap in enumerate(gaps) if gap < TIE), len(gaps))
        assert completion.tokens[:certain] == answer[:certain]
        # Compared token by token after the same text, so a tie does not affect later tokens.
        likeliest = full_forward(ours, tokens + answer)[len(tokens) - 1 : -1].argmax(-1).tolist()
        for place, gap in enumerate(gaps):
            assert likeliest[place] == answer[place] or gap < TIE
        compared += certain
    assert compared > NEW_TOKENS, "most positions are no ties"


def reference(theirs: Any, tokens: list[int]) -> tuple[list[int], list[float]]:
    """transformers' greedy answer, and by how much the likeliest token leads at each position."""
    made = theirs.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    leads: list[Tensor] = [logits[0].topk(2).values for logits in made.logits]
    return made.sequences[0, len(tokens) :].tolist(), [float(best - second) for best, second in leads]
