"""What is assumed of a recipe's work and speed: estimated for a card, or as a run measured it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.plan.parameters import vocabulary
from launcher.plan.summary import ASSUMED_VOCABULARY
from launcher.recipe.located_yaml import read_text
from launcher.simulate.estimate import NOMINAL_CPU, Correction, estimate_work, usual_lengths
from launcher.simulate.lengths import Lengths, Lognormal, Trace
from launcher.simulate.measured import Measured, read_measured
from launcher.simulate.scenario import Work
from launcher.simulate.splits import Assumptions, lay_out, pace, scenario_of
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.platform.cards import CARDS, Card, find_card

USUAL_CARD = "H100"


def assume(
    config: RunConfig,
    profile: Profile | None,
    card: str | None = None,
    lengths: Lengths | None = None,
    measured: RunDir | None = None,
) -> Assumptions | None:
    """What is known of a recipe; None for processes on CPUs that no run has measured.

    Args:
        profile: of the cluster; None: this machine.
        card: name of a GPU; None: the one that the profile names.
        lengths: of the answers; None: what is usual.
        measured: a run of the same model, whose record is taken in place of estimates.

    Raises:
        BadInput: these do not go together, or say nothing.
    """
    if measured is not None:
        if card is not None or lengths is not None:
            raise BadInput("--measured: says speeds and lengths: leave out --card, --answer-tokens and --lengths")
        return _as_measured(config, profile, read_measured(measured))
    if config.job.device == "cpu":
        if card is not None or lengths is not None:
            raise BadInput("job.device is cpu: how fast that is only a run can tell: --measured RUN")
        return None
    chosen, work = _choose_card(card, profile), estimate_work(config, lengths or usual_lengths(config))
    vocab = vocabulary(config) or ASSUMED_VOCABULARY
    return Assumptions(config, work, chosen, vocab, f"estimated for {chosen.name}", profile=profile)


def given_lengths(config: RunConfig, mean: float | None, trace: Path | None) -> Lengths | None:
    """Lengths of answers as somebody says them; None where nobody does.

    Args:
        mean: in tokens.
        trace: a file with the tokens of an answer on each line.

    Raises:
        BadInput: both, or answers that sampling.max_new_tokens does not allow.
    """
    limit = config.sampling.max_new_tokens
    if mean is not None and trace is not None:
        raise BadInput("--lengths: says the mean too: leave out --answer-tokens")
    if mean is not None:
        try:
            return Lognormal.with_mean(mean, limit)
        except ValueError as error:
            raise BadInput(f"--answer-tokens: {error} (sampling.max_new_tokens)") from error
    if trace is None:
        return None
    tokens = []
    for number, line in enumerate(read_text(trace).split(), 1):
        if not (line.isascii() and line.isdigit() and 1 <= int(line) <= limit):
            raise BadInput(f"{trace}: number {number}, {line[:20]!r}, is not between 1 and {limit:,} tokens")
        tokens.append(int(line))
    if not tokens:
        raise BadInput(f"{trace}: is empty; give the tokens of an answer on each line")
    return Trace(tuple(tokens))


def _choose_card(name: str | None, profile: Profile | None) -> Card:
    """The card of this name, or the one that a cluster's profile names; USUAL_CARD where nobody says."""
    card = find_card(name if name is not None else profile.gpu_type if profile else USUAL_CARD)
    if card is None and name is not None:
        raise BadInput(f"--card {name}: is not known; there are {', '.join(card.name for card in CARDS)}")
    return card or next(card for card in CARDS if card.name == USUAL_CARD)


def _as_measured(config: RunConfig, profile: Profile | None, measured: Measured) -> Assumptions:
    """What is estimated for the run that was measured, times what it took over that."""
    if _shape(measured.config) != _shape(config):
        raise BadInput(f"--measured {measured.run}: is a run of another model, whose speed says nothing of this one")
    cpu = measured.config.job.device == "cpu"
    if cpu != (config.job.device == "cpu"):
        raise BadInput(
            f"--measured {measured.run}: has job.device {measured.config.job.device}, and the recipe has not"
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
    """Of the model, wherever its first weights came from."""
    return config.model.model_dump(exclude={"init", "huggingface", "checkpoint"})


def _work_of(config: RunConfig, measured: Measured) -> Work:
    """The recipe's batches of the answers that a run saw."""
    lengths = replace(measured.lengths, maximum=config.sampling.max_new_tokens)
    return Work(config.grpo.prompts_per_step, config.grpo.group_size, measured.prompt_tokens, lengths)


def _correction(own: Assumptions, measured: Measured) -> Correction:
    """What a run took over what is estimated for it.

    Args:
        own: of that run.
    """
    placed, nodes = own.config.placement, own.config.job.most_nodes
    apart = (placed.inference.nodes or 0) if placed.mode == "partitioned" else 0
    laid_out = lay_out(own.config, nodes, apart, None)
    assert laid_out is not None, "it ran"
    scenario = scenario_of(own, *laid_out, measured.max_lag if apart else 0)
    found, refit_s = pace(scenario), scenario.costs.refit_s
    return Correction(
        generate=measured.generate_s / found.generate_s,
        train=measured.train_s / found.train_s,
        refit=measured.refit_s / refit_s if refit_s else 1.0,
        other_s=measured.other_s,
    )
