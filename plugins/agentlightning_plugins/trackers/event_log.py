"""Logs every event of a run, and its finished rollouts, at level DEBUG with the logger ``agentlightning.event``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from agentlightning.event import Event
    from agentlightning.records import Rollout, Span

logger = logging.getLogger("agentlightning.event")


@hookimpl
def observe(event: Event) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", event)


@hookimpl
def observe_rollout(rollout: Rollout, spans: Sequence[Span]) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s has %d spans: %s", rollout.rollout_id, len(spans), ", ".join(span.name for span in spans))
