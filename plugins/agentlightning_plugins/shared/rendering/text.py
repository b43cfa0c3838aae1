"""Formats text, numbers and tables for people: makes hidden characters visible, cuts long text, finds differences."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agentlightning.cli import printable

MAX_SHOWN: Final = 20_000
"""Maximum number of characters that a page shows of one text."""
_HIDDEN: Final = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def show_hidden(text: str) -> str:
    """Replaces each hidden character with its code point, such as ⟨202E⟩."""
    return re.sub(_HIDDEN, lambda match: f"⟨{ord(match[0]):04X}⟩", text)


def show_text(text: str, length: int = MAX_SHOWN) -> str:
    """Returns the text, cut at ``length``, with invisible characters and direction marks as their code points."""
    cut = text if len(text) <= length else text[:length]
    shown = show_hidden(cut.replace("\r\n", "\n"))
    return shown if cut is text else f"{shown}… ({len(text):,} characters in all)"


def show_line(value: Any, length: int = 160) -> str:
    """Formats a value as one line, cut at ``length``; a value that is not text becomes JSON."""
    text = value if isinstance(value, str) else dump(value)
    text = " ".join(text[: 4 * length].split())
    return show_text(text if len(text) <= length else text[: length - 1] + "…")


def show_error(error: str, length: int = 300) -> str:
    """Returns an error as one line: its first line and, if that ends with a colon, the end of the text."""
    first, *rest = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    end = " / ".join(rest)[-length:] if first.endswith(":") else ""
    return f"{first[:length]} {end}".rstrip()


def show_task(task: Any, between: str = ", ") -> str:
    """Returns a task as text: fields as ``name: value``, one field without its name, nested lists as JSON."""
    if isinstance(task, str):
        return task
    if not isinstance(task, Mapping) or not task:
        return json.dumps(task, ensure_ascii=False, default=str)
    fields = {name: show_task(value) for name, value in task.items()}
    return next(iter(fields.values())) if len(fields) == 1 else between.join(f"{k}: {v}" for k, v in fields.items())


def dump(value: Any) -> str:
    """Formats a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def finalize(value: Any) -> Any:
    """Converts a value of a template before it is escaped."""
    if type(value) is str:
        return show_text(value)
    return "" if value is None else value


def show_number(value: float | None, digits: int = 3) -> str:
    """Formats a number with few digits, None as a dash."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 1 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits + 1 - len(str(int(abs(value)))))}f}"


def show_span(seconds: float | None) -> str:
    """Formats a duration, such as ``340 ms`` or ``2 h 05 min``."""
    if seconds is None:
        return "–"
    if 0 < seconds < 0.001:
        return "< 1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def show_time(instant: float | None) -> str:
    """Formats a Unix time in UTC."""
    return "–" if instant is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(instant))


def show_ago(instant: float | None) -> str:
    """Formats the time since a Unix time, in one unit."""
    if instant is None:
        return "–"
    seconds = max(0.0, time.time() - instant)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "now"


_MAX_WORDS: Final = 3_000
"""Texts with more words are compared by line, and texts with more lines as a whole: the time grows quadratically."""
_MAX_LENGTH: Final = 200_000
_MAX_PAIRS: Final = 3_000_000
"""Number of pairs of equal words that are visited; what is not compared by then counts as replaced."""


class _BoundedMatcher(difflib.SequenceMatcher[str]):
    """Compares words in bounded time; ``SequenceMatcher`` takes a minute for a word that is repeated 700 times."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, after, autojunk=False)
        counts = Counter(after)
        self._pairs = [counts[word] for word in before]
        self._left = _MAX_PAIRS

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Any:
        self._left -= sum(self._pairs[alo:ahi])
        return super().find_longest_match(alo, ahi, blo, bhi) if self._left >= 0 else difflib.Match(alo, blo, 0)


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
    for kind, start, end, to_start, to_end in _BoundedMatcher(one, other).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(one[start:end])))
        else:
            pieces += [("remove", "".join(one[start:end]))] * (end > start)
            pieces += [("add", "".join(other[to_start:to_end]))] * (to_end > to_start)
    return pieces


_LEAST_CHARS: Final = 20
"""Least width of the last column of a table on a terminal."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], optional: Sequence[str] = ()) -> None:
    """Prints rows in columns. Wraps only the last column, and only on a terminal; never truncates text.

    A narrow terminal lacks ``optional`` columns, the first of them first.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    lines = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *lines, strict=True)]
    console = Console(highlight=False, markup=False)
    shown = list(range(len(columns)))
    if console.is_terminal:
        for column in optional:
            if sum(widths[place] + 2 for place in shown[:-1]) + min(widths[-1], _LEAST_CHARS) > console.width:
                shown.remove(columns.index(column))
        left = sum(widths[place] + 2 for place in shown[:-1])
        widths[-1] = min(widths[-1], max(_LEAST_CHARS, console.width - left))
    console.width = sum(widths[place] + 2 for place in shown)  # rich before 14.2 pads the last column too
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for place in shown:
        table.add_column(columns[place], overflow="fold", width=widths[place])
    for line in lines:
        table.add_row(*(line[place] for place in shown))
    console.print(table)


def to_markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]], max_length: int = 300) -> list[str]:
    """Returns the lines of a table in Markdown; numbers have four digits, and longer texts are cut."""
    lines = [list(columns), ["---"] * len(columns), *([_to_cell(cell, max_length) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" if place != 1 else f"|{'|'.join(line)}|" for place, line in enumerate(lines)]


def _to_cell(value: Any, max_length: int) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    text = text if len(text) <= max_length else f"{text[:max_length]}…"
    return without_html(text).replace("|", "\\|")


def without_html(text: str) -> str:
    """Returns text of agents and models for Markdown, in which tags would be HTML."""
    return text.replace("<", "&lt;")


def to_code_block(text: str, language: str = "") -> str:
    """Returns text as a block of code in Markdown, which the text itself cannot end."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"
