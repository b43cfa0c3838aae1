"""The list of rollouts: filters, search, and paging from the newest to the oldest."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from agentlightning.errors import ConfigError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, RolloutMode, RolloutStatus, SortOrder
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.paging import read_spans
from agentlightning_plugins.shared.rendering.text import show_task

PAGE_SIZE: Final = 50
_CHUNK: Final = 200
_BUDGET_S: Final = 0.12
"""Time limit for one page to count and search without an index of the store; the next page continues from there."""
_MAX_SEARCHED: Final = 8 * 2**20
"""About how many bytes of the messages of a rollout are searched."""
_INDEXED: Final = ("step", "task_id", "group")
FILTERS: Final = ("status", "mode", "label", *_INDEXED, "min", "max", "meta", "text", "messages", "sort")
_SORTED: Final = 2000
"""Number of rollouts, the newest ones or the oldest ones, that are sorted: no store has an index for rewards."""
SORTS: Final[Mapping[str, tuple[str, bool]]] = {
    "highest reward": ("reward", True), "lowest reward": ("reward", False), "longest": ("seconds", True),
    "shortest": ("seconds", False), "oldest": ("start_time", False),
}  # fmt: skip
"""The orders beside the newest first: the field of a row, and whether the highest values come first."""
LABEL: Final = "label"
NOTE: Final = "label_note"
"""Keys of a rollout's metadata that contain the label and the note that people gave it."""


def describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Returns a row of the list."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    metadata = rollout.metadata or {}
    ended = rollout.end_time or (attempt.end_time if attempt is not None else None)
    return {
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "mode": rollout.mode,
        "reward": None if attempt is None else attempt.reward,
        "attempt": None if attempt is None else attempt.sequence_id,
        "error": None if attempt is None or attempt.error is None else attempt.error.type,
        "start_time": rollout.start_time,
        "seconds": None if attempt is None or ended is None else max(0.0, ended - attempt.start_time),
        "input": show_task(rollout.input)[:400],
        **{key: metadata.get(key) for key in (*_INDEXED, LABEL)},
    }


async def list_rollouts(visit: Visit) -> dict[str, Any]:
    """Returns the rollouts of a run that match the filters, the newest first."""
    query = {name: visit.query[name].strip() for name in FILTERS if visit.query.get(name, "").strip()}
    before = visit.number("before", -1)
    found = await select(visit.run_store, query, None if before < 0 else before)
    return {"filters": {name: query.get(name, "") for name in FILTERS}, **found}


async def select(store: LightningStore, query: Mapping[str, str], before: int | None = None) -> dict[str, Any]:
    """Finds a page of rollouts; the cursor ``before`` limits the search to this many of the oldest rollouts.

    With ``sort``, the newest rollouts (for ``oldest``, the oldest) are searched and sorted; ``before`` is then a place
    in the sorted list.
    """
    status, mode = query.get("status"), query.get("mode")
    _check("sort", query.get("sort"), tuple(SORTS))
    _check("status", status, get_args(RolloutStatus))
    _check("mode", mode, (*get_args(RolloutMode), "none"))
    conditions: dict[str, Any] = {"status_in": [status] if status else None}
    deadline = time.monotonic() + _BUDGET_S
    total = (await store.query_rollouts(limit=0, **conditions)).total
    indexed = {key: query[key] for key in _INDEXED if key in query}
    readers: tuple[Callable[[str], Any], ...] = (_number_or_text, str)
    for read in readers if indexed else ():
        conditions["metadata"] = {key: read(value) for key, value in indexed.items()}
        total = (await store.query_rollouts(limit=0, **conditions)).total
        if total:
            break
    matches = _make_test(query)
    if "sort" in query:
        return await _sort(store, query, matches, total, before or 0, conditions, deadline)
    position = total if before is None else min(before, total)
    rows: list[dict[str, Any]] = []
    searched, chunk_s = 0, 0.0
    while position > 0 and len(rows) < PAGE_SIZE and (not searched or time.monotonic() + chunk_s < deadline):
        started = time.monotonic()
        size = PAGE_SIZE if matches is None else min(_CHUNK, position)
        found = await _read(store, total, position, size, conditions)
        if not found:
            break
        for rollout in found:
            position -= 1
            searched += 1
            if (matches is None or matches(rollout)) and await _mentions(store, rollout, query):
                rows.append(describe_rollout(rollout))
                if len(rows) == PAGE_SIZE:
                    break
            if "messages" in query and time.monotonic() > deadline:
                break
        chunk_s = time.monotonic() - started
    return {
        "rollouts": rows,
        "total": total,
        "searched": searched,
        "found": len(rows),
        "is_exact": matches is None and "messages" not in query,
        "next": position if position > 0 else None,
    }


async def _sort(
    store: LightningStore,
    query: Mapping[str, str],
    matches: Callable[[Rollout], bool] | None,
    total: int,
    first: int,
    conditions: Mapping[str, Any],
    deadline: float,
) -> dict[str, Any]:
    """Returns a page of the sorted list; rollouts without the value come last."""
    order: SortOrder = "asc" if query["sort"] == "oldest" else "desc"
    key, descending = SORTS[query["sort"]]
    rows, searched = [], 0
    for rollout in await store.query_rollouts(sort_order=order, limit=_SORTED, **conditions):
        if "messages" in query and searched and time.monotonic() > deadline:
            break
        searched += 1
        if (matches is None or matches(rollout)) and await _mentions(store, rollout, query):
            rows.append(describe_rollout(rollout))
    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key], reverse=descending)
    ordered = [*known, *(row for row in rows if row[key] is None)]
    return {
        "rollouts": ordered[first : first + PAGE_SIZE],
        "total": total,
        "searched": searched,
        "found": len(rows),
        "is_exact": False,
        "next": first + PAGE_SIZE if first + PAGE_SIZE < len(rows) else None,
    }


async def _read(
    store: LightningStore, total: int, position: int, size: int, conditions: Mapping[str, Any]
) -> Sequence[Rollout]:
    """Reads the newest of the ``position`` oldest rollouts, the newest first, from the nearer end of the list."""
    if position < total / 2:
        first = max(0, position - size)
        return (await store.query_rollouts(offset=first, limit=position - first, **conditions)).items[::-1]
    return (await store.query_rollouts(sort_order="desc", offset=total - position, limit=size, **conditions)).items


def _check(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value and value not in allowed:
        raise ConfigError(f"{name}={value!r} is not a {name}; allowed are {', '.join(allowed)}")


def _number_or_text(value: str) -> Any:
    try:
        return int(value)
    except ValueError:
        return value


def _to_number(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(query.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={query[name]!r} is not a number; write a reward such as 0.5") from None


def _make_test(query: Mapping[str, str]) -> Callable[[Rollout], bool] | None:
    """Returns a test for the filters without an index in the store; None if there are no such filters."""
    low, high = _to_number(query, "min", -math.inf), _to_number(query, "max", math.inf)
    mode, label, meta = query.get("mode"), query.get("label"), query.get("meta")
    key, value = (part.strip() for part in (meta or "").partition("=")[::2])
    text = None if "messages" in query else query.get("text")
    has_bounds = not query.keys().isdisjoint({"min", "max"})
    if not (mode or label or meta or text or has_bounds):
        return None

    def matches(rollout: Rollout) -> bool:
        metadata = rollout.metadata or {}
        given, found = metadata.get(LABEL), metadata.get(key)
        reward = rollout.attempt.reward if isinstance(rollout, AttemptedRollout) else None
        return (
            mode in (None, rollout.mode or "none")
            and (label in (None, given) or (label == "any" and given is not None))
            and (not has_bounds or (reward is not None and low <= reward <= high))
            and (
                not meta or (key in metadata and value in ("", found if isinstance(found, str) else json.dumps(found)))
            )
            and (not text or text.casefold() in _all_text(rollout))
        )

    return matches


def _all_text(rollout: Rollout) -> str:
    """Returns the text that is searched: id, input, metadata and error, in lower case."""
    error = rollout.attempt.error if isinstance(rollout, AttemptedRollout) else None
    parts = [rollout.rollout_id, json.dumps([rollout.input, rollout.metadata], ensure_ascii=False, default=str)]
    parts += [error.type, error.message, error.traceback] if error is not None else []
    return "\n".join(parts).casefold()


async def _mentions(store: LightningStore, rollout: Rollout, query: Mapping[str, str]) -> bool:
    """Returns whether the text occurs in the rollout or its messages; True if messages are not searched."""
    if "messages" not in query or "text" not in query:
        return True
    wanted = query["text"].casefold()
    if wanted in _all_text(rollout):
        return True
    spans, _ = await read_spans(store, rollout.rollout_id, "latest", max_bytes=_MAX_SEARCHED)
    texts = (str(value) for span in spans for value in span.attributes.values())
    return await asyncio.to_thread(lambda: any(wanted in text.casefold() for text in texts))
