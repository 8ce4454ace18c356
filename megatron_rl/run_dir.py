"""JSON of any shape in files: on its way out. What one process writes and another reads is a record of the contract."""

import json
import os

from megatron_rl.contract.files import write_atomic


def write_json(path, value, durable=True):
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n", durable)


def append_json_line(path, value):
    """Append one JSON line in a single write. A torn last line, left by a crash, is ended first and stays by itself."""
    line = (json.dumps(value, sort_keys=True) + "\n").encode("utf-8")
    with open(str(path), "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read_json(path):
    """The value in `path`, or None where there is no such file yet."""
    try:
        with open(str(path), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def read_json_lines(path):
    """The whole lines of a JSON-lines file; what a crash tore, wherever it stands by now, is left out."""
    try:
        with open(str(path), "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line.decode("utf-8")))
        except ValueError:  # empty or torn
            continue
    return found
