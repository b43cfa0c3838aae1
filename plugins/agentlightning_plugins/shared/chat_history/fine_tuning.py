"""Rollouts as examples for supervised fine-tuning, in the format of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Final

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from agentlightning.frozen import thaw
from agentlightning.reward import read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout
from agentlightning_plugins.shared.chat_history.adapter import TraceToMessages, drop_prefixes

logger = logging.getLogger("agentlightning")
_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")


class FineTuningExample(BaseModel):
    """One conversation: a line of a fine-tuning file."""

    messages: list[dict[str, Any]]
    """The last message is the one to learn."""
    tools: list[dict[str, Any]] | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class PreferencePair(BaseModel):
    """The conversations of two rollouts of one task; the chosen one has the higher reward."""

    chosen: list[FineTuningExample]
    rejected: list[FineTuningExample]


async def select_examples(
    store: LightningStore, min_reward: float | None = None, best_of: int | None = None
) -> AsyncIterator[FineTuningExample]:
    """Yields the conversations of the best rollouts that succeeded (rejection sampling).

    A conversation of several model calls is one example. Rollouts with lost spans, and those of validation and test
    (``mode``), are excluded.

    Args:
        store: where the rollouts are recorded.
        min_reward: rollouts with a smaller reward are excluded, as are those without a reward; None: only the latter.
        best_of: how many rollouts of each task are kept, the ones with the highest rewards; None: all.
    """
    for rollouts in await _rank_rollouts(store, min_reward):
        for _, rollout in rollouts[:best_of]:
            for example in await _read_conversations(store, rollout):
                yield example


async def select_pairs(
    store: LightningStore, min_gap: float = 0.0, pairs_per_task: int | None = 1
) -> AsyncIterator[PreferencePair]:
    """Yields pairs of rollouts of one task: the best with the worst, the second best with the second worst, and so on.

    Rollouts with lost spans, and those of validation and test (``mode``), are excluded.

    Args:
        store: where the rollouts are recorded; only rollouts that succeeded are used.
        min_gap: the rewards of a pair differ by at least this, and by more than 0.
        pairs_per_task: maximum number of pairs of each task; None: no limit.
    """
    for rollouts in await _rank_rollouts(store, None):
        for (more, chosen), (less, rejected) in list(zip(rollouts, reversed(rollouts), strict=True))[:pairs_per_task]:
            if more > less and more - less >= min_gap:
                yield PreferencePair(
                    chosen=await _read_conversations(store, chosen), rejected=await _read_conversations(store, rejected)
                )


async def _rank_rollouts(store: LightningStore, min_reward: float | None) -> list[list[tuple[float, Rollout]]]:
    """Returns the rollouts of each task to learn from, with their rewards, the highest first."""
    succeeded = (await store.query_rollouts(status_in=["succeeded"])).items
    candidates = [rollout for rollout in succeeded if rollout.mode not in ("val", "test")]
    if len(candidates) < len(succeeded):
        logger.warning(
            "%d of %d rollouts are excluded, because they belong to validation or test",
            len(succeeded) - len(candidates),
            len(succeeded),
        )
    by_task: dict[str, list[tuple[float, Rollout]]] = {}
    for rollout in candidates:
        reward = await read_final_reward(store, rollout)
        if reward is None or (min_reward is not None and reward < min_reward):
            continue
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.spans_dropped:
            logger.warning("rollout %s lost spans and is excluded", rollout.rollout_id)
            continue
        by_task.setdefault(repr(rollout.input), []).append((reward, rollout))
    return [sorted(rollouts, key=lambda each: -each[0]) for rollouts in by_task.values()]


async def _read_conversations(store: LightningStore, rollout: Rollout) -> list[FineTuningExample]:
    spans = (await store.query_spans(rollout.rollout_id, "latest")).items
    return [
        FineTuningExample(
            messages=[_clean(message) for message in history["messages"]],
            tools=thaw([dict(tool) for tool in history.get("tools") or ()]) or None,
        )
        for history in drop_prefixes(TraceToMessages().adapt(spans))
    ]


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """Keeps the fields that the API accepts. Content may be missing only in messages with tool calls."""
    kept: dict[str, Any] = {name: thaw(message[name]) for name in _FIELDS if message.get(name) is not None}
    if "content" not in kept and "tool_calls" not in kept:
        kept["content"] = ""
    return kept
