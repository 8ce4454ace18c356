"""A program that was written for OpenAI's API, trained as it is.

    environment:
      name: program
      args:
        command: ["{python}", agent.py]       # or function: agent:rollout
        code: [agent.py, tools.py]
        problems: questions.jsonl

A command gets a problem, a row of the data set, as one JSON line on its standard input, and finds OPENAI_BASE_URL,
OPENAI_API_KEY and OPENAI_MODEL in its environment; the last line that it prints is the reward (reward_line.py). A
function is a coroutine, `async def rollout(client, problem) -> float | dict`, whose client is an openai.AsyncOpenAI.

Each run of the program is one rollout, in its own process and working directory (nursery.py, supervisor.py). It
runs with the rights of the user, or in a container (sandbox/container.py).
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.data_rows import DataRow
from megatron_rl.agent.datasets import Question, distinct, question_of, read_questions
from megatron_rl.agent.endpoint.agent import EndpointAgent, RolloutLost, RunResult, program_environment
from megatron_rl.agent.environments.program.arguments import ProgramConfig, ProgramRows
from megatron_rl.agent.environments.program.nursery_wire import Program, ProgramEnd, ProgramImage, ProgramJob
from megatron_rl.agent.environments.program.reward_line import NoReward, reward_in, reward_of
from megatron_rl.agent.hf_dataset import HELD_OUT, TRAINED, divided, words_digest
from megatron_rl.agent.indexed_problems import Choice, Chosen, select
from megatron_rl.agent.sandbox.container import ContainerLimits
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.children import how_ended
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.errors import ConfigurationError

if TYPE_CHECKING:  # slow imports; the launcher imports this module to check a recipe
    from megatron_rl.agent.endpoint.session import RolloutSession
    from megatron_rl.agent.environments.program.runner import ProgramRunner

PYTHON = "{python}"
DRAIN_S = 5.0
"""Seconds to wait before a rollout whose program was ended by a SIGTERM counts as lost. All processes of a preempted
job may receive one: then the drain cancels the rollout meanwhile, and it is begun again."""
SAMPLES = Path(__file__).parent / "samples"

_ERROR = re.compile(r"[A-Za-z_][\w.]{0,80}(?=: )")
"""Name of an error, or of a command that failed, at the beginning of a line: `KeyError: 'x'`, `curl: (7) Failed`."""
UNUSABLE = (126, 127)
"""Exit codes of shells and of `env` for a command that cannot be executed, or that is not there."""
LONGEST_COMPLAINT = 200
_COMPLAINT = re.compile(r"not found|no such file|permission denied|cannot execute|format error|is a directory", re.I)
_POSITION = re.compile(r"^(?:.*?:\s*(?:line )?\d+:\s+|bash: )")
"""Beginning of a shell's complaint: `sh: 1: `, `ask.sh: line 3: `. The folder of the script may differ in each run."""


class ProgramEnvironment(EndpointAgent, Demonstrator):
    """Any program that speaks OpenAI's API, started once per rollout: a command in any language, or a coroutine.

    Its reward is the last line that it prints, or what the coroutine returns.
    """

    Config = ProgramConfig
    config: ProgramConfig

    def __init__(self, config: ProgramConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._variables = program_environment(config.variables)
        command = _command(config, self._variables) or None
        self._program = Program(command, config.function, config.code, _image(config))
        self._runner: ProgramRunner | None = None
        evaluated = {name: _questions(rows) for name, rows in config.evaluate.items()}
        own = _of_train(config, [*evaluated.values()])
        self._trained = own[TRAINED]
        if not self._trained:
            raise ValueError("environment.args.problems: no problem is left to train on")
        sets = {name: [*map(_problem, questions)] for name, questions in evaluated.items()}
        self._evaluated = {**sets, **({HELD_OUT: own[HELD_OUT]} if own[HELD_OUT] else {})}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        return {
            "command": [PYTHON, "sums.py"],
            "code": [str(SAMPLES / "sums.py")],
            "problems": str(SAMPLES / "sums.jsonl"),
        }

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._evaluated

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        examples = self.config.demonstrations
        if examples is None:
            return []
        return [(each.text, each.answer) for each in read_questions(examples)]

    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        if self._runner is None:
            from megatron_rl.agent.environments.program.runner import ProgramRunner

            self._runner = ProgramRunner(self._program, self._variables)
        base_url, reaches = _address(session.base_url, self.config)
        job = ProgramJob(
            json.dumps(problem.golden, default=str),
            {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": session.api_key, "OPENAI_MODEL": session.model},
            self.config.timeout_s,
            reaches=reaches,
        )
        ended = await self._runner.run(job)
        if ended.code == -signal.SIGTERM and not ended.over_limit:
            import asyncio  # slow import; the launcher imports this module to check a recipe

            await asyncio.sleep(DRAIN_S)
        if reason := why_lost(ended, self.config.timeout_s):
            raise RolloutLost(reason, ended.output)
        try:
            reward = reward_in(ended.ending) if self._program.command else reward_of(ended.returned)
        except NoReward as error:
            if not self._program.command:
                at = f"environment.args.function: {self._program.function}"
                raise ConfigurationError(f"{at}: {error}", ended.output) from error
            raise RolloutLost(f"program: {error}", ended.output) from error
        return RunResult(reward, ended.output)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()
        await super().close()


def why_lost(ended: ProgramEnd, timeout_s: float) -> str:
    """Return the reason why a run of the program has no reward; empty if it may have one. The reason is the same for
    all runs with the same fault: the output of the program has the details."""
    if ended.unstarted:
        return f"program: it could not be started: {ended.unstarted}"
    if ended.exceeded:
        return f"program: {ended.exceeded} (environment.args.container)"
    if ended.over_limit:
        return f"program: not done within {timeout_s:g} s (environment.args.timeout_s)"
    if ended.raised:
        return f"program: {ended.raised}"
    if ended.code:
        error = _unusable_command(ended.output) if ended.code in UNUSABLE else _error(ended.output)
        return f"program: {how_ended(ended.code)}" + (f": {error}" if error else "")
    return ""


def _error(output: str) -> str:
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    error = _ERROR.match(last)
    return error[0] if error else ""


def _unusable_command(output: str) -> str:
    """Return what a shell said of a command that it could not run: `curl: not found`."""
    said = next((line for line in reversed(output.splitlines()) if _COMPLAINT.search(line)), "")
    return _POSITION.sub("", said.strip())[:LONGEST_COMPLAINT]


def _image(config: ProgramConfig) -> ProgramImage | None:
    if (asked := config.container) is None:
        return None
    limits = ContainerLimits(int(asked.memory_gb * 2**30), int(asked.disk_gb * 2**30), asked.processes)
    variables = program_environment(config.variables, contained=True)
    return ProgramImage(asked.image, limits, asked.network == "node", variables)


def _address(base_url: str, config: ProgramConfig) -> tuple[str, tuple[str, int] | None]:
    """Return the URL by which the program reaches the endpoint, and the endpoint's host and port if a relay passes its
    calls on."""
    if config.container is None or config.container.network == "node":
        return base_url, None
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl(), (parts.hostname, parts.port)


def _command(config: ProgramConfig, variables: Mapping[str, str]) -> list[str]:
    if config.container is not None:
        return config.command
    words = [sys.executable if word == PYTHON else word for word in config.command]
    if words and not words[0].startswith("./") and shutil.which(words[0], path=variables.get("PATH")) is None:
        where = "is not an executable file" if "/" in words[0] else "is not in PATH"
        raise ValueError(f"environment.args.command: {words[0]} {where} on this machine")
    return words


def _questions(rows: ProgramRows) -> list[Question]:
    questions = distinct(read_questions(rows))
    if not questions:
        raise ValueError(
            f"data set {rows.path}, split {rows.split}: no row has a problem ({rows.question or 'prompt'})"
        )
    return questions


def _of_train(config: ProgramConfig, evaluated: Sequence[Sequence[Question]]) -> Mapping[str, Sequence[Problem]]:
    def choose() -> Choice:
        questions = _questions(config.problems)
        parts = divided(questions, evaluated, config.held_out, config.split_seed)
        chosen = [[Chosen(_problem(each), each.where, each.place) for each in part] for part in parts]
        return Choice(dict(zip((TRAINED, HELD_OUT), chosen, strict=True)), [*questions[0].row])

    def made(row: DataRow, columns: Sequence[str]) -> Problem:
        return _problem(question_of(config.problems, row, columns))

    depends_on = [
        "program",
        config.model_dump(mode="json", include={"problems", "held_out", "split_seed"}),
        words_digest(evaluated),
    ]
    return select(config.problems, depends_on, choose, made).sets


def _problem(question: Question) -> Problem:
    return Problem(question.text, question.row, is_prompt=False)
