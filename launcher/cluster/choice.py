"""Cluster profiles, and the choice of the one for a run.

The user's profiles are in ~/.config/mrl/clusters.yaml (or where MRL_CLUSTERS points), in addition to shipped ones:

default: lab clusters: lab: {partition: gpu, gpus_per_node: 8, container: null, run_root: /lustre/$USER/mrl}

`clusters:` may be left out: then every key except `default` is a profile.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.host.image.reference import is_path
from launcher.recipe.located_yaml import locator, read_mapping, read_text
from launcher.recipe.problems import KeyPath, Locate, validation_problems

LOCAL = "local"
"""This machine, without Slurm; not a profile."""

SHIPPED = Path(__file__).with_name("shipped")

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


@dataclass(frozen=True, slots=True)
class Clusters:
    file: str
    default: str | None
    own: Mapping[str, Profile]
    """The user's profiles as written; `profile` expands variables."""
    shipped: tuple[str, ...]
    environ: Mapping[str, str]
    _locate: Locate

    def names(self) -> list[str]:
        return [*sorted({*self.own, *self.shipped}), LOCAL]

    def choose(self, cli: str | None, recipe_cluster: str | None) -> str:
        """Name of the cluster, from the first of: --cluster, MRL_CLUSTER, `cluster` of the recipe, `default:` of the
        file, the only profile in it, `local`. Raises BadInput."""
        asked = (
            ("--cluster", cli),
            ("MRL_CLUSTER", self.environ.get("MRL_CLUSTER")),
            ("the recipe's cluster", recipe_cluster),
            ("default", self.default),
        )
        for source, name in asked:
            if name:
                self._check(source, name)
                return name
        return next(iter(self.own)) if len(self.own) == 1 else LOCAL

    def choose_profile(self, cli: str | None, recipe_cluster: str | None) -> tuple[str, Profile | None]:
        """Name of the cluster (`choose`) and its profile; None for this machine. Raises BadInput."""
        name = self.choose(cli, recipe_cluster)
        return name, None if name == LOCAL else self.profile(name)

    def profile(self, name: str) -> Profile:
        """Profile called `name`, the user's own before a shipped one, with paths expanded. Raises BadInput."""
        self._check("cluster", name)
        if name in self.own:
            return _expanded(
                self.own[name], self.environ, lambda path: self._locate((name, *path)), Path(self.file).parent
            )
        file = f"{name}.yaml"
        document = read_mapping(file, (SHIPPED / file).read_text(encoding="utf-8"), "keys")
        return _expanded(Profile.model_validate(document.value), self.environ, locator(file, document), SHIPPED)

    def _check(self, source: str, name: str) -> None:
        names = self.names()
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}? There are" if close else "there are"
            where = f"{self._locate(('default',))[0]}: default" if source == "default" else source
            raise BadInput(f"{where}: no cluster is called {name!r}; {hint} {', '.join(names)} (yours: {self.file})")


def load_clusters(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Clusters:
    """Read the user's profiles: $MRL_CLUSTERS, else clusters.yaml in $XDG_CONFIG_HOME/mrl or ~/.config/mrl. Without a
    file there are only the shipped ones and `local`. Raises BadInput with every problem, each with its line."""
    asked = path or (Path(environ["MRL_CLUSTERS"]) if environ.get("MRL_CLUSTERS") else None)
    config_home = Path(environ.get("XDG_CONFIG_HOME") or _home(environ) + "/.config")
    file = asked or config_home / "mrl" / "clusters.yaml"
    shipped = tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    try:
        there = asked is not None or file.exists()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}; MRL_CLUSTERS names another file") from error
    if not there:
        return Clusters(str(file), None, {}, shipped, environ, lambda path: (str(file), False))
    text = read_text(file)
    if file.stat().st_mode & stat.S_IWOTH:
        raise BadInput(f"{file}: all users can write it, and its commands and images run as you: run chmod o-w on it")
    document = read_mapping(str(file), text, "cluster profiles, such as lab: {partition: gpu, ...}")
    locate = locator(str(file), document)
    nested = "clusters" in document.value
    prefix = ("clusters",) if nested else ()
    default, profiles, problems = _split(document.value, nested, locate)
    own = {}
    for name, values in profiles.items():
        try:
            own[name] = Profile.model_validate(values)
        except ValidationError as error:
            problems += validation_problems(error, Profile, locate, prefix=(*prefix, name))
    if problems:
        raise BadInput(problems)

    def place(path: KeyPath) -> tuple[str, bool]:
        return locate(path if path == ("default",) else (*prefix, *path))

    clusters = Clusters(str(file), default, own, shipped, environ, place)
    if default is not None:
        clusters._check("default", default)
    return clusters


def _split(values: Mapping[str, Any], nested: bool, locate: Locate) -> tuple[str | None, dict[str, Any], list[str]]:
    problems = []
    default = values.get("default")
    if default is not None and not isinstance(default, str):
        problems.append(f"{locate(('default',))[0]}: default: expected the name of a cluster, got {default!r}")
        default = None
    rest = {name: value for name, value in values.items() if name != "default"}
    profiles = rest.pop("clusters") if nested else rest
    if nested and rest:
        problems += [
            f"{locate((name,))[0]}: {name}: unknown key beside clusters: and default: (a profile goes below clusters:)"
            for name in rest
        ]
    if not isinstance(profiles, dict):
        problems.append(f"{locate(('clusters',))[0]}: clusters: expected a mapping of names to profiles")
        profiles = {}
    for name in profiles:
        where = locate(("clusters", name) if nested else (name,))[0]
        if name == LOCAL:
            problems.append(f"{where}: {LOCAL}: always means this machine without Slurm; give the profile another name")
        elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            problems.append(f"{where}: {name!r}: names are letters, digits, dot, dash and underscore")
    return default, profiles, problems


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Replace a leading ~ and every $NAME and ${NAME} in `text`; anything else, such as $(...), is literal. Raises
    KeyError with the name of a variable that is not set."""
    if text == "~" or text.startswith("~/"):
        text = _home(environ) + text[1:]
    return _VARIABLE.sub(lambda found: environ[found[1] or found[2]], text)


def _expanded(profile: Profile, environ: Mapping[str, str], locate: Locate, folder: Path) -> Profile:
    """Expand the paths of a profile; relative ones begin at `folder`. Raises BadInput with every problem."""
    problems = []

    def expanded(text: str, *path: str) -> str:
        try:
            return expand(text, environ)
        except KeyError as unset:
            problems.append(
                f"{locate(path)[0]}: {'.'.join(path)}: {text}: the variable {unset.args[0]} is not set in your shell"
            )
            return text

    run_root = expanded(profile.run_root, "run_root")
    if not problems and not re.fullmatch(r"/[^\x00-\x1f\x7f]*", run_root):
        problems.append(
            f"{locate(('run_root',))[0]}: run_root: expected an absolute path on one line, got {run_root!r}"
        )
    changed: dict[str, Any] = {"run_root": run_root}
    if profile.container is not None:
        image, mounts = profile.container.image, profile.container.mounts
        container: dict[str, Any] = {
            "mounts": [expanded(mount, "container", "mounts", str(i)) for i, mount in enumerate(mounts)]
        }
        problems += [
            f"{locate(('container', 'mounts', str(i)))[0]}: container.mounts: enroot takes no white space: {mount!r}; "
            "mount a link without any, or choose another directory"
            for i, mount in enumerate(container["mounts"])
            if re.search(r"\s", mount)
        ]
        # A reference may contain a literal dollar sign: $oauthtoken@nvcr.io#nvidia/pytorch.
        if re.match(r"~?/|\$(\w+|\{\w+\})/", image):
            container["image"] = expanded(image, "container", "image")
        elif is_path(image):
            container["image"] = str((folder / image).absolute())
        changed["container"] = profile.container.model_copy(update=container)
    if problems:
        raise BadInput(problems)
    return profile.model_copy(update=changed)


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or str(Path.home())
