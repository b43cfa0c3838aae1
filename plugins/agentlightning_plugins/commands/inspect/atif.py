"""Trajectories in ATIF 1.7 (rfcs/0001-trajectory-format.md of Harbor); ``agl import atif`` is the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import RootModel

import agentlightning
from agentlightning import semconv
from agentlightning.cli import echo
from agentlightning.reward import find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout
from agentlightning_plugins.shared.chat_history import ChatHistory, read_conversations


async def read_trajectories(
    store: LightningStore, rollouts: AsyncIterator[Rollout]
) -> AsyncIterator[RootModel[dict[str, Any]]]:
    """Yields a trajectory for each rollout with model calls: its longest conversation, with the rest as subagents."""
    async for rollout in rollouts:
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        found = sorted(read_conversations(spans), key=lambda each: -len(each["messages"]))
        if not found or not isinstance(rollout, AttemptedRollout) or found[0]["messages"][0]["role"] == "unreadable":
            echo(f"left out: {rollout.rollout_id} has no model calls that can be read", err=True)
            continue
        model, own = next(filter(None, map(semconv.read_model, spans)), None), rollout.attempt.attempt_id
        main, *others = [_to_trajectory(each, model, f"{own}/{n}" if n else own) for n, each in enumerate(found)]
        about = {"task": rollout.input, "status": rollout.status, "reward": find_final_reward(spans, rollout)}
        main |= {"session_id": rollout.rollout_id, "extra": about}
        yield RootModel({**main, "subagent_trajectories": others} if others else main)


def _to_trajectory(history: ChatHistory, model: str | None, name: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for message in history["messages"]:
        role, content = str(message.get("role")), _to_content(message.get("content"))
        calls = {str(call.get("id")): call.get("function", {}) for call in message.get("tool_calls") or ()}
        if role == "tool" and steps:
            known = [each["tool_call_id"] for each in steps[-1].get("tool_calls", ())]
            source = {"source_call_id": message["tool_call_id"]} if message.get("tool_call_id") in known else {}
            steps[-1].setdefault("observation", {"results": []})["results"].append({"content": content, **source})
            continue
        source_name = {"assistant": "agent", "developer": "system", "system": "system"}.get(role, "user")
        step = {"step_id": len(steps) + 1, "source": source_name, "message": content}
        if role == "assistant" and message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        if role == "assistant" and calls:
            step["tool_calls"] = [
                {"tool_call_id": key, "function_name": str(each.get("name")), "arguments": _to_arguments(each)}
                for key, each in calls.items()
            ]
        steps.append(step)
    agent = {"name": "lightning", "version": agentlightning.__version__, "model_name": model}
    tools = {"tool_definitions": history["tools"]} if history.get("tools") else {}
    return {"schema_version": "ATIF-v1.7", "trajectory_id": name, "agent": {**agent, **tools}, "steps": steps}


def _to_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a tool call as an object, which ATIF demands."""
    parsed = semconv.parse_json(function.get("arguments"))
    return parsed if isinstance(parsed, dict) else {"arguments": function.get("arguments")}


def _to_content(content: Any) -> Any:
    """Returns a text, or parts of text and images; ATIF 1.7 has no other parts, so any other part becomes text."""
    if not isinstance(content, list):
        return content or ""
    return [
        {"type": "image", "source": {"media_type": "image/png", "path": part["image_url"]["url"]}}
        if part.get("type") == "image_url"
        else {"type": "text", "text": str(part.get("text", part))}
        for part in content
    ]
