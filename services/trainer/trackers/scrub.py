"""Takes secrets out of a text before it is logged: values of the environment's secret variables, logins in addresses. Pure.

What is secret is told by the variable's name. It knows no other source of secrets, such as a library's own files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ADDRESS = re.compile(r"UR[IL]S?$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)\S+@")
"""Up to the last @: a password may have / and @ in it."""
_LONGEST = 400


def scrubbed(text: str, environment: Mapping[str, str]) -> str:
    """`text` in one line of at most 400 characters, with `***` in place of each secret."""
    secrets = [value for name, value in environment.items() if is_secret(name, value) and len(value) > 3]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(_LOGIN.sub("***@", text).split())[:_LONGEST]


def is_secret(name: str, value: str) -> bool:
    """Of an environment variable; an address with a login is one as a whole."""
    return bool(_SECRET.search(name)) or bool(_ADDRESS.search(name) and "://" in value and "@" in value)
