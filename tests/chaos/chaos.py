"""Runs side by side on a real Slurm, hit by faults of all kinds at random moments, until the time is over.

    python tests/chaos/chaos.py --seconds 3600 --seed 7 --report chaos.md

Exit code 1: a record differs, a run did not come back, or something is left behind. Then the report says so, and the
run directories and the timeline of faults are kept. The same seed draws the same runs and the same faults; the moments
at which they hit depend on the machine too. Needs root and the packages of tests/slurm/lab.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "slurm"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import file_faults
import full_disks
import network_cuts
import process_faults
import psutil
import pytest
import second_user
import slurm_faults
import torn_records
from book import Book
from bout import MOST_FAULTS, Arena, Bout, ChaosFailure
from chaos_report import report
from fault import Fault
from flatness import Growth, Watch
from full_disks import small_disk
from kinds import Kind, kinds, marathon
from lab import Cluster, LabError, missing
from leaks import baseline, leaks
from small_root import make_small_root

FAMILIES = (process_faults, slurm_faults, file_faults, network_cuts, torn_records, full_disks, second_user)
MEGABYTES = 500
"""Size of the disk of each run at a time."""
BROKEN = (
    ChaosFailure,
    LabError,
    AssertionError,
    OSError,
    ValueError,
    LookupError,
    subprocess.SubprocessError,
    psutil.Error,
)
"""Errors that fail one run, beside which the others go on."""
INSIDE = "MRL_CHAOS_FOLDER"
"""Environment variable with the folder of the chaos, for the process that has its own /tmp."""
GENTLE = ("the network", "SIGSTOP of a replica", "supervisor", "slurmctld", "slurmdbd", "up to 5 s")
"""Parts of the names of faults that all watched processes of a run survive. The end of a nursery is none: it loses all
answers of a small step, after which the run starts again. Nor is the second user, who ends srun of Slurm 22.05."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="until no further fault is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="file for the report, which is also printed")
    parser.add_argument("--only", default="", help="draw only faults with this in their name")
    parser.add_argument("--runs", default="", help="start only kinds of runs with this in their name")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at once, beside the one that is watched")
    return parser.parse_args()


def in_own_tmp(given: argparse.Namespace) -> int:
    """Start this program again with an empty /tmp, so that what is left there is known to be of these runs."""
    if (reason := missing()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="mrl-chaos-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)  # for the database's user too
    script = f'mount --bind {folder}/tmp /tmp && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", sys.executable, *sys.argv]
    code = subprocess.run(command, env={**os.environ, INSIDE: str(folder), "TMPDIR": "/tmp"}).returncode
    written = folder / "report.md"
    if given.report and written.exists():
        given.report.write_text(written.read_text())
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"kept: {folder}; again: --seed {given.seed} --seconds {given.seconds:.0f}", file=sys.stderr)
    return code


class Chaos:
    def __init__(self, given: argparse.Namespace, folder: Path, lab: Cluster, disks: list[Path]) -> None:
        """disks: a folder for each run at a time, which faults may fill if its disk is small."""
        self.given = given
        self.folder = folder
        self.lab = lab
        self.disks = disks
        self.book = Book(folder / "timeline.jsonl")
        self.growths: list[Growth] = []
        families = [[fault for fault in each.FAULTS if given.only in fault.kind] for each in FAMILIES]
        self.families = [family for family in families if family]
        vllm = os.environ.get("MRL_VLLM_PYTHON")
        kept = kinds(vllm if vllm and Path(vllm).exists() else None, image_for_containers(folder / "image"))
        self.kinds = [kind for name, kind in kept.items() if given.runs in name]
        self.undisturbed: dict[str, Path] = {}

    def arena(self, seconds: float, families: list[list[Fault]]) -> Arena:
        stop_at = time.monotonic() + seconds
        return Arena(self.lab, self.folder, self.book, families, self.undisturbed, stop_at)

    def run(self) -> None:
        before = baseline(self.lab, Path("/tmp"))
        twins = {kind.like: kind for kind in kinds(None, None).values() if kind.like == kind.name}
        needed = [kind for name, kind in twins.items() if name in {each.like for each in self.kinds}]
        arena = self.arena(0.0, [])
        with ThreadPoolExecutor(len(twins)) as pool:
            list(pool.map(lambda kind: self.make_undisturbed(arena, kind), needed))
        if not self.book.failures:
            self.disturb()
        self.book.leaks += leaks(self.lab, before, Path("/tmp"))

    def make_undisturbed(self, arena: Arena, kind: Kind) -> None:
        bout = Bout(
            arena, kind, f"undisturbed-{kind.name}".replace(" ", "-"), random.Random(0), 0, self.folder / "undisturbed"
        )
        try:
            bout.submit()
            self.undisturbed[kind.name] = bout.run.dir.root
            bout.finish()
        except BROKEN:
            self.book.fail(bout.name, traceback.format_exc())
            bout.keep()

    def disturb(self) -> None:
        arena = self.arena(self.given.seconds, self.families)
        draw = random.Random(self.given.seed)
        order = [draw.sample(self.kinds, len(self.kinds)) for _ in range(1000)]
        queue = iter(list(enumerate(kind for turn in order for kind in turn)))
        lock = threading.Lock()

        def work(disk: Path) -> None:
            while not arena.is_over():
                with lock:
                    number, kind = next(queue)
                self.fight(arena, number, kind, disk)

        *disks, last = self.disks
        with ThreadPoolExecutor(len(self.disks)) as pool:
            started = [*(pool.submit(work, disk) for disk in disks), pool.submit(self.watch_marathon, last)]
        for each in started:
            each.result()  # raises what no run is to blame for

    def fight(self, arena: Arena, number: int, kind: Kind, disk: Path) -> None:
        chance = random.Random(f"{self.given.seed}/{number}")
        name = f"{number:03d}-{kind.name}".replace(" ", "-")
        bout = Bout(arena, kind, name, chance, chance.randint(1, MOST_FAULTS), disk)
        try:
            bout.fight()
            bout.clear()
        except BROKEN as error:
            self.book.fail(name, str(error) if isinstance(error, ChaosFailure) else traceback.format_exc())
            bout.keep()

    def watch_marathon(self, disk: Path) -> None:
        """Sample the processes of a run that goes on until the time is over, under faults that they survive."""
        gentle = [[f for f in family if any(word in f.kind for word in GENTLE)] for family in self.families]
        its = self.arena(self.given.seconds, [family for family in gentle if family])
        bout = Bout(its, marathon(self.folder), "marathon", random.Random(f"{self.given.seed}/marathon"), 1, disk)
        try:
            bout.submit()
            watch = Watch(bout.run.dir.root, self.folder / "samples.csv")
            bout.go_on()
            self.growths += watch.stop()
            bout.clear()
        except BROKEN:
            self.book.fail(bout.name, traceback.format_exc())
            bout.keep()


def main() -> int:
    given = arguments()
    if INSIDE not in os.environ:
        return in_own_tmp(given)
    folder = Path(os.environ[INSIDE])
    with contextlib.ExitStack() as stack:
        # Before the lab comes up, since its nodes see the mounts of that moment.
        disks = [disk_at(folder / f"disk-{number}", stack) for number in range(given.side_by_side + 1)]
        lab = Cluster(accounting=missing(accounting=True) is None).up()
        stack.callback(lab.down)
        chaos = Chaos(given, folder, lab, disks)
        version = lab.run("sinfo", "--version").strip()
        try:
            chaos.run()
        finally:
            shutil.copytree(lab.directory / "logs", folder / "logs")  # the lab's directory ends with it
            beside = f"{given.side_by_side} and one that is watched"
            text = report(
                chaos.book, chaos.growths, {"Slurm": version, "seed": str(given.seed), "side by side": beside}
            )
            (folder / "report.md").write_text(text)
            print(text)
    steep = [growth for growth in chaos.growths if not growth.is_flat()]
    return 1 if chaos.book.failures or chaos.book.leaks or steep else 0


def image_for_containers(root: Path) -> Path | None:
    """Return a root file system with an interpreter, or None where the kernel allows no containers."""
    try:
        return make_small_root(root)
    except pytest.skip.Exception:
        return None


def disk_at(folder: Path, stack: contextlib.ExitStack) -> Path:
    """Return a folder on its own small disk, until the stack is closed, or on the machine's where none can be made."""
    folder.mkdir()
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        stack.enter_context(small_disk(folder, MEGABYTES))
    return folder


if __name__ == "__main__":
    sys.exit(main())
