"""Fill of micro-batches, balance of data-parallel ranks, the time to plan both, and the work that padding would add.

    python tests/benchmarks/packing.py [--repeats 5]

Batches are those of the recipe qwen2.5-32b-dapo: 64 prompts with 16 answers of log-normal lengths, in micro-batches of
11,999 tokens. Beside it are the lower bound and next-fit, which fills micro-batches one after the other in order.
Seconds are CPU time, the least of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.recipe.load import load_recipe
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.balance import balance
from megatron_rl.algorithms.bins import BinLimit, Tree
from megatron_rl.algorithms.packing import Packing
from megatron_rl.generate.engine.interface import Completion
from megatron_rl.learn.rollout.encoding import decode_group, encode_group, joined, parted
from megatron_rl.learn.rollout.exchange import group_costs
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.recipe.flops import rows_per_token, training_flops

PROMPTS, ANSWERS, REPLICAS, LONGEST, VOCABULARY = 64, 16, 8, 11_999, 152_064
CONFIG = load_recipe("qwen2.5-32b-dapo").config
ROOM = BinLimit(CONFIG.training.tokens_per_microbatch, rows_per_token(CONFIG.model))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: medians, and spreads between prompts and between answers to a prompt."""

    prompt: int
    answer: int
    between: float
    within: float


CASES = {
    "mathematics, long tails": Lengths(prompt=200, answer=2500, between=0.5, within=0.6),
    "hard, many cut at the limit": Lengths(prompt=200, answer=7000, between=0.5, within=0.6),
    "short answers": Lengths(prompt=120, answer=250, between=0.3, within=0.4),
    "long prompts, short answers": Lengths(prompt=2000, answer=200, between=0.3, within=0.4),
    "very long prompts": Lengths(prompt=7000, answer=600, between=0.3, within=0.4),
}


def batch_of(case: Lengths, seed: int) -> list[TrajectoryGroup]:
    """Answers of random tokens; a third of the groups has no gradient, as if all answers were right or wrong."""
    draw = np.random.default_rng(seed)

    def tokens(length: float) -> list[int]:
        return draw.integers(0, VOCABULARY, max(1, int(length))).tolist()

    groups = []
    for ordinal in range(PROMPTS):
        prompt = tokens(min(case.prompt * draw.lognormal(0, 0.3), LONGEST - 100))
        median, teaches = case.answer * draw.lognormal(0, case.between), draw.random() < 2 / 3
        trajectories = []
        for number in range(ANSWERS):
            answer = tokens(min(median * draw.lognormal(0, case.within), LONGEST - len(prompt)))
            logprobs = (-draw.random(len(answer), dtype=np.float32)).tolist()
            completion = Completion(tokens=answer, logprobs=logprobs, versions=[3] * len(answer), finish_reason="stop")
            trajectories.append(Trajectory.single(prompt, completion, "", float(number % 2 and teaches)))
        groups.append(TrajectoryGroup(ordinal, Problem("", {}), trajectories, {}))
    return groups


def next_fit(trees: Sequence[Tree]) -> int:
    """Number of micro-batches if the sequences of a tree share its prefix only."""
    made, used = 1, 0
    for tree in trees:
        others = 0
        for _, rest in sorted(zip(tree.names, tree.rests, strict=True)):
            alone = ROOM.rows_per_token * (tree.prefix + rest)
            needed = ROOM.rows_per_token * rest + tree.prefix if others else alone
            if used and used + needed > ROOM.cost:
                made, used, others, needed = made + 1, 0, 0, alone
            used += needed
            others += 1
    return made


def lower_bound(trees: Sequence[Tree]) -> int:
    """Lower bound of micro-batches: if sequences could be split, or by those that cannot go together: rests of more
    than half a micro-batch, and prompts of more than half, which each micro-batch pays again."""
    cut = -(-sum(tree.cost(ROOM.rows_per_token) for tree in trees) // ROOM.cost)
    rests = sum(2 * rest > ROOM.tokens for tree in trees for rest in tree.rests)
    prompts = 0
    for tree in trees:
        if 2 * tree.prefix > ROOM.tokens:
            paid_again = (ROOM.rows_per_token - 1) * tree.prefix
            prompts += -(-(tree.cost(ROOM.rows_per_token) - paid_again) // (ROOM.cost - paid_again))
    return max(cut, rests, prompts)


def timed(work: Callable[[], object], repeats: int) -> float:
    """CPU milliseconds."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return 1000 * min(taken)


def show_packing(name: str, groups: Sequence[TrajectoryGroup], repeats: int) -> None:
    trajectories = [each for group in groups for each in group.trajectories]
    tokens, masks = [each.tokens for each in trajectories], [each.loss_mask for each in trajectories]
    packing = Packing(tokens, masks, range(len(tokens)))
    bins = packing.bins(ROOM)
    filled = sum(len(packing.microbatch(names).tokens) for names in bins)
    before, bound = next_fit(packing.trees), lower_bound(packing.trees)
    compare = timed(lambda: Packing(tokens, masks, range(len(tokens))), repeats)
    plan = timed(lambda: packing.bins(ROOM), repeats)
    spread = timed(lambda: packing.bins(ROOM, len(bins) + 3), repeats)

    def merge() -> None:
        fresh = Packing(tokens, masks, range(len(tokens)))
        for names in bins:
            fresh.microbatch(names)

    merged = timed(merge, repeats) - compare
    print(
        f"{name:<28} {sum(map(len, tokens)):>10,} {before:>9} {len(bins):>8} {bound:>6}"
        f" {filled / ROOM.tokens / len(bins):>6.1%}"
        f" {compare:>8.0f} {plan:>6.0f} {spread:>7.0f} {merged:>6.0f}"
    )


def show_balance(name: str, groups: Sequence[TrajectoryGroup], repeats: int) -> None:
    homes = [home for home, share in enumerate(shares(0, PROMPTS, REPLICAS)) for _ in share]
    costs = group_costs(groups, CONFIG)
    assigned = balance(costs, homes, REPLICAS)

    def uneven(replica_of: Sequence[int]) -> float:
        loads = np.bincount(replica_of, costs, REPLICAS)
        return float(loads.max() / loads.mean())

    messages = [joined(*encode_group(group)) for group in groups]
    moved = [message for message, home, its in zip(messages, homes, assigned, strict=True) if its != home]
    share = shares(0, PROMPTS, REPLICAS)[0]
    largest = max(moved, key=len, default=messages[0])
    problem = Problem("", {})
    bound = max(1.0, max(costs) * REPLICAS / sum(costs))
    print(
        f"{name:<28} {uneven(homes):>6.2f} {uneven(assigned):>6.2f} {bound:>6.2f} {len(moved):>6} of {PROMPTS}"
        f" {sum(map(len, moved)) / 2**20:>7.1f} {sum(map(len, messages)) / 2**20:>7.1f}"
        f" {timed(lambda: group_costs(groups[share.start : share.stop], CONFIG), repeats):>7.0f}"
        f" {timed(lambda: balance(costs, homes, REPLICAS), repeats):>8.1f}"
        f" {timed(lambda: decode_group(*parted(largest), problem), repeats):>7.1f}"
    )


def show_padding(name: str, groups: Sequence[TrajectoryGroup]) -> None:
    """Work of the slowest of 8 ranks in an update if all micro-batches were padded to their limit, as communication in
    buffers of a fixed size needs it."""
    homes = [home for home, share in enumerate(shares(0, PROMPTS, REPLICAS)) for _ in share]
    assigned = balance(group_costs(groups, CONFIG), homes, REPLICAS)
    packings = []
    for replica in range(REPLICAS):
        teach = [
            trajectory
            for group, its in zip(groups, assigned, strict=True)
            if its == replica and len({each.reward for each in group.trajectories}) > 1
            for trajectory in group.trajectories
        ]
        packings.append(Packing([each.tokens for each in teach], [each.loss_mask for each in teach], range(len(teach))))
    count = max(len(packing.bins(ROOM)) for packing in packings)
    tokens = [sum(len(packing.microbatch(names).tokens) for names in packing.bins(ROOM)) for packing in packings]
    pairs = [sum(tree.pairs for tree in packing.trees) for packing in packings]

    def slowest(of_ranks: Sequence[int]) -> float:
        work = zip(of_ranks, pairs, strict=True)
        return max(
            training_flops(CONFIG.model, VOCABULARY, tokens=each, pairs=its, predictions=each) for each, its in work
        )

    padded = [count * ROOM.tokens] * REPLICAS
    print(f"{name:<28} {count:>13} {sum(tokens) / sum(padded):>6.1%} {slowest(padded) / slowest(tokens):>6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    batches = {name: batch_of(case, seed=1) for name, case in CASES.items()}
    print(f"{'':<28} {'':>10} {'micro-batches':>18} {'':>6} {'':>6} {'milliseconds':>20}")
    print(
        f"{'1,024 answers on one rank':<28} {'tokens':>10} {'next-fit':>9} {'best-fit':>8} {'bound':>6} {'fill':>6}"
        f" {'compare':>8} {'plan':>6} {'spread':>7} {'merge':>6}"
    )
    for name, groups in batches.items():
        show_packing(name, groups, repeats)
    print(f"\n{'':<28} {'slowest / mean rank':>20} {'':>12} {'MiB':>15} {'milliseconds':>24}")
    print(
        f"{'64 groups on 8 ranks':<28} {'before':>6} {'after':>6} {'bound':>6} {'moved':>12}"
        f" {'moved':>7} {'of all':>7} {'costs':>7} {'balance':>8} {'decode':>7}"
    )
    for name, groups in batches.items():
        show_balance(name, groups, repeats)
    print(f"\n{'an update of 8 ranks':<28} {'micro-batches':>13} {'fill':>6} padded / packed")
    for name, groups in batches.items():
        show_padding(name, groups)


if __name__ == "__main__":
    main()
