"""The newest metrics as a text file that Prometheus reads through the textfile collector of its node_exporter.

Format: prometheus.io/docs/instrumenting/exposition_formats (text, version 0.0.4).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.metrics.names import COMPONENTS, ENVIRONMENT_METRICS, EVALUATION_METRICS, STEP_METRICS

EVERY_S = 5.0  # least seconds between two writes; Prometheus reads every 15 s or less often
SUFFIX = ".prom"  # end of the names of files that node_exporter reads


class PrometheusSample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float
    help: str


class PrometheusFile:
    """Writer of the file of a run. Methods raise OSError.

    Args:
        path: file, or the folder of node_exporter's collector; None: metrics.prom of the run directory.
    """

    name = "Prometheus's file"

    def __init__(self, run_dir: RunDir, path: str | None) -> None:
        self._run = run_dir.root.resolve().name
        given = run_dir.prometheus if path is None else Path(path)
        self.path = given if given.suffix == SUFFIX else given / f"mrl-{self._run}{SUFFIX}"
        self._values: dict[str, Any] = {}
        self._step = 0
        self._written = -math.inf
        self._stale = False

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        kept = {name: value for name, value in self._values.items() if name.startswith("eval/")}
        self._values = ({**self._values, **values}) if step == self._step else {**kept, **values}
        self._step, self._stale = step, True
        if time.monotonic() >= self._written + EVERY_S:
            self._write()

    def close(self) -> None:
        if self._stale:
            self._write()

    def _write(self) -> None:
        self._written, self._stale = time.monotonic(), False
        write_atomic(self.path, text_of(self._run, self._step, self._values, time.time()), durable=False)


def text_of(run: str, step: int, values: Mapping[str, Any], at: float) -> str:
    """Return the content of the file.

    Args:
        values: metrics by name; those that are not numbers are left out.
        at: unix time of the newest of them.
    """
    samples = [
        PrometheusSample("mrl_step", {}, step, "newest step"),
        PrometheusSample("mrl_updated_timestamp_seconds", {}, at, "unix time of the newest metrics"),
        *(_sample(name, value) for name, value in values.items() if isinstance(value, int | float)),
    ]
    by_name: dict[str, list[PrometheusSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, its in by_name.items():
        lines += [f"# HELP {name} {_escaped(its[0].help, quoted=False)}", f"# TYPE {name} gauge"]
        for sample in its:
            labels = {"run": run, **sample.labels}
            pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
            lines.append(f"{name}{{{pairs}}} {float(sample.value)!r}")
    return "\n".join(lines) + "\n"


def _sample(name: str, value: float) -> PrometheusSample:
    """`eval/SET/X` is mrl_eval_X{set="SET"}, `environments/ID/X` mrl_environment_X{environment="ID"}, `reward/X`
    mrl_reward_component{component="X"}."""
    first, _, rest = name.partition("/")
    if name.startswith(COMPONENTS):
        return PrometheusSample("mrl_reward_component", {"component": rest}, value, "mean of a component of the reward")
    if first in ("eval", "environments") and "/" in rest:
        of, _, metric = rest.rpartition("/")
        label = "set" if first == "eval" else "environment"
        known = EVALUATION_METRICS.get(f"eval/SET/{metric}") if first == "eval" else ENVIRONMENT_METRICS.get(metric)
        kind = "eval" if first == "eval" else "environment"
        return PrometheusSample(_name(f"{kind}_{metric}"), {label: of}, value, known.meaning if known else metric)
    known = STEP_METRICS.get(name)
    return PrometheusSample(_name(name), {}, value, known.meaning if known else name)


def _name(metric: str) -> str:
    return "mrl_" + re.sub("[^A-Za-z0-9_]", "_", metric)


def _escaped(text: str, quoted: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
