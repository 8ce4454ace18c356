"""Reference of recipe keys."""

from __future__ import annotations

from launcher.cli.show.help_pages import Keys


def test_an_entry_has_type_unit_default_and_meaning():
    assert Keys().lines(("job", "silence_limit_s"))[:2] == [
        "job.silence_limit_s: an integer > 0, in seconds; default 1800",
        "  Seconds without a sign of life from a rank, or without progress of any rank, after which the run",
    ]
    assert Keys().lines(("environments", "*", "weight"))[0] == "environments.N.weight: a number; default 1.0"
