"""Check of what a recipe teaches, before anything starts: the first rows of its data, its prompts, and the user's
reward, loss and baseline functions, as the copies that the run will have. A child process with the code of the ranks
does it while the submission is prepared."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from launcher.backends.child import ModuleProcess, TookTooLong
from launcher.cluster.profile import Profile
from launcher.doctor.node_files import as_seen_here
from launcher.doctor.preflight import unreadable
from launcher.fetch.needs import Cache, Need
from launcher.job.admission import has_work, with_date
from launcher.job.kept_files import keep_files, own_files
from launcher.recipe.load import Recipe
from launcher.recipe.paths import named_paths
from launcher.recipe.problems import where_named
from megatron_rl.contract.codes import EXIT_FINISHED
from megatron_rl.contract.owned_folders import owned_folder
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import KeptFiles
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.hub import is_hub_name, is_prefetched, package_of
from megatron_rl.recipe.registry import environment_class, required_datasets
from megatron_rl.recipe.requests import RowsRequest

LIMIT_S = 30.0  # seconds that the check may take; then the first rank has the last word
READ = ("code", "curriculum", "data", "environment", "environments", "tokenizer")
TEACHING = (
    *((section,) for section in READ if section != "curriculum"),
    ("curriculum", "start"),
    ("evaluation", "sets"),
    ("grpo", "policy_loss"),
    ("grpo", "baseline"),
    ("model", "init"),
    ("model", "max_position_embeddings"),
    ("sampling", "max_new_tokens"),
    ("training", "objective"),
    ("training", "sequence_length"),
)
LATER = "rank 0 checks it before the run trains"


@dataclass(frozen=True, slots=True)
class LessonVerdict:
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about faults that are uncertain, what the run would warn of, and what could not be checked here."""

    def of(self, recipe: Recipe) -> LessonVerdict:
        return LessonVerdict(
            tuple(_placed(_with_key(problem, recipe), recipe) for problem in self.problems), self.notes
        )


_verdicts: dict[str, LessonVerdict] = {}
"""Results by what was checked. The check takes seconds, and 20 runs of a sweep may have equal data and functions: the
first starts a child, the others find its verdict by `_key`, which covers all that the child reads, and nothing else. A
verdict is kept without places, because the same fault may stand in line 7 of one recipe and in an override of the next;
`of` adds them."""


class LessonCheck:
    def __init__(
        self,
        recipe: Recipe,
        profile: Profile | None = None,
        *,
        included: Sequence[Path] = (),
        run: RunDir | None = None,
        change: bool = False,
    ) -> None:
        """
        Args:
            profile: cluster of the run; None: this machine.
            included: directories of `code.include`, from which the ranks import.
            run: run that is to be started or resumed, which may have copies of the user's code; None: a new one.
            change: whether it is to take the present files.
        """
        self._recipe = recipe if run is None else with_date(recipe, run)
        self._profile, self._included, self._run, self._change = profile, included, run, change
        self._stack = ExitStack()
        self._child: ModuleProcess | None = None
        self._copied: RunDir | None = None
        self._key = ""
        self._missing = absent(recipe.config, profile)
        self._why = why_not_here(recipe.config, profile)

    def __enter__(self) -> LessonCheck:
        """Start it. Raises Failed where the process cannot be started, BadInput for code that cannot be read."""
        config = self._recipe.config
        if _is_shipped(self._recipe) or self._why is not None or not _all_there(config, self._profile):
            return self
        with ExitStack() as stack:
            self._copied = self._copies(stack)
            self._key = _key(config, self._copied, self._included)
            if self._key not in _verdicts:
                resumes = self._run is not None and bool(self._run.checkpoint_steps())
                request = request_of(self._recipe, self._profile, purpose="check", copies=self._copied, resumes=resumes)
                self._began = monotonic()
                self._child = stack.enter_context(rows_child(self._profile, self._included))
                self._child.send(request.model_dump_json())
                self._child.end_input()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _copies(self, stack: ExitStack) -> RunDir | None:
        """Copy the user's code as the run will have it; None if there is none."""
        if not own_files(self._recipe.config):
            return None
        copies = RunDir(stack.enter_context(owned_folder("copies")))
        source = self._run if self._run is not None and has_work(self._run) else None
        keep_files(copies, self._recipe, renew=self._change or source is None, source=source)
        return copies

    def verdict(self) -> LessonVerdict:
        if self._child is not None:
            _verdicts[self._key] = self._wait(self._child)
        if known := _verdicts.get(self._key):
            return known.of(self._recipe)
        reported = self._missing and not any(need.package for need in self._missing)  # as missing files
        return LessonVerdict(notes=(self._why,) if self._why and not reported else ())

    def _wait(self, child: ModuleProcess) -> LessonVerdict:
        """Return the result, whose problems have no places yet."""
        try:
            said = [*child.said(LIMIT_S - (monotonic() - self._began))]
            code = child.wait()
        except TookTooLong:
            return LessonVerdict(notes=(f"the check of the first rows took more than {LIMIT_S:g} s here; {LATER}",))
        if code != EXIT_FINISHED:
            why = "; ".join(child.failure(code).problems)
            return LessonVerdict(notes=(f"the first rows could not be checked here: {why}; {LATER}",))
        elsewhere = self._profile is not None and bool(self._profile.container or self._profile.python)
        warnings = tuple(f"the first rows: {one['warning']}" for one in said if "warning" in one)
        found = [one for one in said if "warning" not in one]
        unsure = [one for one in found if not one["certain"] or (elsewhere and one.get("lacks") is not None)]
        faults = tuple(_with_originals(one["fault"], self._copied) for one in found if one not in unsure)
        notes = tuple(f"could not be checked here: {one['fault']}; {LATER}" for one in unsure)
        return LessonVerdict(faults, warnings + notes)


def _is_shipped(recipe: Recipe) -> bool:
    """Whether a recipe teaches what a shipped one teaches, which tests of mrl have checked: all keys that matter are of
    shipped files, and none names a file or data set."""
    config, written = recipe.config, recipe.written
    keys = [key for key, (file, _) in written.places.items() if file.folder is not None]
    keys += [override.path for override in written.overrides]
    matters = any(key[: len(section)] == section[: len(key)] for key in keys for section in TEACHING)
    outside = [one for one in named_paths(config) if one.key[0] in READ]
    return not (matters or outside or own_files(config) or [*_read_from_caches(config)])


def _with_key(problem: str, recipe: Recipe) -> str:
    """Return a fault that begins with the key whose file it names, so that its place is that of the key."""
    for named in named_paths(recipe.config):
        key = ".".join(named.key)
        if named.key[0] in READ and named.value in problem and key not in problem:
            return f"{key}: {problem}"
    return problem


def _placed(problem: str, recipe: Recipe) -> str:
    """Return a fault behind the place of the key that it begins with, whatever words of data or code follow. Without
    such a key, it is the place of a key that it names."""
    key, _, _ = problem.partition(": ")
    named = key if key.partition(".")[0] in RunConfig.model_fields else problem
    return f"{where_named(named, recipe.written.locate)}: {problem}"


def _with_originals(fault: str, copies: RunDir | None) -> str:
    """Return a fault that names the user's files instead of their copies, which are gone when it is read."""
    if copies is None:
        return fault
    record = if_readable(read(KeptFiles, copies.kept_files_record))
    for one in record.files if record else ():
        fault = fault.replace(str(copies.kept_files / one.name), one.path)
    return fault


def _key(config: RunConfig, copies: RunDir | None, included: Sequence[Path]) -> str:
    sections = config.model_dump(mode="json", include={*READ})
    own = config.grpo.model_dump(mode="json") if config.grpo.own_functions else None
    code = copies.kept_files_record.read_text(encoding="utf-8") if copies else None
    sizes = [config.sequence_length, config.sampling.max_new_tokens, config.training.objective, config.model.init]
    if config.rows.counted:
        sizes.append(config.training.steps)
    return json.dumps([sections, own, code, sizes, sorted(config.evaluation.sets), *map(str, included)])


def rows_child(profile: Profile | None, included: Sequence[Path]) -> ModuleProcess:
    path = os.pathsep.join([*map(str, included), *filter(None, [os.environ.get("PYTHONPATH")])])
    home = {"HF_HOME": str(Cache.of(profile).huggingface)}
    return ModuleProcess("megatron_rl.run.standalone.rows", environ={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **home})


def request_of(recipe: Recipe, profile: Profile | None, **more: Any) -> RowsRequest:
    """Request to the process, with paths as this machine sees them. `more`: further fields; `copies` as a RunDir."""
    copies: RunDir | None = more.pop("copies", None)
    values = as_seen_here(recipe.config, profile).model_dump(mode="json")
    return RowsRequest(recipe=values, copies=str(copies.root) if copies else None, **more)


def why_not_here(config: RunConfig, profile: Profile | None) -> str | None:
    """Return why the rows of a recipe cannot be read on this machine; None: as far as is known they can."""
    for one in [config.environment] if config.environment else config.environments or ():
        if environment_class(one.name).slow_to_build:
            return f"the problems of environment {one.name!r} take long to list, so they are not read here; {LATER}"
    if missing := absent(config, profile):
        return f"the first rows are not read here without {', '.join(map(str, missing))}; {LATER}"
    return None


def absent(config: RunConfig, profile: Profile | None) -> list[Need]:
    """Items of the hub or of packages without which no row can be read here."""
    cache = Cache.of(profile)
    return [need for need in _read_from_caches(config) if not cache.holds(need)]


def _read_from_caches(config: RunConfig) -> Iterator[Need]:
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    if path and is_prefetched(path):
        yield Need("model" if package_of(path) or path == config.model.huggingface else "tokenizer", path)
    sets = [path for path in config.data.paths if is_hub_name(path)] if config.data else []
    yield from (
        Need("dataset", name) for name in [*sets, *(required_datasets(config.task) if config.generates else [])]
    )


def _all_there(config: RunConfig, profile: Profile | None) -> bool:
    """Whether each file that the recipe reads is here. The check of files reports those that are not."""
    here = [one for one in named_paths(as_seen_here(config, profile)) if one.key[0] in READ]
    return not any(one.mark.read and one.path is not None and unreadable(one.path) for one in here)
