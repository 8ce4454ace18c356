"""Teaching a tiny base model the answer format before RL (`model.init: supervised`).

A fixed number of steps with its own seed on the environment's worked examples. Every rank does the same work
without communication, so the result does not depend on how many there are, and it is cached under everything it
depends on: cached or not, the run starts from the same bits.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import os
import pickle
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.algorithms.packing import microbatches
from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import Completion
from megatron_rl.model.config import SupervisedConfig
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.safe_points import SafePoints

logger = logging.getLogger(__name__)


class NoDemonstrations(ConfigurationError):
    """The environment has no worked examples to learn from."""


def teach(
    policy: Policy,
    config: RunConfig,
    environment: object,
    tokenizer: Tokenizer,
    platform: Platform,
    safe_points: SafePoints,
    *,
    writer: bool,
) -> None:
    """Give `policy` the taught weights, from the cache where they are in it.

    policy: with the random weights of seed `model.supervised.seed`.
    writer: whether this rank puts the result into the cache.

    Where this rank is asked to leave meanwhile it returns with weights that are of no use.

    Raises NoDemonstrations.
    """
    if not isinstance(environment, Demonstrator):
        raise NoDemonstrations(
            f"model.init is supervised but environment {config.environment.name!r} has no worked examples "
            "(megatron_rl.agent.api.Demonstrator)"
        )
    path = cache_path(config)
    state = _read(path)
    if state is None:
        examples = [as_trajectory(prompt, answer, tokenizer) for prompt, answer in environment.demonstrations()]
        _train(policy, examples, config.model.supervised, platform, safe_points)
        if writer and not safe_points.poll():
            _write(path, policy)
    else:
        logger.info("base model taken from %s", path)
        policy.load_state_dict(state, strict=False)


def as_trajectory(prompt: str, answer: str, tokenizer: Tokenizer) -> Trajectory:
    """A worked example in the form that packing takes."""
    tokens = [*tokenizer.encode(answer), tokenizer.eos_id]
    completion = Completion(tokens, [0.0] * len(tokens), "stop", policy_version=0)
    return Trajectory.single(tokenizer.encode(prompt), completion, answer, 1.0)


def _train(
    policy: Policy,
    examples: Sequence[Trajectory],
    config: SupervisedConfig,
    platform: Platform,
    safe_points: SafePoints,
) -> None:
    adam = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    targets = torch.tensor(
        [token for example in examples for token in example.tokens[example.prompt_length :]], device=platform.device
    )
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        if safe_points.poll():
            return
        chosen = torch.randint(len(examples), (config.batch_size,), generator=generator).tolist()
        (batch,) = microbatches(examples, chosen, limit=2**62, device=platform.device)
        logits = policy(batch.tokens, batch.positions, batch.layout, batch.select)
        logprobs, _ = token_logprobs(logits, targets[batch.answer_tokens], temperature=1.0)
        adam.zero_grad()
        (-logprobs.mean()).backward()
        adam.step()
    policy.zero_grad(set_to_none=True)


def cache_path(config: RunConfig) -> Path:
    """Where the taught weights of this configuration are kept; `MRL_CACHE` moves the cache."""
    depends_on = {
        "model": config.model.model_dump(exclude={"checkpoint", "init", "init_seed"}),
        "tokenizer": config.tokenizer.model_dump(),
        "environment": config.environment.model_dump(),
        "device": [config.job.device, config.job.threads_per_rank],
        "versions": [importlib.metadata.version(package) for package in ("torch", "megatron-core", "mrl")],
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mrl"
    return Path(os.environ.get("MRL_CACHE", home)) / "supervised" / f"{key}.pt"


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        logger.warning("the cached base model %s cannot be read (%s): teaching it again", path, error)
        return None


def _write(path: Path, policy: Policy) -> None:
    """A cache that cannot be written costs the next run some seconds, not this one its life."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    weights = {name: tensor for name, tensor in policy.state_dict().items() if torch.is_tensor(tensor)}
    content = io.BytesIO()
    torch.save(weights, content)  # to memory: on a full disk it would raise a RuntimeError that names none
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.getvalue())
        temporary.replace(path)
    except OSError as error:
        logger.warning("the base model could not be cached in %s: %s", path.parent, error)
        with suppress(OSError):
            temporary.unlink()
