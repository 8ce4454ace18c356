"""Sizes, placement and memory of a run. Pure: no files, no cluster."""
