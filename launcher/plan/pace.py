"""Closed forms of a step: how long a batch decodes on the replicas, and how generation and training overlap.

A replica is followed in expectation, over bins of decode steps: the answers that have a row, the share of them that
ends, and the answers that take the freed rows. At lag 0 the slowest replica, the training and the refit follow each
other. With a lag, three things bound a step, and the slowest of them sets its length:

    training      a batch is trained while the next ones are generated (partitioned)
    throughput    the rows of all replicas are in use, and a batch has this many tokens
    latency       a batch ends 1 + lag steps after its start, however few rows its longest answers leave in use
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from statistics import NormalDist

from launcher.plan.costs import Scenario, Split
from launcher.plan.lengths import Lognormal, solve

BINS = 48
PHASES = 24
"""Points of a step at which the rows in use are counted."""
ROUNDS = 3
"""Rounds in which a batch and the batches before it, which occupy rows, settle."""
HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Pace:
    """A step of the steady state, without saves and failures. Seconds, and shares of them."""

    step_s: float
    generate_s: float
    """Seconds in which a replica computes, mean over the replicas."""
    train_s: float
    refit_s: float
    """Seconds in which the trainer waits for the replicas to have the previous step's weights."""
    alone_s: float
    tokens: float
    split: Split

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def idle_training(self) -> float:
        """Share of the time in which the trainer neither trains nor waits for weights to arrive. Co-located: in which
        the ranks do nothing at all."""
        busy_s = self.train_s + self.refit_s + self.generate_s * self.split.colocated
        return max(0.0, 1 - busy_s / self.step_s)

    @property
    def idle_inference(self) -> float:
        """Share of the time in which a replica has nothing to compute."""
        return self.idle_training if self.split.colocated else max(0.0, 1 - self.generate_s / self.step_s)

    @property
    def busy(self) -> float:
        split = self.split
        training, inference = 1 - self.idle_training, 1 - self.idle_inference
        return (split.training_nodes * training + split.inference_nodes * inference) / split.nodes


def pace(scenario: Scenario) -> Pace:
    work, costs, lag = scenario.work, scenario.costs, scenario.max_lag
    tokens = work.answers * work.lengths.mean
    squares = work.answers * work.lengths.mean_of(lambda length: length**2, work.answers)
    train_s = costs.train_s(tokens, squares, work.lengths.mean_longest(work.answers))
    share = _Share(scenario)
    alone_s = share.first.seconds + share.late_s + train_s + costs.refit_s
    step_s, generate_s, refit_s = alone_s, share.first.seconds, costs.refit_s
    if lag and scenario.split.colocated:
        steps = share.decode_steps(lag, 0.0)
        generate_s = share.generation_s(steps) + share.resume_s(steps)
        step_s = generate_s + train_s + costs.refit_s
    elif lag:
        if costs.trains_beside_refit:  # only the update, at the end of a training step, waits for the weights
            refit_s = max(0.0, costs.refit_s - (train_s - costs.step_s))
        steps = share.decode_steps(lag, train_s + costs.refit_s)
        step_s = max(train_s + refit_s, share.generation_s(steps))
        generate_s = min(step_s, generate_s)
    return Pace(step_s, generate_s, train_s, refit_s, alone_s, tokens, scenario.split)


@dataclass(frozen=True, slots=True)
class _Wave:
    """The answers of one batch on one replica, by decode steps since they were submitted."""

    width: float
    rows: tuple[float, ...]
    """Expected rows in use, by bin."""
    cached: tuple[float, ...]
    waited: float
    """Decode steps until the last answer has a row."""
    seconds: float
    """Seconds until all have ended, with nothing else on the replica."""

    def at(self, steps: float, every: float, skip: int = 0) -> tuple[float, float]:
        """Rows in use and tokens in their caches, `steps` after a batch was submitted, with one `every` so many steps
        before it. skip: newest batches that do not count."""
        rows = cached = 0.0
        age = steps + skip * every
        while (index := int(age / self.width)) < len(self.rows):
            rows, cached, age = rows + self.rows[index], cached + self.cached[index], age + every
        return rows, cached


class _Share:
    def __init__(self, scenario: Scenario) -> None:
        self._work, self._costs = scenario.work, scenario.costs
        self._replicas = scenario.split.replicas
        self._answers = scenario.work.answers / scenario.split.replicas
        self._lengths: Lognormal = scenario.work.lengths
        self._crowded = self._answers * (1 + scenario.max_lag) > scenario.costs.rows
        self._longest = self._lengths.longest(scenario.work.answers)
        self._tail = self._lengths.mean_longest(max(1, round(self._answers)))
        width, prompt = self._longest / BINS, scenario.work.prompt_tokens
        middles = [(index + 0.5) * width for index in range(BINS)]
        self._alive = [self._lengths.reach(tokens) for tokens in middles]  # by bins since the start of an answer
        self._later = [self._lengths.reach(index * width) for index in range(1, BINS)]
        self._grown = [prompt + tokens for tokens in middles]
        self._waves: dict[float, _Wave] = {}
        self.first = self._wave()

    @property
    def _fewest_steps(self) -> float:
        return self._answers * self._lengths.mean / self._costs.rows

    @cached_property
    def late_s(self) -> float:
        """Seconds that the slowest replica takes longer than the mean: the expected maximum of normal times (Blom
        1958), whose variance is that of the work in the answers of a replica."""
        rows = min(self._costs.rows, self._answers)
        few = rows if self._answers > self._costs.rows else rows / 2  # rows that wait for work cost nothing
        decode = self._costs.decode
        each = (decode.step_s(rows) - (0.0 if few == rows else decode.step_s(few))) / few
        read_s, prompt = decode.read_s(rows), self._work.prompt_tokens

        def work_s(length: float) -> float:
            return length * (each + read_s * (prompt + length / 2))

        mean = self._lengths.mean_of(work_s, self._work.answers)
        variance = self._lengths.mean_of(lambda length: (work_s(length) - mean) ** 2, self._work.answers)
        slowest = NormalDist().inv_cdf((self._replicas - 0.375) / (self._replicas + 0.25))
        return slowest * (self._answers * variance) ** 0.5

    def decode_steps(self, lag: int, apart_s: float) -> float:
        """Decode steps between two training steps.

        Args:
            apart_s: seconds of 1 + lag steps in which a batch does not decode, from its start to its update.
        """
        fewest = self._fewest_steps
        if fewest >= self._longest:
            return fewest

        def slack(steps: float) -> float:
            """Seconds between the end of a batch and the need for it."""
            decoded_s = self.generation_s(steps)
            needed_s = apart_s + self.late_s + self._needed(steps) * decoded_s / steps
            return decoded_s - needed_s / (1 + lag)

        return fewest if slack(fewest) >= 0 else solve(slack, 0.0, fewest, 2 * self._longest + fewest, HALVINGS)

    def generation_s(self, steps: float) -> float:
        """Seconds of the decode steps between two training steps, in which a batch is generated."""
        rows, decode, prefill_s = self._costs.rows, self._costs.decode, self._prefill_s
        if steps <= self._fewest_steps * 1.0001:
            return prefill_s + steps * (decode.step_s(rows) + decode.read_s(rows) * self._full)
        width = steps / PHASES
        found = (self._settled(steps).at((phase + 0.5) * width, steps) for phase in range(PHASES))
        return prefill_s + sum(width * self._decode_s(*each, rows) for each in found)

    def resume_s(self, steps: float) -> float:
        """Seconds to compute the caches of unfinished answers again, which co-located ranks give up to train."""
        if steps <= self._fewest_steps * 1.0001:
            return self._full * self._costs.prefill_token_s
        return self._settled(steps).at(0.0, steps, skip=1)[1] * self._costs.prefill_token_s

    @property
    def _prefill_s(self) -> float:
        return self._work.prompts / self._replicas * self._work.prompt_tokens * self._costs.prefill_token_s

    @cached_property
    def _full(self) -> float:
        """Tokens in the caches of a replica all of whose rows are in use."""
        square = self._lengths.mean_of(lambda length: length**2, self._work.answers)
        return self._costs.rows * (self._work.prompt_tokens + square / self._lengths.mean / 2)

    def _needed(self, steps: float) -> float:
        return self._settled(steps).waited + self._tail

    def _settled(self, steps: float) -> _Wave:
        """A batch that starts while those before it, one every so many steps, still occupy rows."""
        if not self._crowded:
            return self.first
        if steps not in self._waves:
            wave = self.first
            for _ in range(ROUNDS):
                wave = self._wave([wave.at((index + 0.5) * wave.width, steps, skip=1)[0] for index in range(4 * BINS)])
            self._waves[steps] = wave
        return self._waves[steps]

    def _wave(self, taken: Sequence[float] = ()) -> _Wave:
        """Follow a batch. taken: rows that others occupy, by bin."""
        mean, limit, width = self._lengths.mean, self._costs.rows, self._longest / BINS
        most = 2 * self._longest / mean * limit  # of more answers, the rows settle: each end is a start
        before = max(0.0, self._answers - most) * mean / limit
        waiting, waited = min(self._answers, most), 0.0
        started: list[float] = []
        rows: list[float] = []
        cached: list[float] = []
        # Answers that start in one bin end like all others, only later. So the rows in use now are the starts of all
        # bins so far, each times the share of answers that reach its age:
        #
        #     in use in bin 2 = started[1] x reach(1 bin) + started[0] x reach(2 bins)
        #
        # What the limit leaves of that is free for answers that wait.
        while not rows or waiting > 1e-9 or rows[-1] > 1e-6:
            now = len(started)
            in_use = sum(map(mul, reversed(started), self._later))
            others = taken[now] if now < len(taken) else 0.0
            starts = max(0.0, min(waiting, limit - others - in_use))
            started.append(starts)
            waiting -= starts
            waited = now * width if starts > 1e-6 * limit else waited
            live = [*map(mul, reversed(started), self._alive)]
            rows.append(sum(live))
            cached.append(sum(map(mul, live, self._grown)))
        most_rows = min(limit, self._answers)
        seconds = sum(width * self._decode_s(*each, most_rows) for each in zip(rows, cached, strict=True))
        if before:
            seconds += before * (self._costs.decode.step_s(limit) + self._costs.decode.read_s(limit) * self._full)
        return _Wave(width, tuple(rows), tuple(cached), before + waited, seconds + self._prefill_s)

    def _decode_s(self, rows: float, cached: float, most: float) -> float:
        """Seconds of a decode step with so many rows in use, and tokens in their caches, on average.

        Of `most` rows, each is in use with the same probability. A step without any takes no time: the last answers of
        a batch are few, and whether there is one matters more than how many there are.
        """
        some = 1 - max(0.0, 1 - rows / most) ** most
        if some <= 0:
            return 0.0
        decode, count = self._costs.decode, max(1.0, rows / some)
        return some * decode.step_s(count) + decode.read_s(count) * cached
