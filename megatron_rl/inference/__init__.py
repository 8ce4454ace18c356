"""Tokens in; tokens, log-probs and policy versions out: what any engine may be asked, and this process's own."""
