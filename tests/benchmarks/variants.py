"""Learning curves of a recipe with several losses and baselines, three seeds each.

    python tests/benchmarks/variants.py FOLDER [--seeds 3] [--steps 300] [--out docs/variants.svg]
    python tests/benchmarks/variants.py FOLDER --recipe smollm2-135m-chain-sum --steps 16 --out FILE [KEY=VALUE ...]

Trains one after the other into FOLDER, where finished runs are not repeated. Each step has four updates, so that three
of them are off policy: with a single update per step all losses have one gradient. Prints a table, and draws the mean
over the seeds of each variant.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

VARIANTS = {
    "clip": [],
    "gspo": ["grpo.policy_loss=gspo"],
    "cispo": ["grpo.policy_loss=cispo"],
    "dual_clip": ["grpo.dual_clip=3.0"],
    "leave_one_out": ["grpo.baseline=leave_one_out", "grpo.advantage_std=none"],
    "dr_grpo": ["grpo.advantage_std=none", "grpo.reduction=constant"],
}
COLOURS = ["#08519c", "#e6550d", "#31a354", "#9ecae1", "#756bb1", "#c0392b"]
SETTINGS = {
    "demo": ["grpo.global_batch=128"],
    "smollm2-135m-chain-sum": [
        "grpo.prompts_per_step=8",
        "grpo.global_batch=16",
        "optimizer.learning_rate=7e-6",  # an eighth of the answers of the recipe's updates
    ],
}
"""Settings of all runs of a recipe. An update has a quarter of the answers of a step."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 52, 16, 44, 44
"""Size and margins of the plot, in pixels."""


def trained(folder: Path, recipe: str, name: str, seed: int, steps: int, overrides: list[str]) -> list[float]:
    """Return the mean rewards of the steps of a run, which is started unless it has finished."""
    run = folder / f"{name}-{seed}"
    if not (run / "DONE").exists():
        keys = [
            f"training.steps={steps}",
            f"training.seed={seed}",
            *SETTINGS[recipe],
            "evaluation.every=0",
            *overrides,
        ]
        command = [Path(sys.executable).with_name("mrl-submit"), recipe, "--run-dir", str(run), *keys, *VARIANTS[name]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["mean_reward"] for line in lines if "mean_reward" in line]


def draw(curves: dict[str, list[float]], steps: int) -> str:
    """SVG of one curve for each variant, averaged over a fifteenth of the steps."""
    window = max(1, steps // 15)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="16">mean reward ({window}-step average, mean of the seeds)</text>',
    ]

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * reward

    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(reward):.1f}H{WIDTH - RIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(reward) + 4:.1f}" text-anchor="end">{reward:g}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        at = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    for number, (name, rewards) in enumerate(curves.items()):
        smooth = [fmean(rewards[max(0, step - window) : step]) for step in range(1, len(rewards) + 1)]
        points = " ".join(
            f"{LEFT + (WIDTH - LEFT - RIGHT) * step / steps:.1f},{y(reward):.1f}"
            for step, reward in enumerate(smooth, 1)
        )
        colour, left = COLOURS[number], LEFT + 116 * number
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<path d="M{left} {TOP - 14}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 23}" y="{TOP - 10}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=SETTINGS, default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "variants.svg")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs, e.g. model.dtype=fp32")
    options = parser.parse_intermixed_args()
    runs = {name: [] for name in VARIANTS}
    for seed in range(options.seeds):
        for name in VARIANTS:
            rewards = trained(options.folder, options.recipe, name, seed, options.steps, options.overrides)
            runs[name].append(rewards)
    last = max(4, options.steps // 6)
    print(f"| variant | mean reward of the last {last} steps, by seed | of all steps and seeds |")
    for name, its in runs.items():
        ends = " | ".join(f"{fmean(rewards[-last:]):.2f}" for rewards in its)
        print(f"| {name} | {ends} | {fmean(map(fmean, its)):.2f} |")
    curves = {name: [fmean(step) for step in zip(*its, strict=True)] for name, its in runs.items()}
    options.out.write_text(draw(curves, options.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
