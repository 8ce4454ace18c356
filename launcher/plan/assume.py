"""Assumptions about a recipe's work and speed: estimated for a card, or measured in a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.plan.costs import Work
from launcher.plan.estimate import NOMINAL_CPU, Correction, estimate_work, usual_lengths
from launcher.plan.lengths import Lognormal
from launcher.plan.measured import MeasuredRun, read_measured
from launcher.plan.pace import pace
from launcher.plan.parameters import vocabulary
from launcher.plan.splits import Assumptions, lay_out, scenario_of
from launcher.plan.summary import ASSUMED_VOCABULARY
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.cards import CARDS, Card, find_card
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.engines import capabilities_of

USUAL_CARD = "H100"
CPU_UNKNOWN = "job.device is cpu: speeds of CPUs are not estimated; give a run of this recipe: --measured RUN"


def assume(
    config: RunConfig,
    profile: Profile | None,
    card: str | None = None,
    answer_tokens: float | None = None,
    measured: RunDir | None = None,
) -> Assumptions | None:
    """Return the assumptions about a recipe; None for CPU processes without a measured run.

    Args:
        profile: of the cluster; None: this machine.
        card: name of a GPU; None: the one that the profile names.
        answer_tokens: mean length of an answer; None: MEAN_LENGTH of the limit.
        measured: run of the same model whose record replaces the estimates.

    Raises:
        BadInput: the arguments contradict each other or the recipe.
    """
    if measured is not None:
        if card is not None or answer_tokens is not None:
            raise BadInput("--measured: the run gives speed and lengths; leave out --card and --answer-tokens")
        return _as_measured(config, profile, read_measured(measured))
    if config.job.device == "cpu":
        if card is not None or answer_tokens is not None:
            raise BadInput(CPU_UNKNOWN)
        return None
    chosen, work = _choose_card(card, profile), estimate_work(config, _lengths(config, answer_tokens))
    vocab = vocabulary(config) or ASSUMED_VOCABULARY
    return Assumptions(config, work, chosen, vocab, f"estimated for {chosen.name}{_as_ours(config)}", profile=profile)


def _as_ours(config: RunConfig) -> str:
    """Name the engine whose speed was never measured on GPUs, and is taken for that of the project's own."""
    engine = config.inference.engine
    return "" if capabilities_of(engine).modelled else f", with {engine} as fast as mrl's own engine (not measured)"


def _lengths(config: RunConfig, mean: float | None) -> Lognormal:
    if mean is None:
        return usual_lengths(config)
    try:
        return Lognormal.with_mean(mean, config.sampling.max_new_tokens)
    except ValueError as error:
        raise BadInput(f"--answer-tokens: {error} (sampling.max_new_tokens)") from error


def _choose_card(name: str | None, profile: Profile | None) -> Card:
    """Return the card of this name, else the one that the cluster profile names, else USUAL_CARD."""
    card = find_card(name if name is not None else profile.gpu_type if profile else USUAL_CARD)
    if card is None and name is not None:
        raise BadInput(f"--card {name}: unknown card; known cards: {', '.join(card.name for card in CARDS)}")
    return card or next(card for card in CARDS if card.name == USUAL_CARD)


def _as_measured(config: RunConfig, profile: Profile | None, measured: MeasuredRun) -> Assumptions:
    if _shape(measured.config) != _shape(config):
        raise BadInput(
            f"--measured {measured.run}: it trained another model, so its speed does not apply to this recipe"
        )
    cpu = measured.config.job.device == "cpu"
    if cpu != (config.job.device == "cpu"):
        raise BadInput(
            f"--measured {measured.run}: its job.device is {measured.config.job.device}, "
            f"the recipe's is {config.job.device}"
        )
    own = Assumptions(
        config=measured.config,
        work=_work_of(measured.config, measured),
        card=NOMINAL_CPU if cpu else _choose_card(None, profile),
        vocab=vocabulary(config) or ASSUMED_VOCABULARY,
        basis=f"as measured in {measured.steps} step{'s' * (measured.steps > 1)} of {measured.run}",
    )
    by = _correction(own, measured)
    return replace(own, config=config, work=_work_of(config, measured), correction=by, profile=profile)


def _shape(config: RunConfig) -> dict[str, Any]:
    """Keys of the model except those that say where its first weights come from."""
    return config.model.model_dump(exclude={"init", "huggingface", "checkpoint"})


def _work_of(config: RunConfig, measured: MeasuredRun) -> Work:
    lengths = replace(measured.lengths, maximum=config.sampling.max_new_tokens)
    return Work(config.grpo.prompts_per_step, config.grpo.group_size, measured.prompt_tokens, lengths)


def _correction(own: Assumptions, measured: MeasuredRun) -> Correction:
    """Return measured over estimated times.

    Args:
        own: assumptions about the measured run, uncorrected.
    """
    placed, nodes = own.config.placement, own.config.job.most_nodes
    inference_nodes = (placed.inference.nodes or 0) if placed.mode == "partitioned" else 0
    laid_out = lay_out(own.config, nodes, inference_nodes, None)
    assert laid_out is not None, "this layout has run"
    scenario = scenario_of(own, *laid_out, measured.max_lag if inference_nodes else 0)
    found, refit_s = pace(scenario), scenario.costs.refit_s
    return Correction(
        generate=measured.generate_s / found.generate_s,
        train=measured.train_s / found.train_s,
        refit=measured.refit_s / refit_s if refit_s else 1.0,
        other_s=measured.other_s,
    )
