"""Arguments of the environment `program`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.agent.data_rows import DataSource
from megatron_rl.agent.datasets import DataSet, data_extras, hub_names
from megatron_rl.agent.sandbox.image_root import UnusableImage, check_image
from megatron_rl.agent.text_rows import as_text
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.own_code import defined_names
from megatron_rl.recipe.section import FilePath, NonNegativeInt, PathMark, PositiveFloat, PositiveInt, Section

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class ProgramRows(DataSource):
    """Rows of a data set; a program gets whole rows. PATH alone is short for {path: PATH}."""

    structured: ClassVar[bool] = True

    question: str = ""
    """Column that names a problem in logs and records. Rows with the same text there count once. Default: `prompt`
    where the rows have it, otherwise the whole row."""

    def text_of(self, row: Mapping[str, Any]) -> str | None:
        if self.question or "prompt" in row:
            return super().text_of(row) if self.question else as_text(row["prompt"])
        return json.dumps(row, ensure_ascii=False)


class Examples(DataSet):
    """Prompts of the model with right answers. PATH alone is short for {path: PATH}."""

    question: str = "prompt"
    """Column of the prompt, exactly as the program sends it."""


class ContainerConfig(Section):
    """Container of each rollout. PATH alone is short for {image: PATH}."""

    shorthand: ClassVar[str | None] = "image"

    image: FilePath
    """Root file system: a squashfs file, as `enroot import -o agent.sqsh docker://python:3.12` makes, or a directory. A
    node unpacks a file once, into its folder of temporary files (TMPDIR)."""
    network: Literal["endpoint", "node"] = "endpoint"
    """endpoint: the program reaches the policy's endpoint and nothing else. node: all that the node reaches."""
    memory_gb: PositiveFloat = 4.0
    """Memory of all processes of a rollout together, in GiB. A rollout that exceeds this or the next two limits is
    lost, or the program sees the error."""
    disk_gb: PositiveFloat = 1.0
    """Size of the files that a rollout writes, in GiB. They lie in the node's memory and are gone at its end."""
    processes: PositiveInt = 256
    """Processes and threads of a rollout at a time."""


OwnFile = Annotated[str, PathMark(read=False)]  # a run has its own copy and does not need the file


class ProgramConfig(EndpointConfig):
    """Arguments of the environment `program`."""

    command: list[str] = []
    """Words of the command of one rollout, which no shell reads. The first is a program in PATH, an absolute path, or
    ./NAME for one of `code`; {python} is the interpreter of the ranks."""
    function: str | None = None
    """module:name of a coroutine, instead of a command. The module is one of `code` or an installed one."""
    code: list[OwnFile] = []
    """Files of the program, relative to the recipe. A run keeps copies of them; each rollout finds them, executable, in
    its working directory."""
    container: ContainerConfig | None = None
    """Container in which each rollout runs its command; default: none, so that the program has the rights of the run.
    Needs a Linux that lets users create namespaces."""
    problems: ProgramRows
    """Rows to train on."""
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], ProgramRows] = {}
    """Evaluation sets by name, each with the keys of `problems`. Their problems are excluded from the training set."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the distinct problems that form the evaluation set held_out and are never trained on."""
    split_seed: NonNegativeInt = 0
    """Seed that selects the held-out problems."""
    demonstrations: Examples | None = None
    """Prompts and right answers, which teach the format to a tiny model (`model.init: supervised`)."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str | None) -> str | None:
        if function is not None and not _FUNCTION.fullmatch(function):
            raise ValueError(f"{function!r} is not of the form module:name, such as agent:rollout for code: [agent.py]")
        return function

    @field_validator("variables")
    @classmethod
    def _name_no_policy(cls, variables: dict[str, str | None]) -> dict[str, str | None]:
        for name in variables:
            if name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
                raise ValueError(f"{name} is set for each rollout: it names the policy that is trained")
        return variables

    @model_validator(mode="after")
    def _fits_together(self) -> ProgramConfig:
        if bool(self.command) == (self.function is not None):
            raise ValueError("give either command (a list of words) or function (module:name)")
        names = [Path(file).name for file in self.code]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"code: two files are named {twice[0]}: a working directory can hold one")
        if self.container is not None:
            self._fits_into_container()
        first = self.command[0] if self.command else ""
        own = first.removeprefix("./")
        if "/" in first and not first.startswith("/") and not (first.startswith("./") and own in names):
            raise ValueError(
                f"command: {first} is not in the working directory: give an absolute path, or put the file into code "
                f"and write ./{Path(first).name}"
            )
        return self

    def _fits_into_container(self) -> None:
        if self.function is not None:
            raise ValueError("container: a function runs in a process of the rank: give a command instead")
        if "{python}" in self.command:
            raise ValueError(
                "command: {python} is the interpreter of the ranks, which the container does not have: name the one of "
                "its image, such as python3"
            )

    def _sources(self) -> list[DataSource | None]:
        return [self.problems, *self.evaluate.values(), self.demonstrations]

    def datasets(self) -> list[str]:
        return hub_names(self._sources())

    def extras(self) -> list[str]:
        return [*data_extras(self._sources()), *(["program"] if self.function else [])]

    def files(self) -> list[str]:
        return self.code

    def check_files(self) -> None:
        """Raise ValueError if a file cannot be read, is not valid Python, or lacks the function, or if the image is
        not one. Runs none of them."""
        if self.container is not None:
            try:
                check_image(Path(self.container.image).expanduser())
            except UnusableImage as error:
                raise ValueError(f"container: {error}") from error
        module, _, function = (self.function or "").partition(":")
        for file in (Path(each).expanduser() for each in self.code):
            if file.suffix == ".py":
                names = defined_names(file)
                if file.stem == module and not {function, "*"} & names:
                    raise ValueError(
                        f"{file}: defines no {function}: async def {function}(client, problem) -> float | dict"
                    )
            elif not file.is_file():
                raise ValueError(f"{file}: no such file")
