"""The tasks that come with mrl."""
