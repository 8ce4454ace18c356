"""Programming problems, answered by programs that are run against tests."""
