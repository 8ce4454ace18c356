"""Cost of the proof that nothing said is lost, beside rendering and tokenizing the same conversations.

    python tests/benchmarks/chat_proof.py [--repeats 5]

The tokenizer learns its merges from the docs, and the texts are drawn from them. Each row of the output is a
conversation: its turns, words of a text, and whether it calls tools. Times are the shortest of the repeats, in
microseconds. No time is asserted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from chat_templates import QWEN3, QWEN25, QWEN_CONTROLS, QWEN_TAGS  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from megatron_rl.chat.chat import Chat  # noqa: E402
from megatron_rl.chat.conversation import Conversation, conversation_of  # noqa: E402
from megatron_rl.chat.proof import Rendering  # noqa: E402
from megatron_rl.model.tokenizer import HuggingFaceTokenizer  # noqa: E402

SIZES = ((1, 30, False), (1, 300, False), (4, 100, False), (4, 100, True), (30, 200, True))
TEXTS = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]


def tokenizer_of(template: str) -> HuggingFaceTokenizer:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=list(QWEN_CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken(tag, special=False) for tag in QWEN_TAGS])
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template), [0]
    )


def conversation(turns: int, words: int, with_tools: bool, draw: random.Random) -> Conversation:
    known = [word for word in " ".join(TEXTS).split() if "think>" not in word]  # a template would drop what precedes it

    def text(count: int) -> str:
        return " ".join(draw.choices(known, k=count))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text(20)}]
    for turn in range(turns):
        messages.append({"role": "user", "content": text(words)})
        if with_tools:
            arguments = {"word": text(3), "most": turn, "deep": {"a": [1, 2, True, None]}}
            messages.append(
                {"role": "assistant", "tool_calls": [{"id": f"c{turn}", "name": "f0", "arguments": arguments}]}
            )
            messages.append({"role": "tool", "content": json.dumps({"x": text(words)})})
        messages.append({"role": "assistant", "content": text(words)})
    properties = {"word": {"type": "string", "description": text(8)}}
    schema = {"type": "object", "properties": properties}
    tools = [{"name": f"f{number}", "description": text(10), "parameters": schema} for number in range(3)]
    return conversation_of(messages, tools if with_tools else None)


def microseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    count = 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.05:
        work()
        count += 1
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(count):
            work()
        found.append((time.perf_counter() - begun) / count)
    return min(found) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args(arguments).repeats
    print("turns words tools | tokens  render  encode  proof of the prompt |    row  proof of the row")
    for template in (QWEN25, QWEN3):
        tokenizer = tokenizer_of(template)
        chat = Chat.of(tokenizer)
        print(f"by {'its template' if chat.renderer == 'template' else f'the renderer {chat.renderer}'}:")
        for turns, words, with_tools in SIZES:
            said = conversation(turns, words, with_tools, random.Random(turns + words))
            print(f"{turns:5} {words:5} {with_tools!s:5} | {measured(chat, tokenizer, said, repeats)}")


def measured(chat: Chat, tokenizer: HuggingFaceTokenizer, said: Conversation, repeats: int) -> str:
    asked, (_, row) = said[:-1], chat._format.example(said)
    text = chat.text(asked)
    chat.example(said)
    render = microseconds(partial(chat._text, asked), repeats)
    encode = microseconds(partial(tokenizer.encode, text), repeats)
    whole = microseconds(partial(chat._format.example, said), repeats)
    # Both forms are known, so that nothing is rendered again.
    proof = microseconds(partial(chat._proof.check, asked, Rendering(text), lambda sample: row), repeats)
    of_row = microseconds(partial(chat._proof_of_examples.check, said, row, lambda sample: row), repeats)
    return (
        f"{len(tokenizer.encode(text)):6} {render:7.0f} {encode:7.0f} {proof:7.0f} = {proof / encode:5.1%} of encode | "
        f"{whole:6.0f} {of_row:7.0f} = {of_row / whole:5.1%}"
    )


if __name__ == "__main__":
    main()
