"""Pure: which files are somebody's secrets, by their names alone. They stay out of a snapshot, tracked or not.

Ordinary source may speak of tokens and secrets in its name (tokenizer.py, token_count.py, secrets.py): a pattern here
is a name that programs keep credentials under, not a word.
"""

from __future__ import annotations

import re

_FOLDERS = (".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kube", ".oci", ".ssh")
_FILES = (
    r"\.env|\.env\.(?!example$|sample$|template$).*|.*\.env|\.envrc"
    r"|[._]netrc|\.pypirc|\.npmrc|\.yarnrc|\.pgpass|\.my\.cnf|\.boto|\.s3cfg|\.dockercfg|\.htpasswd|\.vault-token"
    r"|\.git-credentials|\.?credentials|credentials[^/]*\.(?:json|ya?ml|toml|ini|cfg|txt)"
    r"|(?:.*[._-])?(?:client[_-]secret|service[_-]account)[^/]*\.json"
    r"|\.?secrets?(?:\.[a-z]+)?\.(?:ya?ml|json|toml|ini|cfg|txt)"
    r"|(?:.*[._-])?token(?:\.(?:txt|json|ya?ml))?"
    r"|.*\.(?:pem|key|p12|pfx|jks|kdbx|ppk)|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?"
    r"|.*_history"
)  # compiled where a name is looked at: a dry run looks at none


def holds_credentials(name: str) -> bool:
    """Whether a file says so by its name, or by that of a folder that it lies in.

    Args:
        name: relative to the directory that is copied.
    """
    *folders, file = name.split("/")
    return (
        any(folder.lower() in _FOLDERS for folder in folders) or re.fullmatch(_FILES, file, re.IGNORECASE) is not None
    )
