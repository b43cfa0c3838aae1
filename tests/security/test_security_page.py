"""The tests that SECURITY.md names exist."""

from __future__ import annotations

import re

from tests.source import REPO


def test_every_test_that_security_md_names_exists() -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(test_\w+))?`", (REPO / "SECURITY.md").read_text(encoding="utf-8"))
    missing = []
    for path, name in named:
        file = REPO / "tests" / (path if "/" in path else f"security/{path}")
        if not file.is_file() or not re.search(rf"def {name or 'test_'}", file.read_text(encoding="utf-8")):
            missing.append(f"{path}::{name}")
    assert len(named) > 20
    assert missing == []
