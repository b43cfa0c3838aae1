"""A scripted OpenAI-compatible server: real HTTP, no model.

    async with ScriptedOpenAI([Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("3")]) as server:
        client = AsyncOpenAI(base_url=server.endpoint, api_key="any")
        ...
        assert server.requests[0].body["tools"]

Its tokens are the UTF-8 bytes of the text and one ``EOS``, so that a test can say which ids it expects (``encode``); a
token's log-probability is a function of its id (``logprob``). Like vLLM it gives both when a request asks for them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from aiohttp import web

EOS: Final = 256
"""The token that ends every answer."""
_CHUNK_CHARS: Final = 4


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """The text of tokens, without ``EOS``."""
    return bytes(token for token in token_ids if token != EOS).decode()


def logprob(token_id: int) -> float:
    """The log-probability that the server claims for a token; exact in binary, so that tests can use ``==``."""
    return -(token_id % 15 + 1) / 16


def render_prompt(body: Mapping[str, Any]) -> str:
    """The text whose tokens are a request's prompt."""
    if "messages" not in body:
        return str(body["prompt"])
    return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in body["messages"]) + "<assistant>"


@dataclass(frozen=True)
class RecordedRequest:
    """What a client sent."""

    path: str
    headers: Mapping[str, str]
    """By name in any case."""
    raw: bytes
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the server does with one request. The fields from ``status`` on make it misbehave."""

    content: str | None = None
    """Default: nothing beside tool calls, else ``ok``."""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Name and arguments of each call."""
    finish_reason: str | None = None
    """Default: ``tool_calls`` if there are any, else ``stop``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More top-level fields of the answer, such as ``weight_version``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    """Before the status line."""
    chunk_delay_s: float = 0.0
    """Before each chunk of a stream but the first."""
    status: int = 200
    error: str = "scripted error"
    """The message when ``status`` is an error."""
    cut_after: int | None = None
    """Hangs up after this many chunks of a stream, or halfway through a body; 0: before the status line."""
    body: bytes | None = None
    """Sent as it is, instead of the answer."""
    content_type: str = "application/json"
    """Of ``body``."""


Script: TypeAlias = Callable[[RecordedRequest], Answer] | Sequence[Answer]


class ScriptedOpenAI:
    """An OpenAI-compatible server on a free port of 127.0.0.1 that says what a script tells it to.

    It serves chat completions, completions and models. ``async with`` starts and stops it on the running event loop.
    """

    requests: list[RecordedRequest]
    """Every request to a model so far, in the order of arrival."""

    def __init__(
        self,
        script: Script = (Answer(),),
        *,
        models: Sequence[str] = ("scripted",),
        token_ids: Literal["give", "ignore", "refuse"] = "give",
        api_key: str | None = None,
    ) -> None:
        """Prepares the server.

        Args:
            script: answers in order, of which the last is repeated, or a function of the request.
            models: names for ``/v1/models``; requests may name any.
            token_ids: what a request for ``return_token_ids`` gets: ids, as from vLLM; none, as from a server that does
                not know the field; or an error, as from OpenAI.
            api_key: the only one that is let in; None lets everybody in.
        """
        self.requests = []
        self._script = script
        self._models = models
        self._token_ids = token_ids
        self._api_key = api_key
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """Base URL as the ``openai`` client takes it."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> ScriptedOpenAI:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "scripted"} for name in self._models]
        return web.json_response({"object": "list", "data": data})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        recorded = RecordedRequest(request.path, request.headers, raw, json.loads(raw))
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return _error(401, "incorrect API key provided")
        script, turn = self._script, len(self.requests)
        self.requests.append(recorded)
        answer = script(recorded) if callable(script) else script[min(turn, len(script) - 1)]
        await asyncio.sleep(answer.delay_s)
        if answer.cut_after == 0:
            return _hang_up(request)
        if answer.body is not None:
            headers = {**answer.headers, "Content-Type": answer.content_type}
            return web.Response(status=answer.status, body=answer.body, headers=headers)
        if answer.status >= 400:
            return _error(answer.status, answer.error, answer.headers)
        if self._token_ids == "refuse" and "return_token_ids" in recorded.body:
            return _error(400, "Unrecognized request argument supplied: return_token_ids")
        reply = _Reply(recorded.body, answer, f"scripted-{turn}", give_ids=self._token_ids == "give")
        if recorded.body.get("stream"):
            return await _stream(request, answer, reply.chunks())
        if answer.cut_after is not None:
            body = json.dumps(reply.whole()).encode()
            half = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
            await half.prepare(request)
            await half.write(body[: len(body) // 2])
            return _hang_up(request)
        return web.json_response(reply.whole(), headers=answer.headers)


class _Reply:
    """One answer in OpenAI's form, whole or in chunks."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str, *, give_ids: bool) -> None:
        self._body, self._answer, self._id = body, answer, reply_id
        self._is_chat = "messages" in body
        self._ids = give_ids and bool(body.get("return_token_ids"))
        asked = body.get("logprobs")
        self._logprobs = bool(asked) if self._is_chat else asked is not None
        self._prompt_ids = encode(render_prompt(body))
        self._reason = answer.finish_reason or ("tool_calls" if answer.tool_calls else "stop")

    def whole(self) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        choices, count = [], 0
        for index in range(self._body.get("n") or 1):
            tokens = [token for piece in self._pieces(index) for token in piece[1]]
            count += len(tokens)
            choice = self._choice(index, tokens, self._reason)
            if self._is_chat:
                calls = self._tool_calls(index)
                message = {"role": "assistant", "content": self._text(index), "refusal": None}
                choice["message"] = {**message, "tool_calls": calls} if calls else message
            else:
                choice["text"] = self._text(index) or ""
            choices.append(choice)
        return self._envelope("", choices) | {"usage": self._usage(count)}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks of a stream; the first has the role, the last the finish reason."""
        first, count = True, 0
        for index in range(self._body.get("n") or 1):
            for delta, tokens, last in self._pieces(index):
                count += len(tokens)
                choice = self._choice(index, tokens, self._reason if last else None)
                if not self._is_chat:
                    choice["text"] = delta.get("content", "")
                else:
                    choice["delta"] = {"role": "assistant", **delta} if first else delta
                chunk = self._envelope(".chunk", [choice])
                if not first:
                    chunk.pop("prompt_token_ids", None)
                    choice.pop("prompt_token_ids", None)
                yield chunk
                first = False
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(".chunk", []) | {"usage": self._usage(count)}

    def _text(self, index: int) -> str | None:
        content = self._answer.content
        if content is None:
            if self._answer.tool_calls:
                return None
            content = "ok"
        return content if index == 0 else f"{content} #{index}"

    def _tool_calls(self, index: int) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call-{self._id}-{index}-{position}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for position, (name, arguments) in enumerate(self._answer.tool_calls)
        ]

    def _pieces(self, index: int) -> Iterator[tuple[dict[str, Any], list[int], bool]]:
        """(delta, tokens, is it the last) of one choice."""
        text = self._text(index) or ""
        for start in range(0, len(text), _CHUNK_CHARS):
            piece = text[start : start + _CHUNK_CHARS]
            yield {"content": piece}, encode(piece), False
        for position, call in enumerate(self._tool_calls(index)):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            head = {**call, "index": position, "function": {"name": name, "arguments": ""}}
            yield {"tool_calls": [head]}, encode(f"<tool_call>{name}"), False
            for start in range(0, len(arguments), _CHUNK_CHARS):
                piece = arguments[start : start + _CHUNK_CHARS]
                yield {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}, encode(piece), False
        yield {}, [EOS], True

    def _choice(self, index: int, tokens: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._ids:
            choice["token_ids"] = tokens
            if not self._is_chat:
                choice["prompt_token_ids"] = self._prompt_ids
        if self._logprobs:
            texts, values = [decode([t]) if t < 128 else "" for t in tokens], [logprob(t) for t in tokens]
            choice["logprobs"] = (
                {"content": [_chat_logprob(text, value) for text, value in zip(texts, values, strict=True)]}
                if self._is_chat
                else {"tokens": texts, "token_logprobs": values, "text_offset": [], "top_logprobs": None}
            )
        return choice

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{kind}" if self._is_chat else "text_completion"
        envelope: dict[str, Any] = {
            "id": self._id,
            "object": name,
            "created": int(time.time()),
            "model": self._body.get("model"),
            "choices": choices,
        }
        if self._ids and self._is_chat:
            envelope["prompt_token_ids"] = self._prompt_ids
        return envelope | dict(self._answer.extra)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self._prompt_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _chat_logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


async def _stream(request: web.Request, answer: Answer, chunks: Iterator[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**answer.headers, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number, chunk in enumerate(chunks):
        if number == answer.cut_after:
            return _hang_up(request)
        if number:
            await asyncio.sleep(answer.chunk_delay_s)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "code": None}
    return web.json_response({"error": error}, status=status, headers=headers)


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
