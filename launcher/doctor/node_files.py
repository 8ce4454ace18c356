"""Whether the nodes of a cluster, and the containers on them, see the files that a recipe names.

Nodes are assumed to see a path unless this machine knows better: the path lies in a directory that every machine has
for itself, or on a local disk while `run_root` is on a network file system.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from launcher.backends.probe.disk import file_system, spans_machines
from launcher.cluster.profile import Profile
from launcher.doctor.finding import DoctorFinding, error
from launcher.doctor.preflight import file_error, missing_packages, packages, vllm_of
from launcher.doctor.vllm_python import vllm_findings
from launcher.recipe.load import Recipe, place_of
from launcher.recipe.paths import NamedPath, named_paths, read_paths, with_changed_paths
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.config import RunConfig

OF_ONE_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
OF_THE_KERNEL = ("/dev", "/proc", "/sys")


def on_nodes(recipe: Recipe, profile: Profile, resumes: bool = False) -> list[DoctorFinding]:
    """Return findings about what the ranks will lack on the nodes, as far as this machine can see: files, and packages
    if they run without a container. A run that resumes has its own checkpoint."""
    found = list(_unseen(recipe, profile, resumes))
    if profile.container is None and profile.python is None and (absent := missing_packages(recipe.config)).names:
        finding = packages(absent)
        found.append(replace(finding, text=f"{finding.text}; the ranks use this Python, {sys.executable}"))
    for kind, facts, refused in vllm_of(recipe.config, profile) if profile.container is None else ():
        vllm = recipe.config.started_vllms[kind]
        found += [*vllm_findings(facts, recipe.config.job.device, vllm, kind), *refused]
    return found


def run_directory(run_dir: Path, profile: Profile) -> Iterator[DoctorFinding]:
    if why := _of_one_machine(run_dir, Path(profile.run_root)):
        fix = f"give one below run_root, {profile.run_root}, or on another file system that all nodes see"
        yield error("run directory", f"--run-dir {run_dir}: {why}, and the nodes do not see it", fix)


def _unseen(recipe: Recipe, profile: Profile, resumes: bool) -> Iterator[DoctorFinding]:
    read = [*read_paths(recipe.config, resumes), *(one for one in _of_evaluation(recipe) if one.mark.read)]
    shared = f"put it below run_root, {profile.run_root}, or on another file system that all nodes see"
    for named in _of_nodes(recipe):
        path, key = named.path, ".".join(named.key)
        assert path is not None
        where = f"{place_of(recipe, key)}: {key}: {path}"
        on_host = _source_of(path, profile)
        if named in read and (found := file_error(recipe, named, on_host)):
            yield found
        elif (named in read or key == "out") and (why := _of_one_machine(on_host, Path(profile.run_root))):
            yield error("files", f"{where}: {why}, and the nodes do not see it", shared)
        elif profile.container is not None and {",", ":"} & {*str(path)}:
            yield error(
                "files", f"{where}: a path with a comma or a colon cannot be mounted in the container", "rename it"
            )


def _of_nodes(recipe: Recipe) -> list[NamedPath]:
    """Paths that processes on the nodes read or write: not the image, which the host side fetches, programs, which may
    be those of an image, or code, which is copied into the run directory."""
    return [
        one
        for one in [*named_paths(recipe.config), *_of_evaluation(recipe)]
        if one.path is not None and one.mark.kind not in ("image", "program", "code") and one.key[0] != "code"
    ]


def _of_evaluation(recipe: Recipe) -> list[NamedPath]:
    asked = named_paths(recipe.evaluation) if recipe.evaluation else []
    return [one for one in asked if one.key in (("checkpoint",), ("out",))]


def as_seen_here(config: RunConfig, profile: Profile | None) -> RunConfig:
    if profile is None or not _mounts_of(profile):
        return config

    def here(named: NamedPath) -> str:
        if named.path is None or named.mark.kind in ("image", "program", "code"):
            return named.value
        return str(_source_of(named.path, profile))

    return with_changed_paths(config, here)


def _source_of(path: Path, profile: Profile) -> Path:
    for source, target in _mounts_of(profile):
        if path.is_relative_to(target):
            return source / path.relative_to(target)
    return path


def _mounts_of(profile: Profile) -> list[tuple[Path, Path]]:
    mounts = profile.container.mounts if profile.container else []
    return [(Path(source), Path(target)) for source, target in (mount.split(":")[:2] for mount in mounts)]


def _of_one_machine(path: Path, run_root: Path) -> str | None:
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(run_root))
    for folder in OF_ONE_MACHINE:
        if real.is_relative_to(folder) and not root.is_relative_to(folder):
            return f"{folder} is local to each machine"
    kind, kind_of_root = (file_system(_existing(path)) for path in (real, root))
    if spans_machines(kind) is False and spans_machines(kind_of_root):
        return f"its file system ({kind}) is local to this machine"
    return None


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def to_mount(recipe: Recipe, profile: Profile, run_dir: Path) -> tuple[Path, ...]:
    """Paths to mount into the container beside `container.mounts`, each under its own name: the run root, the run
    directory, and paths that the recipe names elsewhere, with the targets of links. Of nested paths only the
    outermost."""
    if profile.container is None:
        return ()
    targets = [target for _, target in _mounts_of(profile)]
    mounted = [*targets, *map(Path, OF_THE_KERNEL)]
    found = [Path(profile.run_root), run_dir]
    for named in _of_nodes(recipe):
        assert named.path is not None
        if not any(named.path.is_relative_to(target) for target in mounted):
            found += _with_targets(_whole(named))
    paths = [path for path in dict.fromkeys(found) if path != Path("/")]
    return tuple(path for path in paths if not any(path.is_relative_to(one) for one in paths if one != path))


def _whole(named: NamedPath) -> Path:
    """Return the path to mount for a named one: for a run's checkpoint the run, for a future file its folder."""
    path = named.path
    assert path is not None
    run = path.parent.parent
    if path.parent == RunDir(run).checkpoints and RunDir(run).resolved.is_file():
        return run
    return path if path.exists() else _existing(path)


def _with_targets(path: Path) -> list[Path]:
    """Return a path and the targets of its links, or of those in it: files of the hub's cache are links."""
    found = [path]
    if (real := Path(os.path.realpath(path))) != path:
        found.append(real)
    try:
        inside = list(path.iterdir()) if path.is_dir() else []
    except OSError:
        inside = []
    targets = {Path(os.path.realpath(one)).parent for one in inside if one.is_symlink()}
    return [*found, *sorted(target for target in targets if not target.is_relative_to(path))]
