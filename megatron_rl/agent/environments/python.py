"""Rows of a data set, scored by a function in a file of the user's.

    environment: {name: python, args: {file: reward.py, train: mine.jsonl}}

    def reward(response: str, answer: str, **columns) -> float: ...

The first argument is the response. The others are columns of the row by name, and `finish_reason`, which is "length" if
the response was cut off. An `async def` is awaited, and all answers are scored concurrently. It may also return a
mapping of components: see `megatron_rl.agent.reward_value.Reward`.

The file is trusted code. It runs in its own process (agent/own_process), in the main thread: wherever the answers
come from, signals, threads, event loops and children work as in a script.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron_rl.agent.api import Demonstrator, Scoring
from megatron_rl.agent.data_rows import DataSource, root_of
from megatron_rl.agent.datasets import Question, shortened
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig, filled
from megatron_rl.agent.prompts import PromptConfig, messages_in, render_messages, render_prompt
from megatron_rl.agent.reward_only import of_answer
from megatron_rl.agent.reward_value import Reward
from megatron_rl.agent.scoring import Call, CheckedReward, NotScored, RolloutLimits, UnusableFunction
from megatron_rl.agent.text_rows import as_text, value_at
from megatron_rl.agent.trajectories import OUTPUT_LIMIT, Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.own_code import defined_names
from megatron_rl.recipe.section import PathMark, PositiveInt

logger = logging.getLogger(__name__)

FUNCTION = "reward"
FINISH_REASON = "finish_reason"
UNCHANGED = "{question}"  # a template
TOOLS = "tools"  # rows may lack the column of this name
NO_LIMITS = RolloutLimits(math.inf)


class PythonRows(DataSource):
    """Rows of a data set. PATH alone is short for {path: PATH}."""

    structured: ClassVar[bool] = True

    question: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    system: str | None = None
    """Column of the system message of a row whose messages have none; default: environment.args.system."""
    tools: str | None = TOOLS
    """Column of the definitions of tools that the chat template offers, as in OpenAI's API, where a row has some; null:
    only the reward reads them."""
    remove: list[str] = []
    """Texts to remove from every question, or from the user's last message in a list of messages, such as instructions
    that contradict ours. Any white space matches any other."""

    @property
    def needed(self) -> list[str]:
        others = [self.system, self.tools if self.tools != TOOLS else None]
        return [*super().needed, *map(root_of, filter(None, others))]


class PythonConfig(HFDatasetConfig):
    """Arguments of the environment `python`."""

    file: Annotated[str, PathMark(read=False)]  # a run has its own copy and does not need the file
    """Python file that defines `reward`."""
    train: PythonRows | None = None  # type: ignore[assignment]
    """Rows to train on; null: the environment only evaluates."""
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], PythonRows] = {}  # type: ignore[assignment]
    """Evaluation sets by name, each with the keys of `train`. Their problems are excluded from the training set."""
    prompt: str = UNCHANGED
    """The prompt, in Python's format syntax. In a list of messages it takes the place of the user's last message, which
    is then {question}."""
    processes: PositiveInt = 1
    """Number of processes that score answers, on each rank that generates. Each imports the file and has its own module
    state, and a plain function scores one answer at a time. Default: one, so that all answers see the same state."""
    on_error: Literal["end", "lose"] = "end"
    """Effect of an exception that the function still raises after environment.reward_retries: `end` ends the run with
    the line, as TRL and verl do; `lose` leaves the answer out of its group. A function that fails on wrong answers only
    would leave the right ones: prefer to return a reward for what cannot be scored. Errors of the network and exceeded
    limits always lose the answer."""

    def files(self) -> list[str]:
        return [self.file]

    def check_files(self) -> None:
        """Raise ValueError if the file does not define the function. Does not run it."""
        _check(Path(self.file).expanduser())


class PythonEnvironment(HFDatasetAgent, Demonstrator):
    """Rows of any data set, scored by a function `reward` in a Python file of yours."""

    Config = PythonConfig  # type: ignore[assignment]  # the file has no default
    config: PythonConfig

    def __init__(self, config: PythonConfig, tokenizer: Tokenizer) -> None:
        from megatron_rl.agent.own_process.function import OwnFunction  # slow; the launcher only checks arguments

        self._file = Path(config.file).expanduser()
        _check(self._file)
        super().__init__(config, tokenizer)
        try:
            self._score = OwnFunction(self._file, FUNCTION, config.processes)
        except UnusableFunction as error:
            raise ValueError(f"environment.args.file: {error}") from error
        logger.info("rewards from %s (sha256 %s)", self._file, hashlib.sha256(self._file.read_bytes()).hexdigest())
        self._accepted = _accepted(self._score.parameters)
        first = (its[:1] for its in (self.training_problems(), *self.evaluation_problems().values()))
        try:  # all rows of a set have the same columns
            _check_columns(self._file.name, self._score.parameters, [one.golden for its in first for one in its])
        except ValueError as error:
            self._score.close()
            raise ValueError(f"environment.args.file: {error}") from error

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return prompts and right answers of the rows with a column `answer`; used only by `model.init:
        supervised`."""
        answers = [(one.prompt, as_text(one.golden.get("answer"))) for one in self.training_problems()]
        return [(prompt, answer) for prompt, answer in answers if answer]

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> Reward:
        return (await self._score(self._call(response, golden, finish_reason, NO_LIMITS))).value

    async def _answer_score(
        self, problem: Problem, text: str, finish_reason: FinishReason, limits: RolloutLimits
    ) -> CheckedReward | str:
        try:
            scored = await self._score(self._call(text, problem.golden, finish_reason, limits))
        except NotScored as error:
            if error.wrong:
                raise ConfigurationError(f"{error} {of_answer(problem, text)}", printed_below(error)) from error
            if error.fault and self.config.on_error == "end":
                advice = "return a reward for what cannot be scored, or set environment.args.on_error to lose"
                raise ConfigurationError(
                    f"{error} {of_answer(problem, text)}: {advice}", printed_below(error)
                ) from error
            return self._lost(error.kind, str(error), printed_below(error), problem, text)
        return CheckedReward.of(scored.value, scored.printed[-OUTPUT_LIMIT:])

    def _call(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason, limits: RolloutLimits
    ) -> Call:
        columns = {FINISH_REASON: finish_reason, **golden}
        if self._accepted is not None:
            columns = {name: value for name, value in columns.items() if name in self._accepted}
        return Call((response,), columns, limits.timeout_s, limits.retries)

    def scoring(self) -> Scoring:
        return Scoring(f"{FUNCTION} ({self._score.place})", self._score.answers, self._score.seconds_per_answer)

    async def close(self) -> None:
        import asyncio  # slow import; the launcher imports this module to check a recipe

        await asyncio.to_thread(self._score.close)

    def wordings(self, question: Question) -> Collection[str]:
        """Return the texts of a question; of a list of messages, those of all that are not the system's."""
        source = question.source
        assert isinstance(source, PythonRows)
        messages = messages_in(value_at(question.row, source.question.split(".")), source.question)
        if messages is None:
            return super().wordings(question)
        said = conversation_of(messages, field=source.question).messages
        text = "\n".join(message["content"] for message in said if message["role"] != "system")
        return {text, shortened(source, text)}

    def golden(self, question: Question) -> dict[str, Any]:
        return dict(question.row)

    def _prompt(self, question: Question, template: str) -> str:
        source, config = question.source, self.config
        assert isinstance(source, PythonRows)
        system = value_at(question.row, source.system.split(".")) if source.system else None
        prompt_config = config if system is None else config.model_copy(update={"system": str(system)})
        tools = value_at(question.row, source.tools.split(".")) if source.tools else None
        if not tools:
            return self._rendered(question, template, prompt_config)
        try:
            return self._rendered(question, template, prompt_config, tools)
        except ValueError as error:
            self._rendered(question, template, prompt_config)  # raises where the prompt is to blame
            raise ValueError(
                f"column {source.tools}: {error}; if only the reward reads it, set `tools` of the data set to null"
            ) from error

    def _rendered(self, question: Question, template: str, config: PromptConfig, tools: Any = None) -> str:
        source, columns = question.source, self._columns(question)
        assert isinstance(source, PythonRows)
        messages = messages_in(value_at(question.row, source.question.split(".")), source.question)
        if messages is None:
            text = filled(template, columns)
            if not tools:
                return render_prompt(self.tokenizer, text, config)
            messages, ask = [{"role": "user", "content": text}], None
        elif template == UNCHANGED and not source.remove:
            ask = None
        else:

            def ask(text: str) -> str:
                return filled(template, {**columns, "question": shortened(source, text) if source.remove else text})

        return render_messages(self.tokenizer, messages, config, source.question, tools=tools, ask=ask)


def _check(file: Path) -> None:
    if not {FUNCTION, "*"} & defined_names(file):
        raise ValueError(f"{file}: defines no function {FUNCTION}: def {FUNCTION}(response, **columns) -> float")


def printed_below(error: NotScored) -> str:
    """Return the traceback of a failure, with what the function printed before it."""
    printed = f"it printed:\n{error.printed.rstrip()}\n" if error.printed.strip() else ""
    return f"{printed}{error.trace}"


Parameters = Sequence[tuple[str, str, bool]]


def _accepted(parameters: Parameters) -> frozenset[str] | None:
    """Return the names of the columns that the function accepts; None: any."""
    if any(kind == "VAR_KEYWORD" for _, kind, _ in parameters):
        return None
    return frozenset(name for name, kind, _ in parameters if kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"))


def _check_columns(file: str, parameters: Parameters, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the function cannot be called with the columns of every row."""
    first = next((one for one in parameters if one[1] in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")), None)
    if first is None and not any(kind == "VAR_POSITIONAL" for _, kind, _ in parameters):
        raise ValueError(
            f"{file}: {FUNCTION} has no parameter for the response: write def {FUNCTION}(response, **columns) -> float"
        )
    needed = [
        one[0]
        for one in parameters
        if one is not first and not one[2] and one[1] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
    ]
    for row in rows:
        if first is not None and first[1] == "POSITIONAL_OR_KEYWORD" and first[0] in row:
            raise ValueError(
                f"{file}: the first parameter of {FUNCTION}, which receives the response, has the name of a column, "
                f"{first[0]}: rename it, for example def {FUNCTION}(response, {first[0]}, **columns) -> float"
            )
        lacking = [name for name in needed if name not in row and name != FINISH_REASON]
        if lacking:
            raise ValueError(f"{file}: {FUNCTION} needs the column {lacking[0]}, but a row has only {', '.join(row)}")
