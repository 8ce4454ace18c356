"""Reasons why a run does not learn: rules over its recipe and its record, with evidence and what to try."""
