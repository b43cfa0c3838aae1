"""A model server with scripted answers, over real HTTP.

    async with ScriptedOpenAI([Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("3")]) as server:
        client = AsyncOpenAI(base_url=server.endpoint, api_key="any")
        ...
        assert server.requests[0].body["tools"]

Its tokens are the UTF-8 bytes of the text and one ``EOS``, so tests can compute the ids they expect (``encode``); a
token's log-probability depends on its id only (``logprob``). Like vLLM it returns both if a chat or text completion
asks for them; its Responses and Messages return neither, like OpenAI's and Anthropic's.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from aiohttp import web

from agentlightning_plugins.shared.loop_thread import LoopThread
from agentlightning_plugins.shared.scripted_model.reply import (
    EOS,
    Answer,
    ChatReply,
    MessagesReply,
    RecordedRequest,
    ResponsesReply,
    count_tokens,
    decode,
    embed,
    encode,
    logprob,
)
from agentlightning_plugins.shared.scripted_model.reply import render_prompt as render_prompt

__all__ = ["EOS", "Answer", "RecordedRequest", "Script", "ScriptedOpenAI", "decode", "encode", "logprob"]

Script: TypeAlias = Callable[[RecordedRequest], Answer] | Sequence[Answer]
_OK: Final = (Answer(),)


class ScriptedOpenAI:
    """A model server on a free port of 127.0.0.1.

    It serves OpenAI's chat completions, completions, responses, embeddings and models, and Anthropic's messages.
    ``async with`` serves on the running event loop; ``with`` serves in a separate thread, for callers that block.
    """

    requests: list[RecordedRequest]
    """All requests to models so far, in the order of arrival."""

    def __init__(
        self,
        script: Script = _OK,
        *,
        models: Sequence[str] = ("scripted",),
        token_ids: Literal["give", "ignore", "refuse"] = "give",
        refused: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        """Configures the server.

        Args:
            script: the answers in order, of which the last is repeated, or a function of the request.
            models: names for ``/v1/models``; requests may name any model.
            token_ids: the reaction to ``return_token_ids``: ids, like vLLM; none, like a server that does not know the
                field; or an error, like OpenAI.
            refused: further request fields that cause an error, which names only the first such field.
            api_key: the only accepted key; None accepts any request.
        """
        self.requests = []
        self._script = script
        self._models = models
        self._token_ids = token_ids
        self._refused = (*(["return_token_ids"] if token_ids == "refuse" else ()), *refused)
        self._api_key = api_key
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """Base URL for the ``openai`` client."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> ScriptedOpenAI:
        app = web.Application(client_max_size=1 << 28)
        for path in ("chat/completions", "completions", "responses", "messages"):
            app.router.add_post(f"/v1/{path}", self._complete)
        app.router.add_post("/v1/embeddings", functools.partial(self._compute, embed))
        count = functools.partial(self._compute, lambda body: {"input_tokens": count_tokens(body)})
        app.router.add_post("/v1/messages/count_tokens", count)
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

    def __enter__(self) -> ScriptedOpenAI:
        self._thread = LoopThread("scripted-model")
        return self._thread.submit(self.__aenter__()).result()

    def __exit__(self, *exc_info: object) -> None:
        self._thread.submit(self.__aexit__()).result()
        self._thread.close()

    async def _list_models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "scripted"} for name in self._models]
        return web.json_response({"object": "list", "data": data})

    async def _compute(self, answer: Callable[[dict[str, Any]], Any], request: web.Request) -> web.Response:
        recorded = await self._record(request)
        return self._refusal(request) or web.json_response(answer(recorded.body))

    async def _record(self, request: web.Request) -> RecordedRequest:
        raw = await request.read()
        recorded = RecordedRequest(request.path_qs, request.headers, raw, json.loads(raw))
        self.requests.append(recorded)
        return recorded

    def _refusal(self, request: web.Request) -> web.Response | None:
        headers, key = request.headers, self._api_key
        if key is None or key in (headers.get("Authorization", "").removeprefix("Bearer "), headers.get("x-api-key")):
            return None
        return _error(request, 401, "incorrect API key provided")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        recorded = await self._record(request)
        turn = len(self.requests) - 1  # counted now: other requests may have arrived while the body was read
        refusal = self._refusal(request)
        if refusal is not None:
            self.requests.remove(recorded)
            return refusal
        script = self._script
        answer = script(recorded) if callable(script) else script[min(turn, len(script) - 1)]
        await asyncio.sleep(answer.delay_s)
        if answer.until is not None:
            await answer.until.wait()
        if answer.cut_after == 0:
            return _abort(request)
        if answer.body is not None:
            headers = {**answer.headers, "Content-Type": answer.content_type}
            return web.Response(status=answer.status, body=answer.body, headers=headers)
        if answer.status >= 400:
            return _error(request, answer.status, answer.error, answer.headers)
        refused_field = next((name for name in self._refused if name in recorded.body), None)
        if refused_field is not None:
            return _error(request, 400, f"Unrecognized request argument supplied: {refused_field}")
        reply = self._reply(recorded, answer, f"scripted-{turn}")
        if recorded.body.get("stream"):
            return await _stream(request, answer, _sent_events(reply))
        if answer.cut_after is not None:
            body = json.dumps(reply.whole()).encode()
            half = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
            await half.prepare(request)
            await half.write(body[: len(body) // 2])
            return _abort(request)
        return web.json_response(reply.whole(), headers=answer.headers)

    def _reply(
        self, request: RecordedRequest, answer: Answer, reply_id: str
    ) -> ChatReply | ResponsesReply | MessagesReply:
        path = request.path.partition("?")[0]
        if path == "/v1/responses":
            return ResponsesReply(request.body, answer, reply_id)
        if path == "/v1/messages":
            return MessagesReply(request.body, answer, reply_id)
        return ChatReply(request.body, answer, reply_id, give_ids=self._token_ids == "give")


def _sent_events(reply: ChatReply | ResponsesReply | MessagesReply) -> Iterator[bytes]:
    if not isinstance(reply, ChatReply):
        for event in reply.events():
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        return
    for chunk in reply.chunks():
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _stream(request: web.Request, answer: Answer, events: Iterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**answer.headers, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number, event in enumerate(events):
        if number == answer.cut_after:
            return _abort(request)
        if number:
            await asyncio.sleep(answer.chunk_delay_s)
        await response.write(event)
    return response


def _error(request: web.Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error: dict[str, Any] = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error"}
    body: dict[str, Any] = {"error": error | {"code": None}}
    if request.path.startswith("/v1/messages"):
        body = {"type": "error", "error": error, "request_id": "req_scripted"}
    return web.json_response(body, status=status, headers=headers)


def _abort(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
