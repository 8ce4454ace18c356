"""Pure: formats that Slurm's commands print and accept: fields, times, host lists, states."""

from __future__ import annotations

import itertools
import math
import re
import time

CLOCK_S = 5.0  # seconds that times of one record may differ

# States of a job that has ended. With any other word, also one of a later version, it may still run. So it may with
# REVOKED, the state that a cluster of a federation shows for a job which another cluster has started.
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)

NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE")  # values of a limit that is not set

# A key in `scontrol show job -o` follows a blank and looks like this; values may hold blanks too.
_FIELD = r"(?:^|\s)([A-Z][A-Za-z0-9_/:]*)="
_COMMA = r",(?![^\[]*\])"  # between two hosts, not inside brackets: `node[01-03,07]-ib` is one part
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_HOSTS = rf"(?:[^\s,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"
MOST_HOSTS = 1 << 16  # hosts in one list; Slurm allows no larger cluster
_NUMBER = "[0-9]{1,9}"
_BRACKETS = r"\[([^\]]*)\]"


def parse_fields(line: str) -> dict[str, str]:
    found = list(re.finditer(_FIELD, line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match.group(1): line[match.end() : end].strip() for match, end in zip(found, ends)}


def parse_config(text: str) -> dict[str, str]:
    pairs = (line.partition(" = ") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def expand_hosts(node_list: str) -> list[str]:
    """Expand `node[01-03,07],x` into the name of each host. Raises ValueError for what is not a list of nodes."""
    if not node_list:
        return []
    hosts: list[str] = []
    for part in re.split(_COMMA, node_list):
        if re.fullmatch(_HOSTS, part) is None:
            raise ValueError(f"{node_list!r} is not a list of nodes as Slurm writes it: {part!r}")
        pieces = re.split(_BRACKETS, part)  # text, numbers, text, numbers, ..., text
        choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > MOST_HOSTS:
            raise ValueError(f"{node_list[:200]!r} names more than {MOST_HOSTS} nodes")
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= MOST_HOSTS:
            raise ValueError(f"[{ranges}]: {one} is not a range of nodes")
        numbers += [str(int(first) + number).zfill(len(first)) for number in range(count)]
    return numbers


def id_of_job(answer: str) -> str | None:
    """Job id in the output of `sbatch --parsable`: `4711` or `4711;cluster`, perhaps below a banner; else None."""
    job_id = answer.strip().rpartition("\n")[2].partition(";")[0].strip()
    return job_id if job_id.isdecimal() else None


def is_dead(state: str) -> bool:
    return state.endswith("*") or state.startswith(("down", "unknown"))


def seconds_of(text: str | None) -> float | None:
    """Seconds of Slurm's `1-02:00:00` or `04:00:00`; None for UNLIMITED."""
    found = re.match(rf"^(?:({_NUMBER})-)?({_NUMBER}):({_NUMBER}):({_NUMBER})$", text or "")
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def time_limit_s(text: str | None) -> int | None:
    """Seconds of a value of --time, where a bare number means minutes; None: no limit. Raises ValueError."""
    if text is None or text.upper() in NOTHING or text == "-1":
        return None
    found = re.fullmatch(rf"(?:({_NUMBER})-)?({_NUMBER})(?::({_NUMBER}))?(?::({_NUMBER}))?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a time as Slurm writes it")
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found.group(1) is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    if found.group(4) is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def time_of(text: str | None) -> float | None:
    """Unix time of Slurm's `2026-11-21T07:00:00`, in this process's time zone; None for None, Unknown and N/A."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def text_of(at: float) -> str:
    """The inverse of `time_of`."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
