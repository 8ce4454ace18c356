"""The token that every request must bring."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import Scope

MISSING = "the token is missing or wrong: Authorization: Bearer TOKEN"


def token_of(scope: Scope, tokens: Sequence[bytes]) -> int | None:
    """Which of the tokens an HTTP request has, compared in constant time; None: none of them."""
    scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    matches = [hmac.compare_digest(given.strip(), token) for token in tokens]
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None
