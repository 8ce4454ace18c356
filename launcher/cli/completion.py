"""Shell completion of recipes, keys and runs. Imports slow modules only when completing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from launcher.recipe.shipped import shipped_recipes

PROGRAMS = ("mrl", "mrl-submit")
SHELLS = ("bash", "zsh", "fish")
UNFINISHED = "unfinished"
"""Type of a completion that no blank follows, such as `KEY=`."""

BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    response=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            unfinished) COMPREPLY+=("$value"); compopt -o nospace ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class WholeWords(BashComplete):
    """Completion of whole words. Bash itself ends a word at `=` and `:`, so that it would ask for a value without its
    key, and puts an answer behind them."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE")
        if line is None:  # a script of click's own, from an earlier version
            return super().get_completion_args()
        words = split_arg_string(line)
        while words and "=" in words[0]:  # variables before the command
            words.pop(0)
        begun = "" if not words or line[-1:].isspace() else words.pop()
        return words[1:], begun

    def complete(self) -> str:
        args, begun = self.get_completion_args()
        breaks = [character for character in "=:" if character in os.environ.get("COMP_WORDBREAKS", "")]
        kept = max((begun.rfind(character) + 1 for character in breaks), default=0)
        return "\n".join(f"{item.type},{item.value[kept:]}" for item in self.get_completions(args, begun))


add_completion_class(WholeWords)


def completion_scripts(shell: str) -> Iterator[str]:
    kind = get_completion_class(shell)
    assert kind is not None  # click ships all of SHELLS
    for program in PROGRAMS:
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        source = kind(click.Command(program), {}, program, variable)
        yield source.source_template % source.source_vars()


def complete_recipe(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in shipped_recipes() if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]


def complete_override(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete keys of a recipe, with their meanings; behind KEY= the values that it takes, if they can be listed."""
    key, equals, value = begun.partition("=")
    if equals:
        return [CompletionItem(f"{key}={one}") for one in _values_of(key) if one.startswith(value)]
    return [
        CompletionItem(f"{key}=", UNFINISHED, help=text)
        for key, text in _keys(sections=False).items()
        if key.startswith(begun)
    ]


def _values_of(key: str) -> list[str]:
    from launcher.recipe.problems import known_keys
    from megatron_rl.recipe.config import RunConfig

    field = known_keys(RunConfig.model_json_schema()).get(tuple(key.split(".")))
    return list(dict.fromkeys(_listed(field or {})))


def _listed(field: Mapping[str, Any]) -> Iterator[str]:
    for one in field.get("anyOf", []):
        yield from _listed(one)
    yield from map(str, [*field.get("enum", []), *([field["const"]] if "const" in field else [])])
    if words := re.match(r"one of (.*?)(?:,? or |$)", field.get("words", "")):
        yield from words[1].split(", ")
    if field.get("type") == "boolean":
        yield from ("true", "false")
    if field.get("type") == "null":
        yield "null"


def complete_key(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from launcher.cli.main import COMMANDS

    found = {**dict.fromkeys(COMMANDS, ""), **_keys(sections=True)}
    return [CompletionItem(name, help=text) for name, text in found.items() if name.startswith(begun)]


def _keys(sections: bool) -> dict[str, str]:
    from launcher.recipe.meaning import meanings
    from launcher.recipe.problems import known_keys
    from megatron_rl.recipe.config import RunConfig

    found = known_keys(RunConfig.model_json_schema()).items()
    texts = meanings(RunConfig)
    return {
        ".".join(path): texts.get(path, "").replace("\n", " ")
        for path, field in found
        if sections or "properties" not in field
    }


def complete_run(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from launcher.errors import BadInput
    from launcher.runs.find import newest_first

    try:
        found = [CompletionItem(Path(entry.run_dir).name, help=entry.cluster) for entry in newest_first(begun)]
    except BadInput:  # the index cannot be read; complete directories only
        found = []
    return found or [CompletionItem(begun, type="dir")]
