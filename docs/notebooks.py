"""Notebooks as Markdown pages, for the site and the tests."""

from __future__ import annotations

import json
from pathlib import Path


def read_page(page: Path) -> str:
    """Returns the text of a Markdown page, or a notebook's cells as Markdown; outputs are left out."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    cells = (("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"])
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for source, kind in cells) + "\n"
