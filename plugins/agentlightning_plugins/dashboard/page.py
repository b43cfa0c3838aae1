"""Pages (a path, a view that reads the store, and a template) and actions (forms that change the store)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.store.check import check_run_id
from agentlightning.store.protocol import LightningStore

_MAX_DIGITS: Final = 15


@dataclass(frozen=True)
class Visit:
    """A request for a page, or a submitted form."""

    store: LightningStore
    names: Mapping[str, str]
    """The names in the path, such as ``run_id``."""
    query: Mapping[str, str]
    """The parameters of the query, or the fields of the form."""

    @property
    def run_id(self) -> str:
        """The run in the path.

        Raises:
            ConfigError: the path contains no valid id of a run.
        """
        return check_run_id(self.names["run_id"])

    @property
    def run_store(self) -> LightningStore:
        """The store, scoped to the run in the path."""
        return self.store.with_run(self.run_id)

    def number(self, name: str, default: int) -> int:
        """Returns a parameter of the query as a number that is not negative.

        Raises:
            ConfigError: the parameter is not a whole number, or too large.
        """
        text = self.query.get(name, "").strip()
        if text and not (text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise ConfigError(f"{name}={text[:40]!r} is not a whole number, or too large; write one such as 3")
        return int(text) if text else default


View: TypeAlias = Callable[[Visit], Awaitable[dict[str, Any]]]
"""Returns the contents of a page as plain values, which the JSON twin returns and the template renders."""


@dataclass(frozen=True)
class DashboardPage:
    """A page; its JSON twin has the same path with ``.json``."""

    path: str
    """Path of the page, with ``{names}``, such as ``/runs/{run_id}/ledger``."""
    view: View
    template: str
    tab: str = ""
    """Label in the navigation of a run, or in the main navigation for a path without a run; empty for no entry."""


@dataclass(frozen=True)
class Action:
    """A form of a page, submitted by POST; disabled by ``--read-only``."""

    path: str
    run: Callable[[Visit], Awaitable[str]]
    """Performs the action and returns the path of the page to show next."""
