"""Callbacks around rollouts, in the runner's process, with the live objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.litagent import LitAgent
from agentlightning.tracer.tracer import Tracer
from agentlightning.types import AttemptedRollout, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.runner import Runner


class Hook:
    """Override what you need. An exception in a hook is logged and changes nothing."""

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout) -> None:
        """A rollout was claimed; nothing has run yet."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The attempt's trace is open: spans made here belong to it."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The agent is done; the trace is still open."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: Rollout, spans: Sequence[Span]
    ) -> None:
        """The attempt has ended and its spans are stored."""
