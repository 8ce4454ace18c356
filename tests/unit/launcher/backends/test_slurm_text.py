"""Slurm's own texts, recorded from 22.05 and written after newer releases, are read for what they say."""

from __future__ import annotations

import pytest
from doctor_helpers import text
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.slurm.cluster_facts import (
    Gres,
    gres,
    number,
    oneliners,
    options,
    settings,
    tres,
)
from launcher.host.slurm.formats import time_limit_s


def test_what_is_not_set_is_absent():
    config = settings(text("22.05-partition", "config"))
    assert not {"Prolog", "PowerPlugin", "PreemptParameters", "MaxBatchRequeue"} & set(config)
    assert "PreemptType" not in settings(text("24.05", "config"))


def test_settings_that_are_numbered_keep_their_number():
    assert settings(text("24.05", "config"))["Prolog[0]"] == "/etc/slurm/prolog.d/10-health.sh"


def test_partitions_of_newer_releases_have_further_keys():
    (batch,) = oneliners(text("25.05", "partitions"))
    assert (batch["Topology"], batch["ExclusiveTopo"], batch["PreemptMode"]) == ("block", "NO", "GANG,SUSPEND")


def test_a_value_with_blanks_stays_whole():
    assert oneliners("NodeName=a OS=Linux 6.1 #1 SMP RealMemory=8") == [
        {"NodeName": "a", "OS": "Linux 6.1 #1 SMP", "RealMemory": "8"}
    ]
    assert oneliners("No reservations in the system\n") == []


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 5400),
        ("4:30", 270),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
        ("00:00:30", 30),
        ("UNLIMITED", None),
        ("infinite", None),
        ("NONE", None),
        ("-1", None),
        (None, None),
    ],
)
def test_times(written, seconds):
    assert time_limit_s(written) == seconds


def test_what_is_no_time_is_refused():
    with pytest.raises(ValueError, match="noon"):
        time_limit_s("noon")


@given(days=st.integers(0, 400), rest=st.integers(0, 86399))
def test_every_time_with_days_is_read_back(days, rest):
    written = f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    assert time_limit_s(written) == days * 86400 + rest


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("gpu:h100:8(S:0-1)", [Gres("gpu", "h100", 8)]),
        ("gpu:8", [Gres("gpu", None, 8)]),
        ("gpu:h100:8(S:0,1),shard:h100:32(S:0,1)", [Gres("gpu", "h100", 8), Gres("shard", "h100", 32)]),
        ("gpu:a100:4,gpu:v100:2", [Gres("gpu", "a100", 4), Gres("gpu", "v100", 2)]),
        ("(null)", []),
        ("", []),
        ("craynetwork", []),
    ],
)
def test_generic_resources(written, read):
    assert gres(written) == read


def test_options_and_counts():
    assert options("bf_continue,requeue_delay=7") == {"bf_continue": "", "requeue_delay": "7"}
    assert options(None) == {}
    assert tres("node=2,gres/gpu:h100=16,mem=8T") == {"node": 2, "gres/gpu:h100": 16}
    assert (number("30 sec"), number(None, 7), number("x", 3)) == (30, 7, 3)
