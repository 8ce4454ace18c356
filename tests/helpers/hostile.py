"""Input that no program of ours writes: odd values, and files damaged by hand, by a crash, or on purpose.

Every choice is made by a source of random numbers, which is one of Hypothesis in tests.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

DEEP = 3000  # levels, more than Python's stack has
ODD_TEXTS = [
    *("", " ", "\0", "a\0b", "a\nb", "\x1b[31m", "\ud800", "\u202e", "\u2028", "é", "x" * 5000, "1e5", "2026-13-41"),
    *("..", "../../x", "/", "/dev/zero", "~", "~nouser/x", "$HOME", "$(id)", "`id`", "'", '"', "%s", "{0}", "[red]x"),
    *("</script><script>x", "<!--", "*", "a,b", "n[1-3", "-1", "nan", "inf", "null", "True", "1_000", "٣"),
]
ODD_JSON = [
    *("null", "true", "false", "0", "-1", "1", "0.5", "-0.0", "1e308", "-1e308", "5e-324", "1e999", "-1e999", "NaN"),
    *("Infinity", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 5000),
    *("1795973827.5", "1e12", "253402300800", "-62135596801", "1e17", "4294967296"),
    *("[]", "{}", "[[]]", "[null]", "[{}]", '{"a": null}', '[1, "a"]', "[" * DEEP + "]" * DEEP, '{"a":' * DEEP),
    *("[1, 2, 3]", '["n1", "n1"]', '"n1"'),
]
_PLACE = "place-of-an-odd-value"


def odd_json(chance: Random) -> str:
    """Text of a JSON value, or of what parsers take for one."""
    return json.dumps(chance.choice(ODD_TEXTS)) if chance.random() < 0.3 else chance.choice(ODD_JSON)


def odd_bytes(chance: Random) -> bytes:
    """Content of a whole file."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice([b"", b"\n", b" ", b"\xff\xfe\x00", b"\xef\xbb\xbf{}", b"\0" * 512, b"{", b'"x"\n'])
    if kind == 1:
        return odd_json(chance).encode("utf-8", "surrogatepass") + b"\n"
    if kind == 2:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
    return chance.choice(ODD_TEXTS).encode("utf-8", "surrogatepass") + b"\n"


def damaged_json(text: str, chance: Random) -> str:
    """JSON text with a value replaced, a key removed, given twice or added."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # it was damaged before
        return text
    places = places_in(tree)
    container, key = chance.choice(places) if places else (None, None)
    if container is None:
        return odd_json(chance)
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[chance.choice(ODD_TEXTS)] = _PLACE
    elif kind == 1:
        container.extend(container[:1] * 3)
    elif kind == 2 and isinstance(container[key], str):
        container[key] = chance.choice(ODD_TEXTS)
    elif kind == 3 and isinstance(container[key], (int, float)) and abs(container[key]) < 1e100:
        container[key] = container[key] * chance.choice([-1, 0, 1000, 1e18, 0.5])
    else:
        container[key] = _PLACE
    indent = 1 if "\n" in text.strip() else None
    whole = json.dumps(tree, indent=indent).replace(json.dumps(_PLACE), odd_json(chance))
    if kind == 4 and isinstance(key, str):
        whole = whole.replace(f"{json.dumps(key)}:", f"{json.dumps(key)}: {odd_json(chance)}, {json.dumps(key)}:", 1)
    return whole


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree: a list or dictionary, and an index or a key."""
    found: list[tuple[Any, Any]] = []
    rest = [tree]
    while rest:
        here = rest.pop()
        keys = here if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            found.append((here, key))
            rest.append(here[key])
    return found


def damaged_lines(text: str, chance: Random) -> str:
    """Lines of JSON with one of them damaged, torn, doubled, moved or lost."""
    lines = text.splitlines()
    if not lines:
        return odd_json(chance)
    at, kind = chance.randrange(len(lines)), chance.randrange(8)
    line = lines[at]
    if kind == 0:
        lines.insert(chance.randrange(len(lines)), line)
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        chance.shuffle(lines)
    elif kind == 3:
        lines[at] = line[: chance.randrange(len(line) + 1)]
    else:
        lines[at] = damaged_json(line, chance)
    return "\n".join(lines) + ("\n" if chance.random() < 0.8 else "")


def damaged_bytes(data: bytes, chance: Random) -> bytes:
    """Bytes of a file that was cut, overwritten, or written twice."""
    for _ in range(chance.randint(1, 3)):
        at, size = chance.randrange(len(data) + 1), chance.choice([1, 1, 1, 8, 512, 4096])
        kind = chance.randrange(6)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + b"\0" * size + data[at + size :]
        elif kind == 2:
            data = data[:at] + data[at + size :]
        elif kind == 3:
            data = data[:at] + data[at : at + size] + data[at:]
        else:
            new = bytes([chance.choice([*b'0159eE-+."{}[],:ntf\\\n =|', 0, 0x1F, 0x80, 0xFF])])
            data = data[:at] + new + data[at + (kind == 4) :]
    return data


def damaged(name: str, data: bytes, chance: Random) -> bytes:
    """Content of a file of this name, damaged in a way that its readers may take for a record, or in any."""
    if chance.random() < 0.15:
        return odd_bytes(chance)
    if name.endswith(".gz") and chance.random() < 0.8:
        return gzip.compress(damaged(name.removesuffix(".gz"), gzip.decompress(data), chance), 1)
    if chance.random() < 0.3 or not name.endswith((".json", ".jsonl", "DONE")):
        return damaged_bytes(data, chance)
    text = data.decode("utf-8")
    change = damaged_lines if name.endswith(".jsonl") else damaged_json
    for _ in range(chance.randint(1, 2)):
        text = change(text, chance)
    return text.encode("utf-8", "surrogatepass")


KINDS_OF_PLACE = ("folder", "pipe", "loop", "dangling", "absent")


def replace_place(path: Path, kind: str) -> None:
    """Put a folder, a pipe, a link or nothing in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "absent":
        path.symlink_to(path.name if kind == "loop" else "nowhere")
