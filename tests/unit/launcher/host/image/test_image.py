"""The container image: imported once for everybody, whole or not at all.

enroot is a stand-in on PATH: a machine without containers lacks it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.host.image import cache, enroot
from launcher.host.image.cache import find, import_image
from launcher.host.image.reference import ImageError, parse

DIGEST = "sha256:" + "4d5b" * 16
REFERENCE = "nvcr.io#nvidia/pytorch:25.06-py3"
SQUASHFS = struct.pack("<4s36xQ", b"hsqs", 4096).ljust(4096, b"\0")

ENROOT = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$1" in
digest) [ -e "$0.digest" ] && cat "$0.digest" || { echo "[ERROR] Invalid command: digest" >&2; exit 1; } ;;
import) . "$0.import" ;;
esac
"""
WELL = 'cp "$SQUASHFS" "$3"'


class Machine:
    """A PATH with the stand-ins, and a cache."""

    def __init__(self, root: Path) -> None:
        self.bin, self.cache = root / "bin", root / "cache" / "images"
        self.bin.mkdir()
        (self.bin / "enroot").write_text(ENROOT)
        (self.bin / "enroot").chmod(0o755)
        (root / "squashfs").write_bytes(SQUASHFS)
        self.importing(WELL)
        self.tag_is(DIGEST)

    def tag_is(self, digest: str | None) -> None:
        file = self.bin / "enroot.digest"
        file.write_text(digest + "\n") if digest else file.unlink()

    def importing(self, script: str) -> None:
        """Effect of `enroot import --output $3 URI`."""
        (self.bin / "enroot.import").write_text(script + "\n")

    def calls(self, verb: str) -> list[str]:
        log = self.bin / "enroot.calls"
        return [line for line in log.read_text().splitlines() if line.startswith(verb)] if log.exists() else []

    def files(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if path.suffix in (".sqsh", ".tmp"))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUASHFS", str(tmp_path / "squashfs"))
    monkeypatch.delenv("ENROOT_SQUASH_OPTIONS", raising=False)
    monkeypatch.setattr(enroot, "TICK", 0.01)
    return made


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("ubuntu", "docker://ubuntu"),
        ("docker://ns/image:1.0", "docker://ns/image:1.0"),
        (REFERENCE, "docker://nvcr.io#nvidia/pytorch:25.06-py3"),
        ("nvcr.io/nvidia/pytorch:25.06-py3", "docker://nvcr.io#nvidia/pytorch:25.06-py3"),
        ("localhost:5000/a/b:2", "docker://localhost:5000#a/b:2"),
        ("$oauthtoken@nvcr.io#nvidia/pytorch:1", "docker://$oauthtoken@nvcr.io#nvidia/pytorch:1"),
        (f"a@{DIGEST}", f"docker://a:{DIGEST}"),
        (f"nvcr.io/a/b:1@{DIGEST}", f"docker://nvcr.io#a/b:{DIGEST}"),
    ],
)
def test_a_reference_becomes_what_every_enroot_understands(text, uri):
    assert parse(text).uri() == uri
    assert parse(uri).uri() == uri


@pytest.mark.parametrize("text", ["", "Upper:1", "a b", "https://x.org/a", "a@sha256:12", "x; rm -rf ~", "a\nb"])
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(ImageError, match="expected"):
        parse(text)


def test_an_image_is_imported_once_and_keyed_by_its_digest(machine):
    file = import_image(REFERENCE, machine.cache)
    assert file == machine.cache / f"nvidia+pytorch.{DIGEST.replace(':', '-')}.sqsh"
    assert file.read_bytes() == SQUASHFS
    assert import_image(REFERENCE, machine.cache) == file
    (call,) = machine.calls("import")
    assert call.endswith(f"docker://nvcr.io#nvidia/pytorch:{DIGEST}"), "what is imported is what the key says"
    assert len(machine.calls("digest")) == 1
    assert find(REFERENCE, machine.cache) == file


def test_what_a_shell_prints_at_its_start_does_not_hide_the_digest(machine):
    machine.tag_is(f"module loaded\n{DIGEST}")
    assert DIGEST.replace(":", "-") in import_image(REFERENCE, machine.cache).name


def test_a_moved_tag_is_seen_only_when_asked_for(machine):
    first = import_image(REFERENCE, machine.cache)
    machine.tag_is("sha256:" + "0" * 64)
    assert import_image(REFERENCE, machine.cache) == first
    second = import_image(REFERENCE, machine.cache, refresh=True)
    assert second != first
    assert first.exists(), "running jobs still use it"
    assert import_image(REFERENCE, machine.cache) == second


def test_two_tags_of_one_image_share_a_file(machine):
    assert import_image("a:1", machine.cache) == import_image("a:2", machine.cache)
    assert len(machine.calls("import")) == 1


def test_an_old_enroot_that_cannot_resolve_tags_still_imports(machine, capsys):
    machine.tag_is(None)
    file = import_image(REFERENCE, machine.cache)
    assert file.name.startswith("nvidia+pytorch+25.06-py3.")
    assert import_image(REFERENCE, machine.cache) == file
    (call,) = machine.calls("import")
    assert call.endswith(" docker://nvcr.io#nvidia/pytorch:25.06-py3")
    assert "Invalid command: digest" in capsys.readouterr().err


def test_squashfs_options_are_fast_unless_the_user_has_some(machine, monkeypatch):
    machine.importing(f'echo "$ENROOT_SQUASH_OPTIONS"; {WELL}')
    said: list[str] = []
    import_image("a:1", machine.cache, report=said.append)
    assert enroot.SQUASH_OPTIONS in said
    monkeypatch.setenv("ENROOT_SQUASH_OPTIONS", "-comp lz4")
    machine.tag_is("sha256:" + "1" * 64)
    import_image("a:2", machine.cache, report=said.append)
    assert "-comp lz4" in said


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('echo "[ERROR] URL returned error code: 401 Unauthorized" >&2; exit 1', "401.*credentials"),
        ('echo "[ERROR] URL returned error code: 404" >&2; exit 1', "no such image or tag"),
        ('printf x > "$3"; echo "write: No space left on device"; exit 1', "ENROOT_TEMP_PATH"),
        ('printf "not a squashfs" > "$3"', "is not a squashfs file"),
        ('head -c 100 "$SQUASHFS" > "$3"', "cut short, 100 of 4096 bytes"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_failed_import_says_why_and_leaves_no_file(machine, script, words):
    machine.importing(script)
    with pytest.raises(ImageError, match=f"(?s){words}"):
        import_image(REFERENCE, machine.cache)
    assert machine.files() == []
    assert find(REFERENCE, machine.cache) is None


def test_an_import_that_takes_too_long_is_ended_with_its_children(machine, monkeypatch):
    monkeypatch.setattr(enroot, "IMPORT_LIMIT", 0.3)
    machine.importing('sleep 300 & echo $! > "$0.child"; wait')
    with pytest.raises(ImageError, match="took longer than"):
        import_image(REFERENCE, machine.cache)
    child = int((machine.bin / "enroot.child").read_text())
    give_up = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < give_up:
        if "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_a_missing_enroot_is_said(machine, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImageError, match=r"enroot is not on PATH.*image\.import_on"):
        import_image(REFERENCE, machine.cache)


def test_a_damaged_file_in_the_cache_is_imported_again(machine):
    file = import_image(REFERENCE, machine.cache)
    file.write_bytes(SQUASHFS[:100])
    assert find(REFERENCE, machine.cache) is None
    assert import_image(REFERENCE, machine.cache).read_bytes() == SQUASHFS


def test_a_path_is_passed_through_when_it_is_a_squashfs_file(machine, tmp_path):
    assert import_image(str(tmp_path / "squashfs"), machine.cache) == tmp_path / "squashfs"
    with pytest.raises(ImageError, match="No such file"):
        import_image(str(tmp_path / "nowhere.sqsh"), machine.cache)
    with pytest.raises(ImageError, match="is not a squashfs file"):
        import_image(str(machine.bin / "enroot"), machine.cache)
    assert machine.calls("import") == []


def test_of_many_at_once_one_imports_and_the_others_wait(machine, monkeypatch):
    monkeypatch.setattr(cache, "REMIND", 0.1)
    machine.importing(f"sleep 0.5; {WELL}")
    found: list[Path] = []
    said: list[str] = []

    def ask() -> None:
        found.append(import_image(REFERENCE, machine.cache, report=said.append))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(machine.calls("import")) == 1
    assert any(line.startswith(f"waiting for {REFERENCE}: it is in use by the import of") for line in said)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_importer_leaves_nothing_that_the_next_one_could_take_for_an_image(machine, signum):
    machine.importing('printf half > "$3"; echo half > "$0.half"; sleep 5')
    command = [
        sys.executable,
        "-m",
        "launcher.host.image",
        "--reference",
        REFERENCE,
        "--cache",
        str(machine.cache),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + 30
        while not (machine.bin / "enroot.half").exists() and time.monotonic() < give_up:
            time.sleep(0.02)
        process.send_signal(signum)
        assert process.wait(timeout=30) != 0
    assert not [name for name in machine.files() if name.endswith(".sqsh")]
    if signum == signal.SIGTERM:
        assert machine.files() == []
    machine.importing(WELL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()).read_bytes() == SQUASHFS
    assert len(machine.files()) == 1


def test_the_command_line_prints_the_path_alone_and_fails_with_one_error(machine):
    command = [sys.executable, "-m", "launcher.host.image", "--cache", str(machine.cache), "--reference"]
    done = subprocess.run([*command, REFERENCE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{find(REFERENCE, machine.cache)}\n"
    failed = subprocess.run([*command, "No Image"], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode != 0
    assert failed.stderr.startswith("error: image 'No Image'")
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("locks", [True, False])
def test_only_a_lock_allows_to_remove_what_another_importer_may_be_writing(machine, monkeypatch, locks):
    def no_locks(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    import_image("a:1", machine.cache)
    (record,) = machine.cache.glob("a+1.*.json")
    theirs = record.with_name(f".{record.stem}.othernode.7.tmp")
    theirs.write_text("half an image")
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    machine.tag_is("sha256:" + "0" * 64)
    import_image("a:1", machine.cache, refresh=True)
    assert theirs.exists() == (not locks)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 9, "reference": "a:1", "file": "x", "at": 1}'])
def test_a_record_that_cannot_be_read_is_made_anew(machine, monkeypatch, damage):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.0)
    import_image("a:1", machine.cache)
    (record,) = machine.cache.glob("a+1.*.json")
    record.write_text(damage)
    assert find("a:1", machine.cache) is None
    assert import_image("a:1", machine.cache) == find("a:1", machine.cache)
