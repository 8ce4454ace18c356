"""Sources of the values of a recipe, in a few lines for a dry run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from launcher.cluster.profile import Profile
from launcher.recipe.load import Recipe, origins

WIDTH = 118


def origin_lines(recipe: Recipe, cluster: str, profile: Profile | None) -> list[str]:
    """A line for each source: `mine.yaml  name, model.huggingface, grpo.{prompts_per_step, global_batch}`.

    A section stands for all of its keys that are given, where they have one source. The lowest base has the rest.
    """
    found = {key: origin.source for key, origin in origins(recipe).items()}
    found |= dict.fromkeys(_of_profile(recipe, profile), f"cluster {cluster}")
    names = [file.name for file in recipe.written.files]
    lowest = names[1:][-1:]
    rows = {source: ", ".join(_braced(_shortened(source, found))) for source in ("override", *names)}
    rows |= {source: "the shape of the model" for key, source in recipe.filled.items() if key.startswith("model.")}
    rows |= {f"cluster {cluster}": ", ".join(_braced(_shortened(f"cluster {cluster}", found)))}
    for base in lowest:
        sections = dict.fromkeys(key.partition(".")[0] for key, source in found.items() if source == base)
        del rows[base]
        rows[base] = f"all other keys of {', '.join(sections)} that a file gives"
    rows["default"] = "all other keys"
    width = max(len(source) for source, keys in rows.items() if keys)
    lines = ["values from"]
    for source, keys in rows.items():
        head = f"  {source:<{width}}  "
        lines += textwrap.wrap(keys, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _of_profile(recipe: Recipe, profile: Profile | None) -> Iterator[str]:
    if profile and profile.time_limit and recipe.config.job.time_limit is None:
        yield "job.time_limit"
    if profile and profile.container and recipe.config.image.reference is None:
        yield "image.reference"


def _shortened(source: str, found: Mapping[str, str]) -> list[str]:
    """Keys of a source; where it gives all of a section, the section."""
    short: dict[str, None] = {}
    for key in (key for key, its in found.items() if its == source):
        parts = key.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts))]
        whole = (
            prefix
            for prefix in prefixes
            if all(its == source for other, its in found.items() if other.startswith(f"{prefix}."))
        )
        short[next(whole, key)] = None
    return list(short)


def _braced(keys: list[str]) -> list[str]:
    """`grpo.{prompts_per_step, global_batch}` for keys of one section."""
    by_section: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        by_section.setdefault(section or name, []).append(name if section else "")
    return [
        section
        if names == [""]
        else f"{section}.{names[0]}"
        if len(names) == 1
        else f"{section}.{{{', '.join(names)}}}"
        for section, names in by_section.items()
    ]
