"""Tables for the terminal and for Markdown; ``parts.table`` of the templates writes them as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentlightning.cli import printable


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows in columns. Wraps only the last column, and only on a terminal; never truncates text."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    lines = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    *widths, last = (max(map(cell_len, cells)) for cells in zip(columns, *lines, strict=True))
    left = sum(width + 2 for width in widths)
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        last = min(last, max(24, console.width - left - 2))
    console.width = left + last + 2  # rich before 14.2 pads the last column too
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column, width in zip(columns, (*widths, last), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def to_markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]], max_length: int = 300) -> list[str]:
    """Returns the lines of a table in Markdown; numbers have four digits, and longer texts are cut."""
    lines = [list(columns), ["---"] * len(columns), *([_to_cell(cell, max_length) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" if place != 1 else f"|{'|'.join(line)}|" for place, line in enumerate(lines)]


def _to_cell(value: Any, max_length: int) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split()).replace("|", "\\|")
    return text if len(text) <= max_length else f"{text[:max_length]}…"
