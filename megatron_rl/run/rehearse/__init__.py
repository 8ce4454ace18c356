"""Rehearsal of a run at its true size on one machine: a rank of each kind, on tensors with shape, dtype and device but
without values."""
