"""A dialect and a provider of the gateway, a template engine and a type of resource."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Literal

import agentlightning as agl
from agentlightning.plugin import Completion, Component, Dialect, OpenAICompatible, TokenOptions, Translation, hookimpl

plugin_interface = 1


class Ask(Dialect):
    """``POST /v1/ask`` with ``{"model": ..., "question": ...}`` answers ``{"answer": ...}``."""

    name = "acme-ask"
    routes = ("v1/ask",)
    path = "ask"
    span_name = "ask"
    operation = "chat"

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "parts": [{"type": "text", "content": body["question"]}]}]

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        choice = completion.choice(0)
        choice.text, choice.finish_reason = answer["answer"], "stop"

    def read_token_options(self, body: Mapping[str, Any]) -> TokenOptions:
        return TokenOptions(True, True)

    def translate(self, body: Mapping[str, Any]) -> Translation:
        return AskTranslation(body)

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return {"problem": message}


class AskTranslation:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def request(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._body["question"]}]
        return {"model": self._body.get("model"), "messages": messages}

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"answer": answer["choices"][0]["message"]["content"]}

    def feed(self, chunk: dict[str, Any]) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""


class AcmeServer(OpenAICompatible):
    """A server of chat completions that takes its key in a header of its own."""

    name = "acme"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"X-Acme-Key": api_key}


class Dollar:
    """Templates as in ``string.Template``: ``$question``."""

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        return string.Template(template).substitute(values)


class Voice(agl.Resource):
    resource_type: Literal["acme_voice"] = "acme_voice"
    pitch: float = 1.0


@hookimpl
def components() -> list[Component]:
    return [
        Component("dialect", "acme-ask", f"{__name__}:Ask", summary="questions and answers"),
        Component("provider", "acme", f"{__name__}:AcmeServer", summary="Acme's model server"),
        Component("template_engine", "dollar", f"{__name__}:Dollar", summary="$question"),
        Component("resource", "acme_voice", f"{__name__}:Voice", summary="a voice"),
    ]
