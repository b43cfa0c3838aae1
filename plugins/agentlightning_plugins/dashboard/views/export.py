"""The export of labelled rollouts, as a dataset."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agentlightning.frozen import thaw
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout
from agentlightning_plugins.dashboard.views.rollouts import LABEL, NOTE
from agentlightning_plugins.shared.chat_history import TraceToMessages, drop_prefixes
from agentlightning_plugins.shared.paging import every


async def read_labelled(store: LightningStore) -> AsyncIterator[dict[str, Any]]:
    """Yields the labelled rollouts of a run: input, label, note, reward and conversations."""
    async for rollout in every(store.query_rollouts):
        if rollout.metadata and (LABEL in rollout.metadata or NOTE in rollout.metadata):
            yield await _describe(store, rollout)


async def _describe(store: LightningStore, rollout: Rollout) -> dict[str, Any]:
    metadata = dict(rollout.metadata or {})
    spans = (
        (await store.query_spans(rollout.rollout_id, "latest")).items if isinstance(rollout, AttemptedRollout) else []
    )
    return {
        "rollout_id": rollout.rollout_id,
        "label": metadata.get(LABEL),
        "note": metadata.get(NOTE),
        "reward": rollout.attempt.reward if isinstance(rollout, AttemptedRollout) else None,
        "input": thaw(rollout.input),
        "conversations": [thaw(dict(history)) for history in drop_prefixes(TraceToMessages().adapt(spans))],
    }
