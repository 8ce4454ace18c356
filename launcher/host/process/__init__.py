"""Locks, processes that leave nothing behind, output that may come to nothing."""
