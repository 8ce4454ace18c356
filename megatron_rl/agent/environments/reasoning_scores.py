"""Score answers with the scorers of reasoning-gym, in a worker process of reasoning_gym.py.

Some tasks parse the answer with sympy, which evaluates it as Python and may never return, in code that no exception
interrupts; others call eval. So only such a worker may import this module: it has limits of time and memory, no
network, and cannot change files.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS


def score(request: Mapping[str, Any]) -> tuple[float, str | None]:
    """Return the score, and the error of a task that cannot parse the answer, which scores 0. Raises MemoryError.

    request: `dataset`, `dataset_args`, `seed` and `draws` of the environment; `task`, pickled; `answer`.
    """
    dataset = _dataset(request["dataset"], json.dumps(request["dataset_args"]), request["seed"], request["draws"])
    task = pickle.loads(base64.b64decode(request["task"]))  # sent by a rank, which is trusted
    try:
        return float(dataset.score_answer(request["answer"], task)), None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - some tasks raise anything
        return 0.0, repr(error)[:200]


@lru_cache(maxsize=1)
def _dataset(name: str, arguments: str, seed: int, size: int) -> Any:
    dataset, config = DATASETS[name]
    return dataset(config(**json.loads(arguments), seed=seed, size=size))
