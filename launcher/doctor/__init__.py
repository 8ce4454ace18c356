"""Checks of a recipe against a cluster or this machine, before it runs. Pure: facts in, findings out."""
