"""Links: what has to hold between an agent and its training, one after the other."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "broken", "unchecked"]
NAMES: tuple[str, ...] = (
    "environment",
    "agent",
    "endpoint",
    "rollout",
    "calls",
    "spans",
    "token ids",
    "logprobs",
    "reward",
    "triplets",
    "template",
)
"""In the order in which they are checked."""


class Link(NamedTuple):
    """What was found of one link."""

    name: str
    state: State
    text: str
    """What is the case."""
    mend: str = ""
    """What to do when it is broken."""


def ok(name: str, text: str) -> Link:
    """A link that holds."""
    return Link(name, "ok", text)


def broken(name: str, text: str, mend: str) -> Link:
    """A link that does not."""
    return Link(name, "broken", text, mend)


def unchecked(name: str, text: str) -> Link:
    """A link of which nothing can be said, and why."""
    return Link(name, "unchecked", text)


def one_line(text: object, limit: int = 300) -> str:
    """Anything as one short line."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
