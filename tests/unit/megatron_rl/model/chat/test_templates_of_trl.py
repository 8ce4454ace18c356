"""Chat templates of published models as TRL carries them, word for word: the renderer of the library that equals each,
and what is not written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from chat_templates import QWEN_CONTROLS, QWEN_TAGS
from published_templates import PUBLISHED, Published
from test_published_templates import NO_THOUGHTS_BEFORE_CALLS, NOT_WRITTEN, cases, outcome, row_outcome

from megatron_rl.model.chat.chat import Chat

FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
GLM_TAGS = tuple(
    f"<{end}{name}>" for name in ("think", "tool_call", "tool_response", "arg_key", "arg_value") for end in ("", "/")
)
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}}
DESCRIBED = [
    {"name": "look_up", "description": "Finds a word.", "parameters": WORD},
    {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}},
]
"""gpt-oss's template refuses tools without descriptions."""
SEEING = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN = Published("", "<|im_end|>", (*QWEN_CONTROLS, *SEEING), QWEN_TAGS)
GLM = PUBLISHED["glm-4.5"]._replace(tags=GLM_TAGS, controls=(*PUBLISHED["glm-4.5"].controls, "/nothink"))

SECOND_CALL = "messages.1.tool_calls.1.function.name"
GPT_OSS = NOT_WRITTEN["gpt-oss"] | {"two calls": (SECOND_CALL, SECOND_CALL), "text and call": ("", "messages.3")}


class Found(NamedTuple):
    published: Published
    renderer: str
    """Renderer that `tokenizer.renderer: auto` finds."""
    not_written: dict[str, tuple[str, str]]


FILES = {
    "qwen3": Found(QWEN, "qwen3", NOT_WRITTEN["qwen3"]),
    "qwen3_instruct_2507": Found(QWEN, "qwen3-vl", NO_THOUGHTS_BEFORE_CALLS),  # Qwen3-Next's too
    "qwen3_5_think": Found(QWEN, "qwen3.5", NOT_WRITTEN["qwen3"]),
    "qwen3_5_nothink": Found(QWEN, "qwen3.5", NOT_WRITTEN["qwen3"]),
    "glm4moe": Found(GLM, "template", NOT_WRITTEN["glm-4.5"]),  # the renderer glm-4.5 joins two calls without a newline
    "gptoss": Found(PUBLISHED["gpt-oss"], "template", GPT_OSS),  # its renderer needs a download
}


@pytest.mark.parametrize("name", FILES)
def test_published_template_is_a_renderer_or_proven_by_itself(name: str) -> None:
    published, renderer, not_written = FILES[name]
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    chat = Chat(published._replace(template=text).tokenizer("auto"))
    found = {
        case: (outcome(lambda said=said: chat.prompt(said[:-1])), row_outcome(chat, said))  # type: ignore[misc]
        for case, said in cases(tools=DESCRIBED).items()
    }
    assert chat.renderer == renderer
    assert {case: each for case, each in found.items() if each != ("", "")} == not_written
