"""The table of failures in docs/operations.md: its tests read from it what the messages say."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.source import REPO


class Failure(NamedTuple):
    """A row of the table."""

    name: str
    how_long: str
    messages: list[re.Pattern[str]]
    """The texts that the row has in backticks; ``...`` stands for any text, and numbers for any numbers."""
    tests: list[str]


def read_table() -> dict[str, Failure]:
    """Returns the rows by the name of the failure."""
    table = (REPO / "docs" / "operations.md").read_text().partition("## Failures")[2].partition("\n## ")[0]
    lines = [line.strip("|") for line in table.splitlines() if line.startswith("| ")][1:]
    found = {}
    for name, _, how_long, said, tests in (map(str.strip, line.split("|")) for line in lines):
        texts = [re.escape(text).replace(r"\.\.\.", ".*") for text in re.findall("`([^`]+)`", said)]
        messages = [re.compile(re.sub(r"\d+(\\\.\d+)?", r"[0-9.]+", text)) for text in texts]
        found[name] = Failure(name, how_long, messages, re.findall(r"`(test_\w+)`", tests))
    return found


def check_messages(failure: str, *texts: str) -> None:
    """Checks that texts have the messages of a failure, one each, in order; no text must be left."""
    messages = read_table()[failure].messages
    assert len(messages) == len(texts), (failure, texts)
    for message, text in zip(messages, texts, strict=True):
        assert message.search(text), (message.pattern, text)
