"""Recipe keys of the data of supervised training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from megatron_rl.recipe.chat_section import ChatConfig
from megatron_rl.recipe.section import HubPath, PositiveFloat, PositiveInt, Section


class HeldOutConfig(Section):
    """Rows that are not trained on, whose loss each evaluation computes (evaluation.every; evaluation.prompts limits
    their number): a share of the rows, or other rows of the same form. A row that is equal to a held-out one, of this
    set or another, is left out of training as well."""

    share: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """About this share of the rows. A hash of its text decides about a row, so equal rows lie on the same side, and
    neither the order of the rows nor their number matters."""
    path: HubPath | None = None
    """Name on the hub, or a local file or directory, with the held-out rows; default: that of the rows trained on."""
    split: str | None = None
    """Split of the held-out rows; default: train, with a path."""
    subset: str | None = None
    """Configuration of the held-out rows, if their data set has several; without a path, that of the rows trained
    on."""

    @model_validator(mode="after")
    def _says_which(self) -> HeldOutConfig:
        elsewhere = [name for name in ("path", "split", "subset") if getattr(self, name) is not None]
        if self.share is not None and elsewhere:
            raise ValueError(f"share and {elsewhere[0]} are both given: hold out a share, or other rows")
        if self.share is None and self.path is None and self.split is None:
            raise ValueError("nothing says which rows are held out: give share, split or path")
        return self


class RowsConfig(Section):
    """A data set of rows, and its columns."""

    path: HubPath | None = None
    """Name on the hub, or a local file or directory, relative to the recipe's file: JSON lines, Parquet, CSV, Arrow, or
    the output of `save_to_disk` of `datasets`. Default: the worked examples of the environment, or else its training
    problems with a right response to each."""
    split: str = "train"
    """Split to read."""
    subset: str | None = None
    """Configuration to read, if the data set has several."""
    messages: str | None = None
    """Column of the conversations, each a list of messages; a.0.b is the field b of the first element of the list in
    column a. Default: the columns are recognised by their names, such as messages, conversations, or prompt and
    completion."""
    tools: str | None = None
    """Column of the tools that a conversation offers, as in OpenAI's API; default: `tools` or `functions`, if there is
    one."""
    prompt: str | None = None
    """Column of the prompt, a text or a list of messages, in place of `messages` and together with `answer`."""
    answer: str | None = None
    """Column of the answer to the prompt, a text or a list of messages."""
    held_out: HeldOutConfig | None = None
    """Rows whose loss is computed during training, and which are not trained on; default: none."""

    @model_validator(mode="after")
    def _columns_fit(self) -> RowsConfig:
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("prompt and answer belong together: give both columns, or neither for conversations")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("messages and prompt are both given: keep the columns of one form")
        return self

    @property
    def source(self) -> tuple[str | None, str | None, str]:
        """Path, subset and split of the rows."""
        return self.path, self.subset, self.split

    def held_out_rows(self) -> RowsConfig | None:
        """Return the held-out rows as rows of the same columns; None if there are none, or if they are a share."""
        held = self.held_out
        if held is None or held.share is not None:
            return None
        subset = held.subset if held.path is not None or held.subset is not None else self.subset
        source = {"path": held.path or self.path, "split": held.split or "train", "subset": subset}
        return self.model_copy(update={**source, "held_out": None})


class RowSet(RowsConfig):
    """One of several sets of rows that are trained on together."""

    path: HubPath
    """Name on the hub, or a local file or directory, as `data.path`."""
    id: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
            json_schema_extra={"words": "letters, digits, and any of . _ -, the first a letter or digit"},
        ),
    ] = ""
    """Name in metrics and in the record; default: the last part of the path, without its ending."""
    weight: PositiveFloat | None = None
    """Share of the rows, relative to the sum of the weights of all sets; 1 if no set gives weight or epochs. The sets
    take turns: after any number of rows each has had its share, up to less than one row. A set that is through begins
    again, in another order."""
    epochs: PositiveFloat | None = None
    """Passes over the set in the whole run, instead of a weight: all sets give epochs, or none does. The rows of a set
    are spread evenly over the run, and training.steps may be as many as all rows fill."""
    system: str | None = None
    """System message of the rows that have none, instead of data.system."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("id") or not isinstance(values.get("path"), str):
            return values
        name = PurePath(values["path"].rstrip("/")).name.partition(".")[0]
        return {**values, "id": re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")}

    @model_validator(mode="after")
    def _has_one_share(self) -> RowSet:
        if self.weight is not None and self.epochs is not None:
            raise ValueError("weight and epochs are both given: a set has a share of the rows, or a number of passes")
        return self


def _fit_together(sets: list[RowSet]) -> list[RowSet]:
    if not sets:
        raise ValueError("the list is empty: name at least one set, or leave it out and give data.path")
    twice = [id for id, count in Counter(one.id for one in sets).items() if count > 1]
    if twice:
        raise ValueError(f"set {twice[0]!r} is listed more than once: give each its own id")
    without = [one.id for one in sets if one.epochs is None]
    if without and len(without) < len(sets):
        other = next(one.id for one in sets if one.epochs is not None)
        raise ValueError(
            f"set {other!r} has epochs and set {without[0]!r} has none: give epochs to all sets, or weights to all"
        )
    return sets


class DataConfig(RowsConfig, ChatConfig):
    """Rows that `training.objective: supervised` trains on: conversations, or prompts with answers. Only tokens that
    the model would write itself carry loss: those of the assistant's messages, or of the answers, each with its
    end."""

    sets: Annotated[list[RowSet], AfterValidator(_fit_together)] | None = None
    """Several data sets that are trained on together, each with its path, columns, weight or epochs, and held-out rows,
    instead of `path`."""
    chat: Literal["always", "auto", "never"] = "auto"
    """Prompts and answers as messages in the tokenizer's chat template. always: do so. auto: do so if the tokenizer has
    a template. never: the plain texts follow each other. Lists of messages need the template."""
    system: str | None = None
    """System message of the rows that have none, in their messages or in a column `system`; default: the chat
    template's own."""
    examples_per_step: PositiveInt = 32
    """Rows per step, which is one update. The loss is the mean over all their tokens that carry loss. A pass over N
    rows takes N / examples_per_step steps."""

    @model_validator(mode="after")
    def _sections_fit(self) -> DataConfig:
        if self.chat == "never" and (self.system is not None or self.chat_template):
            name = "system" if self.system is not None else "chat_template"
            raise ValueError(f"{name}: with chat: never the chat template is not used")
        alone = [name for name in RowsConfig.model_fields if getattr(self, name) != getattr(RowsConfig(), name)]
        if self.sets is not None and alone:
            raise ValueError(f"sets and {alone[0]} are both given: move {alone[0]} into an entry of sets")
        return self

    @property
    def members(self) -> dict[str, DataConfig]:
        """Each set by its id, as if it were alone; a single one has the id ''."""
        if self.sets is None:
            return {"": self}
        found = {}
        for one in self.sets:
            its = {name: getattr(one, name) for name in RowsConfig.model_fields}
            system = self.system if one.system is None else one.system
            found[one.id] = self.model_copy(update={**its, "sets": None, "system": system})
        return found

    @property
    def counted(self) -> bool:
        """Whether the sets say how many rows the whole run has."""
        return self.sets is not None and self.sets[0].epochs is not None

    @property
    def held_out_share(self) -> float:
        """Share of these rows that is held out; 0 if none is, or if other rows are."""
        return (self.held_out.share if self.held_out else None) or 0.0

    @property
    def holds_out(self) -> bool:
        """Whether some rows are held out."""
        return any(one.held_out for one in self.members.values())

    @property
    def paths(self) -> list[str]:
        """Paths and hub names of all rows, held-out ones included, each once."""
        found = [one for its in self.members.values() for one in (its, its.held_out_rows())]
        return [*dict.fromkeys(one.path for one in found if one is not None and one.path is not None)]
