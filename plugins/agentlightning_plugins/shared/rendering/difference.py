"""Differences between texts, by word."""

from __future__ import annotations

import difflib
import re
from typing import Final

_MAX_WORDS: Final = 3_000
"""Texts with more words are compared by line, and texts with more lines as a whole: the time grows quadratically."""
_MAX_LENGTH: Final = 200_000


def find_difference(before: str, after: str) -> list[tuple[str, str]]:
    """Returns the pieces of both texts in order, each with ``same``, ``add`` or ``remove``."""
    whole = [("same", after)] if before == after else [("remove", before), ("add", after)]
    if len(before) + len(after) > _MAX_LENGTH:
        return whole
    one, other = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (before, after))
    if len(one) + len(other) > _MAX_WORDS:
        one, other = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if len(one) + len(other) > _MAX_WORDS:
        return whole
    pieces: list[tuple[str, str]] = []
    for kind, start, end, to_start, to_end in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(one[start:end])))
        else:
            pieces += [("remove", "".join(one[start:end]))] * (end > start)
            pieces += [("add", "".join(other[to_start:to_end]))] * (to_end > to_start)
    return pieces
