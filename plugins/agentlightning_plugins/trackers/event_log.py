"""Logs every event of a run at level DEBUG with the logger ``agentlightning.event``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from agentlightning.event import Event

logger = logging.getLogger("agentlightning.event")


@hookimpl
def observe(event: Event) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", event)
