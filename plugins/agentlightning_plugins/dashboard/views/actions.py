"""The actions of forms: cancel a rollout, retry it, label it."""

from __future__ import annotations

from urllib.parse import quote

from agentlightning.errors import ConfigError
from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.dashboard.views.rollout import find_rollout
from agentlightning_plugins.dashboard.views.rollouts import LABEL, NOTE

_MAX_NOTE = 4000


async def cancel(visit: Visit) -> str:
    """Cancels a rollout."""
    rollout = await find_rollout(visit)
    await visit.run_store.cancel_rollout(rollout.rollout_id)
    return _path(visit)


async def retry(visit: Visit) -> str:
    """Queues a rollout again."""
    rollout = await find_rollout(visit)
    await visit.run_store.retry_rollout(rollout.rollout_id)
    return _path(visit)


async def label(visit: Visit) -> str:
    """Labels a rollout as good or bad, with a note, in its metadata; ``keep`` leaves the label as it is.

    Raises:
        ConfigError: the label is not allowed.
    """
    chosen, note = visit.query.get("label", ""), visit.query.get("note", "")[:_MAX_NOTE].strip()
    if chosen not in ("good", "bad", "keep", ""):
        raise ConfigError(f"label={chosen!r} is not a label; allowed are good, bad, keep and an empty value")
    rollout = await find_rollout(visit)
    metadata = dict(rollout.metadata or {})
    if chosen != "keep":
        metadata[LABEL] = chosen
    metadata[NOTE] = note
    kept = {key: value for key, value in metadata.items() if key not in (LABEL, NOTE) or value}
    await visit.run_store.update_rollout(rollout.rollout_id, metadata=kept or None)
    return _path(visit)


def _path(visit: Visit) -> str:
    return f"/runs/{quote(visit.run_id, safe='')}/rollouts/{quote(visit.names['rollout_id'], safe='')}"
