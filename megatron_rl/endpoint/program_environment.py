"""Environment variables of programs, which inherit nothing secret."""

from __future__ import annotations

import os
from collections.abc import Mapping

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "http_proxy", "https_proxy", "no_proxy"),
)
"""Environment variables that a program inherits. None of them is secret."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def program_environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return all environment variables of a program on this machine.

    variables: those of a recipe; None: the value in the environment of this process.

    Raises ValueError if a variable is not set.
    """
    found = {name: os.environ[name] for name in INHERITED if name in os.environ} | ONE_THREAD
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise ValueError(f"environment.args.variables: {name} is not set in the environment of the run")
        found[name] = os.environ[name] if value is None else value
    return found
