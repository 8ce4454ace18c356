"""The file with an evaluation's answers: appended as they come, and read again when the evaluation resumes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.contract.evaluation_records import EvaluationSettings, ProblemAnswers, ProblemKey
from megatron_rl.contract.files import WRITE_PATIENCE_S, append_line
from megatron_rl.contract.records import Unreadable, append, encode_line, read_lines
from megatron_rl.recipe.errors import ConfigurationError


class AnswerFile:
    def __init__(self, path: Path, known: Mapping[ProblemKey, ProblemAnswers]) -> None:
        self.path = path
        self.known = dict(known)

    def add(self, lines: Sequence[ProblemAnswers]) -> None:
        """Append answers durably. Raises OSError, leaving the file as it was."""
        append_line(self.path, "\n".join(map(encode_line, lines)), durable=True, patience=WRITE_PATIENCE_S)
        self.known |= {(line.set, line.mode, line.problem): line for line in lines}


@contextmanager
def kept_answers(path: Path, settings: Mapping[str, Any]) -> Iterator[AnswerFile]:
    """Open a file of answers for this process alone, and create it if necessary.

    Raises:
        ConfigurationError: the file has other settings or other content, or is in use.
        OSError: it cannot be read or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, path)
        yield AnswerFile(path, _read(path, settings))
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigurationError(f"{path} is in use by another evaluation; wait for it, or give --out") from error
    except OSError:
        pass  # this file system has no locks


def _read(path: Path, settings: Mapping[str, Any]) -> dict[ProblemKey, ProblemAnswers]:
    found = read_lines((EvaluationSettings, ProblemAnswers), path)
    if isinstance(found, Unreadable):
        raise ConfigurationError(str(found))
    headers = [line for line in found.records if isinstance(line, EvaluationSettings)]
    if not headers:
        if found.records or len(found.damaged) > 1:
            raise ConfigurationError(f"{path} is not a file of an evaluation's answers; give another --out")
        append(path, EvaluationSettings(dict(settings)), durable=True, patience=WRITE_PATIENCE_S)
        return {}
    if different := differences(headers[0].settings, settings):
        raise ConfigurationError(
            f"{path} has answers with other settings: {'; '.join(different)}. Use those, or give another --out"
        )
    answered = [line for line in found.records if isinstance(line, ProblemAnswers)]
    return {(line.set, line.mode, line.problem): line for line in answered}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """Return a text such as `sampling.temperature was 0.6 and is 1.0` for each value that differs."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            found += differences(was, is_now, f"{name}{key}.")
        elif was != is_now:
            found.append(f"{name}{key} was {was} and is {is_now}")
    return found
