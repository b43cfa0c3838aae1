"""A request for a page of the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
        """The run in the path; raises ConfigError for an invalid id."""
        return check_run_id(self.names["run_id"])

    @property
    def run_store(self) -> LightningStore:
        """The store, scoped to the run in the path."""
        return self.store.with_run(self.run_id)

    def number(self, name: str, default: int) -> int:
        """Returns a parameter of the query as a number that is not negative."""
        text = self.query.get(name, "").strip()
        if text and not (text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise ConfigError(f"{name}={text[:40]!r} is not a whole number, or too large; write one such as 3")
        return int(text) if text else default
