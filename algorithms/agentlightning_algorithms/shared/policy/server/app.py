"""HTTP handlers of the policy server. The event loop speaks HTTP while the sampler's thread runs the model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict

from agentlightning_algorithms.shared.policy.draw import Generation, SamplingParams, Token
from agentlightning_algorithms.shared.policy.model import Policy, open_adapter
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy.server.completion import CompletionAnswer
from agentlightning_algorithms.shared.policy.server.conversation import Prompt
from agentlightning_algorithms.shared.policy.server.request import (
    ChatRequest,
    CompletionError,
    PolicyCompletions,
    TextRequest,
    parse_body,
    parse_request,
)
from agentlightning_algorithms.shared.policy.server.tool_format import Json
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy_backend import digest_weights
from agentlightning_plugins.shared.token import StoreTokens
from agentlightning_plugins.shared.web.request import RequestRefused, check_local, is_among, parse_json, read_body
from agentlightning_plugins.shared.web.server import WebServer

logger = logging.getLogger("agentlightning")

_MAX_BODY_BYTES = 32 * 2**20
_THREAD_BYTES = 256 * 1024
"""Requests of at least this size are tokenized in a thread."""


_WITH_KEY = ("/weights", "/statistics")
_MAX_ADAPTERS = 4
"""Adapters of the folder that stay in memory; a further one takes the place of the idle one used longest ago."""


class _WeightsRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    path: str
    version: int
    digest: str | None = None
    """Digest of the weights in ``path``; weights with another digest are refused."""
    model: str | None = None
    """Name of the model, or of a LoRA adapter over it; an adapter that is not served yet is added. None: the model."""


@dataclass
class _Served:
    """The model, or an adapter over it: a policy with its own batch, caches and conversations."""

    sampler: Sampler
    completions: PolicyCompletions
    digest: str | None = None
    """Digest of the newest weights."""

    @property
    def is_idle(self) -> bool:
        return not self.sampler.running and not self.sampler.waiting


class PolicyApp:
    """The HTTP handlers of a model and of the LoRA adapters that are added to it."""

    def __init__(
        self,
        policy: Policy,
        make_sampler: Callable[[Policy], Sampler],
        *,
        model_name: str,
        key: str,
        api_key: str | None = None,
        max_length: int | None = None,
        is_local: bool = True,
        tool_format: str = "auto",
        keep_thinking: bool = False,
        adapters: Path | None = None,
    ) -> None:
        """Takes a policy, and a function that makes a sampler for it and for each adapter.

        ``key`` is required for ``/weights`` and ``/statistics``; ``api_key``, unless it is None, for all other paths
        but ``/health``: a key, or ``file:PATH`` for each line of a file, which may change. ``max_length`` bounds the
        tokens of a prompt and its response together; with ``is_local``, requests from web pages are refused.
        ``tool_format`` and ``keep_thinking`` are as in ``PolicyCompletions``. Each folder in ``adapters`` that has a
        LoRA adapter is a model of that name, which the first request for it loads.
        """
        self._policy = policy
        self._make_sampler = make_sampler
        self._model_name = model_name
        self._key = f"Bearer {key}"
        self._api_keys = StoreTokens.of_setting(api_key) if api_key else None
        self._is_local = is_local
        self.server: WebServer | None = None
        """The server of this application; None until ``serve``."""
        self._swapping = asyncio.Lock()
        self._max_length = min(max_length or policy.max_length, policy.max_length)
        self._prompts: dict[str, Any] = {"tool_format": tool_format, "keep_thinking": keep_thinking}
        self._adapters = adapters
        self._opened: list[str] = []
        """Adapters of the folder that are in memory, the one used longest ago first."""
        self._served = {model_name: self._serve(policy, model_name)}

    def close(self) -> None:
        """Ends the samplers."""
        for served in self._served.values():
            served.sampler.close()

    def _serve(self, policy: Policy, name: str) -> _Served:
        completions = PolicyCompletions(policy, name, self._max_length, **self._prompts)
        return _Served(self._make_sampler(policy), completions)

    def build(self) -> web.Application:
        """Returns the application; the caller serves it, and then closes this object."""
        app = web.Application(middlewares=[_errors_as_json, self._check_client])
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", partial(self._complete, ChatRequest)),
            ("POST", "/v1/completions", partial(self._complete, TextRequest)),
            ("GET", "/v1/models", self._models),
            ("GET", "/health", self._health),
            ("GET", "/statistics", self._statistics),
            ("POST", "/weights", self._weights),
        ]

        async def refuse(request: web.Request) -> web.StreamResponse:
            allowed = [method for method, path, _ in routes if path == request.path]
            raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound

        for method, path, handler in [*routes, ("*", "/{path:.*}", refuse)]:
            app.router.add_route(method, path, handler)
        return app

    async def _complete(self, kind: type[ChatRequest | TextRequest], http: web.Request) -> web.StreamResponse:
        text = await read_body(http, _MAX_BODY_BYTES, _MAX_BODY_BYTES)
        request = parse_request(kind, await parse_json(text), self._model_names())
        served = await self._open(request.model or self._model_name)
        completions, sampler = served.completions, served.sampler
        if len(text) < _THREAD_BYTES:
            prompt = completions.prompt(request)
        else:
            prompt = await asyncio.to_thread(completions.prompt, request)
        params = completions.sampling_params(request, len(prompt.token_ids))
        answer = CompletionAnswer(completions, request, prompt)
        if request.stream:
            if isinstance(request, TextRequest) and request.prompt_logprobs is not None:
                raise CompletionError("prompt_logprobs cannot be streamed; leave stream out.", param="prompt_logprobs")
            async with contextlib.aclosing(self._stream(sampler, answer, prompt, params)) as stream:
                return await _send_stream(http, stream)
        # A client that disconnects cancels this handler, and with it the futures: its rows leave the batch.
        futures = [sampler.submit(prompt.token_ids, p) for p in params]
        generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
        body = answer.whole(generations)
        if isinstance(request, TextRequest) and request.prompt_logprobs is not None:
            scored = await self._score_prompt(served, prompt.token_ids)
            for choice in body["choices"]:
                choice["prompt_logprobs"] = scored
        return _json(body, headers={"x-weight-version": str(body["weight_version"])})

    async def _score_prompt(self, served: _Served, token_ids: Sequence[int]) -> list[Json | None]:
        """Returns the log-probability at temperature 1 of each prompt token but the first, as vLLM does."""
        if len(token_ids) == 1:
            return [None]
        row = TrainingRow(token_ids[:1], token_ids[1:], [0.0] * (len(token_ids) - 1), 0.0)
        async with self._swapping:  # the weights must not change during a score
            (scores,) = await asyncio.to_thread(served.sampler.policy.score, [row])
        text = served.completions.token_text
        told = [
            {str(token): {"logprob": score, "rank": None, "decoded_token": text(token)["token"]}}
            for token, score in zip(token_ids[1:], scores, strict=True)
        ]
        return [None, *told]

    async def _stream(
        self, sampler: Sampler, answer: CompletionAnswer, prompt: Prompt, params: Sequence[SamplingParams]
    ) -> AsyncGenerator[Json]:
        """Yields chunks as tokens are sampled; tokens sampled while a chunk is being sent share the next one."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()  # None: the choice has ended

        def on_token(index: int, token: Token) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.put_nowait, (index, token))

        def on_end(index: int, ended: asyncio.Future[Generation]) -> None:
            if not ended.cancelled():
                ended.exception()  # else asyncio logs the error if the client disconnects
            news.put_nowait((index, None))

        futures = [
            asyncio.wrap_future(sampler.submit(prompt.token_ids, p, partial(on_token, index)))
            for index, p in enumerate(params)
        ]
        for index, future in enumerate(futures):
            future.add_done_callback(partial(on_end, index))
        begun, unfinished = False, len(futures)
        try:
            while unfinished:
                fresh: dict[int, list[Token | None]] = {}
                while not fresh or not news.empty():
                    index, token = await news.get()
                    fresh.setdefault(index, []).append(token)
                for index, found in sorted(fresh.items()):
                    tokens = [token for token in found if token is not None]
                    if tokens and not begun:
                        begun = True
                        for chunk in answer.begin(tokens[0].weight_version):
                            yield chunk
                    if tokens:
                        yield answer.feed(index, tokens)
                    if None in found:
                        yield answer.end(index, futures[index].result())
                        unfinished -= 1
            for chunk in answer.close([future.result() for future in futures]):
                yield chunk
        finally:
            for future in futures:
                future.cancel()  # takes the rows out of the batch if the client has disconnected

    async def _models(self, _: web.Request) -> web.Response:
        about = {"object": "model", "created": 0, "owned_by": "agentlightning", "max_model_len": self._max_length}
        return _json({"object": "list", "data": [{"id": name, **about} for name in self._model_names()]})

    async def _health(self, _: web.Request) -> web.Response:
        models = {
            name: {"weight_version": served.sampler.weight_version, "weights_digest": served.digest}
            for name, served in self._served.items()
        }
        samplers = [served.sampler for served in self._served.values()]
        counts = {"running": sum(s.running for s in samplers), "waiting": sum(s.waiting for s in samplers)}
        status, code = ("ok", 200) if all(sampler.alive for sampler in samplers) else ("broken", 503)
        return _json({"status": status, **models[self._model_name], **counts, "models": models}, status=code)

    async def _statistics(self, _: web.Request) -> web.Response:
        totals: Counter[str] = Counter()
        for served in self._served.values():
            totals.update(served.sampler.statistics)
            totals.update(served.completions.conversations.counts)
        return _json(dict(totals))

    async def _weights(self, http: web.Request) -> web.Response:
        request = parse_body(_WeightsRequest, await parse_json(await read_body(http, _MAX_BODY_BYTES, _MAX_BODY_BYTES)))
        name = request.model or self._model_name
        async with self._swapping:
            try:
                digest = await self._load(name, Path(request.path), request)
            except (ValueError, OSError) as error:
                raise CompletionError(str(error), param="path", code="bad_weights") from error
        return _json({"model": name, "weight_version": request.version, "weights_digest": digest})

    def _model_names(self) -> list[str]:
        files = [] if self._adapters is None else sorted(self._adapters.glob("[!.]*/adapter_config.json"))
        return list(dict.fromkeys([*self._served, *(file.parent.name for file in files)]))

    async def _open(self, name: str) -> _Served:
        """Returns a model; loads it if it is an adapter of the folder that is not in memory."""
        if name in self._opened:
            self._opened.append(self._opened.pop(self._opened.index(name)))
        if name in self._served or self._adapters is None:
            return self._served[name]
        async with self._swapping:
            if name not in self._served:
                try:
                    path = self._adapters / name
                    await self._load(name, path, _WeightsRequest(path=str(path), version=0))
                except (ValueError, OSError) as error:
                    raise CompletionError(str(error), status=500, param="model", code="bad_weights") from error
                self._opened.append(name)
                idle = [each for each in self._opened[:-1] if self._served[each].is_idle]
                for each in idle[: max(len(self._opened) - _MAX_ADAPTERS, 0)]:
                    self._opened.remove(each)
                    await asyncio.to_thread(self._served.pop(each).sampler.close)
        return self._served[name]

    async def _load(self, name: str, path: Path, request: _WeightsRequest) -> str:
        digest = await asyncio.to_thread(digest_weights, path)
        if request.digest not in (None, digest):
            raise ValueError(f"the weights in {request.path!r} have the digest {digest}, not {request.digest}")
        if name == self._model_name and len(self._served) > 1:
            raise ValueError(f"the weights of {name!r} are shared with its adapters and cannot be replaced")
        served = self._served.get(name)
        with contextlib.ExitStack() as undo:
            if served is None:
                served = self._serve(await asyncio.to_thread(open_adapter, self._policy, path), name)
                undo.callback(served.sampler.close)
            await asyncio.wrap_future(served.sampler.load_weights(path, request.version))
            undo.pop_all()
        served.digest = digest
        self._served[name] = served
        return digest

    @web.middleware
    async def _check_client(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._is_local:
            check_local(request, "this server")
        shown = request.headers.get("Authorization", "")
        if request.path in _WITH_KEY:
            if not is_among(shown, [self._key]):
                raise CompletionError(f"{request.path} requires the key that the server printed.", status=401)
        elif request.path != "/health" and not self._is_user(shown):
            raise CompletionError("this server requires its API key: Authorization: Bearer KEY.", status=401)
        if self.server is not None and request.path != "/health":
            self.server.admit(request)
        return await handler(request)

    def _is_user(self, shown: str) -> bool:
        keys = self._api_keys
        return keys is None or is_among(shown, [f"Bearer {key}" for key in keys.current])


async def _send_stream(http: web.Request, stream: AsyncIterator[Json]) -> web.StreamResponse:
    """Sends chunks as server-sent events; the response begins with the first chunk, which has the weights' version."""
    response: web.StreamResponse | None = None
    try:
        async for chunk in stream:
            if response is None:
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                headers["x-weight-version"] = str(chunk["weight_version"])
                response = web.StreamResponse(headers=headers)
                await response.prepare(http)
            await _send(response, orjson.dumps(chunk))
        assert response is not None
        await _send(response, b"[DONE]")
    except ConnectionResetError:  # the client disconnected
        if response is None:
            raise
        return response
    # An isolation point: the status has been sent, so the error can only be reported in the stream.
    except Exception as error:
        if response is None:
            raise
        logger.exception("a stream failed")
        message = f"{type(error).__name__}: {error}"
        await _send(response, orjson.dumps({"error": {"message": message, "type": "server_error"}}))
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, data: bytes) -> None:
    await response.write(b"data: " + data + b"\n\n")


def _json(body: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:  # the client disconnected
        raise
    except CompletionError as error:
        return _error(error.status, str(error), error.param, error.code)
    except RequestRefused as error:
        return _error(error.status, str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    # An isolation point: a request that fails must not affect other requests.
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(500, f"{type(error).__name__}: {error}")
