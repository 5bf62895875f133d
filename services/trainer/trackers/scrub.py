"""Takes secrets out of a text before it is logged: values of the environment's secret variables, logins in addresses. Pure.

What is secret is told by the variable's name. It knows no other source of secrets, such as a library's own files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_LONGEST = 400


def scrubbed(text: str, environment: Mapping[str, str]) -> str:
    """`text` in one line of at most 400 characters, with `***` in place of each secret."""
    secrets = [value for name, value in environment.items() if _SECRET.search(name) and len(value) > 3]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(_LOGIN.sub("***@", text).split())[:_LONGEST]
