"""The container image, imported once into the shared cache as a squashfs file:

    python3 -m launcher.host.image --reference nvcr.io#nvidia/pytorch:25.06-py3 --cache RUN_ROOT/cache/images

prints the path of the file; what happens meanwhile goes to stderr. A reference that is a path is checked and printed.

    nvidia+pytorch.sha256-4d5b...sqsh    keyed by digest: two tags of one image share a file
    REFERENCE.json                       {reference, file, digest, at}: which file a tag stands for

A tag is looked up once. From then on the cache answers, without a network, so every attempt of a run gets the image of
the first one; `--refresh` (and `mrl prefetch`) look again. enroot resolves tags from 4.0; with an older one the file is
keyed by the tag and the time. Credentials are enroot's own ($ENROOT_CONFIG_PATH/.credentials), never read here.
"""

import argparse
import errno
import hashlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Callable, List, Optional

from launcher.host.image.reference import ImageError, Reference, is_path, parse
from launcher.host.process.lock import RunIsOwned, RunLock
from megatron_rl.contract.codes import EXIT_CRASHED
from megatron_rl.run_dir import read_json, write_json

IMPORT_LIMIT = 7200.0  # seconds for one import: tens of GB over a slow link
DIGEST_LIMIT = 120.0  # seconds for one question to the registry
LIST_LIMIT = 600.0  # seconds for unsquashfs to read the tables of the file
REMIND = 30.0  # seconds between words of patience
TICK = 0.5  # seconds between looks at the import
SQUASH_OPTIONS = "-comp zstd -Xcompression-level 3 -b 1M -exit-on-error"  # fast to write, fast to read
SUPERBLOCK = struct.Struct("<4s36xQ")  # magic, bytes used: https://dr-emann.github.io/squashfs/#superblock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems mounted without flock

Say = Callable[[str], None]


def import_image(reference: str, cache: Path, refresh: bool = False, say: Optional[Say] = None) -> Path:
    """The squashfs file of `reference`, imported now unless the cache has it.

    Of processes that ask at the same time, on any node, one imports and the others wait for it.

    Args:
        cache: shared directory of images.
        refresh: look up again what a tag stands for.
        say: takes lines about what happens; default: stderr.

    Raises:
        ImageError: nothing half done was left under a name that anybody reads.
    """
    say = say or _to_stderr
    if is_path(reference):
        return _whole(Path(os.path.abspath(os.path.expanduser(reference))))
    found = None if refresh else kept(reference, cache)
    if found is not None:
        return found
    wanted = parse(reference)
    entry = _entry(reference, cache)
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(entry.with_suffix(".lock"), reference, say)
    try:
        found = None if refresh else kept(reference, cache)  # whoever had the lock may have imported it
        if found is not None:
            return found
        digest = wanted.digest or _ask_digest(wanted, say)
        exact = wanted._replace(tag=None, digest=digest) if digest else wanted
        file = entry.with_name(_file_name(exact, time.strftime("%Y%m%d-%H%M%S")))
        if not (digest and _is_whole(file)):
            _import(exact, file, entry, say)
        write_json(entry, {"reference": reference, "file": file.name, "digest": digest, "at": time.time()})
        return file
    finally:
        if lock is not None:
            lock.release()


def kept(reference: str, cache: Path) -> Optional[Path]:
    """The whole squashfs file that `reference` already has; None where it would have to be imported."""
    if is_path(reference):
        file = Path(os.path.abspath(os.path.expanduser(reference)))
        return file if _is_whole(file) else None
    entry = _entry(reference, cache)
    known = read_json(entry)
    if known is None:
        return None
    file = entry.with_name(known["file"])
    return file if _is_whole(file) else None


def _entry(reference: str, cache: Path) -> Path:
    """Where the cache says which file a reference stands for."""
    readable = re.sub("[^A-Za-z0-9.-]+", "+", re.sub("^docker://", "", reference))
    code = hashlib.sha256(reference.encode()).hexdigest()[:8]
    return Path(str(cache)) / "{}.{}.json".format(readable, code)


def _file_name(reference: Reference, now: str) -> str:
    """A file never changes: without a digest each import makes its own, and running containers keep theirs."""
    name = reference.name.replace("/", "+")
    if reference.digest:
        return "{}.{}.sqsh".format(name, reference.digest.replace(":", "-"))
    return "{}+{}.{}.sqsh".format(name, reference.tag or "latest", now)


def _lock(path: Path, reference: str, say: Say) -> Optional[RunLock]:
    """The right to import this reference; None where the file system has no locks: then two may do the same work."""
    give_up = time.monotonic() + IMPORT_LIMIT
    while True:
        try:
            return RunLock(path, "the import of {}".format(reference), patience=REMIND)
        except RunIsOwned as error:
            if time.monotonic() > give_up:
                raise ImageError("waited {:.0f} s for {}: {}".format(IMPORT_LIMIT, path, error)) from None
            say("waiting for {}: {}".format(reference, error))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ImageError("{}: {}".format(path, error.strerror)) from error
            return None


def _ask_digest(reference: Reference, say: Say) -> Optional[str]:
    """What the tag stands for now; None where this enroot cannot tell."""
    try:
        answer = subprocess.run(
            ["enroot", "digest", reference.uri()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=DIGEST_LIMIT,
        )
    except FileNotFoundError:
        raise ImageError(_no_enroot()) from None
    except subprocess.TimeoutExpired:
        say("the registry did not say within {:.0f} s what {} is".format(DIGEST_LIMIT, reference.uri()))
        return None
    digest = answer.stdout.decode("utf-8", "replace").strip()
    if answer.returncode == 0 and re.match("^sha256:[0-9a-f]{64}$", digest):
        return digest
    words = answer.stderr.decode("utf-8", "replace").strip().splitlines()[:1]
    say(
        "enroot did not resolve {} (it can from 4.0 on): {}".format(
            reference.uri(), " ".join(words) or "no reason given"
        )
    )
    return None


def _import(reference: Reference, file: Path, entry: Path, say: Say) -> None:
    """Import into a temporary name, validate, rename."""
    for debris in entry.parent.glob("." + entry.stem + ".*.tmp"):  # of importers that were killed: the lock is ours
        debris.unlink()
    fresh = entry.with_name(".{}.{}.{}.tmp".format(entry.stem, socket.gethostname(), os.getpid()))
    log = entry.with_suffix(".log")
    say("importing {} into {} (log: {})".format(reference.uri(), file, log))
    began = time.monotonic()
    try:
        _run_enroot(["enroot", "import", "--output", str(fresh), reference.uri()], log, say)
        _whole(fresh)
        _list(fresh)
        with open(str(fresh), "rb") as image:
            os.fsync(image.fileno())
        os.replace(str(fresh), str(file))
    finally:
        if fresh.exists():
            fresh.unlink()
    say("imported {} MB in {:.0f} s".format(file.stat().st_size // 10**6, time.monotonic() - began))


def _run_enroot(command: List[str], log: Path, say: Say) -> None:
    """Run to its end within the limit; its words go to `log` and, as they come, to `say`."""
    env = dict(os.environ)
    env.setdefault("ENROOT_SQUASH_OPTIONS", SQUASH_OPTIONS)
    with open(str(log), "w+b") as output:
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended with all it started
            )
        except FileNotFoundError:
            raise ImageError(_no_enroot()) from None
        give_up = time.monotonic() + IMPORT_LIMIT
        try:
            with open(str(log), encoding="utf-8", errors="replace") as reader:
                while process.poll() is None and time.monotonic() < give_up:
                    time.sleep(TICK)
                    _pass_on(reader.read(), say)
                _pass_on(reader.read(), say)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if code != 0:
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        late = time.monotonic() >= give_up
        why = (
            "took longer than {:.0f} s".format(IMPORT_LIMIT) if late else " ".join(words) or "exit code {}".format(code)
        )
        raise ImageError("{}: {}{}".format(command[-1], why, _advice(why)))


def _pass_on(text: str, say: Say) -> None:
    for line in text.splitlines():
        say(line)


def _advice(why: str) -> str:
    if re.search(r"\b(401|403)\b|[Uu]nauthorized|[Ff]orbidden", why):
        return "; credentials: see containers/README.md, $ENROOT_CONFIG_PATH/.credentials (~/.config/enroot)"
    if "404" in why:
        return "; no such image or tag in that registry: check image.reference"
    if "No space left" in why:
        return "; enroot unpacks in $ENROOT_TEMP_PATH (default $TMPDIR, /tmp): set it in the profile's environment"
    return ""


def _whole(file: Path) -> Path:
    """`file`, if it is a squashfs file that is not cut short. Raises ImageError."""
    try:
        with open(str(file), "rb") as image:
            head = image.read(SUPERBLOCK.size)
            size = os.fstat(image.fileno()).st_size
    except OSError as error:
        raise ImageError("image {}: {}".format(file, error.strerror)) from error
    magic, used = SUPERBLOCK.unpack(head) if len(head) == SUPERBLOCK.size else (b"", 0)
    if magic != b"hsqs":
        raise ImageError("image {}: is no squashfs file; enroot import makes one".format(file))
    if size < used:
        raise ImageError("image {}: is cut short, {} of {} bytes; import it again".format(file, size, used))
    return file


def _is_whole(file: Path) -> bool:
    try:
        return bool(_whole(file))
    except ImageError:
        return False


def _list(file: Path) -> None:
    """Have unsquashfs, where there is one, read all its tables. Raises ImageError."""
    try:
        subprocess.run(
            ["unsquashfs", "-l", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LIST_LIMIT,
            check=True,
        )
    except FileNotFoundError:
        return
    except subprocess.TimeoutExpired:
        raise ImageError("unsquashfs -l {}: no answer within {:.0f} s".format(file, LIST_LIMIT)) from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode("utf-8", "replace").strip()
        raise ImageError("the imported image is damaged: unsquashfs: {}".format(words)) from error


def _no_enroot() -> str:
    where = socket.gethostname()
    return (
        "enroot is not on PATH on {}: load its module in the profile's prolog, import on the other side "
        "(image.import_on), or give the path of a squashfs file".format(where)
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="image", description="Import a container image once; print its squashfs file."
    )
    parser.add_argument("--reference", required=True, help="[REGISTRY#]IMAGE[:TAG] or a path")
    parser.add_argument("--cache", required=True, type=Path, help="shared directory, RUN_ROOT/cache/images")
    parser.add_argument("--refresh", action="store_true", help="look up again what a tag stands for")
    options = parser.parse_args(arguments)

    def leave(signum: int, frame: Optional[FrameType]) -> None:
        raise SystemExit(128 + signum)  # through every `finally`: enroot ends with us

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, leave)
    try:
        print(import_image(options.reference, options.cache, options.refresh))
    except ImageError as error:
        print("error: {}".format(error), file=sys.stderr)
        return EXIT_CRASHED
    except OSError as error:  # the cache cannot be written
        print("error: {}: {}".format(error.filename or options.cache, error.strerror), file=sys.stderr)
        return EXIT_CRASHED
    return 0
