"""Output of the host side never stops its work."""

from __future__ import annotations

import io

import pytest

from launcher.host.process.output import QuietStream


@pytest.mark.parametrize(
    ("encoding", "text", "written"), [("ascii", "Übung\n", "\\xdcbung\n"), ("utf-8", "\udcff", "\\udcff")]
)
def test_what_the_encoding_of_the_log_lacks_is_written_by_number(encoding, text, written):
    log = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print(text, end="", file=QuietStream(log))
    assert log.buffer.getvalue().decode() == written
