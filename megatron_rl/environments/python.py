"""Rows of a data set, scored by a function in a file of the user's.

    environment: {name: python, args: {file: reward.py, train: mine.jsonl}}

    def reward(response: str, answer: str, **columns) -> float: ...

The first argument is the response. The others are columns of the row by name, and `finish_reason`, which is "length" if
the response was cut off. An `async def` is awaited, and all answers of a group are scored concurrently; a plain
function runs in the event loop that generates, so it must be quick. It may also return a mapping of components: see
`megatron_rl.agent.scoring.Reward`.

The file is trusted code, and runs inside the rank like any environment.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.data_rows import Source
from megatron_rl.agent.datasets import Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.prompts import messages_in, render_messages, render_prompt
from megatron_rl.agent.scoring import Reward
from megatron_rl.agent.text_rows import as_text, value_at
from megatron_rl.errors import task_location
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.own_code import import_file
from megatron_rl.recipe.python_file import defined_names
from megatron_rl.recipe.section import PathMark

logger = logging.getLogger(__name__)

FUNCTION = "reward"
FINISH_REASON = "finish_reason"
Scoring = Callable[..., Reward | Awaitable[Reward]]


class Rows(Source):
    """Rows of a data set. PATH alone is short for {path: PATH}."""

    structured: ClassVar[bool] = True

    question: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    system: str | None = None
    """Column of the system message; default: environment.args.system."""


class PythonConfig(HFDatasetConfig):
    """Arguments of the environment `python`."""

    file: Annotated[str, PathMark(read=False)]  # a run has its own copy and does not need the file
    """Python file that defines `reward`."""
    train: Rows | None = None  # type: ignore[assignment]
    """Rows to train on; default: none, the environment only evaluates."""
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], Rows] = {}  # type: ignore[assignment]
    """Evaluation sets by name. Their problems are excluded from the training set."""

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
        """Raises ValueError for an unusable file or unusable data."""
        self._file = Path(config.file).expanduser()
        self._score = _loaded(self._file)
        self._accepted = _accepted(self._score)
        super().__init__(config, tokenizer)
        problems = [*self.training_problems(), *(one for its in self.evaluation_problems().values() for one in its)]
        _check_columns(self._file, self._score, [problem.golden for problem in problems])

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return prompts and right answers of the rows with a column `answer`; used only by `model.init:
        supervised`."""
        answers = [(one.prompt, as_text(one.golden.get("answer"))) for one in self.training_problems()]
        return [(prompt, answer) for prompt, answer in answers if answer]

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> Reward | Awaitable[Reward]:
        columns = {FINISH_REASON: finish_reason, **golden}
        if self._accepted is not None:
            columns = {name: value for name, value in columns.items() if name in self._accepted}
        return self._score(response, **columns)

    def _waits(self) -> bool:
        return inspect.iscoroutinefunction(self._score)

    def golden(self, question: Question) -> dict[str, Any]:
        return dict(question.row)

    def _prompt(self, question: Question) -> str:
        source, config = question.source, self.config
        assert isinstance(source, Rows)
        system = value_at(question.row, source.system.split(".")) if source.system else None
        prompt_config = config if system is None else config.model_copy(update={"system": str(system)})
        messages = messages_in(value_at(question.row, source.question.split(".")), source.question)
        if messages is not None:
            return render_messages(self.tokenizer, messages, prompt_config, source.question)
        return render_prompt(self.tokenizer, config.prompt.format(**self.fields(question)), prompt_config)


def _check(file: Path) -> None:
    """Raises ValueError."""
    if not {FUNCTION, "*"} & defined_names(file):
        raise ValueError(f"{file}: defines no function {FUNCTION}: def {FUNCTION}(response, **columns) -> float")


def _loaded(file: Path) -> Scoring:
    _check(file)
    try:
        module = import_file(file)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        why = f"{task_location(error) or file}: {type(error).__name__}: {error}"
        raise ValueError(f"environment.args.file: {why}") from error
    found = getattr(module, FUNCTION, None)
    if not callable(found):
        raise ValueError(f"environment.args.file: {file}: {FUNCTION} is not a function")
    logger.info("rewards from %s (sha256 %s)", file, hashlib.sha256(file.read_bytes()).hexdigest())
    return found


def _accepted(score: Scoring) -> frozenset[str] | None:
    """Return the names of the columns that the function accepts; None: any."""
    parameters = [*inspect.signature(score).parameters.values()]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _check_columns(file: Path, score: Scoring, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the function cannot be called with the columns of every row."""
    parameters = [*inspect.signature(score).parameters.values()]
    first = next((one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)), None)
    variable = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if first is None and not variable:
        raise ValueError(
            f"{file}: {FUNCTION} has no parameter for the response: write def {FUNCTION}(response, **columns) -> float"
        )
    needed = [
        one.name
        for one in parameters
        if one is not first and one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    for row in rows:
        if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD and first.name in row:
            raise ValueError(
                f"{file}: the first parameter of {FUNCTION}, which receives the response, has the name of a column, "
                f"{first.name}: rename it, for example def {FUNCTION}(response, {first.name}, **columns) -> float"
            )
        lacking = [name for name in needed if name not in row and name != FINISH_REASON]
        if lacking:
            raise ValueError(f"{file}: {FUNCTION} needs the column {lacking[0]}, but a row has only {', '.join(row)}")
