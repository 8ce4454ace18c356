"""Recipes that come with mrl, by name."""
