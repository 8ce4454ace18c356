"""Time that a step of a partitioned run waits for its weights to be sent: beside the next step, and before it.

    python tests/benchmarks/refit_overlap.py [--steps 10] [--repeats 2] [--layers 8] [--max-lag 1] [--gbit 1.6]

Complete runs on this machine, with one training rank and one replica of one rank, of a Qwen2.5-shaped model in fp32, in
turns with runs that wait for each version to be published before they continue. Sending takes at least as long as on a
network of `--gbit` gigabits per second, because on two busy cores only waiting can overlap.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from core_helpers import tiny_model, tiny_run
from loop_helpers import Attempt, lines_of, prepare

SKIPPED = 3
"""Steps at the start of a run that are not counted, since memory is touched for the first time."""
COLUMNS = ("time/step_s", "time/refit_s", "time/publish_s", "time/train_s", "time/generate_s")


def recipe(layers: int, steps: int, max_lag: int) -> dict[str, Any]:
    shape = {"num_layers": layers, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8}
    run = tiny_run(
        job={"nodes": 2, "gpus_per_node": 1},
        placement={"mode": "partitioned", "inference": {"nodes": 1}},
        model=tiny_model(**shape).model_dump(),
        training={"steps": steps + SKIPPED},
        evaluation={"every": 0},
        save={"every": 0},
        sampling={"max_new_tokens": 8},
        # An entropy bonus has all answers trained: those of random weights are all wrong.
        grpo={"prompts_per_step": 4, "group_size": 8, "importance": {"upper": 2.0}, "entropy_coefficient": 1e-3},
        **{"async": {"max_lag": max_lag}},
    )
    return run.model_dump(by_alias=True)


def over_a_network(gbit: float, rank: int) -> None:
    from megatron_rl.model.platform.transport import GlooTransport, Message

    exchange = GlooTransport.exchange

    def and_take_time(transport: GlooTransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        due = time.perf_counter() + sum(tensor.nbytes for _, tensor in sends) * 8 / gbit / 1e9
        exchange(transport, sends, receives)
        time.sleep(max(0.0, due - time.perf_counter()))

    GlooTransport.exchange = and_take_time  # type: ignore[method-assign]


def and_wait_for_each_version(gbit: float, rank: int) -> None:
    from megatron_rl.generate.refit.overlapped import OverlappedRefit

    over_a_network(gbit, rank)
    publish = OverlappedRefit.publish

    def and_wait(refit: OverlappedRefit, policy_version: int) -> None:
        publish(refit, policy_version)
        refit.finish()

    OverlappedRefit.publish = and_wait  # type: ignore[method-assign]


def measure(folder: Path, asked: dict[str, Any], sabotage: Callable[[int], None]) -> dict[str, float]:
    """Medians over steps."""
    attempt = Attempt(prepare(folder, asked), folder, ranks=1, sabotage=sabotage)
    try:
        attempt.start_replica(0)
        assert attempt.exit_codes(600.0) == [0], attempt.logs()
    finally:
        for process in [*attempt.processes, *attempt.replicas]:
            process.kill()
    lines = lines_of(attempt.run_dir.metrics)[SKIPPED:]
    return {name: median(line[name] for line in lines) for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--gbit", type=float, default=1.6, help="gigabits per second of the network")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    asked = recipe(options.layers, options.steps, options.max_lag)
    print(f"{'':14}" + "".join(f"{name.removeprefix('time/'):>14}" for name in COLUMNS))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for turn in range(options.repeats):
            for name, sabotage in (("beside", over_a_network), ("before", and_wait_for_each_version)):
                found = measure(Path(folder) / f"{name}-{turn}", asked, partial(sabotage, options.gbit))
                print(f"{name:14}" + "".join(f"{found[column]:14.3f}" for column in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
