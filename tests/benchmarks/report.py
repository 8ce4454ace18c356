"""Time to write the page of a run, its size, and the time until a browser shows it.

    python tests/benchmarks/report.py            # a run of 60 steps, and one of 10,000 with 100,000 answers

The time in a browser needs the extra `browser` and chromium; it is left out without them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from reported_run import make_reported_run

from launcher.report.write import write_run

SHAPES = {"60 steps, 480 answers": (60, 2, 4), "10,000 steps, 100,000 answers": (10_000, 1, 10)}
"""Steps, groups of each, answers of each group."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for place, (name, (steps, groups, answers)) in enumerate(SHAPES.items()):
            run = make_reported_run(Path(folder) / str(place), steps, groups, answers)
            began = time.perf_counter()
            size = write_run(run, run.report)
            took = time.perf_counter() - began
            print(f"{name}: {took:.1f} s to write, {size / 1e6:.2f} MB{_painted(run.report)}")


def _painted(file: Path) -> str:
    """Describe when a browser painted first, and when the rollouts were there."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return ""
    if program is None:
        return ""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        began = time.perf_counter()
        page.goto(file.as_uri())
        page.wait_for_selector("button.group")
        took = time.perf_counter() - began
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        browser.close()
    return f"; in a browser {paint:.2f} s to the first paint, {took:.2f} s until the rollouts are listed"


if __name__ == "__main__":
    main()
