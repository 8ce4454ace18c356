"""Record the runs and the keys of a release, for the tests of upgrades.

    python tests/upgrades/record.py v0.1.2              the tag, or any commit that is to become it
    python tests/upgrades/record.py v0.1.2 --of COMMIT

The code of the release runs in its own directory, with the packages of this environment.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from recorded_runs import CASES, HERE, STEPS, STOPPED_AFTER, WITHOUT_BITS, environment, packages

LIMIT_S = 600.0
LEFT_OUT = ("tensorboard", "logs", "__pycache__")
"""Folders of a run directory that no command of a later release needs."""
LIST = str(HERE / "list_keys.py")
SUBMIT = "from launcher.cli.entry import mrl_submit; mrl_submit()"


def install(commit: str, folder: Path) -> Path:
    """Check out a commit and return a Python that imports it, and everything else from this environment."""
    source, home = folder / "source", folder / "environment"
    source.mkdir()
    archive = subprocess.run(["git", "-C", str(HERE.parents[1]), "archive", commit], check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "release.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n")
    about = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = site / f"mrl-{about['version']}.dist-info"  # found before that of this environment
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mrl\nVersion: {about['version']}\n")
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())])
        for group, entries in about["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    return home / "bin" / "python"


def train(python: Path, case: str, root: Path, interrupt: bool) -> None:
    """Run a case; with `interrupt`, press Ctrl-C in its middle. Raises SystemExit if it ends in another way."""
    command = [str(python), "-P", "-c", SUBMIT, *CASES[case], "--run-dir", str(root)]
    log = root.with_name(root.name + ".txt")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=root.parent, env=environment(root.parent), stdout=output, stderr=output)
        try:
            if interrupt:
                wait_until(lambda: lines(root / "metrics.jsonl") >= STOPPED_AFTER or process.poll() is not None)
                process.send_signal(signal.SIGINT)
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
    reached = lines(root / "metrics.jsonl")
    if code != (130 if interrupt else 0) or (reached >= STEPS) == interrupt:
        raise SystemExit(f"{case}: exit code {code} after {reached} steps\n{log.read_text()}")
    print(f"{case}: {reached} steps", file=sys.stderr)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit("the run did not get that far")
        time.sleep(0.01)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what no later release needs, and whose machine and user recorded it."""
    if any(part in LEFT_OUT for part in member.name.split("/")) or member.name.endswith((".lock", ".tmp")):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--of", help="commit; default: the tag RELEASE")
    parser.add_argument("--keys", action="store_true", help="only the keys")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mrl-record-") as name:
        folder = Path(name)
        python = install(asked.of or asked.release, folder)
        keys = subprocess.run([str(python), "-P", LIST], check=True, stdout=subprocess.PIPE, text=True)
        (HERE / f"{asked.release}.keys.json").write_text(keys.stdout)
        if asked.keys:
            return
        record = folder / "record"
        for case in CASES:
            for kind, interrupt in (("runs", True), ("undisturbed", False)):
                if case in WITHOUT_BITS and not interrupt:
                    continue
                (record / kind).mkdir(parents=True, exist_ok=True)
                train(python, case, record / kind / case, interrupt)
        (record / "recorded.json").write_text(json.dumps(packages()))
        shutil.copytree(folder / "source" / "launcher" / "recipe" / "shipped", record / "recipes")
        for undisturbed in (path for path in (record / "undisturbed").iterdir() if path.is_dir()):
            for path in undisturbed.iterdir():
                if path.name not in ("metrics.jsonl", "evaluations.jsonl"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        with tarfile.open(HERE / f"{asked.release}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(record.iterdir()):
                if path.name in ("recorded.json", "recipes"):
                    archive.add(path, path.name, filter=plain)
                else:
                    for case in (case for case in CASES if (path / case).exists()):
                        archive.add(path / case, f"{path.name}/{case}", filter=plain)
    print(f"{asked.release}: {(HERE / f'{asked.release}.tar.xz').stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
