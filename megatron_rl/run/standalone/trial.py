"""Trial of an environment on its first problems, for `mrl environments try`:

    python -m megatron_rl.run.standalone.trial < TRIAL.json

Without a model, an environment that asks it directly is tried with a right and a wrong answer
(agent/scripted_trial.py), and one that asks the policy endpoint with scripted answers. With a model, every environment
is. Writes a JSON object per problem to stdout, and errors to stderr in one line; before an error of the task's own code
an object with its `trace`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest, build_environment
from megatron_rl.agent.endpoint.agent import EndpointAgent
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.scripted_trial import CodePoints, first_problems, traces_of, try_answers, wrong_answer
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.extras import install_command
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.registry import environment_class, with_samples
from megatron_rl.recipe.requests import Trial

MAX_NEW_TOKENS = 512  # most tokens of an answer, if neither a run nor the user sets a limit


END = "\ufdd0"  # end token in a text. A noncharacter of Unicode, so no message should contain it
CALL, CALL_END = "<tool_call>", "</tool_call>"
TAGS = (CALL, CALL_END, "<think>", "</think>")  # texts that are one token each
_PIECE = re.compile("|".join(map(re.escape, TAGS)) + "|.", re.DOTALL)


class PlainChat(CodePoints):
    """Most tokens are code points. Messages look so, and a model calls tools as Qwen's do:

    user: What is 2+3?<end>
    assistant: <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call><end>
    tool: 5<end>
    """

    vocab_size = CodePoints.vocab_size + len(TAGS)
    chat_template = f"tools, messages, {CALL}, {CALL_END}"
    renderer = "template"

    def encode(self, text: str) -> list[int]:
        return [self._token(piece) for piece in _PIECE.findall(text)]

    encode_prompt = encode

    def _token(self, piece: str) -> int:
        if piece in TAGS:
            return CodePoints.vocab_size + TAGS.index(piece)
        return self.eos_id if piece == END else ord(piece)

    def show(self, token: int) -> str:
        return TAGS[token - CodePoints.vocab_size] if token >= CodePoints.vocab_size else super().show(token)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        if variables:
            raise ValueError(f"{next(iter(variables))}: scripted answers have no template variables; use --model")
        offered = [f"tools: {json.dumps([*tools])}\n"] if tools else []
        said = [f"{message['role']}: {_text(message)}{END}\n" for message in messages]
        return "".join((*offered, *said, "assistant: " if add_generation_prompt else ""))


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [
        f"{CALL}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']})}\n{CALL_END}" for call in calls
    ]
    return "\n".join(filter(None, [message.get("content") or "", *written]))


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    trial = Trial.model_validate_json(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # keep an environment's own prints out of the output
    try:
        for found in tried(trial):
            output.write(json.dumps(found) + "\n")
            output.flush()
    except (ValueError, ConfigurationError, CheckpointError) as error:
        if trace := getattr(error, "trace", ""):
            output.write(json.dumps({"trace": trace}) + "\n")
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    except ImportError as error:
        brought = f"; `{install_command('train')}` installs what the environments of mrl import"
        sys.stderr.write(f"environment {trial.environment.name}: {error}{brought}\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def tried(trial: Trial) -> Iterator[dict[str, Any]]:
    """Yield what `mrl environments try` reports of each problem: see `try_answers` and `conversation`.

    Raises ValueError if the environment cannot be built or has no problems, ConfigurationError if it or the model
    cannot be used here.
    """
    config = with_samples(trial.environment) if trial.tokenizer is None else trial.environment
    if trial.model is None and not issubclass(environment_class(config.name), EndpointAgent):
        tokenizer = _tokenizer(trial, CodePoints)
        environment = build_environment(config, tokenizer)
        try:
            problems = first_problems(environment, config, trial.problems)
            yield from try_answers(environment, config, problems, tokenizer)
        finally:
            asyncio.run(environment.close())
        return
    with _model(trial) as model, asyncio.Runner() as runner:
        environment = build_environment(config, model.tokenizer)
        try:
            for number, problem in enumerate(first_problems(environment, config, trial.problems)):
                request = GroupRolloutRequest(
                    ordinal=number,
                    problem=problem,
                    group_size=1,
                    sampling=model.sampling,
                    key=stable_key("try", number),
                    inference=model.answering(environment, problem),
                    limits=RolloutLimits.of(config),
                )
                yield runner.run(conversation(environment, request, model.tokenizer))
        finally:
            runner.run(environment.close())


async def conversation(environment: Environment, request: GroupRolloutRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one rollout as JSON: its `prompt`, `failures` with their `traces`, and, unless it was lost, `reward`,
    `components`, `output` and `sequences`, each a list of spans of tokens."""
    group = await environment.group_rollout(request)
    shown = [_shown(trajectory, tokenizer) for trajectory in group.trajectories]
    failures = [*group.failures]
    traces = {"traces": found} if (found := traces_of(environment, failures)) else {}
    return {"prompt": request.problem.prompt, "failures": failures, **traces, **(shown[0] if shown else {})}


def _shown(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "reward": trajectory.reward,
        "components": dict(trajectory.components),
        "finish_reason": trajectory.finish_reason,
        "output": trajectory.output,
        "sequences": [[*_spans(sequence, tokenizer)] for sequence in trajectory.sequences],
    }


def _spans(sequence: Branch, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the spans of a sequence. Their kind is `given` for tokens that the model did not sample here, `trained`, or
    `untrained` for sampled tokens without loss."""
    sampled = {place for turn in sequence.turns for place in turn}

    def kind(place: int) -> str:
        return "trained" if sequence.loss_mask[place] else "untrained" if place in sampled else "given"

    for name, places in groupby(range(len(sequence.tokens)), kind):
        tokens = [sequence.tokens[place] for place in places]
        yield {"kind": name, "tokens": tokens, "texts": [*map(tokenizer.show, tokens)]}


@dataclass(frozen=True, slots=True)
class _Model:
    tokenizer: Tokenizer
    sampling: Sampling
    answering: Callable[[Environment, Problem], InferenceInterface]


@contextmanager
def _model(trial: Trial) -> Iterator[_Model]:
    if trial.model is None:
        tokenizer = _tokenizer(trial, PlainChat)
        longest = max(map(len, trial.answers), default=MAX_NEW_TOKENS)
        sampling = Sampling.model_validate({"max_new_tokens": longest + 1, **trial.sampling})

        def scripted(environment: Environment, problem: Problem) -> InferenceInterface:
            left = list(trial.answers)
            if not left:
                try:
                    left = [environment.gold_response(problem)]
                except NotImplementedError:
                    left = [wrong_answer(environment, problem, tokenizer)]
            return ScriptedInference(tokenizer, lambda prompt, sample: left.pop(0) if len(left) > 1 else left[0])

        yield _Model(tokenizer, sampling, scripted)
        return
    # Imported here because it takes seconds.
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.source import find_source
    from megatron_rl.generate.engine.opened_policy import open_policy

    with open_policy(find_source(trial.model, trial.dtype), device=trial.device) as opened:
        recipe = opened.source.recipe
        usual = recipe.sampling.model_dump() if recipe else {"max_new_tokens": MAX_NEW_TOKENS}
        sampling = Sampling.model_validate({**usual, **trial.sampling})
        yield _Model(opened.tokenizer, sampling, lambda environment, problem: opened.engine)


def _tokenizer(trial: Trial, default: Callable[[], Tokenizer]) -> Tokenizer:
    return default() if trial.tokenizer is None else build_tokenizer(trial.tokenizer)


if __name__ == "__main__":
    sys.exit(main())
