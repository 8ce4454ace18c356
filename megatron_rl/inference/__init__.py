"""Tokens in, tokens and log-probs out: the engine, and what may be asked of any engine."""
