"""Request of `mrl evaluate`, with defaults from the checkpoint's run, and the recipe of a job for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.host.code.git import GitError, dirty, work_tree
from launcher.plan.memory_terms import WEIGHT_BYTES
from launcher.plan.parameters import vocabulary, weights
from launcher.plan.summary import gpu_bytes
from launcher.recipe.load import Recipe, dump_resolved, read_resolved
from launcher.recipe.located_yaml import YamlProblems, read
from launcher.recipe.paths import NoPath, with_absolute_paths
from launcher.recipe.problems import validation_problems
from launcher.recipe.published import find_published
from launcher.recipe.written import RecipeFile, with_base
from megatron_rl.contract.paths import CARRIED, RunDir
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import MULTI_TASK, EnvironmentConfig
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.registry import asks_reward_model, environment_class, registered, with_kept_files

MAX_NEW_TOKENS = 512  # default limit of an answer's tokens for a checkpoint of no run

OPTIONS = {"sets": "--set", "checkpoint": "CHECKPOINT"}


@dataclass(frozen=True, slots=True)
class CheckpointRun:
    run: RunDir
    config: RunConfig


def origin_of(checkpoint: str) -> CheckpointRun | None:
    """Run whose directory or checkpoint a path is; None: it is neither. Raises BadInput."""
    path = Path(checkpoint).absolute()
    for root in (path, path.parent.parent):
        run = RunDir(root)
        if run.resolved.is_file() and (root == path or path.parent == run.checkpoints):
            return CheckpointRun(run, read_resolved(run.resolved))
    return None


def requested(
    origin: CheckpointRun | None,
    environment: str | None,
    environment_args: Sequence[str],
    sampling: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> Evaluation:
    """Complete an evaluation. Raises BadInput.

    Args:
        environment: name; None: the run's. The run's own environment keeps its arguments.
        environment_args: laid over these, see `parse_args`.
        sampling: given values, laid over the run's.
        asked: the other values of Evaluation.
    """
    config = origin.config if origin else None
    if environment is None and config is None:
        raise BadInput("--env is needed for a checkpoint that belongs to no run; `mrl environments` lists them")
    if environment is None and config is not None and not config.generates:
        raise BadInput("--env is needed for a run without an environment; `mrl environments` lists them")
    of_run = _environments_of(config, origin.run) if config and origin and config.generates else {}
    found = of_run.get(environment or "")
    given: dict[str, Any] = found.model_dump() if found else {"name": environment}
    given["args"] = {**given.get("args", {}), **parse_args(environment_args)}
    drawn: dict[str, Any] = config.sampling.model_dump() if config else {"max_new_tokens": MAX_NEW_TOKENS}
    values = {
        **asked,
        "code": code_version(given["name"]),
        "environment": given,
        "sampling": {**drawn, **sampling},
    }
    evaluation = _validated(Evaluation, values, _option)
    return evaluation.model_copy(update={"environment": checked_environment(evaluation.environment, "--env")})


def checked_environment(environment: EnvironmentConfig, option: str) -> EnvironmentConfig:
    """Return the environment with relative paths in its arguments resolved from the current directory. Raises BadInput:
    there is no such environment, or it has no such arguments. `option`: option that names the environment, for
    messages."""
    try:
        if asks_reward_model(environment):
            server = "name a server, such as --env-args 'reward_model={url: http://node:8000, model: m}'"
            if environment.name == MULTI_TASK:
                server = f"choose one of the environments by --env ID, and {server} for one that asks it"
            raise BadInput(
                f"{option}: environment {environment.name!r} asks the reward model that its run starts, and nothing "
                f"else does: {server}"
            )
        values = with_absolute_paths(environment.model_dump(), type(environment), lambda key, path: Path.cwd())
        return type(environment).model_validate(values)
    except NoPath as error:
        raise BadInput(f"--env-args {error}".replace("args.", "", 1)) from error
    except ValidationError as error:
        arguments = environment_class(environment.name).Config
        raise _refusal(error, arguments, lambda path: f"--env-args {'.'.join(path)}") from error
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from error


def _environments_of(config: RunConfig, run: RunDir) -> dict[str, EnvironmentConfig]:
    """Value of `--env` -> environment of a run: an id, a name, or "" for the whole task. Files of the user's code are
    the run's copies."""
    known = {
        one.id: EnvironmentConfig(**one.model_dump(include={*EnvironmentConfig.model_fields}))
        for one in config.environments or ()
    }
    found = {**known, config.task.name: config.task, "": config.task}
    try:
        return {name: with_kept_files(one, run) for name, one in found.items()}
    except ValueError as error:
        raise BadInput(str(error)) from error


def parse_args(texts: Sequence[str]) -> dict[str, Any]:
    """`dataset=chain_sum`, `dataset_args.max_terms=3`, or a whole mapping in YAML; later ones win. Raises BadInput."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        path = key.split(".") if equals and re.fullmatch(r"\w+(\.\w+)*", key) else []
        try:
            parsed = read(value if path else text).value
        except YamlProblems as error:
            raise BadInput(f"--env-args {text!r}: {error}") from error
        if path:
            for name in reversed(path):
                parsed = {name: parsed}
        if not isinstance(parsed, Mapping):
            raise BadInput(f"--env-args {text!r}: expected KEY=VALUE, for example seed=3, or a mapping in YAML")
        found = _laid_over(found, parsed)
    return found


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        merged[key] = _laid_over(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _option(path: tuple[str, ...]) -> str:
    if not path:  # a conflict between several values
        return "mrl evaluate"
    return OPTIONS.get(path[0], f"--{path[-1].replace('_', '-')}")


def _validated(kind: Any, values: Mapping[str, Any], name: Any) -> Any:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        assert issubclass(kind, BaseModel)
        raise _refusal(error, kind, name) from error


def _refusal(error: ValidationError, kind: type[BaseModel], name: Any) -> BadInput:
    return BadInput(validation_problems(error, kind, lambda path: (name(path), True)))


def code_version(environment: str) -> str:
    packages = {"megatron_rl", *(entry.module.partition(".")[0] for entry in registered(environment))}
    said = []
    for name in sorted(packages):
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        try:
            tree = work_tree(places[0]) if places else None
            if tree and tree.commit:
                said.append(f"{name} {tree.commit[:12]}{' with changes' if dirty(places[0]) else ''}")
        except GitError:
            continue  # it only documents the evaluation
    return ", ".join(said)


# The job


def job_recipe(evaluation: Evaluation, origin: CheckpointRun | None, cluster: str, caches: Sequence[Path]) -> Recipe:
    """Recipe of a job of one node that evaluates. Raises BadInput. `caches`: Hugging Face caches, which may hold the
    config.json of published weights."""
    device = {"device": evaluation.device}
    if origin:
        values = origin.config.model_dump()
        values["job"] |= device
        native = {"engine": "native", "vllm": None}
        values["inference"] |= native  # works in one process, also on a CPU
        if values["model"]["init"] == "supervised":  # the job needs no worked examples
            values["model"]["init"] = "from-scratch"
    else:
        carried = Path(evaluation.checkpoint) / CARRIED  # of converted weights, which have no config.json themselves
        folder = str(carried if carried.is_dir() else evaluation.checkpoint)
        values = {
            "model": {"init": "huggingface", "huggingface": folder, "dtype": evaluation.dtype or "bf16"},
            "tokenizer": {"type": "huggingface", "path": folder},
            "optimizer": {"learning_rate": 1e-6},
            "training": {"steps": 1},
            "job": device,
        }
    values["job"] |= {"nodes": 1, "gpus_per_node": evaluation.ranks, "spare_nodes": 0}
    values["training"] |= {"sequence_length": None}
    of = origin.run.root.name if origin else Path(evaluation.checkpoint).name
    values |= {
        "name": f"evaluate-{re.sub('[^A-Za-z0-9._-]', '-', of)}",
        "cluster": cluster,
        # The layout of the model; a job that only generates has no other setting for it.
        "placement": {"training": {"tp": evaluation.tp, "sequence_parallel": evaluation.tp > 1}},
        "grpo": {},
        **dict.fromkeys(("distill", "reward", "harvest", "profile")),
        "save": {},
        "logging": {},
        "environment": _without_algorithms(evaluation.environment),
        "environments": None,
        "sampling": evaluation.sampling.model_dump(),
    }
    published = find_published(values, caches, lambda path: (_option(path), True))
    if published:
        values["model"] |= published.missing(values["model"])
    config: RunConfig = _validated(RunConfig, values, _option)
    written = with_base(RecipeFile("mrl evaluate", dump_resolved(config), None))
    return Recipe("mrl evaluate", config, written, evaluation=evaluation)


def _without_algorithms(environment: EnvironmentConfig) -> dict[str, Any]:
    """Return an environment without the keys of `grpo` of those that it combines, which a recipe has elsewhere."""
    values = environment.model_dump()
    if environment.name == MULTI_TASK:
        members = values["args"]["environments"]
        values["args"]["environments"] = [{**one, "grpo": None} for one in members]
    return values


def refuse_ranks(asked: Evaluation, config: RunConfig, profile: Profile) -> None:
    """Raise BadInput where a node of the cluster is too small for an evaluation's job."""
    model = config.model
    if asked.ranks > profile.gpus_per_node:
        raise BadInput(
            f"--tp {asked.tp} --replicas {asked.replicas}: {asked.ranks} ranks are more than the "
            f"{profile.gpus_per_node} GPUs of a node, and an evaluation has one node"
        )
    if undivided := next(model.undivided(asked.tp), None):
        raise BadInput(f"--{undivided}")
    held = WEIGHT_BYTES[asked.dtype or model.dtype] * weights(model.trunk, vocabulary(config) or 0, asked.tp).all
    if (limit := gpu_bytes(config, profile)) is not None and held > limit:
        raise BadInput(
            f"--tp {asked.tp}: {held / 2**30:.0f} GiB of weights do not fit in a GPU's {limit / 2**30:.0f} GiB; a "
            "larger --tp shares them out"
        )
