"""Rules for the spans that an agent writes with the token of its attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.run.attempt_token import AttemptToken
from agentlightning.store.protocol import LightningStore
from agentlightning.types import LIVE_ATTEMPT, Span

_RESERVED: Final = frozenset({semconv.LATE, semconv.WEIGHT_VERSION})
_RESERVED_PREFIX: Final = "agentlightning.gateway."


def find_reserved(attributes: Mapping[str, Any]) -> str | None:
    """Returns the first attribute that only the gateway or the store may write; None if there is none."""
    for name in attributes:
        if name.startswith(_RESERVED_PREFIX) or name in _RESERVED:
            return name
    return None


async def mark_late(store: LightningStore, token: AttemptToken, spans: Sequence[Span]) -> list[Span]:
    """Marks spans of an attempt that has ended, so that they cannot change its reward.

    Args:
        store: the store that has the attempt.
        token: the attempt's token.
        spans: new spans of this attempt.
    """
    attempts = await store.query_attempts(token.rollout_id) if spans else ()
    if all(attempt.status in LIVE_ATTEMPT for attempt in attempts if attempt.attempt_id == token.attempt_id):
        return list(spans)
    return [span.model_copy(update={"attributes": {**span.attributes, semconv.LATE: True}}).sealed() for span in spans]
