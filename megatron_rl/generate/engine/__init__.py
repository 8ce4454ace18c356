"""Inference engines: their common interface, this project's own engine, and clients of other engines."""
