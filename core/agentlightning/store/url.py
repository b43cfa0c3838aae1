"""URLs of stores without their passwords, for messages."""

from __future__ import annotations

import re
from typing import Final

_USER: Final = re.compile(r"(?<=://)[^/?#].*", re.DOTALL)
"""The user part before the last @: a password that is not percent-encoded may contain any character."""
_PASSWORD: Final = re.compile(r"(?<=[?&])((?:ssl)?password)=[^&#]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    """Replaces the user and password of a URL, and a password in its query string, with ``***``."""
    before, at, host = url.rpartition("@")
    return _PASSWORD.sub(r"\1=***", _USER.sub("***", before) + at + host)
