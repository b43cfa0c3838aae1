"""Resources: their versions, the difference between them, and the lineage of a prompt search."""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from agentlightning.errors import NotFoundError
from agentlightning.resources import PromptTemplate, ResourcesUpdate, hide_secrets
from agentlightning.store.protocol import LightningStore
from agentlightning.types import SortOrder
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.monitoring.evaluation import (
    CANDIDATE,
    list_distributions,
    read_candidate,
    read_candidates,
    read_verdict,
)
from agentlightning_plugins.shared.monitoring.metrics import read_metrics
from agentlightning_plugins.shared.rendering.text import find_difference

_PAGE_SIZE: Final = 50
_MAXCANDIDATES: Final = 500
_STEPS_IN_USE: Final = 2
"""Number of steps that are searched after a version was published: the step that it ends, and the next."""
_ENDS: Final[tuple[SortOrder, ...]] = ("asc", "desc")
"""The first rollout of a step is one of training, the last one of its validation, if it has one."""
_SHOWN: Final = (
    *("candidate_id", "parent_id", "round", "full_score", "batch_score", "critique", "edited", "prompts"),
    "task_scores",
)


async def list_resources(visit: Visit) -> dict[str, Any]:
    """Returns the newest versions of a run's resources, and the candidates of its prompt search as trees."""
    store = visit.run_store
    offset = visit.number("offset", 0)
    page = await store.query_resources(sort_order="desc", limit=_PAGE_SIZE, offset=offset)
    latest = await store.get_latest_resources()
    updates: Sequence[ResourcesUpdate] = page.items
    if page.total > _PAGE_SIZE and any(CANDIDATE in update.resources for update in page):
        updates = await _read_newest(store)
    candidates = _find_candidates(updates)
    uses = {} if candidates else await _find_uses(store, page.items)
    return {
        "versions": [
            {
                "version_id": update.version_id,
                "time": update.update_time,
                "is_latest": latest is not None and update.version_id == latest.version_id,
                "use": uses.get(update.version_id),
                "contents": {
                    name: value.model_dump(mode="json")["resource_type"] for name, value in update.resources.items()
                },
            }
            for update in page
        ],
        "total": page.total,
        "next": offset + _PAGE_SIZE if offset + _PAGE_SIZE < page.total else None,
        "candidates": _make_trees(candidates),
        "verdicts": await read_verdict(store, candidates) if candidates else {},
        "distributions": list_distributions(candidates),
    }


async def _find_uses(store: LightningStore, updates: Sequence[ResourcesUpdate]) -> dict[str, dict[str, Any]]:
    """Returns the step whose rollouts used a version first, their mode, and the reward of the step, by version."""
    if not updates:
        return {}
    first, last = updates[-1].update_time, updates[0].update_time
    steps = [each for each in await read_metrics(store) if each.time >= first]
    after = sum(each.time <= last for each in steps) + _STEPS_IN_USE
    names = {update.resources_id: update.version_id for update in reversed(updates)}
    names |= {update.version_id: update.version_id for update in updates}
    found: dict[str, dict[str, Any]] = {}
    for each in steps[:after]:
        for order in _ENDS:
            ran = await store.query_rollouts(metadata={"step": each.step}, sort_order=order, limit=1)
            for rollout in ran:
                mode = rollout.mode
                reward = each.values.get("reward" if mode == "train" else f"{mode}_reward")
                use = {"step": each.step, "mode": mode, "reward": reward}
                found.setdefault(names.get(rollout.resources_id or "", ""), use)
    return found


async def show_resources(visit: Visit) -> dict[str, Any]:
    """Returns one version of resources and its difference from the parent candidate or the previous version."""
    store, wanted = visit.run_store, visit.names["resources_id"]
    update = await store.get_resources_by_id(wanted)
    if update is None:
        raise NotFoundError(f"this store has no resources {wanted!r}")
    base_id = visit.query.get("base") or await _find_base(visit, update)
    base = await store.get_resources_by_id(base_id) if base_id else None
    old = {} if base is None else _describe(base)
    latest, is_candidate = await store.get_latest_resources(), CANDIDATE in update.resources
    return {
        "version_id": update.version_id,
        "resources_id": update.resources_id,
        "version": update.version,
        "time": update.update_time,
        "is_latest": (is_latest := latest is not None and latest.version_id == update.version_id),
        "verdicts": await read_verdict(store, await read_candidates(store)) if is_latest or is_candidate else {},
        "base": None if base is None else base.version_id,
        "resources": [
            {
                "name": name,
                "type": value["resource_type"],
                "text": value["text"],
                "difference": await asyncio.to_thread(find_difference, old[name]["text"], value["text"])
                if name in old
                else None,
                "candidate": _read_candidate(update, base) if name == CANDIDATE else None,
            }
            for name, value in _describe(update).items()
        ],
    }


async def promote(visit: Visit) -> str:
    """Makes a version the latest resources of the run."""
    update = await visit.run_store.promote(visit.names["resources_id"])
    return f"/runs/{quote(visit.run_id, safe='')}/resources/{quote(update.version_id, safe='')}"


async def _find_base(visit: Visit, update: ResourcesUpdate) -> str | None:
    if parent := read_candidate(update).get("parent_id"):
        for other in sorted(await _read_newest(visit.run_store), key=operator.attrgetter("version"), reverse=True):
            if read_candidate(other).get("candidate_id") == parent:
                return other.version_id
    return f"{update.resources_id}@{update.version - 1}" if update.version > 1 else None


async def _read_newest(store: LightningStore) -> Sequence[ResourcesUpdate]:
    return (await store.query_resources(sort_order="desc", limit=_MAXCANDIDATES)).items


def _read_candidate(update: ResourcesUpdate, base: ResourcesUpdate | None) -> dict[str, Any]:
    """Returns the fields of a candidate, and the scores of the candidate that it is compared with."""
    fields, scores = read_candidate(update), read_candidate(base)
    parent = {f"parent_{name}": scores.get(name) for name in ("full_score", "batch_score")}
    is_parent = scores.get("candidate_id") == fields.get("parent_id")
    pairs = (("task rewards", fields), ("task rewards of the parent", scores if is_parent else {}))
    return {
        **{name: fields.get(name) for name in _SHOWN},
        **parent,
        "distributions": [{"name": name, "values": of["task_scores"]} for name, of in pairs if of.get("task_scores")],
    }


def _describe(update: ResourcesUpdate) -> dict[str, dict[str, str]]:
    """Returns the resources as text, without secrets."""
    described = {}
    for name, resource in update.resources.items():
        fields = resource.model_dump(mode="json")
        kind = str(fields.pop("resource_type"))
        if name == CANDIDATE:
            fields.pop("prompts", None)  # the version has them as separate resources
        text = (
            resource.template
            if isinstance(resource, PromptTemplate)
            else json.dumps(hide_secrets(fields), indent=2, ensure_ascii=False)
        )
        described[name] = {"resource_type": kind, "text": text}
    return described


def _find_candidates(updates: Sequence[ResourcesUpdate]) -> list[dict[str, Any]]:
    """Returns the candidates of a search by round, each in its newest version: later versions add scores."""
    found: dict[str, dict[str, Any]] = {}
    for update in sorted(updates, key=operator.attrgetter("version")):
        if fields := read_candidate(update):
            shown = {key: fields.get(key) for key in _SHOWN}
            found[str(fields.get("candidate_id"))] = {**shown, "version_id": update.version_id}
    return sorted(found.values(), key=lambda candidate: candidate["round"] or 0)


def _make_trees(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the candidates as trees: each candidate has ``children``."""
    nodes: dict[str, dict[str, Any]] = {str(each["candidate_id"]): {**each, "children": []} for each in candidates}
    roots: list[dict[str, Any]] = []
    for each in nodes.values():
        parent = nodes.get(str(each["parent_id"]))
        (roots if parent is None or parent is each else parent["children"]).append(each)
    return roots
