"""Parts of the prompts of known agents that change with every call, so that no call would continue another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

VOLATILE: Final[Sequence[tuple[re.Pattern[str], str]]] = (
    # Claude Code's checksum of the request, in the first block of its system prompt.
    (re.compile(r"(x-anthropic-billing-header:[^\n]*?\bcch=)[^;\s]+"), r"\g<1>00000"),
)
"""Patterns in system messages, and what replaces them."""


def settle(text: str) -> str:
    """Returns the text of a system message without what changes with every call."""
    for pattern, replacement in VOLATILE:
        text = pattern.sub(replacement, text)
    return text
