"""Programming: problems whose answers are programs, which are run against tests."""
