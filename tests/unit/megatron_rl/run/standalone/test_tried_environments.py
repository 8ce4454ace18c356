"""`mrl environments try`: problems with the rewards of given answers, or whole conversations with programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest

from launcher.cli.show.row_lines import conversation_lines
from megatron_rl.agent.api import Environment
from megatron_rl.agent.endpoint.agent import EndpointAgent, RolloutLost, RunResult
from megatron_rl.agent.endpoint.session import RolloutSession
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.requests import Trial
from megatron_rl.recipe.section import Section
from megatron_rl.run.standalone import trial as trial_module
from megatron_rl.run.standalone.trial import main, tried

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


class Adder(EndpointAgent):
    """A program with a tool loop, which is lost when the model calls no tool."""

    Config = EndpointConfig

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("What is 2+3?", {})]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        from openai import AsyncOpenAI

        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            while True:
                answer = await client.chat.completions.create(model=session.model, messages=messages, tools=[ADD])
                message = answer.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    assert call.type == "function"
                    total = sum(json.loads(call.function.arguments).values())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        if len(messages) == 1:
            raise RolloutLost("program: the tool was not called", "asking\nTraceback ...\nKeyError: 'city'\n")
        return RunResult({"reward": float(message.content == "5"), "calls": len(messages) // 2}, output="done\n")


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> EnvironmentConfig:
    def build(config: EnvironmentConfig, tokenizer: Any) -> Environment:
        return Adder(EndpointConfig(), tokenizer)

    monkeypatch.setattr(trial_module, "with_samples", lambda config: config)
    monkeypatch.setattr(trial_module, "build_environment", build)
    monkeypatch.setattr(trial_module, "environment_class", lambda name: Adder)
    return EnvironmentConfig(name="adder")


def test_a_program_with_scripted_answers_is_shown_as_the_model_sees_it(adder: EnvironmentConfig) -> None:
    [found] = tried(Trial(environment=adder, answers=(CALL, "5")))
    assert (found["reward"], found["components"], found["output"]) == (1.0, {"calls": 1.0}, "done\n")
    [spans] = found["sequences"]
    texts = ["".join(span["texts"]) for span in spans]
    assert texts[0].endswith("user: What is 2+3?<end>\nassistant: ") and texts[0].startswith("tools: [{")
    assert texts[1:] == [f"{CALL}<end>", "\ntool: 5<end>\nassistant: ", "5<end>"]
    assert [span["kind"] for span in spans] == ["given", "trained", "given", "trained"]
    assert all(len(span["tokens"]) == len(span["texts"]) for span in spans)
    shown = [click.unstyle(line).rstrip() for line in conversation_lines(found, boundaries=False)]
    assert shown[0] == "What is 2+3?" and "    trained    5<end>" in shown
    assert shown[-4:] == ["  output", "    done", "  reward 1, calls 1", ""]


def test_a_lost_rollout_has_no_reward_but_a_reason(adder: EnvironmentConfig) -> None:
    [found] = tried(Trial(environment=adder))
    reason = "program: the tool was not called"
    assert (found["prompt"], found["failures"]) == ("What is 2+3?", [reason])
    shown = [*conversation_lines(found, boundaries=False)]
    assert shown == ["What is 2+3?", f"  lost: {reason}", "    asking", "    Traceback ...", "    KeyError: 'city'", ""]


def test_controls_in_what_others_wrote_do_not_reach_the_terminal() -> None:
    control = "\x1b]0;a\x07"
    span = {"kind": "given", "tokens": [0], "texts": [control]}
    found = {"prompt": control + "?", "sequences": [[span]], "components": {}, "reward": 1, "output": control}
    shown = conversation_lines({**found, "failures": [control], "traces": {control: control}}, boundaries=False)
    assert "".join(shown).count("\\x1b]0;a\\x07") == 5 and "\x07" not in "".join(shown)


def rewards_of(folder: Path, source: str) -> Trial:
    (folder / "reward.py").write_text(source)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    arguments = {"file": str(folder / "reward.py"), "train": str(folder / "rows.jsonl")}
    return Trial(environment=EnvironmentConfig(name="python", args=arguments, reward_retries=0))


def test_what_a_reward_printed_and_where_it_failed_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def reward(response, answer, **columns):\n    print('looking at', response)\n    "
    [found] = tried(rewards_of(tmp_path, source + "return float(response == answer)\n"))
    assert (found["gold_reward"], found["wrong_reward"]) == (1.0, 0.0)
    assert found["output"] == "looking at 2\nlooking at I do not know.\n"
    [found] = tried(rewards_of(tmp_path, source + "raise TimeoutError('busy')\n"))
    [reason] = {*found["failures"]}
    assert reason == "reward at reward.py:3: TimeoutError: busy"
    assert found["traces"][reason].startswith("it printed:\nlooking at 2\nTraceback")
    failing = rewards_of(tmp_path, source + "return columns['city']\n")
    monkeypatch.setattr(sys, "stdin", StringIO(failing.model_dump_json()))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # main gives it away
    assert main() == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"].endswith("KeyError: 'city'\n")
    assert err.startswith("reward at reward.py:3: KeyError: 'city' (for the answer '2' to '1+1=')")


def test_countdown_and_arithmetic_can_be_tried_as_they_are() -> None:
    for name in ("countdown", "arithmetic"):
        environment = EnvironmentConfig(name=name, args={"draws": 9})
        for one in tried(Trial(environment=environment, problems=2)):
            assert (one["gold_reward"], one["wrong_reward"]) == (1.0, 0.0)


def test_prints_of_an_environment_stay_out_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Chatty(RewardOnlyAgent):
        Config = Section

        def training_problems(self) -> Sequence[Problem]:
            return [Problem(f"What is {number}?", {"answer": "it"}) for number in range(4)]

        def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
            return {}

        def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
            sys.stdout.write('{"scoring": 1}')
            return float(response == golden["answer"])

    monkeypatch.setattr(trial_module, "with_samples", lambda config: config)
    monkeypatch.setattr(trial_module, "build_environment", lambda config, tokenizer: Chatty(Section(), tokenizer))
    monkeypatch.setattr(trial_module, "environment_class", lambda name: Chatty)
    monkeypatch.setattr(sys, "stdin", StringIO('{"environment": {"name": "chatty"}, "problems": 2}'))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # main gives it away
    assert main() == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["What is 0?", "What is 1?"]
    assert "scoring" in err
