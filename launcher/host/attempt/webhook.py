"""Send one notification to a webhook: POST a JSON object. Run by its file name, as a separate process.

The name of the variable or file with the URL is in MRL_WEBHOOK, the object in MRL_PAYLOAD. The URL is a secret: it is
in no argument and no message.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 20.0  # seconds without an answer


def main() -> int:
    where = os.environ["MRL_WEBHOOK"]
    try:
        url = url_of(where)
    except OSError as error:
        return _fail(f"{where}: {error.strerror}")
    if not url.startswith(("https://", "http://")):
        return _fail(f"{where} holds no URL" if url else f"{where} is not set, or empty")
    headers = {"Content-Type": "application/json", "User-Agent": "mrl"}
    try:
        request = urllib.request.Request(url, os.environ["MRL_PAYLOAD"].encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        return _fail(f"the webhook answered HTTP {error.code}")
    except urllib.error.URLError as error:
        reason = error.reason
        known = isinstance(reason, OSError) and reason.strerror
        return _fail(f"the webhook cannot be reached: {known or type(reason).__name__}")
    except (OSError, ValueError, http.client.HTTPException) as error:  # their text may quote the URL
        return _fail(f"the webhook cannot be called: {type(error).__name__}")


def url_of(where: str) -> str:
    """Return the URL in a variable, or in a file if `where` has a slash. Raises OSError."""
    if "/" not in where:
        return os.environ.get(where, "").strip()
    with open(os.path.expanduser(where), encoding="utf-8", errors="replace") as file:
        return file.read(65536).strip()


def _fail(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
