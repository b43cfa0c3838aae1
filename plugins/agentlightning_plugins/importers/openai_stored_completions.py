"""Stored chat completions of OpenAI, as ``GET /v1/chat/completions`` returns them (API of 2026, openai-python 2.8).

The messages of a completion are a second list, of ``GET /v1/chat/completions/{id}/messages``, whose ids begin with the
completion's; or the completion has them as ``messages``.
"""

from __future__ import annotations

from typing import Any

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.importing import Imported, ImportedRollout


@hookimpl
def components() -> list[Component]:
    name = "openai-stored-completions"
    return [Component("importer", name, f"{__name__}:read", summary="stored chat completions of OpenAI")]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    prompts: dict[str, list[dict[str, Any]]] = {}
    for place, value in items:
        if "role" in value and "id" in value:  # a stored message
            kept = {key: each for key, each in value.items() if each is not None and key not in ("id", "content_parts")}
            kept |= {"content": value["content_parts"]} if value.get("content_parts") else {}
            prompts.setdefault(str(value["id"]).rpartition("-")[0], []).append(kept)
        elif value.get("object") != "chat.completion":
            imported.leave_out(f"neither a completion nor a message, but {value.get('object', 'unknown')!r}", place)
    for place, value in items:
        if value.get("object") != "chat.completion":
            continue
        with imported.reading(value.get("id", place)):
            messages = value.get("messages") or prompts.pop(value["id"], None)
            if not messages:
                imported.leave_out("a completion without its messages (GET .../ID/messages has them)", value["id"])
                continue
            rollout = ImportedRollout(value["id"], metadata=dict(value.get("metadata") or {}))
            choices, usage = value["choices"], value.get("usage") or {}
            attributes = {
                semconv.GEN_AI_RESPONSE_ID: value["id"],
                semconv.GEN_AI_FINISH_REASONS: [choice.get("finish_reason") or "" for choice in choices],
                semconv.GEN_AI_INPUT_TOKENS: usage.get("prompt_tokens"),
                semconv.GEN_AI_OUTPUT_TOKENS: usage.get("completion_tokens"),
            }
            answers = [choice["message"] for choice in choices]
            tools, start = value.get("tools"), value.get("created")
            rollout.add_call("call", messages, answers, value.get("model"), tools, attributes, start=start)
            imported.rollouts.append(rollout)
    for completion in prompts:
        imported.leave_out("messages without their completion", completion)
