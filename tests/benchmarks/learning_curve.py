"""Draw docs/learning-curve.svg: the demo on a real Slurm, undisturbed and preempted twice.

    python tests/benchmarks/learning_curve.py [--at 250 550] [--out docs/learning-curve.svg]

Brings up the cluster of tests/slurm (root; Debian's slurm-wlm munge libslurm-dev) and submits the demo twice, on two
nodes. At the steps of `--at` a job of higher priority takes the nodes of the second run, and returns them once the run
has saved and is queued again. Fails unless both runs leave the same record, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1] / "slurm"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from lab import Cluster
from login import Login
from records import preempt, record, wait_for_ends

LIMIT_S = 1800.0
WINDOW = 20
"""Steps over which the drawn reward is the mean."""
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 44
"""Margins of the plot, in pixels as WIDTH and HEIGHT."""


def train(login: Login, name: str, at: Sequence[int]) -> tuple[list[float], list[int], object]:
    """Run the demo and preempt it at the steps `at`. Returns its rewards, the steps saved at each preemption, and its
    record without what may differ between runs."""
    run = login.submit("demo", "--cluster", "real", "job.nodes=2", "job.gpus_per_node=1", f"name={name}")
    saved = []
    for number, step in enumerate(at, 1):
        run.wait_for_step(step, LIMIT_S)
        urgent = preempt(login, run)
        wait_for_ends(run, number)
        run.wait("PENDING")
        saved.append(len(run.metrics()))
        login.lab.run("scancel", urgent)
    run.wait("COMPLETED", "PREEMPTED", limit=LIMIT_S)  # Slurm 24.05 and later call a job PREEMPTED that ever was
    assert run.ends() == [("drained", "preempted")] * len(at) + [("finished", None)], run.log()
    return [line["mean_reward"] for line in run.metrics()], saved, record(run.dir)


def smooth(rewards: Sequence[float]) -> list[float]:
    return [fmean(rewards[max(0, step - WINDOW) : step]) for step in range(1, len(rewards) + 1)]


def draw(undisturbed: Sequence[float], preempted: Sequence[float], saved: Sequence[int]) -> str:
    """SVG of both curves, on white so that it can be read on a dark page."""

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / len(preempted)

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * reward

    def line(rewards: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in enumerate(smooth(rewards), 1))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def text(at: tuple[float, float], content: str, anchor: str = "middle", style: str = "") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" {style}>{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(reward):.1f}H{WIDTH - RIGHT}" stroke="#e3e3e3"/>')
        parts.append(text((LEFT - 8, y(reward) + 4), f"{reward:g}", "end"))
    for step in range(0, len(preempted) + 1, 150):
        parts.append(text((x(step), HEIGHT - BOTTOM + 18), str(step)))
    parts.append(text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8), "step"))
    parts.append(text((12, TOP - 16), f"mean reward ({WINDOW}-step average)", "start"))
    parts.append(line(undisturbed, 'stroke="#9ecae1" stroke-width="7" stroke-linejoin="round"'))
    parts.append(line(preempted, 'stroke="#08519c" stroke-width="1.6" stroke-linejoin="round"'))
    for step in saved:
        parts.append(f'<path d="M{x(step):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#c0392b" stroke-dasharray="4 3"/>')
        parts.append(
            text((x(step) - 5, HEIGHT - BOTTOM - 22), f"preempted after step {step}:", "end", 'fill="#c0392b"')
        )
        parts.append(text((x(step) - 5, HEIGHT - BOTTOM - 8), "saved, requeued, resumed", "end", 'fill="#c0392b"'))
    for row, (stroke, width, label) in enumerate((("#9ecae1", 7, "undisturbed"), ("#08519c", 1.6, "preempted twice"))):
        left, middle = WIDTH - RIGHT - 250 + 130 * row, TOP - 20
        parts.append(f'<path d="M{left} {middle}h24" stroke="{stroke}" stroke-width="{width}"/>')
        parts.append(text((left + 30, middle + 4), label, "start"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, nargs="+", default=[250, 550])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "learning-curve.svg")
    options = parser.parse_args()
    cluster = Cluster()
    with tempfile.TemporaryDirectory() as folder:
        try:
            login = Login(cluster.up(), Path(folder) / "home", Path(folder) / "share")
            login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(cluster.cache)}}
            undisturbed, _, expected = train(login, "undisturbed", ())
            preempted, saved, found = train(login, "preempted", options.at)
        finally:
            cluster.down()
    assert found == expected, "the two runs left different records"
    options.out.write_text(draw(undisturbed, preempted, saved), encoding="utf-8")
    print(f"{options.out}: preempted after steps {saved}, the same record as undisturbed")


if __name__ == "__main__":
    main()
