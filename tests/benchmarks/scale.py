"""Costs that grow with ranks, replicas, answers, steps and problems, at four sizes each and extrapolated.

    python tests/benchmarks/scale.py [--only TEXT] [--write]

Ranks, files and replicas are fake, the functions are the real ones. Seconds are CPU time of one process, the least of
some calls; the exponent is fitted to the larger sizes. The table is compared with scale.json, which --write replaces:
a row that costs more than twice as much at its largest size is marked.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path

from scale_rows import Fit, Row, fit

HERE = Path(__file__).parent
COMMITTED = HERE / "results" / "scale.json"
WORSE = 2.0
SMALL_S = 1e-3
"""Seconds below which a difference is noise."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="rows whose name contains this")
    options.add_argument("--write", action="store_true", help="replace the committed figures of these rows")
    chosen = options.parse_args()
    committed = json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else {}
    measured = {}
    for row in rows():
        if chosen.only.lower() in row.name.lower():
            measured[row.name] = points = show(row, committed.get(row.name))
            committed = committed | {row.name: points} if chosen.write else committed
    if not measured:
        raise SystemExit(f"no row contains {chosen.only!r}")
    if chosen.write:
        COMMITTED.write_text(json.dumps(committed, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def rows() -> list[Row]:
    modules = sorted(path.stem for path in HERE.glob("scale_*.py") if path.stem != "scale_rows")
    return [row for name in modules for row in importlib.import_module(name).ROWS]


def show(row: Row, before: dict[str, list[float]] | None) -> dict[str, list[float]]:
    """Measure a row and print it. Returns size -> [seconds, bytes]."""
    costs = [row.measure(size) for size in row.sizes]
    seconds = fit(row.sizes, [cost.cpu_s for cost in costs], row.target)
    print(f"\n{row.name}, by {row.what}")
    print("  " + "  ".join(f"{size:>12,}" for size in (*row.sizes, row.target)) + "   exponent  aim")
    print("  " + "  ".join(f"{as_time(cost.cpu_s):>12}" for cost in costs) + ending(seconds, row.limit_s, as_time))
    if any(cost.bytes for cost in costs):
        memory = fit(row.sizes, [float(cost.bytes) for cost in costs], row.target)
        limit = None if row.limit_bytes is None else float(row.limit_bytes)
        print("  " + "  ".join(f"{as_size(cost.bytes):>12}" for cost in costs) + ending(memory, limit, as_size))
    points = {str(size): [cost.cpu_s, cost.bytes] for size, cost in zip(row.sizes, costs, strict=True)}
    largest = str(row.sizes[-1])
    if before and largest in before and points[largest][0] > max(WORSE * before[largest][0], SMALL_S):
        print(f"  MORE than the committed {as_time(before[largest][0])} at {row.sizes[-1]:,} {row.what}")
    return points


def ending(found: Fit, limit: float | None, unit: Callable[[float], str]) -> str:
    at_target, aim = unit(found.at_target), "" if limit is None else unit(limit)
    verdict = "" if limit is None else "  met" if found.at_target <= limit else "  MISSED"
    return f"  {at_target:>12}   {found.exponent:8.2f}  {aim}{verdict}"


def as_time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def as_size(size: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


if __name__ == "__main__":
    main()
