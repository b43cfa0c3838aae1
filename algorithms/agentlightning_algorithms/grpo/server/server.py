"""The policy server: a model behind an OpenAI-compatible endpoint, in a process of its own.

    python -m agentlightning_algorithms.grpo.server.server --model DIR

    POST /v1/chat/completions, /v1/completions    GET /v1/models, /health, /statistics
    POST /weights {"path": DIR, "version": 7}     answers when the weights are in use

When it is ready it prints one line of JSON, such as ``{"host": "127.0.0.1", "port": 41234}``; everything else goes to
stderr. The event loop talks HTTP while one thread runs the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.model.policy import Policy, load_policy
from agentlightning_algorithms.grpo.server.completion import Answer, Completions
from agentlightning_algorithms.grpo.server.completion_request import (
    ChatRequest,
    Json,
    RequestError,
    TextRequest,
    parse_request,
)
from agentlightning_algorithms.grpo.server.conversation import Prompt
from agentlightning_algorithms.grpo.server.sampler import Sampler
from agentlightning_algorithms.grpo.server.sampling import SamplingParams, Token

logger = logging.getLogger("agentlightning")

_MAX_BODY_BYTES = 64 * 2**20


class _SwapRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    path: str
    version: int


class PolicyApp:
    """The endpoint's handlers over one sampler."""

    def __init__(self, policy: Policy, sampler: Sampler, *, model_name: str, max_length: int | None = None) -> None:
        """Takes a policy and its sampler.

        Args:
            policy: for its tokenizer and limits.
            sampler: runs the policy.
            model_name: what requests call the model.
            max_length: tokens that a prompt and its response may have together; None: all the model's positions.
        """
        self._sampler = sampler
        self._completions = Completions(policy, model_name, min(max_length or policy.max_length, policy.max_length))

    def build(self) -> web.Application:
        """Returns the application; the caller serves it and closes the sampler."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/statistics", self._statistics)
        app.router.add_post("/weights", self._weights)
        return app

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = parse_request(ChatRequest, await http.read(), self._completions.model_name)
        return await self._complete(http, request, self._completions.chat_prompt(request))

    async def _text(self, http: web.Request) -> web.StreamResponse:
        request = parse_request(TextRequest, await http.read(), self._completions.model_name)
        return await self._complete(http, request, self._completions.text_prompt(request))

    async def _complete(
        self, http: web.Request, request: ChatRequest | TextRequest, prompt: Prompt
    ) -> web.StreamResponse:
        params = self._completions.sampling_params(request, len(prompt.token_ids))
        answer = Answer(self._completions, request, prompt)
        if request.stream:
            return await self._stream(http, answer, prompt, params)
        # A client that hangs up cancels this handler, and with it the futures: its rows leave the batch.
        futures = [self._sampler.submit(prompt.token_ids, p) for p in params]
        generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
        body = answer.whole(generations)
        return _json(body, headers={"x-weight-version": str(body["weight_version"])})

    async def _stream(
        self, http: web.Request, answer: Answer, prompt: Prompt, params: Sequence[SamplingParams]
    ) -> web.StreamResponse:
        """Sends tokens as they are sampled; what was sampled while the last ones were being sent goes out together."""
        loop = asyncio.get_running_loop()
        sampled: list[list[Token]] = [[] for _ in params]
        news = asyncio.Event()

        def hear(index: int, token: Token) -> None:
            sampled[index].append(token)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(news.set)

        futures = [
            asyncio.wrap_future(self._sampler.submit(prompt.token_ids, p, partial(hear, index)))
            for index, p in enumerate(params)
        ]
        whole = asyncio.gather(*futures)  # cancelled with this handler, and the rows with it
        whole.add_done_callback(lambda _: news.set())
        response: web.StreamResponse | None = None
        sent = [0] * len(params)
        open_choices = set(range(len(params)))
        try:
            while open_choices:
                await news.wait()
                news.clear()
                if whole.done() and response is None:
                    whole.result()  # what failed before the first token is an answer of its own
                for index in sorted(open_choices):
                    done = futures[index].done()
                    tokens = sampled[index][sent[index] :]
                    sent[index] += len(tokens)
                    if tokens:
                        if response is None:
                            response = await _open_stream(http, tokens[0].weight_version)
                            await _send(response, *answer.begin(tokens[0].weight_version))
                        await _send(response, answer.feed(index, tokens))
                    if done and response is not None:
                        await _send(response, answer.end(index, futures[index].result()))
                        open_choices.remove(index)
            assert response is not None
            await _send(response, *answer.close([future.result() for future in futures]))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            raise
        # An isolation point: the status has been sent, so an error can only be told in the stream.
        except Exception as error:
            if response is None:
                raise
            logger.exception("a stream failed")
            await _send(response, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})
        finally:
            whole.cancel()
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._completions.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "agentlightning",
            "max_model_len": self._completions.max_length,
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        sampler = self._sampler
        state = {
            "status": "ok" if sampler.alive else "broken",
            "weight_version": sampler.weight_version,
            "running": sampler.running,
            "waiting": sampler.waiting,
        }
        return _json(state, status=200 if sampler.alive else 503)

    async def _statistics(self, _: web.Request) -> web.Response:
        return _json({**self._sampler.statistics, **self._completions.conversations.counts})

    async def _weights(self, http: web.Request) -> web.Response:
        try:
            swap = _SwapRequest.model_validate_json(await http.read())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        try:
            await asyncio.wrap_future(self._sampler.load_weights(Path(swap.path), swap.version))
        except (ValueError, OSError) as error:
            raise RequestError(str(error), param="path", code="bad_weights") from error
        return _json({"weight_version": swap.version})


async def _open_stream(http: web.Request, weight_version: int) -> web.StreamResponse:
    headers = {
        "x-weight-version": str(weight_version),
        "Content-Type": "text/event-stream",
        "Cache-Control": "no-cache",
    }
    response = web.StreamResponse(headers=headers)
    await response.prepare(http)
    return response


async def _send(response: web.StreamResponse, *chunks: Json) -> None:
    await response.write(b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks))


def _json(body: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error(error.status, str(error), param=error.param, code=error.code)
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    # An isolation point: one request that fails is answered, and the others go on.
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(500, f"{type(error).__name__}: {error}")


async def serve(
    app: web.Application, host: str, port: int, ready: Callable[[str, int], None], stop: asyncio.Event
) -> None:
    """Serves until ``stop`` is set; calls ``ready`` with the address once connections are accepted."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        # Given a host and a port, asyncio makes TCP sockets that it knows as such and turns Nagle's algorithm off.
        site = web.TCPSite(runner, host, port)
        await site.start()
        address: Any = runner.addresses[0]
        ready(str(address[0]), int(address[1]))
        await stop.wait()
    finally:
        await runner.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM, SIGINT or, with ``--exit-with-parent``, the end of standard input."""
    options = _parser().parse_args(arguments)
    # The ready line is all that standard output is for; whatever else a library prints joins the log.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        policy = load_policy(options.model, dtype=options.dtype, device=options.device)
        sampler = Sampler(
            policy,
            max_batch_size=options.max_batch_size,
            prefix_cache_bytes=options.prefix_cache_mb * 2**20,
            seed=options.seed,
            weight_version=options.weight_version,
        )
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    app = PolicyApp(policy, sampler, model_name=options.model_name, max_length=options.max_length).build()

    def ready(host: str, port: int) -> None:
        answer.write(json.dumps({"host": host, "port": port}) + "\n")
        answer.flush()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if options.exit_with_parent:
            threading.Thread(target=_await_parent, args=(loop, stop), name="agl-parent", daemon=True).start()
        await serve(app, options.host, options.port, ready, stop)

    try:
        asyncio.run(run())
    finally:
        sampler.close()
    return 0


def _await_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stops the server when standard input is closed: its other end is the parent's, and even a killed one lets go."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentlightning_algorithms.grpo.server.server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="directory written by save_pretrained, or a hub name")
    parser.add_argument("--model-name", default="policy", help="what requests call the model (default: policy)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; anybody who reaches it may use it")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0")
    parser.add_argument("--max-batch-size", type=int, default=64, help="responses sampled together")
    parser.add_argument(
        "--max-length", type=int, help="tokens of a prompt and its response together; default: the model's"
    )
    parser.add_argument("--prefix-cache-mb", type=int, default=512, help="memory for prompts seen before; 0 for none")
    parser.add_argument("--threads", type=int, help="threads of torch; 1 is fastest for tiny models")
    parser.add_argument("--seed", type=int, help="of requests that bring none")
    parser.add_argument("--weight-version", type=int, default=0, help="version of the weights as loaded")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
