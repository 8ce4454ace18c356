"""Supervised training: rows of data or worked examples of an environment -> tokens with a loss mask -> batches."""
