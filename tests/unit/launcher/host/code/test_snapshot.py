"""The code of a run: taken once, whole, with what was not committed, and imported before anything installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.host.code import snapshot
from launcher.host.code.listing import SnapshotError
from launcher.host.code.snapshot import plan_sources, take, update
from megatron_rl.contract.records import read
from megatron_rl.contract.run_records import CodeSnapshot


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, "-C", str(where), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def repository(root: Path, files: dict[str, str]) -> Path:
    """A repository at `root` with one commit of these files."""
    root.mkdir(parents=True)
    git(root, "init", "-q")
    write(root, files)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first", "--allow-empty")
    return root


def shot(tmp_path: Path, *include: Path, installed: tuple[Path, ...] = ()) -> tuple[CodeSnapshot, Path]:
    """The record and the directory of a new snapshot."""
    sources = plan_sources([str(path) for path in installed], [str(path) for path in include])
    target = tmp_path / "run" / "code"
    return take(sources, target), target


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def test_a_clean_repository_is_copied_with_its_commit(tmp_path):
    mine = repository(tmp_path / "mine", {"pkg/mod.py": "x = 1\n"})
    record, code = shot(tmp_path, mine)
    (source,) = record.sources
    assert names(code) == {"SNAPSHOT.json", "1-mine/pkg/mod.py"}
    assert (source.kind, source.dirty) == ("git", False)
    assert source.commit == git(mine, "rev-parse", "HEAD")
    assert record.pythonpath == [".", "1-mine"]
    assert read(CodeSnapshot, code / "SNAPSHOT.json") == record


def test_what_was_not_committed_is_taken_and_said(tmp_path):
    mine = repository(tmp_path / "mine", {"changed.py": "x = 1\n", "deleted.py": "", ".gitignore": "*.bin\n"})
    write(mine, {"changed.py": "x = 2\n", "new.py": "y = 1\n", "data.bin": "weights"})
    (mine / "deleted.py").unlink()
    record, code = shot(tmp_path, mine)
    (source,) = record.sources
    assert (code / "1-mine" / "changed.py").read_text() == "x = 2\n"
    assert {"1-mine/new.py", "1-mine/changed.py"} <= names(code)
    assert not names(code) & {"1-mine/data.bin", "1-mine/deleted.py"}
    assert source.dirty
    assert source.untracked == ["new.py"]


def test_names_are_arbitrary_bytes_and_links_stay_links(tmp_path):
    mine = repository(tmp_path / "my code", {"a.py": ""})
    odd = ["with space", "new\nline", "quote'\"$(x)", os.fsdecode(b"\xff.txt"), "-rf"]
    for name in odd:
        (mine / name).write_text("x")
    (mine / "inside").symlink_to("a.py")
    (mine / "outside").symlink_to("/etc/hostname")
    (mine / "broken").symlink_to("nowhere")
    (mine / "script").write_text("#!/bin/sh\n")
    (mine / "script").chmod(0o755)
    record, code = shot(tmp_path, mine)
    copied = code / "1-my_code"
    assert names(copied) == {*odd, "a.py", "inside", "outside", "broken", "script"}
    assert (copied / "inside").readlink() == Path("a.py")
    assert os.access(copied / "script", os.X_OK)
    assert record.sources[0].notes == ["link outside leads outside, to /etc/hostname"]


def test_credentials_environments_runs_and_byte_code_stay_out(tmp_path):
    mine = repository(tmp_path / "mine", {"tracked.py": ""})
    write(mine, {".env": "TOKEN=hunter2", "venv/pyvenv.cfg": "", "venv/lib/a.py": "", "pkg/__pycache__/x.pyc": ""})
    write(mine, {"runs/one/resolved.yaml": "", "runs/one/recipe.yaml": "", "runs/one/checkpoints/big": "x"})
    record, code = shot(tmp_path, mine)
    assert names(code / "1-mine") == {"tracked.py"}
    assert record.sources[0].notes == [
        "left out: .env (its name says credentials)",
        "left out: runs/one/ (a run directory)",
        "left out: venv/ (a virtual environment)",
    ]


SECRETS = [
    ".aws/credentials",
    ".git-credentials",
    ".ssh/id_ecdsa",
    ".ssh/config",
    ".kube/config",
    ".pypirc",
    ".npmrc",
    ".pgpass",
    ".netrc",
    "prod.env",
    ".env",
    ".env.local",
    ".envrc",
    ".huggingface/token",
    "credentials.json",
    "service-account.json",
    "my-service-account-7.json",
    "secrets.yaml",
    "secrets.yml",
    ".bash_history",
    ".python_history",
    "deploy.pem",
    "server.key",
    "hf_token",
    "hf_token.txt",
    ".vault-token",
    "token.json",
    "client_secret_5.json",
    ".docker/config.json",
    "sub/.aws/config",
    "credentials-prod.json",
]
SOURCE = [
    "tokenizer.py",
    "tokenizer.json",
    "token_count.py",
    "tokens.json",
    "special_tokens_map.json",
    "secrets.py",
    "credentials.py",
    "history.py",
    "train_history.json",
    "environment.yaml",
    "env.py",
    ".env.example",
    "aws/config.py",
    "keys.py",
    "id_rsa.py",
    "service_account.py",
    "token.py",
]


@pytest.mark.parametrize("kept", ["tracked", "untracked", "outside git"])
def test_credentials_stay_out_and_ordinary_source_does_not(tmp_path, kept):
    everything = dict.fromkeys([*SECRETS, *SOURCE], "hunter2\n")
    mine = tmp_path / "mine"
    if kept != "outside git":
        repository(mine, everything if kept == "tracked" else {"a.py": ""})
    write(mine, everything)
    record, code = shot(tmp_path, mine)
    assert names(code / "1-mine") == {*SOURCE, *(["a.py"] if kept == "untracked" else [])}
    said = [f"left out: {name} (its name says credentials)" for name in sorted(SECRETS)]
    assert record.sources[0].notes == said, "once"


def test_files_and_folders_are_as_private_as_they_were(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": "", "hidden/deep/b.py": ""})
    (mine / "a.py").chmod(0o600)
    (mine / "hidden").chmod(0o700)
    _, code = shot(tmp_path, mine)
    modes = {name: (code / "1-mine" / name).stat().st_mode & 0o777 for name in ("a.py", "hidden", "hidden/deep")}
    assert modes == {"a.py": 0o600, "hidden": 0o700, "hidden/deep": 0o755}


def test_a_group_that_can_write_the_source_cannot_write_the_snapshot(tmp_path):
    mine = repository(tmp_path / "mine", {"a.sh": "", "deep/b.py": ""})
    for path, mode in ((mine, 0o2775), (mine / "deep", 0o777), (mine / "a.sh", 0o775), (mine / "deep" / "b.py", 0o664)):
        path.chmod(mode)
    _, code = shot(tmp_path, mine)
    copies = (code / "1-mine", *(code / "1-mine" / name for name in ("deep", "a.sh", "deep/b.py")))
    assert [path.stat().st_mode & 0o777 for path in copies] == [0o755, 0o755, 0o755, 0o644]


@pytest.mark.parametrize("home", ["mine", "mine/me"])
def test_a_home_directory_is_refused(tmp_path, monkeypatch, home):
    repository(tmp_path / "mine", {"a.py": "", "me/b.py": ""})
    monkeypatch.setenv("HOME", str(tmp_path / home))
    with pytest.raises(SnapshotError, match=r"is your home directory.*code\.include"):
        plan_sources([], [str(tmp_path / "mine")])


@pytest.mark.parametrize("in_git", [True, False])
def test_a_run_directory_inside_the_code_is_not_copied_into_itself(tmp_path, in_git):
    mine = repository(tmp_path / "mine", {"a.py": ""}) if in_git else tmp_path / "mine"
    write(mine, {"a.py": "", "runs/one/.lock": "{}"})
    take(plan_sources([], [str(mine)]), mine / "runs" / "one" / "code")
    assert names(mine / "runs" / "one" / "code" / "1-mine") == {"a.py"}


def test_a_directory_outside_git_is_taken_whole(tmp_path):
    plain = tmp_path / "plain"
    write(plain, {"a.py": "", "sub/b.py": ""})
    (plain / "sub" / "link").symlink_to("../sub")
    record, code = shot(tmp_path, plain)
    (source,) = record.sources
    assert names(code / "1-plain") == {"a.py", "sub/b.py", "sub/link"}
    assert (source.kind, source.commit, source.dirty, source.untracked) == ("directory", None, False, [])


def test_a_repository_without_a_commit_is_all_uncommitted(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    git(mine, "init", "-q")
    write(mine, {"a.py": "x = 1\n"})
    record, code = shot(tmp_path, mine)
    (source,) = record.sources
    assert (source.kind, source.commit, source.dirty) == ("git", None, True)
    assert (code / "1-mine" / "a.py").exists()


def test_a_part_of_a_repository_can_be_named_and_an_ignored_part_is_a_plain_directory(tmp_path):
    mine = repository(tmp_path / "mine", {"part/a.py": "", "other/b.py": ""})
    write(mine, {".gitignore": "ignored/\n", "ignored/c.py": ""})
    record, code = shot(tmp_path, mine / "part", mine / "ignored")
    assert names(code) == {"SNAPSHOT.json", "1-part/a.py", "2-ignored/c.py"}
    assert [source.kind for source in record.sources] == ["git", "directory"]
    assert not record.sources[0].dirty


def test_submodules_and_repositories_inside_are_taken_too(tmp_path):
    inner = repository(tmp_path / "inner", {"i.py": ""})
    mine = repository(tmp_path / "mine", {"a.py": ""})
    git(mine, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "sub")
    git(mine, "commit", "-q", "-m", "sub")
    git(mine, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "absent")
    git(mine, "commit", "-q", "-m", "absent")
    git(mine, "submodule", "--quiet", "deinit", "-f", "absent")
    repository(mine / "nested", {"n.py": ""})
    record, code = shot(tmp_path, mine)
    assert {"1-mine/sub/i.py", "1-mine/nested/n.py"} <= names(code)
    assert not [name for name in names(code) if "/.git/" in name or name.endswith("/.git")]
    assert "submodule absent is not checked out" in record.sources[0].notes


def test_without_git_everything_is_taken_and_said(tmp_path, monkeypatch):
    mine = repository(tmp_path / "mine", {"a.py": ""})
    monkeypatch.setenv("PATH", str(tmp_path))
    record, code = shot(tmp_path, mine)
    (source,) = record.sources
    assert names(code / "1-mine") == {"a.py"}
    assert source.kind == "directory"
    assert source.notes == ["git is not on PATH: no commit recorded, ignored files taken too"]


def test_a_hook_that_submits_is_not_mistaken_for_its_repository(tmp_path, monkeypatch):
    mine, other = repository(tmp_path / "mine", {"a.py": ""}), repository(tmp_path / "other", {"b.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    _, code = shot(tmp_path, mine)
    assert (code / "1-mine" / "a.py").exists()


def test_what_git_refuses_is_said_in_its_words(tmp_path):
    broken = repository(tmp_path / "broken", {"a.py": ""})
    (broken / ".git" / "config").write_text("[core\n")
    with pytest.raises(SnapshotError, match=r"broken: .*config"):
        plan_sources([], [str(broken)])


def test_a_missing_directory_is_an_error_that_leaves_nothing(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": ""})
    with pytest.raises(SnapshotError, match="no such directory"):
        plan_sources([], [str(tmp_path / "nowhere")])
    sources = plan_sources([], [str(mine)])
    shutil.rmtree(mine)
    with pytest.raises(SnapshotError, match="no such directory on"):
        take(sources, tmp_path / "run" / "code")
    assert list((tmp_path / "run").iterdir()) == []


def test_data_is_refused_by_name_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 3_000_000)
    mine = repository(tmp_path / "mine", {"a.py": ""})
    (mine / "small.bin").write_bytes(bytes(1_000_000))
    (mine / "weights.bin").write_bytes(bytes(2_500_000))
    with pytest.raises(SnapshotError, match=r"weights\.bin \(2 MB\), .*small\.bin \(1 MB\).*code\.include"):
        shot(tmp_path, mine)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_later_attempt_gets_the_same_snapshot(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": "x = 1\n"})
    first, code = shot(tmp_path, mine)
    write(mine, {"a.py": "x = 2\n"})
    second, _ = shot(tmp_path, mine)
    assert second == first
    assert (code / "1-mine" / "a.py").read_text() == "x = 1\n"


def test_an_update_moves_to_a_new_snapshot_and_keeps_the_old(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": "x = 1\n"})
    _, code = shot(tmp_path, mine)
    write(mine, {"a.py": "x = 2\n"})
    record = update(plan_sources([], [str(mine)]), code)
    assert record.snapshot == 2
    assert (code / "1-mine" / "a.py").read_text() == "x = 2\n"
    assert (code.with_name("code-001") / "1-mine" / "a.py").read_text() == "x = 1\n"
    assert sorted(path.name for path in code.parent.iterdir()) == ["code", "code-001", "code-002"]


def test_an_update_that_fails_changes_nothing(tmp_path, monkeypatch):
    mine = repository(tmp_path / "mine", {"a.py": "x = 1\n"})
    before, code = shot(tmp_path, mine)
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 0)
    write(mine, {"a.py": "x = 2\n"})
    with pytest.raises(SnapshotError):
        update(plan_sources([], [str(mine)]), code)
    assert read(CodeSnapshot, code / "SNAPSHOT.json") == before
    assert sorted(path.name for path in code.parent.iterdir()) == ["code", "code-001"]


def test_a_killed_taker_leaves_debris_that_the_next_one_removes(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": ""})
    program = f"""
import os, signal
from pathlib import Path
from launcher.host.code import snapshot
snapshot._flush = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
snapshot.take(snapshot.plan_sources([], [{str(mine)!r}]), Path({str(tmp_path / "run" / "code")!r}))
"""
    killed = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "run" / "code").exists()
    assert len(list((tmp_path / "run").iterdir())) == 1
    shot(tmp_path, mine)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["code", "code-001"]


def test_a_directory_that_is_no_snapshot_is_not_touched(tmp_path):
    mine = repository(tmp_path / "mine", {"a.py": ""})
    write(tmp_path / "run" / "code", {"precious.py": ""})
    with pytest.raises(SnapshotError, match="is not a snapshot of mrl"):
        shot(tmp_path, mine)
    assert (tmp_path / "run" / "code" / "precious.py").exists()


def test_a_snapshot_that_cannot_be_read_is_not_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "PATIENCE_S", 0.1)
    mine = repository(tmp_path / "mine", {"a.py": "x = 1\n"})
    _, code = shot(tmp_path, mine)
    (code / "SNAPSHOT.json").write_text("{")
    with pytest.raises(SnapshotError, match=r"SNAPSHOT\.json cannot be used: is torn"):
        shot(tmp_path, mine)
    assert update(plan_sources([], [str(mine)]), code).snapshot == 2


def test_the_job_imports_the_snapshot_and_not_what_is_installed(tmp_path):
    """mrl is installed here as a link to its checkout, as for its developers."""
    installed = [Path(find_spec(name).origin).parent for name in ("launcher", "megatron_rl")]
    mine = repository(tmp_path / "mine", {"src/riddles/__init__.py": ""})
    record, code = shot(tmp_path, mine, installed=tuple(installed))
    modules = "launcher.host.process.lock as a, megatron_rl.recipe.config as b, riddles as c"
    program = f"import {modules}; print(*(m.__file__ for m in (a, b, c)))"
    path = os.pathsep.join(str(code / name) for name in record.pythonpath)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = ["launcher/host/process/lock.py", "megatron_rl/recipe/config.py", "1-mine/src/riddles/__init__.py"]
    assert ran.stdout.split() == [str(code / name) for name in expected]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_repository_of_somebody_else_is_taken_along_with_its_commit(tmp_path):
    """git calls its ownership dubious: a shared editable install belongs to the user who made it."""
    mine = repository(tmp_path / "shared", {"a.py": ""})
    commit = git(mine, "rev-parse", "HEAD")
    for path in (mine, mine / ".git"):
        os.chown(path, 12345, 12345)
    record, _ = shot(tmp_path, mine)
    assert record.sources[0].commit == commit
