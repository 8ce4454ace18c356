"""Recipe keys of evaluations during training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section

PassAt = Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)]


class EvaluationSetConfig(Section):
    """Settings of one evaluation set. A key that is left out, or null, has the value that it has in `evaluation`."""

    every: NonNegativeInt | None = None
    """Steps between evaluations of the set."""
    prompts: PositiveInt | None = None
    """Problems of the set, the first ones."""
    greedy: bool | None = None
    """Whether each problem is answered greedily."""
    samples: NonNegativeInt | None = None
    """Sampled answers to each problem."""
    pass_at: PassAt | None = None
    """Values of k for pass@k."""
    temperature: NonNegativeFloat | None = None
    """Temperature of the sampled answers."""
    top_p: Probability | None = None
    """`sampling.top_p` of the sampled answers."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """`sampling.top_k` of the sampled answers."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer in tokens."""


class EvaluationConfig(Section):
    """Evaluations during training, before its first step and after its last one. All sets of the environment are
    answered, greedily by default."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: PositiveInt | None = None
    """Problems per evaluation set, the first ones; default: all."""
    greedy: bool = True
    """Whether each problem is answered once at temperature 0."""
    samples: NonNegativeInt = 0
    """Sampled answers to each problem, from which pass@k, the share of right answers (avg@K) and, where the environment
    compares answers, majority votes (maj@K) are computed. 0: none."""
    pass_at: PassAt | None = None
    """Values of k for which the unbiased pass@k (Chen et al. 2021, arXiv 2107.03374) is recorded, each at most
    `samples`; default: 1, 2, 4, ..., and `samples`."""
    temperature: NonNegativeFloat | None = None
    """Temperature of the sampled answers; default: that of `sampling`."""
    top_p: Probability | None = None
    """Sample from the smallest set of tokens whose total probability reaches this; default: that of `sampling`."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Sample from this number of likeliest tokens; default: that of `sampling`."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer in tokens, also of greedy answers; default: that of `sampling`."""
    replicas: PositiveInt | None = None
    """Replicas of a partitioned run that keep the weights of an evaluated step until they have answered, while the
    others take newer weights and training goes on; fewer than all. Each such evaluation begins with a checkpoint, from
    which a resumed run repeats it. Default: training waits for the answers, as it does on ranks that also generate."""
    sets: dict[str, EvaluationSetConfig] = {}
    """Settings of single evaluation sets, by name: `sets: {held_out: {samples: 16}}`. A key that is left out there, or
    null, has the value above."""

    def of(self, name: str) -> EvaluationConfig:
        """Return the settings of a set, with those values of pass_at that its samples allow."""
        own = self.sets[name].model_dump(exclude_none=True) if name in self.sets else {}
        asked = self.model_copy(update=own)
        counts = tuple(k for k in asked.pass_at or () if k <= asked.samples)
        return asked.model_copy(update={"pass_at": counts or None})

    def due(self, step: int, last: int) -> bool:
        """Whether to evaluate after a step. last: final step of the run."""
        return step in (0, last) or (self.every > 0 and step % self.every == 0)

    def any_due(self, step: int, last: int) -> bool:
        """Whether to evaluate any set after a step."""
        return any(asked.due(step, last) for asked in (self, *map(self.of, self.sets)))

    def sampling(self, of_training: Sampling) -> Sampling:
        """Return the sampling of answers. Raises ValueError if they cannot be sampled so."""
        keys = ("temperature", "top_p", "top_k", "max_new_tokens")
        given = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return Sampling.model_validate({**of_training.model_dump(), **given}) if given else of_training
