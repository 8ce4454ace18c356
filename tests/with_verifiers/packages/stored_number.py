"""A task set of verifiers: the answer is stored under a word, and a tool reads it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["StoredNumberTaskset"]

NUMBERS = {"apple": 17, "pear": 42, "plum": 8}


class Store(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "store"

    @vf.tool
    def read(self, word: str) -> str:
        """Return the number that is stored under a word."""
        return str(NUMBERS[word])


class StoredNumberData(vf.TaskData):
    word: str


class StoredNumberTask(vf.Task[StoredNumberData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Store(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(NUMBERS[self.data.word]) in trace.last_reply)

    @vf.metric
    async def tool_results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class StoredNumberTaskset(vf.Taskset[StoredNumberTask, vf.TasksetConfig]):
    def load(self) -> list[StoredNumberTask]:
        return [
            StoredNumberTask(
                StoredNumberData(prompt=f"Which number is stored under {word!r}?", word=word), self.config.task
            )
            for word in NUMBERS
        ]


if __name__ == "__main__":
    Store.run()
