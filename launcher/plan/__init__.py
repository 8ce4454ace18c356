"""Sizes, placement, memory and time of a run."""
