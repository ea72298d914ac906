"""Which files look like secrets: by their names, and by what begins in them.

A guess, for a warning: a package goes to other machines, and into archives that are kept.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

NAMES = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", ".pypirc",
    ".git-credentials", "credentials", "credentials*.json", "client_secret*.json",
)  # fmt: skip
_LOOKED_AT = 1 << 16  # bytes from the beginning of a file
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_SERVICE_ACCOUNT = re.compile(rb'"type"\s*:\s*"(?:service_account|authorized_user)"')


def looks_secret(name: str, content: bytes) -> bool:
    """Whether a file may hold a secret.

    Args:
        name: its path; only the last part counts.
        content: all of it, or its beginning.
    """
    last = name.rpartition("/")[2].lower()
    if any(fnmatchcase(last, pattern) for pattern in NAMES):
        return True
    head = content[:_LOOKED_AT]
    return bool(_PRIVATE_KEY.search(head) or (last.endswith(".json") and _SERVICE_ACCOUNT.search(head)))
