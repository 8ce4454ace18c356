"""Processes that answer requests, and end with all that they have started."""
