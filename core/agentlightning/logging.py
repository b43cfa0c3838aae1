"""Formats text of agents and models so that a terminal can show it safely."""

from __future__ import annotations

import logging
import re
from typing import Final

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, and characters that change the direction of text."""


def printable(text: str) -> str:
    r"""Returns text of agents and models with terminal escapes and the like escaped as in JSON: ``\u001b``."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


class PrintableFormatter(logging.Formatter):
    """Formats records so that a terminal can show them safely."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
