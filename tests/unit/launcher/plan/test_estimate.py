"""Estimated times of a step."""

from __future__ import annotations

import pytest

from launcher.plan.costs import Costs
from launcher.plan.estimate import estimate_costs, estimate_work, usual_lengths
from launcher.plan.placement import place
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.cards import CARDS


@pytest.mark.parametrize(
    ("layout", "travels"),
    [
        ({"training.tp": 4}, False),
        ({"training.tp": 4, "inference.tp": 2}, True),
        ({"training.tp": 4, "training.pp": 2, "inference.tp": 4}, True),
        ({"mode": "partitioned", "training.tp": 4, "inference.nodes": 4}, True),
    ],
)
def test_weights_are_sent_if_the_generating_ranks_do_not_have_all_of_them(
    layout: dict[str, object], travels: bool
) -> None:
    words = [f"placement.{key}={value}" for key, value in layout.items()]
    config = load_recipe("qwen2.5-32b-dapo", words).config
    sizes = place(config.job, config.placement, 8, config.model).sizes
    costs = estimate_costs(config, sizes, 152064, CARDS[0], estimate_work(config, usual_lengths(config)))
    assert (costs.refit_s > 0) == travels


def test_more_replicas_take_hardly_longer_to_get_the_weights() -> None:
    """The training ranks send to enough of them to be busy, and these pass the weights on."""

    def refit_s(inference_nodes: int) -> float:
        nodes = 8 + inference_nodes
        words = ["placement.mode=partitioned", "placement.training.tp=4", f"job.nodes={nodes}"]
        words += [f"placement.inference.nodes={inference_nodes}", "placement.inference.tp=4"]
        config = load_recipe("qwen2.5-32b-dapo", words).config
        sizes = place(config.job, config.placement, nodes, config.model).sizes
        return estimate_costs(config, sizes, 152064, CARDS[0], estimate_work(config, usual_lengths(config))).refit_s

    assert refit_s(1) == pytest.approx(refit_s(8))
    assert refit_s(8) < refit_s(800) < 1.2 * refit_s(8)


def test_each_part_of_a_replica_decodes_as_many_answers_as_a_replica_of_one() -> None:
    def costs(dp: int) -> Costs:
        words = ["placement.mode=partitioned", "placement.inference.nodes=2", "placement.inference.tp=4"]
        words += [f"placement.inference.dp={dp}", "inference.engine=vllm"]
        config = load_recipe("qwen3-30b-a3b-dapo", words).config
        sizes = place(config.job, config.placement, 8, config.model, "vllm").sizes
        return estimate_costs(config, sizes, 152064, CARDS[0], estimate_work(config, usual_lengths(config)))

    one, four = costs(1), costs(4)
    assert four.rows == 4 * one.rows
    assert one.decode.step_s(one.rows) / 4 < four.decode.step_s(four.rows) < 1.1 * one.decode.step_s(one.rows)
    assert four.decode.read_s(four.rows) == pytest.approx(one.decode.read_s(one.rows) / 4)
