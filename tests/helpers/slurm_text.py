"""Output of Slurm's commands, written by tests."""

from __future__ import annotations

from launcher.backends.slurm.jobs import SEPARATOR, SQUEUE_FIELDS


def squeue_record(**fields: str) -> str:
    """One job as `squeue --Format` prints it for SQUEUE_FIELDS; fields that are not given are N/A."""
    return "".join(fields.get(name, "N/A") + SEPARATOR for name in SQUEUE_FIELDS) + "\n"
