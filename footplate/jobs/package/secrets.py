"""Guess which files contain secrets, by their names and their first bytes.

The guess is for a warning: a package goes to other machines, and into archives that are kept.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

NAMES = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", ".pypirc",
    ".git-credentials", "credentials", "credentials*.json", "client_secret*.json",
)  # fmt: skip
# The first bytes of a file that the guess looks at.
LOOKED_AT = 1 << 16
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_SERVICE_ACCOUNT = re.compile(rb'"type"\s*:\s*"(?:service_account|authorized_user)"')


def looks_secret(name: str, content: bytes) -> bool:
    """Return True if a file may contain a secret.

    Args:
        name: its path; only the last part counts.
        content: its first `LOOKED_AT` bytes.
    """
    last = name.rpartition("/")[2].lower()
    if any(fnmatchcase(last, pattern) for pattern in NAMES):
        return True
    return bool(_PRIVATE_KEY.search(content) or (last.endswith(".json") and _SERVICE_ACCOUNT.search(content)))
