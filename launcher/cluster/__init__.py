"""Cluster profiles, and the choice of the one for a run."""
