"""Inference replicas of other processes as one engine: what is said to them, which of them is asked, and what becomes
of a request whose replica dies."""
