"""Errors that no retry mends."""


class ConfigurationError(ValueError):
    """The recipe cannot run as it stands; the message says what to change. Ends a rank with EXIT_CONFIG."""
