"""URLs of stores without their passwords, for messages."""

from __future__ import annotations

import re
from typing import Final

_USER: Final = re.compile(r"(?<=://)[^/?#].*@", re.DOTALL)
"""Up to the last @, because a password that is not percent-encoded may have any character."""
_PASSWORD: Final = re.compile(r"(?<=[?&])((?:ssl)?password)=[^&#]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    """Replaces the user and password of a URL, and a password in its query string, by ``***``."""
    return _PASSWORD.sub(r"\1=***", _USER.sub("***@", url))
