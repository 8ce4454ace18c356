"""The teacher of a run: a frozen model on the training ranks, replicas, or servers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_rl.checkpoint.initial_weights import read_initial_weights
from megatron_rl.config import RunConfig
from megatron_rl.distill.config import DistillConfig
from megatron_rl.distill.replicas import TeacherRoster
from megatron_rl.distill.served import ServedTeacher, endpoints_of
from megatron_rl.distill.teacher import VOCABULARY_FILE, TeacherFiles, against_teacher, teacher_files
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai import Endpoint
from megatron_rl.model.hf_config import CONFIG_FILE
from megatron_rl.model.hub import local_folder
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.here import Here
from megatron_rl.run.models import build_part, share_weights
from megatron_rl.training.objective import FirstPass, Teacher


def build_teacher(config: RunConfig, here: Here, tokenizer: Tokenizer) -> Teacher | None:
    """Load the teacher, or connect to its replicas or servers; None without `distill`. Collective.

    Raises ConfigurationError if the teacher cannot judge the policy's tokens, its files are missing, or servers refuse;
    NoTeacher if all replicas are given up; and LeaveAgreed if a rank is asked to leave while servers are awaited.
    """
    if (distill := config.distill) is None:
        return None
    files = _files(distill)
    if problem := next(against_teacher(config, files, _tokenizer_folder(config)), None):
        raise ConfigurationError(problem)
    groups, safe_points = here.groups, here.safe_points
    servers: Sequence[Endpoint] | TeacherRoster | None = None
    if distill.replicas is not None:
        servers = TeacherRoster(here.run_dir, here.attempt, distill.replicas.answer_limit_s)
    elif distill.server is not None:
        servers = endpoints_of(distill.server)
    if servers is not None:
        safe_points.activity.enter("waiting for the teacher", 0)
        served = ServedTeacher(servers, tokenizer, groups, safe_points, config.job.silence_limit_s)
        served.check()
        return lambda first_pass: served.logprobs(first_pass.batch.sequences, here.platform.device)
    safe_points.activity.enter("reading the teacher's weights", 0)
    assert files is not None  # only servers may know more than this machine
    source = {"init": "checkpoint", "checkpoint": str(files.folder)}
    if not files.is_checkpoint:
        source = {"init": "huggingface", "huggingface": str(files.folder)}
    own = config.model
    model = files.model.model_copy(
        update={"dtype": own.dtype, "vocab_multiple": own.vocab_multiple, "lora": None, **source}
    )
    policy = build_part(config, tokenizer, here.platform, model=model)
    read_initial_weights(policy, model, groups, "distill.teacher")
    safe_points.agree()
    share_weights(policy, groups)
    return partial(FirstPass.under_another, policy=policy.requires_grad_(False))


def _files(distill: DistillConfig) -> TeacherFiles | None:
    """Return the teacher's files; None if its servers or replicas have the only ones."""
    try:
        return teacher_files(local_folder(distill.teacher, "distill.teacher", CONFIG_FILE))
    except ValueError as error:
        if distill.is_served and not isinstance(error, ConfigurationError):
            return None
        raise ConfigurationError(str(error)) from error


def _tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the policy's tokenizer, which the ranks have loaded; None for one of characters."""
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    return None if path is None else local_folder(path, "tokenizer.path", VOCABULARY_FILE)
