"""Processes of `mrl chat`, `mrl rows` and `mrl environments try` beside the command line."""
