"""Removes a provider's key from everything that agents get or that is recorded."""

from __future__ import annotations

import base64
import re
from typing import Final
from urllib.parse import quote

_STARS: Final = b"***"
_ESCAPES: Final = (b"\\u", b"\\/", b"%", b"&#")
_MIN_SECRET: Final = 12
"""Shorter keys, such as EMPTY for a local server, are words that answers may contain."""


class KeyRedactor:
    """Replaces a key with asterisks: plain, in base64 or hex, and with characters escaped as in JSON, URLs or HTML."""

    def __init__(self, key: str) -> None:
        data = key.encode()
        self._is_secret = len(data) >= _MIN_SECRET
        self._literals = [data]
        if self._is_secret:
            hexadecimal = data.hex().encode()
            self._literals += [*_in_base64(data), hexadecimal, hexadecimal.upper(), quote(key, safe="").encode()]
        self._literals = list(dict.fromkeys(self._literals))
        self._escaped = re.compile(b"".join(map(_any_form, data)), re.IGNORECASE)

    def redact_error(self, text: bytes) -> bytes:
        """Redacts any key, even one that may be a word."""
        for literal in self._literals:
            if literal in text:
                text = text.replace(literal, _STARS)
        if any(escape in text for escape in _ESCAPES):
            text = self._escaped.sub(_STARS, text)
        return text

    def redact_answer(self, text: bytes) -> bytes:
        """Redacts a key that cannot be a word."""
        return self.redact_error(text) if self._is_secret else text


def _in_base64(data: bytes) -> list[bytes]:
    """Returns the base64 encodings of data at any position of a longer text, in both alphabets."""
    found = []
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + data)
        inner = encoded[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]  # characters that encode only the data
        found += [inner, inner.translate(bytes.maketrans(b"+/", b"-_"))]
    return found


def _any_form(byte: int) -> bytes:
    """Returns a pattern of a character: itself, or escaped once or several times."""
    plain = re.escape(bytes([byte]))
    forms = [b"(?-i:%b)" % plain, rb"\\+u00%02x" % byte, b"%%(?:25)*%02x" % byte, b"&#(?:%d|x%x);" % (byte, byte)]
    if byte == ord("/"):
        forms.append(rb"\\+/")
    return b"(?:%b)" % b"|".join(forms)
