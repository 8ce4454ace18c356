"""Runs that exist: found, looked at, told what to do."""
