"""Debian 13 in a directory, so that tests run with its Slurm 24.11 on a machine with another Slurm.

    python tests/slurm/trixie.py make               create the directory if it does not exist, and print its path
    python tests/slurm/trixie.py run COMMAND...     run a command there, in this checkout and with this .venv

A command sees the programs of that system, Slurm and Python 3.13 included, and the machine's processes, devices,
/tmp and /var/tmp. Its mounts belong to its own namespace and end with it. This needs root.

MRL_TRIXIE names the directory; the default is in XDG_CACHE_HOME/mrl. An existing directory is used unchanged.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SUITE = "trixie"
# No accounting: slurmdbd 24.11.5 ends at once with libmariadb 11.8.9 ("Number of columns in result ... maximum ... 0").
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "libslurm-dev"),
    *("python3", "gcc", "libc6-dev", "iproute2", "git"),
)
UNUSED = ("doc", "man", "locale", "info")
"""Folders of /usr/share that are not installed."""
MIRROR = "http://deb.debian.org/debian"
LIMIT_S = 1800.0

CHECKOUT = Path(__file__).resolve().parents[2]
SHARED = ("/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/etc/hosts", "/etc/resolv.conf")


def root() -> Path:
    """Directory of the system, whether it exists or not. Its name changes with the list of packages."""
    if given := os.environ.get("MRL_TRIXIE"):
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(" ".join((*PACKAGES, *UNUSED)).encode()).hexdigest()
    return Path(cache, "mrl", f"{SUITE}-{digest[:12]}").absolute()


def mirror() -> str:
    """Debian mirror that apt of this machine uses, or Debian's own."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"^[^#\n]*?\b(https?://\S+/debian)/?(?=\s|$)", text, re.MULTILINE)
    return found[1] if found else MIRROR


def make() -> Path:
    """Directory of the system, created if it does not exist. Raises SystemExit if that fails."""
    target = root()
    if target.exists():
        return target
    if shutil.which("mmdebstrap") is None:
        sys.exit("error: mmdebstrap is not installed: apt-get install mmdebstrap")
    if os.geteuid() != 0:
        sys.exit("error: creating a Debian system needs root")
    print(f"creating {target}: Debian 13 with Slurm 24.11, from {mirror()}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        made = Path(folder, "root")
        options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNUSED]
        options += ["--dpkgopt=force-unsafe-io", "--aptopt=APT::Install-Recommends false"]
        command = ["mmdebstrap", "--quiet", "--variant=apt", *options, f"--include={','.join(PACKAGES)}"]
        try:
            subprocess.run([*command, SUITE, made, mirror()], check=True, timeout=LIMIT_S, stdout=sys.stderr)
        except (subprocess.SubprocessError, OSError) as error:
            sys.exit(f"error: Debian 13 could not be created: {error}")
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    return target


def enter(system: Path, command: list[str]) -> None:
    """Replace this process by a command in the system. The caller has given it its own mount namespace. Raises
    OSError."""
    _mount("--bind", system, system)  # namespaces of the lab's nodes need a root that is a mount point
    for path in (*map(Path, SHARED), CHECKOUT, *_repository(), Path(sys.prefix), *_python()):
        _bind(path, system)
    _bind_programs(system)
    here = Path.cwd()
    os.chroot(system)
    os.chdir(here)
    os.execvp(command[0], command)


def _repository() -> list[Path]:
    """Git directory of this checkout; that of a worktree is outside it."""
    command = ["git", "-C", CHECKOUT, "rev-parse", "--path-format=absolute", "--git-common-dir"]
    told = subprocess.run(command, capture_output=True, text=True)
    return [Path(told.stdout.strip())] if told.returncode == 0 else []


def _python() -> list[Path]:
    """Files outside this .venv that its Python needs."""
    base = Path(sys.base_prefix)
    if base != Path("/usr"):
        return [base]
    return [_program(), Path(sysconfig.get_path("stdlib"))]


def _program() -> Path:
    """Program to which the Python of .venv is a link."""
    return Path(sys.executable).resolve()


def _bind_programs(system: Path) -> None:
    """Make .venv/bin/python the machine's Python, because the same path may be another Python in the system."""
    programs = Path(sys.prefix, "bin")
    copy = system / "mnt" / "bin"
    _mount("-t", "tmpfs", "none", system / "mnt")
    shutil.copytree(programs, copy, symlinks=True)
    for file in copy.iterdir():
        if file.is_symlink() and (programs / file.name).resolve() == _program():
            file.unlink()
            file.symlink_to(_program())
    _mount("--bind", copy, system / programs.relative_to("/"))


def _bind(path: Path, system: Path) -> None:
    if not path.exists():
        return
    there = system / path.relative_to("/")
    if path.is_dir():
        there.mkdir(parents=True, exist_ok=True)
    elif not there.is_file():
        there.unlink(missing_ok=True)  # a broken link
        there.parent.mkdir(parents=True, exist_ok=True)
        there.touch()
    _mount("--rbind", path, there)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def main() -> None:
    match sys.argv[1:]:
        case ["make"]:
            print(make())
        case ["run", *command] if command:
            os.execvp("unshare", ["unshare", "--mount", sys.executable, __file__, "enter", str(make()), *command])
        case ["enter", system, *command] if command:
            enter(Path(system), command)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
