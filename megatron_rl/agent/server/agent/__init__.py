"""An environment in its own process, which the ranks of a run ask: see agent/remote/wire.py."""
