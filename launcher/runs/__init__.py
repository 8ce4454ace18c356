"""Existing runs: find, inspect and control them."""
