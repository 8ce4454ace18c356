"""The process that supervises a local run, as mrl-submit starts it."""

from __future__ import annotations

import pytest

from launcher.backends.local import Supervisor
from launcher.errors import Failed


def test_one_that_cannot_be_started_is_an_error_of_one_line(tmp_path):
    with pytest.raises(Failed, match="the supervisor of the run cannot be started"):
        Supervisor([str(tmp_path / "python")])
