"""mrl convert: sizes of files, and a child that says nothing."""

from __future__ import annotations

import pytest
from click import BadParameter
from click.testing import CliRunner

from launcher.cli.convert import Size, command


@pytest.mark.parametrize("text", ["infGB", "nanGB", "1e400TB", "-1GB", "0GB", "GB", "5", ""])
def test_sizes_need_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(BadParameter, match="is not a size such as 5GB"):
        Size().convert(text, None, None)
    assert Size().convert("0.1 kb", None, None) == 100


def test_an_unreadable_source_is_one_error() -> None:
    done = CliRunner().invoke(command, ["megatron-to-hf", "--", "-x", "y"])
    assert (done.exit_code, done.stderr.startswith("error: ")) == (2, True), done.output
