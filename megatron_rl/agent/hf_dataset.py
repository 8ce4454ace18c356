"""Tasks whose problems are the rows of data sets, on the hub or in local files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from megatron_rl.agent.data_rows import DataRow, DataSource
from megatron_rl.agent.datasets import (
    DataSet,
    Question,
    data_extras,
    distinct,
    hub_names,
    normalised,
    question_of,
    read_questions,
    words_key,
)
from megatron_rl.agent.dropped_rows import DroppedRows
from megatron_rl.agent.indexed_problems import Choice, Chosen, select
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.prompts import PromptConfig, check_characters, prompt_format, render_prompt, template_fields
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import NonNegativeInt, PositiveInt

logger = logging.getLogger(__name__)

HELD_OUT = "held_out"
TRAINED = ""
SAMPLED = 1000  # tokens whose texts identify a tokenizer


class HFDatasetConfig(PromptConfig):
    """Arguments of every environment whose problems are rows of data sets."""

    prompt_fields: ClassVar[Sequence[str]] = ("question",)
    """Fields that the prompt may use."""

    train: DataSet | None = None
    """Problems to train on; null: the environment only evaluates."""
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], DataSet] = {}
    """Evaluation sets by name, each with the keys of `train`. Their problems are excluded from the training set."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the distinct problems of `train` that form the evaluation set held_out and are never trained on."""
    split_seed: NonNegativeInt = 0
    """Seed that selects the held-out problems."""
    prompt: str = "{question}"
    """The prompt, in Python's format syntax."""
    teacher_prompt: str | None = None
    """Prompt that the teacher of `distill` reads in place of `prompt`, in the same syntax. Its fields are those of
    `prompt` and the columns that score the answers, such as {answer}. Example: "{question} The right answer is
    {answer}. Explain how to find it." The model answers `prompt` as always, and learns from what it would have said
    with the hint. Default: the same prompt."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, in tokens. Problems with a longer one are excluded and counted in the log; default: no limit."""

    @field_validator("prompt")
    @classmethod
    def _asks_the_question(cls, prompt: str) -> str:
        if "question" not in template_fields(prompt, cls.prompt_fields):
            raise ValueError("the prompt must contain {question}: otherwise the model does not see the problem")
        return prompt

    def datasets(self) -> list[str]:
        return hub_names([self.train, *self.evaluate.values()])

    def extras(self) -> list[str]:
        return data_extras([self.train, *self.evaluate.values()])


class HFDatasetAgent(RewardOnlyAgent):
    """Problems of `train`, except those of `evaluate` and the held-out ones; without repeats, in the order of the data
    sets. A subclass scores the answers."""

    Config = HFDatasetConfig
    config: HFDatasetConfig

    def __init__(self, config: HFDatasetConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.prompt_format = prompt_format(tokenizer, config)
        evaluated = {name: _questions(data) for name, data in config.evaluate.items()}
        own = {} if config.train is None else self._of_train(config.train, evaluated)
        self._trained = own.get(TRAINED, [])
        sets: dict[str, Sequence[Problem]] = {
            name: [each.problem for each in self._chosen(name, questions)] for name, questions in evaluated.items()
        }
        if own.get(HELD_OUT):
            sets[HELD_OUT] = own[HELD_OUT]
        self._evaluated = {name: problems for name, problems in sets.items() if problems}
        if config.train and not self._trained:
            raise ValueError(f"environment.args.train: {config.train.path} leaves no problem to train on")

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Return the evaluation sets; a set whose prompts are all too long is absent."""
        return self._evaluated

    def golden(self, question: Question) -> dict[str, Any]:
        """Return the verifier data of a question, which `get_reward` receives."""
        return {"answer": question.answer}

    def fields(self, question: Question) -> dict[str, Any]:
        return {"question": question.text}

    def wordings(self, question: Question) -> Collection[str]:
        """Return texts by each of which the question is known in another environment."""
        return question.wordings

    def _of_train(
        self, source: DataSet, evaluated: Mapping[str, Sequence[Question]]
    ) -> Mapping[str, Sequence[Problem]]:
        def choose() -> Choice:
            questions = _questions(source)
            trained, apart = divided(questions, evaluated.values(), self.config.held_out, self.config.split_seed)
            sets = {TRAINED: self._chosen(source.path, trained), HELD_OUT: self._chosen(HELD_OUT, apart)}
            return Choice(sets, [*questions[0].row])

        def made(row: DataRow, columns: Sequence[str]) -> Problem:
            return self._problem(question_of(source, row, columns))

        own_files: list[str] = getattr(self.config, "files", list)()  # a run has its own copies
        arguments = self.config.model_dump(mode="json", exclude={"evaluate"})
        depends_on = [
            [type(self).__module__, type(self).__qualname__],
            {name: value for name, value in arguments.items() if value not in own_files},
            words_digest(evaluated.values()),
            _traits(self.tokenizer),
        ]
        return select(source, depends_on, choose, made).sets

    def _chosen(self, source: str, questions: Sequence[Question]) -> list[Chosen]:
        chosen: list[Chosen] = []
        dropped = DroppedRows(source)
        for number, question in enumerate(questions):
            try:
                problem = self._problem(question)
                check_characters(self.tokenizer, problem.prompt + (problem.teacher_prompt or ""))
            except ValueError as error:
                dropped.add(number, question.where, error)
            else:
                chosen.append(Chosen(problem, question.where, question.place))
        dropped.report(len(questions))
        limit = self.config.max_prompt_tokens
        if limit is None:
            return chosen
        fitting = [each for each in chosen if len(self.tokenizer.encode(each.problem.prompt)) <= limit]
        if len(fitting) < len(chosen):
            left_out = len(chosen) - len(fitting)
            logger.info("%s: %d of %d problems skipped: over %d tokens", source, left_out, len(chosen), limit)
        return fitting

    def _problem(self, question: Question) -> Problem:
        """Return the problem of a question. Raises ValueError for a question that cannot be asked."""
        config = self.config
        teachers = None
        if config.teacher_prompt is not None:
            try:
                teachers = self._prompt(question, config.teacher_prompt)
            except ValueError as error:
                raise ValueError(f"environment.args.teacher_prompt: {error}") from error
        return Problem(
            self._prompt(question, config.prompt),
            self.golden(question),
            teacher_prompt=teachers,
            questions=frozenset(map(words_key, self.wordings(question))),
        )

    def _prompt(self, question: Question, template: str) -> str:
        return render_prompt(self.tokenizer, filled(template, self._columns(question)), self.config)

    def _columns(self, question: Question) -> dict[str, Any]:
        return {**self.golden(question), **self.fields(question)}


def filled(template: str, columns: Mapping[str, Any]) -> str:
    """Return a template with its fields filled in. Raises ValueError if it has another field than these."""
    return template.format(**{name: columns[name] for name in template_fields(template, [*columns])})


def divided(
    questions: Sequence[Question], evaluated: Iterable[Sequence[Question]], held_out: float, seed: int
) -> tuple[list[Question], list[Question]]:
    """Return the questions to train on, without those of the evaluation sets, and the held-out ones."""
    kept_apart = {words for its in evaluated for question in its for words in question.wordings}
    trained = [question for question in questions if kept_apart.isdisjoint(question.wordings)]
    if len(trained) < len(questions):
        logger.info("%d training problems skipped: an evaluation set contains them", len(questions) - len(trained))
    return split(trained, held_out, seed)


def words_digest(sets: Iterable[Sequence[Question]]) -> str:
    """Return a digest of the words of all questions, whatever their order."""
    words = sorted({words for its in sets for question in its for words in question.wordings})
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _traits(tokenizer: Tokenizer) -> list[Any]:
    """Return what identifies a tokenizer for the purposes of prompts."""
    ids = [*range(min(SAMPLED, tokenizer.vocab_size))]
    written = None
    with suppress(ValueError):  # the template may refuse it
        written = tokenizer.conversation([{"role": "user", "content": "a"}])  # with the date, where it writes one
    return [type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.chat_template, written, tokenizer.decode(ids)]


def split(questions: Sequence[Question], held_out: float, seed: int) -> tuple[list[Question], list[Question]]:
    """Return the questions to train on and the held-out ones, each in the given order. A hash of the words decides, so
    neither the order of the rows nor repeats move a question to the other side."""
    by_hash = sorted(questions, key=lambda one: stable_key(f"split:{normalised(one.text)}", seed))
    apart = {*by_hash[: round(held_out * len(questions))]}
    return [one for one in questions if one not in apart], [one for one in questions if one in apart]


def _questions(source: DataSource) -> list[Question]:
    questions = distinct(read_questions(source))
    if not questions:
        needed = f"a question ({source.question})"
        if isinstance(source, DataSet):
            needed = f"both {needed} and an answer ({source.answer})"
        raise ValueError(f"data set {source.path}, split {source.split}: no row has {needed}")
    return questions
