"""From a configuration to a run: problems, models, who generates, and one attempt from start to exit."""
