"""Files of a directory that count as code, and those that a snapshot leaves out.

Files of credentials stay out, tracked or not, by their names alone. Ordinary source may have tokens and secrets in its
name (tokenizer.py, token_count.py, secrets.py): the patterns are names under which programs keep credentials.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from typing import Callable, NamedTuple, TypeVar

from launcher.host.code import git
from megatron_rl.contract.paths import RunDir

T = TypeVar("T")
SECRET = "its name says credentials"


class SnapshotError(Exception):
    """The code cannot be copied."""


class Listing(NamedTuple):
    """Files and links to copy, relative to their source, and remarks for the user."""

    files: list[str]
    sizes: dict[str, int]
    untracked: list[str]
    notes: list[str]


def list_files(path: str, run: str) -> Listing:
    """Files of a snapshot of the directory `path`, made into the run directory `run`. Raises SnapshotError."""
    if not os.path.isdir(path):
        raise SnapshotError(f"{path}: no such directory on {socket.gethostname()}")
    refuse_home(path)
    notes: list[str] = []
    tracked, untracked = _names(path, os.path.realpath(run), notes)
    names = sorted(set(tracked + untracked))
    secret = [name for name in names if holds_credentials(name)]
    notes[:0] = [f"left out: {name} ({SECRET})" for name in secret]
    sizes = {}
    for name in sorted(set(names) - set(secret)):
        try:
            found = os.lstat(os.path.join(path, name))
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, and deleted in the work tree
        if stat.S_ISLNK(found.st_mode):
            _note_link(path, name, notes)
        elif not stat.S_ISREG(found.st_mode):
            notes.append(f"left out: {name} (no file)")
            continue
        sizes[name] = found.st_size
    return Listing(sorted(sizes), sizes, sorted(set(untracked) & set(sizes)), notes)


def refuse_home(path: str) -> None:
    """Raise SnapshotError where `path` is the user's home directory, or a directory above it."""
    home = os.path.realpath(os.path.expanduser("~"))
    if (home + "/").startswith(os.path.realpath(path).rstrip("/") + "/"):
        raise SnapshotError(
            f"{path}: is your home directory, which is not copied into a run; name the directories of your code in "
            "code.include (`[]`: none)"
        )


def _names(path: str, run: str, notes: list[str]) -> tuple[list[str], list[str]]:
    """Return (tracked files, other files) below `path`; outside git all count as tracked. `notes` gets omissions."""
    if tree_of(path) is None:
        if ask_git(git.below_a_repository, path) and shutil.which("git") is None:
            notes.append("git is not on PATH: no commit recorded, ignored files taken too")
        return _code_among(path, _walk(path), run, notes), []
    tracked, untracked = [], []
    for name in ask_git(git.tracked, path):
        below = os.path.join(path, name)
        if os.path.isdir(below) and not os.path.islink(below):  # a submodule
            if not os.path.exists(os.path.join(below, ".git")):
                notes.append(f"submodule {name} is not checked out")
                continue
            inner_tracked, inner_untracked = _names(below, run, notes)
            tracked += [os.path.join(name, one) for one in inner_tracked]
            untracked += [os.path.join(name, one) for one in inner_untracked]
        elif not _is_byte_code(name):
            tracked.append(name)
    others = []
    for name in ask_git(git.untracked, path):
        if name.endswith("/"):  # a nested repository, not a submodule
            inner_tracked, inner_untracked = _names(os.path.join(path, name), run, notes)
            others += [os.path.join(name, one) for one in inner_tracked + inner_untracked]
        else:
            others.append(name)
    return tracked, untracked + _code_among(path, others, run, notes)


def _walk(path: str) -> list[str]:
    names = []
    for folder, folders, files in os.walk(path):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in links and name != ".git"]
        names += [os.path.relpath(os.path.join(folder, name), path) for name in files + links if name != ".git"]
    return names


def _code_among(path: str, names: list[str], run: str, notes: list[str]) -> list[str]:
    reasons: dict[str, str | None] = {}
    kept = []
    for name in names:
        if _is_byte_code(name):
            continue
        if not _inside_no_code(path, os.path.dirname(name), run, reasons):
            kept.append(name)
    notes += [f"left out: {folder}/ ({why})" for folder, why in sorted(reasons.items()) if why]
    return kept


def _inside_no_code(path: str, folder: str, run: str, reasons: dict[str, str | None]) -> bool:
    """Whether `folder` or one above it is a virtual environment or a run directory; `reasons` remembers which."""
    while folder:
        if folder not in reasons:
            whole = os.path.join(path, folder)
            reasons[folder] = None
            other = RunDir(whole)
            if os.path.exists(os.path.join(whole, "pyvenv.cfg")):
                reasons[folder] = "a virtual environment"
            elif os.path.realpath(whole) == run or (other.resolved.exists() and other.recipe.exists()):
                reasons[folder] = "a run directory"
        if reasons[folder]:
            return True
        folder = os.path.dirname(folder)
    return False


def _is_byte_code(name: str) -> bool:
    return name.endswith(".pyc") or "__pycache__" in name.split("/")


def _note_link(path: str, name: str, notes: list[str]) -> None:
    goal = os.readlink(os.path.join(path, name))
    if os.path.isabs(goal) or os.path.normpath(os.path.join(os.path.dirname(name), goal)).startswith(".."):
        notes.append(f"link {name} leads outside, to {goal}")


def tree_of(path: str) -> git.WorkTree | None:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    return ask_git(git.work_tree, path)


def ask_git(question: Callable[[str], T], path: str) -> T:
    """Query git about a directory. Its refusal becomes a SnapshotError that names the directory."""
    try:
        return question(path)
    except git.GitError as error:
        raise SnapshotError(f"{path}: {error}") from error


_FOLDERS = (".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kube", ".oci", ".ssh")
_FILES = (
    r"\.env|\.env\.(?!example$|sample$|template$).*|.*\.env|\.envrc"
    r"|[._]netrc|\.pypirc|\.npmrc|\.yarnrc|\.pgpass|\.my\.cnf|\.boto|\.s3cfg|\.dockercfg|\.htpasswd|\.vault-token"
    r"|\.git-credentials|\.?credentials|credentials[^/]*\.(?:json|ya?ml|toml|ini|cfg|txt)"
    r"|(?:.*[._-])?(?:client[_-]secret|service[_-]account)[^/]*\.json"
    r"|\.?secrets?(?:\.[a-z]+)?\.(?:ya?ml|json|toml|ini|cfg|txt)"
    r"|(?:.*[._-])?token(?:\.(?:txt|json|ya?ml))?"
    r"|.*\.(?:pem|key|p12|pfx|jks|kdbx|ppk)|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|.*_history"
)  # compiled on use, since a dry run lists no files


def holds_credentials(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        any(folder.lower() in _FOLDERS for folder in folders) or re.fullmatch(_FILES, file, re.IGNORECASE) is not None
    )
