"""Replicas that fail in a row are offered fewer and fewer versions, until they take one."""

from __future__ import annotations

from megatron_rl.generate.refit.replica_control import MAX_SKIPPED, BackOff

GOOD, BAD = (0, 0), (1, 0)


def offered(back_off: BackOff, versions: int) -> list[int]:
    """Versions that are offered to a replica that fails each time."""
    found = []
    for version in range(versions):
        offers = BAD not in back_off.skipped
        found += [version] * offers
        back_off.note({GOOD}, {BAD} if offers else ())
    return found


def test_the_pauses_double_up_to_a_limit() -> None:
    first = offered(BackOff(), 300)
    assert first == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    assert first[-1] - first[-2] == MAX_SKIPPED + 1


def test_taking_a_version_resets_the_count() -> None:
    back_off = BackOff()
    back_off.note({GOOD}, {BAD})
    back_off.note({GOOD, BAD}, ())
    assert offered(back_off, 4) == [0, 1, 3]
