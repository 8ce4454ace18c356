"""Who fails in a row is asked less and less often, and who took a version begins anew."""

from __future__ import annotations

from megatron_rl.refit.refusals import MOST_SKIPPED, Refusals

GOOD, BAD = (0, 0), (1, 0)


def offered(refusals: Refusals, versions: int) -> list[int]:
    """The versions that one is offered that takes none."""
    found = []
    for version in range(versions):
        asked = BAD not in refusals.skipped
        found += [version] * asked
        refusals.note({GOOD}, {BAD} if asked else ())
    return found


def test_the_pauses_double_up_to_a_limit() -> None:
    first = offered(Refusals(), 300)
    assert first == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    assert first[-1] - first[-2] == MOST_SKIPPED + 1


def test_who_took_a_version_has_not_failed() -> None:
    refusals = Refusals()
    refusals.note({GOOD}, {BAD})
    refusals.note({GOOD, BAD}, ())
    assert offered(refusals, 4) == [0, 1, 3]
