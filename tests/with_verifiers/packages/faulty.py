"""A task set of verifiers whose tasks fail in different ways, one each."""

from __future__ import annotations

import os
import time

import verifiers.v1 as vf

__all__ = ["FaultyTaskset"]

FAULTS = ("raises", "no reward", "not a number", "dies", "hangs", "none")


class FaultyData(vf.TaskData):
    fault: str


class FaultyTask(vf.Task[FaultyData]):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "dies":
            os._exit(3)
        if self.data.fault == "hangs":
            time.sleep(3600)

    @vf.reward
    async def right(self, trace: vf.Trace) -> dict[str, float]:
        if self.data.fault == "raises":
            raise RuntimeError("the answer cannot be judged")
        if self.data.fault == "no reward":
            return {}
        return {"right": float("nan") if self.data.fault == "not a number" else 1.0}


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self) -> list[FaultyTask]:
        return [FaultyTask(FaultyData(prompt=fault, fault=fault), self.config.task) for fault in FAULTS]
