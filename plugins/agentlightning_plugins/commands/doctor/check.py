"""One check of ``agl doctor``: its name, its outcome, and the fix when it fails."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from agentlightning_plugins.shared.terminal import shorten

State: TypeAlias = Literal["ok", "broken", "unchecked"]
NAMES: tuple[str, ...] = (
    *("environment", "agent", "endpoint", "rollout"),
    *("calls", "task", "prompts", "spans", "token ids", "logprobs", "reward", "triplets", "template"),
)
"""Names of the checks, in the order in which they run."""


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    state: State
    text: str
    """The finding, as a sentence."""
    fix: str = ""
    """The remedy; empty unless the check failed."""


def ok(name: str, text: str) -> Check:
    """Returns a check that passed."""
    return Check(name, "ok", text)


def broken(name: str, text: str, fix: str) -> Check:
    """Returns a check that failed."""
    return Check(name, "broken", text, fix)


def unchecked(name: str, text: str) -> Check:
    """Returns a check that could not run, with the reason."""
    return Check(name, "unchecked", text)


def one_line(text: object, limit: int = 300) -> str:
    """Converts to text, joins its lines, and cuts it to ``limit`` characters."""
    return shorten(str(text), limit)
