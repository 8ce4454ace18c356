"""Imported last by the server that ranks of tests are forked from. What it has imported is no garbage: a rank that
looked for some would copy all of it, a third of the work of a short one."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
