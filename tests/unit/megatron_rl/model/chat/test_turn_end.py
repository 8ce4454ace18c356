"""Base models whose chat template ends turns by a token at which their answers do not end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import CHATML, QWEN25, llama, qwen3, shown, tokenizer_of
from supervised_helpers import supervised_run

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import RowEncoder
from megatron_rl.learn.supervised.row_forms import form_of, row_of
from megatron_rl.model.chat.turn_end import turn_end, unknown_end
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.tokenizer_section import TokenizerConfig
from megatron_rl.run.standalone.first_rows import Lesson, unknown_end_of

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def base_model(**options: Any) -> HuggingFaceTokenizer:
    """A tokenizer as that of Qwen2.5's base models."""
    return tokenizer_of(QWEN25, eos="<|endoftext|>", **options)


def learned(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]]) -> str:
    values = row_of(form_of(DataConfig(), ["messages"]), {"messages": messages})
    assert values is not None
    tokens, mask = RowEncoder(DataConfig(), tokenizer, 1000).example(Problem("", values))
    return shown(tokenizer, [token for token, is_learned in zip(tokens, mask, strict=True) if is_learned])


def test_a_row_learns_one_end_the_one_of_the_template() -> None:
    assert learned(base_model(), TURNS) == "2<|im_end|>"
    assert learned(base_model(), TURNS * 2) == "2<|im_end|>2<|im_end|>"
    assert learned(tokenizer_of(QWEN25), TURNS * 2) == "2<|im_end|>2<|im_end|>"


def test_an_end_that_the_tokenizer_does_not_know_is_named_with_its_key() -> None:
    said = unknown_end(base_model())
    assert said and "ends a message by <|im_end|>, which is not an end token of the tokenizer (<|endoftext|>)" in said
    assert "Set tokenizer.end_tokens: ['<|im_end|>']" in said


def test_nothing_is_said_of_tokenizers_that_know_their_end() -> None:
    known = base_model(also_ends=("<|im_end|>",))
    assert [unknown_end(each) for each in (known, qwen3(), llama(), tokenizer_of(CHATML))] == [None] * 4
    assert unknown_end(tokenizer_of(None)) is None, "there is no template"
    assert turn_end(tokenizer_of("{{ messages[-1].content }}")) is None, "the template writes none"
    assert unknown_end(tokenizer_of("{{ 1 / 0 }}", eos="<|endoftext|>")) is None, "it is refused elsewhere"


def run_of(**sections: Any) -> RunConfig:
    return supervised_run(data={"path": "/x"} | sections)


@pytest.mark.parametrize(
    ("config", "prompt", "warns"),
    [
        (run_of(), None, True),
        (run_of(chat="never"), None, False),
        (SimpleNamespace(supervised=False), Problem("<|im_start|>user\n1+1<|im_end|>\n", {}), True),
        (SimpleNamespace(supervised=False), Problem("1+1=", {}), False),
        (SimpleNamespace(supervised=False), Problem("a task", {}, is_prompt=False), True),
    ],
)
def test_a_recipe_that_uses_the_template_is_warned_of(config: Any, prompt: Problem | None, warns: bool) -> None:
    sets = [TrainingSet("", 1.0, [prompt or Problem("", {})])]
    said = unknown_end_of(Lesson(config, base_model(), None, sets))
    assert bool(said and "tokenizer.end_tokens" in said) is warns


def test_the_recipe_adds_end_tokens_by_name(tmp_path: Path) -> None:
    base_model()._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(tmp_path), end_tokens=["<|im_end|>"]))
    assert {tokenizer.show(token) for token in tokenizer.end_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert unknown_end(tokenizer) is None
    with pytest.raises(ValueError, match=r"tokenizer.end_tokens: the tokenizer has no token '<end>'"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path), end_tokens=["<end>"]))
