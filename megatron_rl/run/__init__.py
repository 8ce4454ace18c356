"""Setup of a run from its configuration: problems, models, generation, and one attempt from start to exit."""
