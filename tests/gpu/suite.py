"""Runs the tests of a GPU part by part, the most basic first, and writes their results after each part.

    python tests/gpu/suite.py [--results FOLDER] [--seconds 1800] [--device cuda|cpu] [PART...]

A table has one line a part; failures and the reasons of skipped tests follow. FOLDER gets one file, replaced after each
part, so that a machine that is taken away loses the part in progress alone. Needs torch for CUDA, pytest, hypothesis,
and what `pip install '.[train,huggingface]'` installs, mrl's own metadata included, but no plugin of pytest. With
--device cpu the tests that can do so run on a CPU, and the others say why not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GPU, HELPERS, BENCHMARKS = (ROOT / "tests" / name for name in ("gpu", "helpers", "benchmarks"))


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    limit_s: int
    """Seconds on a GPU after which it is cut off."""
    tests: tuple[str, ...] = ()
    """Files in tests/gpu."""
    script: tuple[str, ...] = ()
    """Benchmark in tests/benchmarks, and its arguments."""
    at_once: bool = False
    """Whether its files run at the same time. They mostly start processes, and measure no speed."""


PARTS = (
    Part(
        "parity",
        300,
        ("test_cuda_parity.py", "test_cuda_run.py", "test_cuda_two_ranks.py", "test_cuda_buckets.py"),
        at_once=True,
    ),
    Part("kernels", 240, ("test_cuda_kernels.py", "test_cuda_layer_kernels.py")),
    Part("decode", 240, ("test_cuda_decode.py", "test_cuda_megatron_engine.py")),
    Part("graphs", 240, ("test_cuda_graphs.py", "test_cuda_exit.py"), at_once=True),
    Part("offload", 90, ("test_cuda_offload.py",)),
    Part("learning", 400, ("test_cuda_learns.py",)),
    Part("decode-speed", 180, script=("gpu_decode.py", "--size", "7b")),
    Part("step-speed", 180, script=("gpu_step.py", "--size", "0.5b")),
)
"""Parts in their order."""


def run(part: Part, device: str, seconds: float, results: Path) -> dict[str, Any]:
    """Run a part for at most so many seconds, on a GPU also for at most its limit, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        pytest = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "-pno:timeout", "-pgpu_report"]
        files = [str(GPU / name) for name in part.tests]
        commands = [[*pytest, file] for file in files] if part.at_once else [[*pytest, *files]]
        if part.script:
            script, *arguments = part.script if device == "cuda" else (part.script[0], "--size", "tiny")
            commands = [[sys.executable, str(BENCHMARKS / script), *arguments]]
            commands[0] += ["--device", device, "--results", str(results)]
        environment = os.environ | {"MRL_GPU_TESTS_ON": device, "MRL_GPU_REPORTS": folder, "PYTHONFAULTHANDLER": "1"}
        # With this variable each of many starts would compile packages again that pip has not compiled.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, HELPERS, os.environ.get("PYTHONPATH", "")]))
        began = time.monotonic()
        limit = min(part.limit_s, seconds) if device == "cuda" else seconds
        codes, output = _run(commands, environment, limit)
        lines = [line for file in Path(folder).iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    tests = [json.loads(line) for line in lines]
    counts = Counter(test["outcome"] for test in tests)
    failed = counts["failed"] + sum(code not in (0, 1, None) for code in codes) + (1 in codes and not counts["failed"])
    return {
        "part": part.name,
        "seconds": round(time.monotonic() - began, 1),
        "passed": counts["passed"],
        "failed": failed,
        "skipped": counts["skipped"],
        "cut": None in codes,
        "output": output if failed or None in codes or part.script else "",
        "tests": tests,
    }


def _run(
    commands: Sequence[Sequence[str]], environment: dict[str, str], seconds: float
) -> tuple[list[int | None], str]:
    """Run commands at the same time. Return their exit codes, None after a cut, and the ends of their outputs."""
    deadline = time.monotonic() + seconds
    with ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in commands]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            for command, log in zip(commands, logs, strict=True)
        ]
        codes = [_code(process, deadline) for process in processes]
        for log in logs:
            log.seek(0)
        return codes, "\n".join(log.read()[-8000:] for log in logs)


def _code(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Wait for a process, and kill it at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        for end, limit in ((signal.SIGABRT, 10), (signal.SIGKILL, None)):  # the first one writes stacks
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, end)  # ranks that the tests started too
                process.wait(limit)
        return None


def machine() -> dict[str, Any]:
    """Card, versions and packages, found in a separate process, because the GPU belongs to the tests."""
    program = """
import json, sys, torch
from megatron_rl.model.platform.gpu_calls import check_packages
found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "card": "none"}
if torch.cuda.is_available():
    found |= {"card": torch.cuda.get_device_name(0), "cards": torch.cuda.device_count()}
print(json.dumps(found | {"packages": [str(fit) for fit in check_packages()]}))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    return (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"card": "none", "failure": done.stderr}
    )


def line_of(result: dict[str, Any]) -> str:
    numbers = "".join(f"{result[name]:9}" for name in ("passed", "failed", "skipped"))
    return f"{result['part']:14}{numbers}{result['seconds']:10.1f}{'  cut off' if result['cut'] else ''}"


def notes_of(result: dict[str, Any]) -> list[str]:
    """Reasons of skipped tests, and the ends of failures."""
    skips = Counter(test["reason"] for test in result["tests"] if test["outcome"] == "skipped")
    failures = [f"{test['test']}\n{test['reason'][-2000:]}" for test in result["tests"] if test["outcome"] == "failed"]
    if result["cut"] or (result["failed"] and not failures):
        failures.append(f"{result['part']}: {result['output']}")
    return [*(f"  {count} skipped: {reason}" for reason, count in skips.items()), *failures]


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(part.name for part in parts)}")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results", help="folder of the file of results")
    parser.add_argument("--seconds", type=float, default=1800, help="time for all parts together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - {part.name for part in parts}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join(part.name for part in parts)}")
    deadline, date = time.monotonic() + asked.seconds, datetime.now(UTC)
    found: dict[str, Any] = {"benchmark": "gpu-tests", "date": date.isoformat(timespec="seconds"), "machine": machine()}
    card = "-".join(found["machine"]["card"].lower().split())
    asked.results.mkdir(parents=True, exist_ok=True)
    file = asked.results / f"gpu-tests-{card}-{date:%Y-%m-%dT%H%M%SZ}.json"
    results: list[dict[str, Any]] = []
    print(json.dumps(found["machine"], indent=1))
    print(f"{'part':14}{'passed':>9}{'failed':>9}{'skipped':>9}{'seconds':>10}", flush=True)
    for part in parts:
        if asked.parts and part.name not in asked.parts:
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"{part.name:14}not started: the {asked.seconds:g} seconds are over")
            continue
        results.append(run(part, asked.device, left, asked.results))
        print(line_of(results[-1]), flush=True)
        half = file.with_suffix(".part")
        half.write_text(json.dumps(found | {"parts": results}, indent=1) + "\n", encoding="utf-8")
        half.replace(file)
    for result in results:
        for note in notes_of(result):
            print(note)
        if result["part"].endswith("-speed"):
            print(result["output"])
    print(file)
    return int(any(result["failed"] or result["cut"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
