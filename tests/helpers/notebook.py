"""A notebook without Jupyter: its code cells, one after the other, in one namespace.

python notebook.py NOTEBOOK.ipynb
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def executed(notebook: Path) -> dict[str, Any]:
    """Return the names that the cells define. Raises what a cell raises, with the cell in the traceback."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    return names


if __name__ == "__main__":
    executed(Path(sys.argv[1]))
