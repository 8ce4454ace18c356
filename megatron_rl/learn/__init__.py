"""Answers and rows on their way to an update of the policy."""
