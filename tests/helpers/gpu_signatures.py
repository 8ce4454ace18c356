"""Signatures of packages that only GPUs can run, read from their wheels and source distributions on PyPI, which are
neither installed nor built. `python tests/helpers/gpu_signatures.py` records them again; it downloads 300 MB and takes
two minutes."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.model.platform.gpu_calls import GPU_CALLS, GpuCall, release_of

RECORDS = Path(__file__).with_suffix(".json")
LINUX = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64")
MAC = ("--only-binary=:all:", "--python-version=3.12", "--platform=macosx_14_0_arm64", "--platform=macosx_11_0_arm64")
SOURCE = ("--no-binary=:all:", "--no-build-isolation")
SOURCES = {
    ("flash-attn", "2.7.4.post1"): SOURCE,
    ("flash-attn", "2.8.3"): SOURCE,
    ("megatron-core", "0.16.1"): LINUX,
    ("megatron-core", "0.19.0"): LINUX,
    ("torch", "2.8.0"): MAC,  # the same Python files as the builds for Linux, without gigabytes of CUDA
    ("torch", "2.11.0"): MAC,
    ("torch", "2.12.0"): MAC,
    ("transformer-engine", "2.4.0"): LINUX,
    ("transformer-engine", "2.9.0"): LINUX,
    ("transformer-engine", "2.12.0"): LINUX,
    ("transformer-engine", "2.20.2"): LINUX,
}
"""Options of `pip download` for each release. NVIDIA's image 25.06 has flash-attn 2.7.4.post1, torch 2.8 and
Transformer Engine 2.4."""


def recorded() -> dict[tuple[str, str], dict[str, str]]:
    """Signatures by full name, of each recorded (package, version)."""
    found = json.loads(RECORDS.read_text(encoding="utf-8"))
    return {(one["package"], one["version"]): one["signatures"] for one in found}


def stand_in(signature: str, called: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
    """Return a function with a recorded signature that passes its arguments on, and raises TypeError for others."""
    scope: dict[str, Any] = {}
    exec(f"def function{signature}: pass", scope)
    bound = inspect.signature(scope["function"])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound.bind(*args, **kwargs)
        return called(*args, **kwargs)

    function.__signature__ = bound  # type: ignore[attr-defined]
    return function


def full_name(call: GpuCall) -> str:
    return f"{call.module}.{call.name}"


def calls_of(package: str, version: str) -> Iterator[GpuCall]:
    """Yield the calls that the project makes to a release, except those of compiled functions, whose parameters are in
    no source file."""
    for call in GPU_CALLS:
        if call.package == package and release_of(version) >= release_of(call.since) and not call.compiled:
            yield call


def signature_in(root: Path, module: str, name: str) -> str:
    """Read a signature from unpacked sources, with all default values None.

    Raises LookupError if there is no such name.
    """
    name, _, method = name.partition(".")
    found = _definition(root, module, name)
    if isinstance(found, ast.ClassDef):
        methods = [one for one in found.body if isinstance(one, ast.FunctionDef)]
        of_class = [one for one in methods if one.name == (method or "__init__")]
        if not of_class:
            if method:
                raise LookupError(f"{module}.{name} has no {method}")
            return "(self, *args, **kwargs)"
        function = of_class[0]
        drop = int("classmethod" in map(ast.unparse, function.decorator_list))
    else:
        function, drop = found, 0
    return _text(function.args, drop)


def _definition(root: Path, module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    path = root / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        raise LookupError(f"no module {module}")
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    package = module.split(".") if path.is_dir() else module.split(".")[:-1]
                    base = package[: len(package) - node.level + 1] if node.level else []
                    return _definition(root, ".".join([*base, *filter(None, [node.module])]), alias.name)
    raise LookupError(f"{module} has no {name}")


def _text(arguments: ast.arguments, drop: int) -> str:
    def each(names: list[ast.arg], defaults: list[Any]) -> list[str]:
        return [one.arg if default is None else f"{one.arg}=None" for one, default in zip(names, defaults, strict=True)]

    names = [*arguments.posonlyargs, *arguments.args]
    places = each(names, [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults))[drop:]
    star = [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    last = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return f"({', '.join([*places, *star, *each(arguments.kwonlyargs, list(arguments.kw_defaults)), *last])})"


def unpacked(folder: Path, package: str, version: str, options: tuple[str, ...]) -> Path:
    """Download a release and return the folder of its Python modules."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *options]
    # Without this variable flash-attn's setup.py needs CUDA's compiler to report its version.
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*command, f"{package}=={version}"], check=True, env=environment)
    (archive,) = [file for file in folder.iterdir() if file.is_file()]
    root = folder / "unpacked"
    if archive.suffix == ".whl":
        parts = tuple("/".join(call.module.split(".")[:2]) for call in calls_of(package, version))
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(parts) and name.endswith(".py")]
            wheel.extractall(root, names)
        return root
    with tarfile.open(archive) as source:
        source.extractall(root, [one for one in source.getmembers() if one.name.endswith(".py")], filter="data")
    (inside,) = root.iterdir()
    return inside


def record() -> None:
    """Write RECORDS."""
    found = []
    for (package, version), options in SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:
            root = unpacked(Path(folder), package, version, options)
            (archive,) = [file.name for file in Path(folder).iterdir() if file.is_file()]
            signatures = {
                full_name(call): signature_in(root, call.module, call.name) for call in calls_of(package, version)
            }
        found.append({"package": package, "version": version, "source": archive, "signatures": signatures})
    RECORDS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
