"""Recipes: YAML and overrides become a validated configuration; each error names its file and line."""
