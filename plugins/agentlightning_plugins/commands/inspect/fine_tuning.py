"""Rollouts as examples for supervised fine-tuning, in the format of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Final

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from agentlightning.frozen import thaw
from agentlightning.reward import read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.chat_history.adapter import TraceToMessages, drop_prefixes
from agentlightning_plugins.commands.terminal import every

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


async def select_examples(store: LightningStore, min_reward: float) -> AsyncIterator[FineTuningExample]:
    """Yields the conversations of rollouts that succeeded with at least ``min_reward`` (rejection sampling).

    A conversation of several model calls is one example. Rollouts with lost spans are excluded.
    """
    adapter = TraceToMessages()
    async for rollout in every(store.query_rollouts, status_in=["succeeded"]):
        reward = await read_final_reward(store, rollout)
        if reward is None or reward < min_reward:
            continue
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.spans_dropped:
            logger.warning("rollout %s lost spans and is excluded", rollout.rollout_id)
            continue
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        for history in drop_prefixes(adapter.adapt(spans)):
            messages = [_clean(message) for message in history["messages"]]
            tools = [dict(tool) for tool in history.get("tools") or ()]
            yield FineTuningExample(messages=messages, tools=thaw(tools) or None)


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """Keeps the fields that the API accepts. Content may be missing only beside tool calls."""
    kept: dict[str, Any] = {name: thaw(message[name]) for name in _FIELDS if message.get(name) is not None}
    if "content" not in kept and "tool_calls" not in kept:
        kept["content"] = ""
    return kept
