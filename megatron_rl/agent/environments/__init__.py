"""Environments that come with mrl."""
