"""A policy outside a run: found by a path, given its weights in this one process, and an engine that answers by it.

with open_policy("runs/mine") as opened:
    opened.engine, opened.tokenizer, opened.model, opened.source
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_rl.checkpoint.hf.load import load_pretrained
from megatron_rl.checkpoint.hf.origin import origin_of
from megatron_rl.checkpoint.hf.to_megatron import CARRIED, check_tokenizer
from megatron_rl.checkpoint.load import read, verify
from megatron_rl.checkpoint.publish import MANIFEST, CheckpointError, find_latest, read_manifest
from megatron_rl.checkpoint.replicas import sharded_weights
from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.paths import RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.inference.engine import Engine
from megatron_rl.model.config import ModelConfig, TokenizerConfig
from megatron_rl.model.hf_config import CONFIG_FILE, read_hf_config, shape
from megatron_rl.model.hub import local_folder
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.alone import alone
from megatron_rl.rank.groups import Groups

logger = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
MOST_POSITIONS = 4096
"""Longest prompt and answer, in tokens, of a model that knows more positions, unless more is asked for: the cache has
room for as many in each row."""
ROWS = 32
"""Answers at once, where neither a recipe nor the caller says how many."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a path was found to be."""

    name: str
    """Of the run, or of the directory, or on the hub."""
    kind: Literal["checkpoint", "huggingface"]
    folder: Path
    """Of the checkpoint, or of the published weights."""
    step: int | None
    """Of a run's checkpoint; None: the weights are of no run."""
    recipe: RunConfig | None
    """The run's."""
    model: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy and what answers by it."""

    engine: Engine
    source: Source
    digest: str
    """Of the weights: two paths with the same one hold the same."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.source.model


@contextmanager
def open_policy(
    path: str,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    dtype: Precision | None = None,
    max_length: int | None = None,
    inference: InferenceConfig | None = None,
) -> Iterator[OpenedPolicy]:
    """Load the policy that a path names, whole, into this process, which must have no process groups yet.

    Args:
        path: see `find_source`.
        threads: default: a thread for each processor that this process may use.
        dtype: default: the recipe's, or that of the published weights.
        max_length: of a prompt and its answer together, in tokens; default: the recipe's, or all positions of the
            model up to MOST_POSITIONS.
        inference: default: the recipe's, or ROWS answers at once.

    Raises:
        ConfigurationError: the path names nothing that can be used, or it cannot be used here.
        CheckpointError: the checkpoint is damaged or cannot be read.
    """
    source = find_source(path, dtype)
    recipe, positions = source.recipe, source.model.max_position_embeddings
    max_length = max_length or (recipe.sequence_length if recipe else min(positions, MOST_POSITIONS))
    if max_length > positions:
        raise ConfigurationError(f"{path}: the model knows {positions} positions, and not the {max_length} asked for")
    inference = inference or (recipe.inference if recipe else InferenceConfig(max_batch=ROWS))
    with alone(device, threads or len(os.sched_getaffinity(0))) as platform:
        policy, digest, version = load_policy(source, platform, Groups.from_megatron(COLLECTIVE_TIMEOUT))
        tokenizer = source.tokenizer
        engine = Engine(policy, source.model, inference, tokenizer.end_ids, max_length, decode=tokenizer.decode)
        engine.policy_version = version
        yield OpenedPolicy(engine, source, digest)


def find_source(path: str, dtype: Precision | None = None) -> Source:
    """What a path names: a run directory (its newest published checkpoint), a checkpoint, a directory of Hugging Face
    weights, the name of one in the cache of the hub, or `package:NAME`. Reads no weights.

    Raises ConfigurationError.
    """
    folder = Path(path)
    try:
        if RunDir(folder).resolved.is_file():
            return _of_run(RunDir(folder.absolute()), dtype, _newest(RunDir(folder)))
        if (folder / MANIFEST).is_file():
            return _of_checkpoint(folder.absolute(), dtype)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be looked into: {error.strerror or error}") from error
    return _published(path, dtype)


def _newest(run: RunDir) -> int:
    found = find_latest(run)
    if found.step is not None:
        for line in found.passed_over:
            logger.warning(line)
        return found.step
    if found.passed_over:
        raise ConfigurationError(f"{run.root} has no good checkpoint: {'; '.join(found.passed_over)}")
    raise ConfigurationError(f"{run.root} has no checkpoint yet; `mrl status {run.root}` says what the run does")


def _of_run(run: RunDir, dtype: Precision | None, step: int) -> Source:
    try:
        recipe = read_config(run)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{run.resolved} cannot be read: {error}") from error
    model = recipe.model.model_copy(update={"dtype": dtype or recipe.model.dtype})
    tokenizer = _tokenizer(recipe.tokenizer)
    return Source(run.root.name, "checkpoint", run.checkpoint(step), step, recipe, model, tokenizer)


def _of_checkpoint(folder: Path, dtype: Precision | None) -> Source:
    carried = folder / CARRIED
    if not carried.is_dir():
        run = RunDir(folder.parent.parent)
        if folder.parent != run.checkpoints or not run.resolved.is_file():
            origin_of(folder)  # raises, and says what it would have to be
        return _of_run(run, dtype, _manifest_step(folder))
    precision = dtype or read_hf_config(carried).precision
    model = origin_of(folder).model.model_copy(update={"dtype": precision})
    return Source(folder.name, "checkpoint", folder, None, None, model, _tokenizer(TokenizerConfig(path=str(carried))))


def _manifest_step(folder: Path) -> int:
    try:
        return read_manifest(folder).step
    except CheckpointError as error:
        raise ConfigurationError(str(error)) from error


def _published(path: str, dtype: Precision | None) -> Source:
    folder = Path(path)
    if folder.is_dir() and not (folder / CONFIG_FILE).exists():
        raise ConfigurationError(
            f"{path} is neither a run directory (resolved.yaml), nor a checkpoint ({MANIFEST}), nor a directory of "
            f"Hugging Face weights ({CONFIG_FILE})"
        )
    try:
        folder = local_folder(path, "PATH", CONFIG_FILE)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    config = read_hf_config(folder)
    check_tokenizer(folder, config.vocab_size)
    of_config: dict[str, Any] = shape(config)
    model = ModelConfig(
        **of_config, init="huggingface", huggingface=str(folder.absolute()), dtype=dtype or config.precision
    )
    name = path if not Path(path).is_dir() else folder.absolute().name
    return Source(
        name, "huggingface", folder, None, None, model, _tokenizer(TokenizerConfig(path=str(folder.absolute())))
    )


def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    try:
        return build_tokenizer(config)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def load_policy(source: Source, platform: Platform, groups: Groups) -> tuple[Policy, str, int]:
    """The policy, whole, with the weights of its source; the digest of these; the number of optimizer steps behind
    them. groups: of one rank.

    Raises UnusableWeights or CheckpointError.
    """
    policy = build_policy(source.model, source.tokenizer.vocab_size, platform, initialize=False)
    policy.requires_grad_(False).eval()
    if source.kind == "huggingface":
        return policy, load_pretrained(policy, source.model, source.folder), 0
    checkpoint = verify(source.folder, groups.control)
    weights = sharded_weights(policy, groups.data_context, groups.expert_data)
    state, meta = read(checkpoint, {"model": weights}, groups.data_context, groups.expert_data)
    policy.load_state_dict(state["model"])
    return policy, checkpoint.manifest.digest, int(meta.get("policy_version", 0))
