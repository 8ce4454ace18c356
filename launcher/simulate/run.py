"""The simulation itself: a run from event to event.

    prompts -> admitted by the bound -> a replica -> answered -> their batch is whole -> trained in order -> new weights
                     ^                                                                                          |
                     +-------------- replicas swap, one more version is published <------------ sent -----------+

Batch s is made of the ordinals [s P, (s + 1) P) and trained by version s. Ordinals below (version + 1 + max_lag) P are
admitted, so a token is at most max_lag versions old when it is trained. Answers continue across versions and while
weights are sent; newly admitted prompts wait for the weights. Co-located ranks do not generate while they train:
unfinished answers of further batches then wait, and resume from their tokens with recomputed caches.

A preemption with enough notice saves, and its unfinished answers resume. Any other end of an attempt goes back to the
newest checkpoint and repeats what came after it. The loss of an inference node costs only its replicas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from launcher.simulate.pool import EventQueue, Pool
from launcher.simulate.replica import Answer
from launcher.simulate.result import SimulatedRun, SimulatedStep
from launcher.simulate.scenario import NEVER, Scenario

SAVES_IN_GRACE = 1.5
"""Saves that must fit into the notice of a preemption, as at a real drain."""


def simulate(scenario: Scenario, steps: int, seed: int = 0, skip: int = 0) -> SimulatedRun:
    """Simulate a run of `steps` steps; equal arguments give equal results.

    Args:
        skip: steps to leave out of the result, from the start of a run without failures.
    """
    return _Simulation(scenario, seed).until(steps, skip)


@dataclass(slots=True)
class _Batch:
    """Sums over the finished answers of a batch."""

    missing: int
    tokens: int = 0
    squares: int = 0
    longest: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    """Tokens by the version that sampled them."""

    def add(self, answer: Answer) -> None:
        self.missing -= 1
        self.tokens += answer.tokens
        self.squares += answer.tokens**2
        self.longest = max(self.longest, answer.tokens)
        for version, tokens in answer.sampled:
            self.versions[version] += tokens  # type: ignore[assignment]


class _Simulation:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self._chance = Random(f"faults of seed {seed}")
        self._queue = EventQueue()
        self._pool = Pool(scenario, self._queue, self._take)
        self._steps: list[SimulatedStep] = []  # not taken back by a failure
        self._batches: dict[int, _Batch] = {}  # admitted and not trained
        self._admitted = 0  # ordinals
        self._waiting: list[Answer] = []  # of co-located ranks, while they train
        self._checkpoint = 0  # steps that a checkpoint holds
        self._training_since: float | None = None
        self._blocked = False  # whether the training world saves
        self._sent_at = 0.0  # when all replicas have the newest weights
        self._generated_s = 0.0  # Pool.busy_s at the end of the step before
        self._trained_s = self._queued_s = self._starting_s = 0.0
        self._attempts, self._repeated = 1, 0

    def until(self, steps: int, skip: int) -> SimulatedRun:
        self._begin_attempt([], self._scenario.costs.refit_s)
        while len(self._steps) < steps:
            self._queue.run_next()
        return self._result(skip)

    # Generation

    def _admit(self, now: float) -> None:
        """Submit the prompts that the bound allows, unless weights are being sent."""
        if self._blocked or now < self._sent_at:
            return
        work = self._scenario.work
        answers: list[Answer] = []
        for number in range(self._admitted // work.prompts, len(self._steps) + 1 + self._scenario.max_lag):
            self._batches[number] = _Batch(work.answers)
            for ordinal in range(number * work.prompts, (number + 1) * work.prompts):
                lengths = work.lengths.of_group(self._seed, ordinal, work.group_size)
                answers += (Answer(ordinal, sample, tokens) for sample, tokens in enumerate(lengths))
            self._admitted = (number + 1) * work.prompts
        self._pool.submit(answers, now)

    def _take(self, answer: Answer, now: float) -> None:
        batch = self._batches[answer.ordinal // self._scenario.work.prompts]
        batch.add(answer)
        if not batch.missing:
            self._train_if_ready(now)

    # Training

    def _train_if_ready(self, now: float) -> None:
        batch, costs = self._batches.get(len(self._steps)), self._scenario.costs
        if self._blocked or self._training_since is not None or batch is None or batch.missing:
            return
        if now < self._sent_at and not costs.trains_beside_refit:
            return
        self._training_since = now
        if self._scenario.split.colocated:
            self._waiting = self._pool.pause(now)
        seconds = costs.train_s(batch.tokens, batch.squares, batch.longest)
        # The update is the last part of a step. It changes the weights, so it waits until the former ones are sent.
        waits_s = max(0.0, self._sent_at - (now + seconds - costs.step_s))
        sent_s = waits_s + costs.refit_s - max(0.0, self._sent_at - now)
        self._queue.at(now + waits_s + seconds, partial(self._update, seconds, sent_s))

    def _update(self, trained_s: float, sent_s: float, now: float) -> None:
        """End the step, send its weights and save if it is time."""
        version, prompts = len(self._steps), self._scenario.work.prompts
        batch = self._batches.pop(version)
        aged = sum((version - old) * tokens for old, tokens in batch.versions.items())
        generated_s = self._pool.busy_s(now)
        self._steps.append(
            SimulatedStep(
                number=version + 1,
                ended_at=now,
                ordinals=range(version * prompts, (version + 1) * prompts),
                tokens=batch.tokens,
                staleness=aged / sum(batch.versions.values()),
                staleness_max=version - min(batch.versions),
                trained_s=trained_s,
                sent_s=sent_s,
                generated_s=generated_s - self._generated_s,
            )
        )
        self._generated_s = generated_s
        self._trained_s += trained_s + sent_s
        self._training_since = None
        costs = self._scenario.costs
        self._sent_at = now + costs.refit_s
        self._queue.at(self._sent_at, self._swap)
        blocked_s = self._begin_save(now)
        self._blocked = True
        self._queue.at(now + blocked_s, self._resume)

    def _swap(self, now: float) -> None:
        """Continue with the newest weights, which all replicas have now."""
        self._pool.swap(len(self._steps), now)
        waiting, self._waiting = self._waiting, []
        self._pool.submit(waiting, now)
        self._admit(now)
        self._train_if_ready(now)

    def _begin_save(self, now: float) -> float:
        """Start a save if one is due. Return the seconds for which training pauses."""
        every, costs = self._scenario.save_every, self._scenario.costs
        if not every or len(self._steps) % every:
            return 0.0
        self._queue.at(now + costs.save_s, partial(self._saved, len(self._steps)))
        return costs.save_blocked_s

    def _saved(self, step: int, now: float) -> None:
        del now
        self._checkpoint = step

    def _resume(self, now: float) -> None:
        self._blocked = False
        self._admit(now)
        self._train_if_ready(now)

    # Attempts

    def _begin_attempt(self, left: list[Answer], now: float) -> None:
        """Start all replicas, which have the weights. left: unfinished answers that resume."""
        faults = self._scenario.faults
        self._sent_at = now
        self._pool.start(len(self._steps), now)
        if faults.preempted_every_s < NEVER:
            self._queue.at(now + self._random_s(faults.preempted_every_s), self._preempt)
        self._schedule_node_failure(now)
        self._pool.submit(left, now)
        self._resume(now)

    def _preempt(self, now: float) -> None:
        faults, costs = self._scenario.faults, self._scenario.costs
        self._queued_s += faults.queued_s
        if SAVES_IN_GRACE * costs.save_s <= faults.grace_s:
            self._checkpoint = len(self._steps)
            self._end_attempt([*self._waiting, *self._pool.stop(now)], now, costs.save_s, faults.queued_s)
        else:
            self._roll_back(now, faults.queued_s)

    def _schedule_node_failure(self, now: float) -> None:
        every = self._scenario.faults.node_fails_every_s
        if every < NEVER:
            self._queue.at(now + self._random_s(every / self._scenario.split.nodes), self._lose_node)

    def _lose_node(self, now: float) -> None:
        split = self._scenario.split
        node = self._chance.randrange(split.nodes)
        if node < split.training_nodes:
            self._roll_back(now, 0.0)
        else:
            self._schedule_node_failure(now)
            self._pool.lose_node(node - split.training_nodes, now)

    def _roll_back(self, now: float, queued_s: float) -> None:
        """Go back to the newest checkpoint."""
        self._pool.stop(now)
        self._generated_s = self._pool.busy_s(now)
        self._repeated += len(self._steps) - self._checkpoint
        del self._steps[self._checkpoint :]
        self._batches.clear()
        self._admitted = self._checkpoint * self._scenario.work.prompts
        self._end_attempt([], now, 0.0, queued_s)

    def _end_attempt(self, left: list[Answer], now: float, saving_s: float, queued_s: float) -> None:
        self._queue.clear()
        self._waiting = []
        if self._training_since is not None:
            self._trained_s += now - self._training_since
            self._training_since = None
        starting_s = saving_s + self._scenario.faults.restart_s
        self._starting_s += starting_s
        self._attempts += 1
        sent_at = now + starting_s + queued_s + self._scenario.costs.refit_s
        self._queue.at(sent_at, partial(self._begin_attempt, left))

    def _random_s(self, mean_s: float) -> float:
        return self._chance.expovariate(1 / mean_s)

    def _result(self, skip: int) -> SimulatedRun:
        before, steps = self._steps[:skip], self._steps[skip:]
        end = steps[-1].ended_at
        seconds = end - (before[-1].ended_at if before else 0.0)
        held_s = seconds - self._queued_s
        running_s = held_s - self._starting_s
        trained_s = self._trained_s - sum(step.trained_s + step.sent_s for step in before)
        generated_s = self._pool.busy_s(end) - sum(step.generated_s for step in before)
        idle_training, idle_inference = 1 - trained_s / running_s, 1 - generated_s / running_s
        kept_trained_s = sum(step.trained_s + step.sent_s for step in steps)
        kept_generated_s = sum(step.generated_s for step in steps)
        split = self._scenario.split
        if split.colocated:
            useful_s = kept_trained_s + kept_generated_s
            idle_training = idle_inference = idle_training + idle_inference - 1
        else:
            useful_s = (split.training_nodes * kept_trained_s + split.inference_nodes * kept_generated_s) / split.nodes
        return SimulatedRun(
            steps=tuple(steps),
            seconds=seconds,
            held_s=held_s,
            attempts=self._attempts,
            repeated=self._repeated,
            lost_replicas=self._pool.lost,
            idle_training=max(0.0, idle_training),
            idle_inference=max(0.0, idle_inference),
            goodput=useful_s / held_s,
        )
