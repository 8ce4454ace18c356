"""Surroundings of a training rank: its run, attempt, device and peers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.model.platform.device import Device
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints


@dataclass(frozen=True, slots=True)
class Here:
    """One rank's place in one attempt. Set-up passes it to every part that it builds."""

    run_dir: RunDir
    attempt: Attempt
    platform: Device
    groups: Groups
    safe_points: SafePoints
