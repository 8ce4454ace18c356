"""The objective of a run, chosen by its recipe."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.distill.served import ServedTeacher
from megatron_rl.model.policy import Policy
from megatron_rl.training.objective import Distillation, FirstPass, Grpo, Objective, Supervised


def objective_of(
    config: RunConfig, policy: Policy, reference: Policy | None, teacher: Policy | ServedTeacher | None
) -> Objective:
    """Return the objective of training a policy; see `Grpo`.

    teacher: of on-policy distillation, if there is one.
    """
    if config.supervised:
        return Supervised()
    if config.distill is None or teacher is None:
        return Grpo(config, policy, reference)
    return Distillation(config, policy, reference, config.distill.weight, partial(_judged, teacher))


def _judged(teacher: Policy | ServedTeacher, first_pass: FirstPass) -> Tensor:
    if isinstance(teacher, ServedTeacher):
        batch = first_pass.batch
        return teacher.logprobs(batch.sequences, batch.inference_logprobs.device)
    return first_pass.under_another(teacher)
