"""OpenAI's Embeddings. Their calls are recorded without the vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.openai import OpenAIError, read_texts


class Embeddings(OpenAIError):
    """OpenAI's Embeddings."""

    name = "openai-embeddings"
    routes = ("v1/embeddings",)
    path = "embeddings"
    span_name = "embeddings"
    operation = "embeddings"

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return read_texts(body["input"])

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        answer["data"]  # else it is no answer
        completion.model = answer.get("model")
        usage = answer.get("usage") or {}
        completion.input_tokens = usage.get("prompt_tokens")
