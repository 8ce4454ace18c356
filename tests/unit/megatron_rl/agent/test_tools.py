"""Tools: offered in the model's chat template and called on request; the model's own tokens stay as sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from agent_helpers import LIMITS
from server_helpers import END, byte_tokenizer
from words import Words

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.calculator import CALCULATOR, Calculator, CalculatorConfig
from megatron_rl.agent.tools import render_tool_prompt
from megatron_rl.agent.trajectories import Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.inference import Sampling

TEMPLATE = (
    "{% if tools %}[tools]{{ tools[0].function.name }} <tool_call>...</tool_call>" + END + "{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}" + END + "\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    return byte_tokenizer(TEMPLATE)


class Plain(Words):
    chat_template = None

    def show(self, token: int) -> str:
        return chr(token)


def call(expression: str, name: str = "calculator") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def written(text: str) -> str:
    """Call as in the text of `converse`, where {...} stands for something else."""
    return text.replace("{", "{{").replace("}", "}}")


def converse(tokenizer: Tokenizer, answers: Mapping[str, str], stop: tuple[str, ...] = ()) -> TrajectoryGroup:
    """answers: by the end of the conversation so far."""
    config = CalculatorConfig(draws=1, held_out=0.0, digits=3, min_terms=2, max_terms=2, operations="+")
    agent = Calculator(config, tokenizer)
    [problem] = agent.training_problems()

    def answer(prompt: str, sample: int) -> str:
        return next(said for end, said in answers.items() if prompt.endswith(end)).format(**problem.golden)

    sampling = Sampling(max_new_tokens=600, stop=stop)
    request = GroupRolloutRequest(0, problem, 1, sampling, 3, ScriptedInference(tokenizer, answer), LIMITS)
    return asyncio.run(agent.group_rollout(request))


def said_by_others(tokenizer: Tokenizer, one: Trajectory) -> list[str]:
    """Return the parts of a conversation that the model did not sample, with visible special tokens."""
    ends = [turn.start for turn in one.turns]
    starts = [0, *(turn.stop for turn in one.turns)]
    return ["".join(map(tokenizer.show, one.tokens[start:end])) for start, end in zip(starts, ends, strict=False)]


def test_model_calls_a_tool_in_its_chat_template_and_answers_with_the_result(chat: Tokenizer) -> None:
    said = f"Let me see. {written(call('EXPRESSION'))}".replace("EXPRESSION", "{expression}")
    group = converse(chat, {"number only.\n[assistant]": said, "\n[assistant]": "It is {answer}."})
    [one] = group.trajectories
    prompt, result = said_by_others(chat, one)
    assert prompt.startswith("[tools]calculator") and prompt.endswith("[assistant]")
    assert result == f"\n[tool]{one.text.split()[-1].rstrip('.')}{END}\n[assistant]"
    assert (len(one.turns), one.reward, group.failures) == (2, 1.0, {})
    sampled = [token for token, trained in zip(one.tokens, one.loss_mask, strict=True) if trained]
    assert sampled == [token for turn in one.turns for token in one.tokens[turn.start : turn.stop]]
    assert [one.tokens[turn.stop - 1] for turn in one.turns] == [chat.eos_id] * 2


@pytest.mark.parametrize(
    ("first", "result"),
    [
        (call("1/0"), "error: a division by zero"),
        (call("__import__"), "error: '_' is not arithmetic"),
        (call("1+" * 200), "error: more than 120 characters"),
        (call("1", name="shell"), "error: there is no tool 'shell', only calculator"),
        ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "error: calculator takes expression"),
        (call("10/4") + call("7"), "2.5" + END + "\n[tool]7"),
    ],
)
def test_result_or_error_of_a_call_is_shown_to_the_model(chat: Tokenizer, first: str, result: str) -> None:
    answers = {"number only.\n[assistant]": written(first), "\n[assistant]": "no idea"}
    [one] = converse(chat, answers).trajectories
    assert said_by_others(chat, one)[1] == f"\n[tool]{result}{END}\n[assistant]"
    assert (one.reward, one.tool_calls) == (0.0, first.count("<tool_call>"))


def test_endless_calls_end_at_the_turn_limit(chat: Tokenizer) -> None:
    [one] = converse(chat, {"[assistant]": written(call("1"))}).trajectories
    assert (len(one.turns), one.reward) == (CalculatorConfig().max_turns, 0.0)


def test_response_without_a_call_is_the_answer(chat: Tokenizer) -> None:
    [one] = converse(chat, {"[assistant]": "<tool_call>{answer}"}).trajectories
    assert (len(one.turns), one.reward, one.tool_calls) == (1, 1.0, 0)


def test_overlong_number_is_wrong_and_has_no_vote(chat: Tokenizer) -> None:
    agent = Calculator(CalculatorConfig(draws=1, held_out=0.0), chat)
    [problem] = agent.training_problems()
    assert agent.get_reward("9" * 5000, problem.golden, "stop") == 0.0
    assert agent.final_answer("9" * 5000) is None


def test_model_without_a_chat_template_calls_in_brackets() -> None:
    group = converse(Plain(), {"=": "hm [{expression}]", "": "{answer}"}, stop=("]",))
    [one] = group.trajectories
    assert said_by_others(Plain(), one)[1:] == [one.text.rpartition("\n")[2]] and one.reward == one.tool_calls == 1


def test_failed_call_without_chat_template_ends_the_conversation() -> None:
    [one] = converse(Plain(), {"=": "[1/0]", "": "{answer}"}, stop=("]",)).trajectories
    assert (len(one.turns), one.reward) == (1, 0.0)


def test_template_with_unknown_call_format_is_rejected() -> None:
    plain = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="offers no tools, or writes calls in a format that cannot be read"):
        render_tool_prompt(Chat(plain), "?", [CALCULATOR])
