"""A policy outside a run: found by a path, held by one process or by several of a machine, and an engine that answers
by it. For `mrl evaluate`, `serve` and `chat`."""
