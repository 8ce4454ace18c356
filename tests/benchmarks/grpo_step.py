"""Seconds per GRPO step and generated tokens/s, beside TRL's GRPOTrainer and beside the arithmetic limit.

    python tests/benchmarks/grpo_step.py [--size demo|small|long|smollm2|smollm2-lora|smollm2-bf16] [--repeats 5]
                                         [--trl-processes 1|2]

Both sides start from the same weights and answer the same prompts with the same group size, batch and limits, in fp32
(smollm2-bf16: products in bf16, updates in fp32) on two cores: mrl with the ranks and threads of the recipe, TRL with
the faster of one process with two threads and two processes with one. They take turns within one run, and the output
has medians over turns. No time is asserted. The last line is TRL's seconds over ours at the demo's size.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from grpo_step_sizes import SIZES, Size, floating_point_operations
from grpo_step_turns import Contestant, ContestantFailed

HERE = Path(__file__).parent
CORES = 2
USUAL = [name for name, size in SIZES.items() if size.recipe == "demo"]
"""Sizes that need only mrl itself."""
START_TIMEOUT_S = 180
TURN_TIMEOUT_S = 600
TRL_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Measured:
    """One side: values by turn, each the mean over the turn's steps."""

    name: str
    seconds: list[float]
    generate_s: list[float]
    answer_length: list[float]

    @classmethod
    def of(cls, name: str, turns: Sequence[Sequence[dict]]) -> "Measured":
        def means(key: str) -> list[float]:
            return [statistics.fmean(step[key] for step in turn) for turn in turns]

        return cls(name, means("seconds"), means("generate_s"), means("answer_length"))

    def line(self, answers: int) -> str:
        rates = [answers * length / s for length, s in zip(self.answer_length, self.seconds, strict=True)]
        decoding = [answers * length / s for length, s in zip(self.answer_length, self.generate_s, strict=True)]
        milliseconds = (1e3 * statistics.median(self.seconds), 1e3 * min(self.seconds), 1e3 * max(self.seconds))
        return (
            f"  {self.name:24} {milliseconds[0]:9.1f} {milliseconds[1]:9.1f} -{milliseconds[2]:8.1f}"
            f" {statistics.median(rates):10.0f} {statistics.median(decoding):12.0f}"
            f" {statistics.fmean(self.answer_length):10.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help=f"only this one (default: {', '.join(USUAL)})")
    parser.add_argument("--repeats", type=int, default=5, help="turns for each side (default: 5)")
    parser.add_argument(
        "--trl-processes", type=int, choices=(1, CORES), help="run TRL only so (default: the faster, after a trial)"
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    torch.set_num_threads(CORES)
    ratios = {}
    for name in [options.size] if options.size else USUAL:
        try:
            ratios[name] = compare(name, SIZES[name], options.repeats, options.trl_processes)
        except ContestantFailed as error:
            sys.exit(str(error))
    if "demo" in ratios:
        print(f"ratio: {ratios['demo']:.2f}")


def compare(name: str, size: Size, repeats: int, trl_processes: int | None) -> float:
    """Measure and print one size. Returns TRL's seconds over ours.

    trl_processes: of TRL; None: what is faster.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        (folder / "size.txt").write_text(name, encoding="utf-8")
        job = size.config().job
        ours = stack.enter_context(
            Contestant("mrl", HERE / "grpo_step_ours.py", folder, ranks=job.world_size, threads=job.threads_per_rank)
        )
        facts = ours.ready(START_TIMEOUT_S)  # now TRL's weights and prompts exist
        trl = fastest_trl(folder, size.steps, stack, (trl_processes,) if trl_processes else (1, CORES))
        ours.turn(size.steps, TURN_TIMEOUT_S)
        rates, our_turns, trl_turns = [], [], []
        for _ in range(repeats):
            rates.append(matmul_rate())
            our_turns.append(ours.turn(size.steps, TURN_TIMEOUT_S))
            trl_turns.append(trl.turn(size.steps, TURN_TIMEOUT_S))
    return show(size, facts, Measured.of("mrl", our_turns), Measured.of(trl.name, trl_turns), our_turns, rates)


def fastest_trl(folder: Path, steps: int, stack: ExitStack, ways: Sequence[int]) -> Contestant:
    """The fastest way to run TRL here, warmed up: each number of processes is tried for a turn after a warm-up turn, if
    there are several. `stack` owns it."""
    script = HERE / "grpo_step_trl.py"
    tried: list[tuple[float, Contestant, ExitStack]] = []
    for processes in ways:
        own = stack.enter_context(ExitStack())
        threads = CORES // processes
        contestant = Contestant(
            f"TRL {processes} x {threads} threads",
            script,
            folder,
            ranks=processes,
            threads=threads,
            environment=TRL_ENVIRONMENT,
        )
        own.enter_context(contestant)
        contestant.ready(START_TIMEOUT_S)
        turn = contestant.turn(steps, TURN_TIMEOUT_S)
        if len(ways) > 1:
            turn = contestant.turn(steps, TURN_TIMEOUT_S)
        seconds = statistics.median(step["seconds"] for step in turn)
        tried.append((seconds, contestant, own))
    tried.sort(key=lambda entry: entry[0])
    for seconds, contestant, own in tried[1:]:
        print(f"({contestant.name}: {1e3 * seconds:.1f} ms a step in its trial, against {1e3 * tried[0][0]:.1f} ms)")
        own.close()
    return tried[0][1]


def matmul_rate(side: int = 1024, seconds: float = 0.3) -> float:
    """Floating-point operations per second of a fp32 matrix product on all cores: the best of many."""
    a, b, out = (torch.ones(side, side) for _ in range(3))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def show(
    size: Size, facts: dict, ours: Measured, trl: Measured, our_turns: Sequence[Sequence[dict]], rates: Sequence[float]
) -> float:
    config = size.config()
    grpo, model = config.grpo, config.model
    answers = grpo.prompts_per_step * grpo.group_size
    steps = [step for turn in our_turns for step in turn]
    # Rank 0's groups represent those of all ranks.
    operations = statistics.fmean(
        floating_point_operations(model, facts["tokens"], step["groups"])
        * (grpo.prompts_per_step / len(step["groups"]))
        for step in steps
    )
    rate = statistics.median(rates)
    seconds, limit = statistics.median(ours.seconds), operations / rate
    ratio = statistics.median(trl.seconds) / seconds
    print(
        f"\n{size.title}: {facts['parameters'] / 1e6:.2f} M parameters ({model.num_layers} layers, hidden "
        f"{model.hidden_size}), {grpo.prompts_per_step} prompts x {grpo.group_size} answers of up to "
        f"{config.sampling.max_new_tokens} tokens, {len(our_turns)} turns of {size.steps} steps\n"
        f"  {'':24} {'ms/step':>9} {'range':>19} {'tokens/s':>10} {'in generation':>13} {'length':>9}\n"
        f"{ours.line(answers)}\n{trl.line(answers)}\n"
        f"  arithmetic limit         {1e3 * limit:9.1f}      {operations / 1e9:.3g} GFLOP at {rate / 1e9:.0f} GFLOP/s "
        f"(1024 x 1024 products, {CORES} cores); mrl is at {limit / seconds:.0%} of it\n"
        f"  TRL / mrl                {ratio:9.2f}"
    )
    generate, train, total = (
        statistics.fmean(step[key] for step in steps) for key in ("generate_s", "train_s", "seconds")
    )
    print(
        f"  mrl's step               generate {1e3 * generate:.1f} ms, train {1e3 * train:.1f} ms, "
        f"other {1e3 * (total - generate - train):.1f} ms (means)\n",
        flush=True,
    )
    return ratio


if __name__ == "__main__":
    main()
