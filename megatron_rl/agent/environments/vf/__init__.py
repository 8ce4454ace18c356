"""Environments of the package verifiers, which run in a separate process and ask the run's policy endpoint."""
