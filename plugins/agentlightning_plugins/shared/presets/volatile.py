"""Parts of the prompts of known agents that change with every call, so that no call would continue another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

VOLATILE: Final[Sequence[tuple[re.Pattern[str], str]]] = (
    # Claude Code's checksum of the request, in the first block of its system prompt.
    (re.compile(r"(x-anthropic-billing-header:[^\n]*?\bcch=)[^;\s]+"), r"\g<1>00000"),
)
"""Patterns in system messages, and what replaces them."""


def settle(content: Any) -> Any:
    """Returns the content of a system message, a text or a list of parts, without what changes with every call."""
    if isinstance(content, list):
        return [
            {**part, "text": settle(part["text"])} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    for pattern, replacement in VOLATILE if isinstance(content, str) else ():
        content = pattern.sub(replacement, content)
    return content
