"""A remote environment: the run has the same learning curve, even if the agent restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command, run
from loop_helpers import Attempt, loop_recipe, prepare, reproducible

from megatron_rl.agent.api import Environment, EvaluationRequest, GroupRolloutRequest
from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment
from megatron_rl.agent.environments.remote import RemoteAgent, RemoteConfig
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

ARGUMENTS = {"min_terms": 2, "max_terms": 2}
STEPS = 6


class Agent:
    """Server of `arithmetic` that can be restarted at the same address."""

    def __init__(self, home: Path, recipe: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.token_file = home / "token"
        self._words = [
            "mrl", "serve-agent", "arithmetic", "--tokenizer", recipe, "--env-args", json.dumps(ARGUMENTS),
            "--port", str(self.port), "--token-file", self.token_file, "--json",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self._command = Command(self._words)
        self.said = json.loads(self._command.stdout.readline() or '{"error": "nothing was said"}')
        assert "error" not in self.said, self.said

    def kill(self) -> None:
        self._command.send_signal(signal.SIGKILL)
        self._command.wait(30.0)

    @property
    def config(self) -> dict[str, Any]:
        return {"url": self.said["address"], "token_file": str(self.token_file)}


def recipe(environment: dict[str, Any]) -> dict[str, Any]:
    """Two trained environments, of which the second is the given one, and one that is only evaluated."""
    easy = {"name": "arithmetic", "id": "easy", "weight": 2.0, "args": {"evaluation_problems": 8}}
    given = {**environment, "id": "given", "weight": 1.0}
    hard = {"name": "arithmetic", "id": "hard", "evaluation_only": True, "args": {"min_terms": 3, "max_terms": 3}}
    run = loop_recipe(
        job={"gpus_per_node": 1},
        training={"steps": STEPS},
        evaluation={"every": STEPS, "prompts": 8},
        save={"every": 3},
    )
    return {**run, "environment": None, "environments": [easy, given, hard]}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("agent")
    here = prepare(folder / "run", recipe({"name": "arithmetic", "args": ARGUMENTS}))
    served = Agent(folder, here.root)
    yield served
    served.kill()


@pytest.mark.slow
def test_run_with_restarted_agent_has_the_curve_of_a_local_run(agent: Agent, tmp_path: Path) -> None:
    """The agent serves one of two environments; the rank is killed once too, and resumes."""
    here = prepare(tmp_path / "here", recipe({"name": "arithmetic", "args": ARGUMENTS}))
    elsewhere = prepare(tmp_path / "elsewhere", recipe({"name": "remote", "args": agent.config}))
    undisturbed = Attempt(here, tmp_path / "cache", ranks=1)
    first = Attempt(elsewhere, tmp_path / "cache", ranks=1)
    first.wait_for_step(2)
    agent.kill()
    agent.start()
    first.wait_for_step(4)
    first.kill()
    second = Attempt(elsewhere, tmp_path / "cache", ranks=1)
    for attempt in (undisturbed, second):
        assert attempt.exit_codes() == [EXIT_FINISHED], attempt.logs()
    steps, evaluations = reproducible(here)
    assert reproducible(elsewhere) == (steps, evaluations)
    assert len(steps) == STEPS and len({line["loss"] for line in steps}) > STEPS // 2
    assert all("environments/given/mean_reward" in line for line in steps)
    assert any(name.startswith("eval/hard/") for name in evaluations[-1])
    assert "trying again" in first.logs()


def test_remote_agent_answers_every_request_like_the_environment(agent: Agent) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789+-="))
    there = RemoteAgent(RemoteConfig(**agent.config), tokenizer)
    here = ArithmeticEnvironment(ArithmeticEnvironment.Config(**ARGUMENTS), tokenizer)

    async def ask(agent: Environment) -> list[Any]:
        problems, engine = agent.training_problems()[:3], ScriptedInference(tokenizer, ["7", "8", "9", "4", "5", "6"])
        rest: Any = {
            "sampling": Sampling(max_new_tokens=4),
            "key": 7,
            "inference": engine,
            "limits": RolloutLimits(60.0),
        }
        group = GroupRolloutRequest(ordinal=0, problem=problems[0], group_size=6, **rest)
        made = await agent.group_rollout(group)
        evaluated = await agent.evaluate(EvaluationRequest(problems, samples_per_problem=2, **rest))
        votes = [evaluated.final_answers.get(place) for place in range(3)]
        return [made.trajectories, evaluated.trajectories, agent.compares_answers, votes]

    of_here, of_there = asyncio.run(ask(here)), asyncio.run(ask(there))
    assert of_there[:-1] == of_here[:-1]
    assert of_there[-1] == [[here.final_answer(answer.text) for answer in answers] for answers in of_here[1]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": "another-token-of-32-characters-or-more"}, "rejects the token"),
        ({"port": 9}, "is unavailable (.*refused.*): start it with `mrl serve-agent`"),
        ({"token": "short"}, "holds no token"),
    ],
)
def test_unusable_agent_is_one_error_at_start(agent: Agent, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    url, token_file = agent.said["address"], agent.token_file
    if "token" in changed:
        token_file = tmp_path / "token"
        token_file.write_text(changed["token"] + "\n")
    if "port" in changed:
        url = f"http://127.0.0.1:{changed['port']}"
    config = RemoteConfig(url=url, token_file=str(token_file), start_patience_s=0.01)
    tokenizer = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789+-="))
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(", 1).replace("):", r"\):")):
        RemoteAgent(config, tokenizer)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["arithmetik", "--tokenizer", "demo"], "did you mean 'arithmetic'?"),
        (["arithmetic", "--tokenizer", "demo", "--env-args", "min_terms=many"], "min_terms: expected an integer > 0"),
        (["arithmetic", "--tokenizer", "nowhere"], "nowhere"),
        (["arithmetic", "--tokenizer", "demo", "--host", "192.0.2.1"], "cannot be listened on"),
    ],
)
def test_environment_that_cannot_be_served_is_rejected_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    ended = run(["mrl", "serve-agent", *words, "--token-file", tmp_path / "token", "--port", "0"])
    assert ended.returncode == EXIT_USAGE and "Traceback" not in ended.stderr
    (line,) = ended.stderr.strip().splitlines()
    assert said in line
