"""A conversation with a policy, for `mrl chat`, in a separate process:

    python -m megatron_rl.run.standalone.talk

It reads JSON objects from stdin, one per line: first what to open, then {"messages": [...]} for each answer. It writes
to stdout, one per line: {"ready": {...}} once, then for each answer {"text": PIECE} as it comes and {"end": REASON}, or
{"refused": WHY}. SIGINT ends only the present answer; the end of stdin, or SIGTERM, ends the process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_rl.generate.engine.opened_policy import OpenedPolicy
    from megatron_rl.recipe.inference import Sampling

MAX_NEW_TOKENS = 512  # most tokens of an answer, if neither a run nor the user sets a limit


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    try:
        _converse(json.loads(sys.stdin.readline()))
    except (ConfigurationError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def _leave(*_: object) -> NoReturn:
    sys.exit(EXIT_INTERRUPTED)


def _converse(asked: dict[str, Any]) -> None:
    """Import late: imports take seconds, and signal handlers must be set before."""
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.source import find_source
    from megatron_rl.generate.engine.opened_policy import open_policy
    from megatron_rl.recipe.inference import InferenceConfig, Sampling

    source, one_at_a_time = find_source(asked["path"], asked["dtype"]), InferenceConfig(max_batch=1)
    with open_policy(source, device=asked["device"], inference=one_at_a_time) as opened, asyncio.Runner() as loop:
        recipe, chats = opened.source.recipe, opened.tokenizer.chat_template is not None
        if asked["system"] and not chats:
            raise ConfigurationError("--system: the model has no chat template, so it cannot get a system message")
        usual = recipe.sampling.model_dump() if recipe else {"max_new_tokens": MAX_NEW_TOKENS}
        sampling = Sampling.model_validate({**usual, **asked["sampling"]})
        _say(ready={"name": opened.source.name, "step": opened.source.step, "chat": chats})
        for number, line in enumerate(sys.stdin):
            try:
                # asyncio turns SIGINT into a cancellation of the running answer, and then raises KeyboardInterrupt.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                loop.run(_answer(opened, sampling, json.loads(line)["messages"], (asked["seed"], number)))
            except KeyboardInterrupt:
                _say(end="interrupted")
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)


async def _answer(
    opened: OpenedPolicy, sampling: Sampling, messages: Sequence[dict[str, str]], place: tuple[int, int]
) -> None:
    """Answer a conversation, or continue the last message if the model has no chat template.

    place: seed, and number of the answer.
    """
    from megatron_rl.agent.keys import stable_key
    from megatron_rl.generate.engine.interface import GenerationRequest
    from megatron_rl.model.chat.chat import Chat
    from megatron_rl.model.chat.conversation import conversation_of
    from megatron_rl.model.text_stream import TextStream

    tokenizer, engine = opened.tokenizer, opened.engine
    try:
        chat = Chat(tokenizer)
        plain = tokenizer.as_prompt(messages[-1]["content"])
        tokens = chat.prompt(conversation_of(messages)) if chat.has_template else tokenizer.encode(plain)
        room = engine.max_length - len(tokens)
        if room < 1:
            raise ValueError(
                f"this has {len(tokens)} tokens, but the context only {engine.max_length}; /clear starts over"
            )
        fitting = sampling.model_copy(
            update={
                "max_new_tokens": min(sampling.max_new_tokens, room),
                "min_new_tokens": min(sampling.min_new_tokens, room),
            }
        )
        deltas = engine.callers.stream(GenerationRequest(tokens, 1, fitting, stable_key("chat", *place)))
    except ValueError as error:
        _say(refused=str(error))
        return
    stream = TextStream(tokenizer.decode, fitting.stop)
    reason = None
    async for delta in deltas:
        if piece := stream.push(delta.tokens):
            _say(text=piece)
        reason = delta.finish_reason or reason
    if piece := stream.finish():
        _say(text=piece)
    _say(end=reason)


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
