"""The first and the last evaluation of a run, and the candidates of a prompt search."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.resources import ResourcesUpdate
from agentlightning.reward import count_failed, find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Metrics, Rollout
from agentlightning_plugins.shared.chat_history import describe_conversations
from agentlightning_plugins.shared.rendering.text import find_difference, show_task
from agentlightning_plugins.shared.statistics.interval import Interval, mean_interval, paired_interval, paired_p_value

CANDIDATE: Final = "prompt_candidate"
"""Name of the resource that holds a candidate of a prompt search."""


def read_candidate(update: ResourcesUpdate | None) -> dict[str, Any]:
    """Returns the fields of the candidate in a version of resources; empty without a candidate."""
    candidate = None if update is None else update.resources.get(CANDIDATE)
    found: dict[str, Any] = {} if candidate is None else candidate.model_dump(mode="json")
    return found if isinstance(found.get("prompts"), dict) else {}  # another resource may have this name


def find_best(candidates: Sequence[Mapping[str, Any]], published: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the published candidate or, if that is the first, the one with the highest score over all tasks.

    Without such scores it is the first. ``published`` has the published templates by name.
    """
    changed = [each for each in candidates if each.get("parent_id") and is_published(each, published)]
    scored = [each for each in candidates if each.get("full_score") is not None]
    return changed[-1] if changed else max(scored, key=lambda each: float(each["full_score"]), default=candidates[0])


def is_published(candidate: Mapping[str, Any], published: Mapping[str, str]) -> bool:
    """Whether all prompts of a candidate are published; ``published`` has the published templates by name."""
    return all(published.get(name) == prompt["template"] for name, prompt in candidate["prompts"].items())


def list_distributions(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the scores of all candidates and the task rewards of seed and best, each with ``name`` and ``values``."""
    scores = [each.get("batch_score" if each.get("full_score") is None else "full_score") for each in candidates]
    found = [{"name": "scores of the candidates", "values": [score for score in scores if score is not None]}]
    tested = [each for each in candidates if each.get("task_scores")]
    scored = [each for each in tested if each.get("full_score") is not None]
    best = max(scored, key=lambda each: float(each["full_score"]), default=tested[0] if tested else None)
    seed = next((each for each in tested if not each.get("parent_id")), None)
    if seed is not None and seed is not best:
        found.append({"name": "task rewards of the seed", "values": list(seed["task_scores"])})
    if best is not None:
        found.append({"name": "task rewards of the best candidate", "values": list(best["task_scores"])})
    return [each for each in found if len(each["values"]) > 1]


@dataclass(frozen=True)
class Transcript:
    """One rollout as a conversation."""

    rollout_id: str
    task: str
    reward: float | None
    messages: Sequence[Mapping[str, Any]]
    """Role, text and tool calls of each message of its last conversation."""
    error: str = ""


@dataclass(frozen=True)
class BeforeAfter:
    """Rewards before and after a run, on the tasks that are in both evaluations."""

    what: str = ""
    """Name of the data set of the evaluations."""
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    prompts: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = ()
    """Name, text and difference from the seed of each learned prompt, as ``find_difference`` returns it."""
    transcripts: Sequence[tuple[str, Transcript]] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, float, Interval | None]]:
        """Before, after and difference, each with its 95 % interval."""
        if not self.before or not self.after:
            return []
        return [
            ("before", statistics.fmean(self.before), mean_interval(self.before)),
            ("after", statistics.fmean(self.after), mean_interval(self.after)),
            ("difference", statistics.fmean(self.changes), paired_interval(self.changes)),
        ]

    @property
    def changes(self) -> list[float]:
        """The difference of each task."""
        return [after - before for before, after in zip(self.before, self.after, strict=True)]


_MODES: Final = ("test", "val")


async def read_candidates(store: LightningStore) -> list[Mapping[str, Any]]:
    """Returns the candidates of a prompt search in the order of creation, each in its newest version."""
    found: dict[str, Mapping[str, Any]] = {}
    for update in await store.query_resources():  # the newest version comes last
        if candidate := read_candidate(update):
            found[update.resources_id] = candidate
    return list(found.values())


def find_published_prompts(candidates: Sequence[Mapping[str, Any]], latest: Mapping[str, str]) -> dict[str, str]:
    """Returns the prompts that a search published as best; if it ended during a trial, the prompts that scored best.

    If fresh rollouts did not confirm the best score, the search published its first prompts instead. ``latest`` has the
    latest resources as text by name.
    """
    if not candidates:
        return {}
    best = find_best(candidates, {} if CANDIDATE in latest else latest)
    templates = {name: prompt["template"] for name, prompt in best["prompts"].items()}
    return templates if CANDIDATE in latest else {name: latest.get(name, text) for name, text in templates.items()}


_COSTS: Final = {
    "calls": "model calls",
    "model_calls": "model calls",
    "tokens": "tokens",
    "sampled_tokens": "sampled tokens",
    "cost": "cost",
}
_LEVEL: Final = 0.05
"""Level of the tests that confirm a gain."""


def describe_outcome(found: BeforeAfter, metrics: Sequence[Metrics], published: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a run achieved, for its page and its report.

    ``rows`` are rewards before and after, and their difference, with intervals; ``p_value`` tests the difference;
    None for a prompt search, whose ``confirmation`` has the gain in fresh rollouts; ``prompts`` are the learned ones,
    each with its difference from the seed; ``costs`` are sums over all steps, or the totals that a search reports.
    """
    values: dict[str, list[float]] = {}
    for each in metrics:
        for name, value in each.values.items():
            values.setdefault(name, []).append(value)
    is_search = bool(found.prompts)
    return {
        "what": found.what,
        "rows": found.rows,
        "p_value": paired_p_value(found.changes) if len(found.before) > 1 and not is_search else None,
        "confirmation": read_confirmation({name: last[-1] for name, last in values.items()}),
        "prompts": found.prompts,
        "is_published": published == {name: text for name, text, _ in found.prompts},
        "costs": [
            (label, values[name][-1] if is_search else sum(values[name]))
            for name, label in _COSTS.items()
            if name in values
        ],
    }


_CONFIRMATION: Final = ("first", "best", "p", "gain", "gain_low", "gain_high")


def read_confirmation(values: Mapping[str, float]) -> dict[str, Any]:
    """Returns the gain of a published prompt in fresh rollouts; only a ``verdict`` if it has not been measured.

    ``values`` has the last value of each metric. The verdict is ``confirmed`` or ``not confirmed``.
    """
    found = {name: values[key] for name in _CONFIRMATION if (key := f"confirmed_{name}") in values}
    is_confirmed = bool(found) and found["best"] > found["first"] and found["p"] <= _LEVEL
    return {**found, "verdict": "confirmed" if is_confirmed else "not confirmed"}


async def read_verdict(store: LightningStore, candidates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the verdict on the published candidate by its id; empty if no candidate but the first is published."""
    latest = await store.get_latest_resources()
    if latest is None or CANDIDATE in latest.resources:  # the trial of a candidate
        return {}
    texts = {name: getattr(each, "template", "") for name, each in latest.resources.items()}
    best = [each for each in candidates if each.get("parent_id") and is_published(each, texts)]
    values = {name: value for each in await store.query_metrics() for name, value in each.values.items()}
    return {best[-1]["candidate_id"]: read_confirmation(values)["verdict"]} if best else {}


async def compare_first_and_last(
    store: LightningStore,
    metrics: Sequence[Metrics],
    candidates: Sequence[Mapping[str, Any]],
    published: Mapping[str, str],
    *,
    transcripts: bool = True,
    most: int | None = None,
) -> BeforeAfter:
    """Compares the seed of a prompt search with its best candidate, or the first evaluation with the last one.

    ``published`` has the templates of the search's published prompts by name. With ``transcripts``, the
    conversations of the task that gained most are read too. If a step of an evaluation has more than ``most``
    rollouts, they are not read: the result has the means that the run recorded, and no intervals.
    """
    if candidates:
        return await _compare_candidates(store, candidates[0], find_best(candidates, published), transcripts)
    for mode in _MODES:
        means = {entry.step: entry.values[name] for entry in metrics if (name := f"{mode}_reward") in entry.values}
        if len(means) > 1:
            what, ends = {"test": "test", "val": "validation"}[mode], (min(means), max(means))
            sizes = [(await store.query_rollouts(metadata={"step": step}, limit=0)).total for step in ends]
            if most is not None and max(sizes) > most:
                return BeforeAfter(what, [means[ends[0]]], [means[ends[1]]])
            first, last = [await _evaluated(store, mode, {"step": step}) for step in ends]
            return await _compare(store, what, first, last, transcripts)
    return BeforeAfter()


async def read_rewards(store: LightningStore, step: int, mode: str) -> dict[str, float]:
    """Reads the rewards of an evaluation by task; failures count as 0, or as the lowest reward if that is negative."""
    rollouts = await _evaluated(store, mode, {"step": step})
    rewards = {task: _reward(rollout) for task, rollout in rollouts.items()}
    failed = count_failed(rewards.values())
    return {task: failed if reward is None else reward for task, reward in rewards.items()}


async def _compare_candidates(
    store: LightningStore, seed: Mapping[str, Any], best: Mapping[str, Any], transcripts: bool
) -> BeforeAfter:
    first_ran, last_ran = [await _evaluated(store, "val", {"group": each["candidate_id"]}) for each in (seed, best)]
    found = await _compare(store, "validation", first_ran, last_ran, transcripts)
    before, after = (each.get("task_scores") or () for each in (seed, best))
    if len(before) != len(after):
        before, after = found.before, found.after
    first, last = ({name: prompt["template"] for name, prompt in each["prompts"].items()} for each in (seed, best))
    prompts = [(name, text, find_difference(first.get(name, ""), text)) for name, text in last.items()]
    return BeforeAfter("validation", before, after, prompts, found.transcripts)


async def _evaluated(store: LightningStore, mode: str, metadata: Mapping[str, Any]) -> dict[str, Rollout]:
    """Returns the finished rollouts of an evaluation by task."""
    rollouts = await store.query_rollouts(metadata=dict(metadata), sort_by="start_time")
    return {
        _task_key(rollout): rollout
        for rollout in rollouts
        if rollout.mode == mode and rollout.status in ("succeeded", "failed", "cancelled")
    }


async def _compare(
    store: LightningStore, what: str, first: Mapping[str, Rollout], last: Mapping[str, Rollout], transcripts: bool
) -> BeforeAfter:
    common = [key for key in first if key in last]
    rewards = [[_reward(rollouts[key]) for key in common] for rollouts in (first, last)]
    failed = count_failed(reward for side in rewards for reward in side)
    before, after = ([failed if reward is None else reward for reward in side] for side in rewards)
    if not common or not transcripts:
        return BeforeAfter(what, before, after)
    best = common[max(range(len(common)), key=lambda place: after[place] - before[place])]
    shown = [
        (label, await _read_transcript(store, rollouts[best]))
        for label, rollouts in (("Before", first), ("After", last))
    ]
    return BeforeAfter(what, before, after, transcripts=shown)


async def _read_transcript(store: LightningStore, rollout: Rollout) -> Transcript:
    spans = (await store.query_spans(rollout.rollout_id, "latest")).items
    conversations = await asyncio.to_thread(describe_conversations, spans)
    error = rollout.attempt.error if isinstance(rollout, AttemptedRollout) else None
    return Transcript(
        rollout.rollout_id,
        show_task(rollout.input),
        find_final_reward(spans, rollout),
        conversations[-1]["messages"] if conversations else [],
        "" if error is None else f"{error.type}: {error.message}",
    )


def _task_key(rollout: Rollout) -> str:
    task_id = (rollout.metadata or {}).get("task_id")
    key = rollout.input if task_id is None else task_id
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False, default=str)


def _reward(rollout: Rollout) -> float | None:
    return find_final_reward((), rollout) if rollout.status == "succeeded" else None
