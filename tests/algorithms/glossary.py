"""The metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PREFIX: Final = r"(val_|test_|greedy_)?"
_SUFFIX: Final = r"(_p50|_p95|_median|_max)?"


def read_names() -> list[str]:
    """Returns the names in the first column of the page's tables, and those of verl; ``<name>`` stands for any."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    columns = re.findall(r"^\| (`.+?) \| ", text, re.MULTILINE)
    return re.findall(r"`([^`\s]+)`", "\n".join([*columns, text.partition("## verl")[2].partition("\n|")[0]]))


def find_unexplained(names: Iterable[str], policies: Iterable[str] = ()) -> set[str]:
    """Returns those of the names that the page does not explain; policies are the prefixes of several policies."""
    known = "|".join(re.sub(r"<\w+>", ".+", re.escape(name)) for name in read_names() if not name.endswith("/"))
    pattern = re.compile(f"({'|'.join(f'{re.escape(each)}/' for each in policies)})?{_PREFIX}({known}){_SUFFIX}")
    return {name for name in names if not pattern.fullmatch(name)}
