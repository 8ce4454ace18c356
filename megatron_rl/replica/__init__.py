"""An inference replica of a run: ranks of a world of their own that answer over HTTP, by weights that they get from the
ranks that train."""
