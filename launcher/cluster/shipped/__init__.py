"""Cluster profiles that come with mrl."""
