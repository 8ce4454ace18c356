"""From YAML and overrides to a validated configuration, and every complaint about it with its line."""
