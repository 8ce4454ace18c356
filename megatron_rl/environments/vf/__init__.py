"""Environments of the package verifiers, which run in a process of their own and ask the run's policy endpoint."""
