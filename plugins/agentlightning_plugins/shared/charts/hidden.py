"""Makes characters visible that are invisible on pages or that change the direction of text."""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def show_hidden(text: str) -> str:
    """Replaces each hidden character with its code point, such as ⟨202E⟩."""
    return _HIDDEN.sub(lambda match: f"⟨{ord(match[0]):04X}⟩", text)
