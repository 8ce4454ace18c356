"""A policy outside a run, for `mrl evaluate`, `serve` and `chat`: found by a path, held by one process or by several of
one machine, with an engine that samples from it."""
