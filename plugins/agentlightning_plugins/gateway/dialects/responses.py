"""OpenAI's Responses: relayed to backends that speak it, translated for other backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.dialect import (
    Completion,
    CompletionChoice,
    CompletionToolCall,
    Translation,
)
from agentlightning_plugins.gateway.dialects.fields import RESPONSE_FIELDS
from agentlightning_plugins.gateway.dialects.openai import CHAT, OpenAIDialect
from agentlightning_plugins.gateway.dialects.responses_translation import (
    ResponsesTranslation,
    to_chat_messages,
    to_chat_tools,
)
from agentlightning_plugins.gateway.dialects.sse import to_typed_event

_DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}


class Responses(OpenAIDialect):
    """OpenAI's Responses."""

    name = "openai-responses"
    routes = ("v1/responses",)
    path = "responses"
    span_name = "responses"
    operation = "chat"
    fields = RESPONSE_FIELDS

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return CHAT.read_messages({"messages": to_chat_messages(body)})

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        return CHAT.read_tools({"tools": to_chat_tools(body)})

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        completion.id, completion.model = answer["id"], answer.get("model")
        usage = answer.get("usage") or {}
        completion.input_tokens, completion.output_tokens = usage.get("input_tokens"), usage.get("output_tokens")
        choice = completion.choices[0] = CompletionChoice()
        for position, item in enumerate(answer["output"]):
            _read_item(item, position, choice)
        status = answer.get("status")
        if status == "completed":
            choice.finish_reason = "tool_calls" if choice.tool_calls else "stop"
        elif status == "incomplete":
            reason = (answer.get("incomplete_details") or {}).get("reason") or "length"
            choice.finish_reason = "length" if reason == "max_output_tokens" else reason
        else:
            error = answer.get("error") or {}
            completion.error = str(error.get("message") or f"the response is {status}, not completed")

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        kind = chunk["type"]
        if kind in _DELTAS:
            choice, key = completion.choice(0), _DELTAS[kind]
            setattr(choice, key, getattr(choice, key) + chunk["delta"])
        elif kind == "response.function_call_arguments.delta":
            completion.choice(0).tool_calls.setdefault(chunk["output_index"], CompletionToolCall()).arguments += chunk[
                "delta"
            ]
        elif kind == "response.output_item.added" and chunk["item"].get("type") == "function_call":
            item = chunk["item"]
            completion.choice(0).tool_calls[chunk["output_index"]] = CompletionToolCall(
                item.get("call_id"), item["name"]
            )
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self.read_answer(chunk["response"], completion)
            completion.is_ended = True
        elif kind == "response.created":
            completion.id, completion.model = chunk["response"]["id"], chunk["response"].get("model")
        elif kind == "error":
            completion.error = str((chunk.get("error") or chunk).get("message"))

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return ResponsesTranslation(body)

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        error = self.error_body(status, message, code)  # the client raises the content of "error"
        return to_typed_event("error", code=code, message=message, param=None, sequence_number=0, **error)


def _read_item(item: Mapping[str, Any], position: int, choice: CompletionChoice) -> None:
    match item.get("type"):
        case "message":
            for part in item["content"]:
                choice.text += part.get("text") or ""
                choice.refusal += part.get("refusal") or ""
        case "reasoning":
            choice.reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        case "function_call":
            choice.tool_calls[position] = CompletionToolCall(item.get("call_id"), item["name"], item["arguments"])
        case _:  # tools that OpenAI ran itself: the following text contains their results
            pass
