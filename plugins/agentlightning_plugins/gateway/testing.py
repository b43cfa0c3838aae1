"""The tests that every dialect and every provider of the gateway must pass."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web

from agentlightning.plugin.registry import get_manager
from agentlightning.testing import promised, refusal
from agentlightning_plugins.gateway.backends.provider import ModelBackend
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, Completion, TokenOptions

ODD: Sequence[Any] = (None, 5, "", [5], {"a": None}, [[]], True)
KEY = "sk-of-the-provider"


def spoil(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields copies of a body in which a field, or a field of a list in it, is missing or odd."""
    for name, value in body.items():
        yield {key: kept for key, kept in body.items() if key != name}
        for odd in ODD:
            yield {**body, name: odd}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ({**body, name: [inner, *value[1:]]} for inner in spoil(value[0]))


class DialectConformance:
    """Tests that every dialect must pass.

    Subclass it, set the examples and define one fixture, ``dialect``.
    """

    example_request: ClassVar[Mapping[str, Any]] = {}
    """A whole request; its last message is from the user."""
    example_answer: ClassVar[Mapping[str, Any]] = {}
    """A whole answer that ended."""
    example_chunks: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """The JSON of the events of the same answer as a stream; empty: the API does not stream."""
    says: ClassVar[str] = ""
    """The text of the answer."""

    def test_it_has_names_and_relative_paths(self, dialect: Any) -> None:
        for name in ("name", "path", "span_name", "operation"):
            assert isinstance(getattr(dialect, name, None), str), f"a dialect has {name}, a text"
            assert getattr(dialect, name), f"a dialect has {name}, which is not empty"
        assert dialect.routes, "routes lists at least one path at which agents call the dialect"
        for path in (*dialect.routes, dialect.path):
            assert not path.startswith("/"), f"routes and path are relative, without a slash in front: {path!r}"
        unknown = set(self.example_request) - set(dialect.fields or self.example_request)
        assert not unknown, f"fields contains every field that agents may send; without {sorted(unknown)}"

    def test_a_request_is_read_as_messages(self, dialect: Any) -> None:
        before = copy.deepcopy(self.example_request)
        with promised("read_messages, read_tools, read_token_options and capture_fields take every valid request"):
            messages = dialect.read_messages(self.example_request)
            json.dumps([messages, list(dialect.read_tools(self.example_request))])
            dict(dialect.capture_fields(dialect.read_token_options(self.example_request)))
        assert self.example_request == before, "reading a request must not change it: it is sent on"
        promise = "read_messages returns OpenTelemetry's messages: {'role': ..., 'parts': [{'type': ..., ...}]}"
        assert messages, f"{promise}; it returned none"
        for message in messages:
            assert isinstance(message.get("role"), str), f"{promise}; not {message}"
            assert all("type" in part for part in message.get("parts") or [{}]), f"{promise}; not {message}"

    def test_an_answer_is_read_whole_and_as_a_stream(self, dialect: Any) -> None:
        whole = Completion()
        with promised("read_answer takes every valid answer"):
            dialect.read_answer(copy.deepcopy(dict(self.example_answer)), whole)
        self._check(whole, "read_answer")
        streams = Completion(), Completion()  # two calls at once
        for chunk in self.example_chunks:
            for stream in streams:
                with promised(f"read_chunk takes every event of a valid stream: {chunk}"):
                    dialect.read_chunk(copy.deepcopy(dict(chunk)), stream)
        for stream in streams if self.example_chunks else ():
            self._check(stream, "read_chunk")

    def _check(self, completion: Completion, method: str) -> None:
        choice = completion.choices.get(0)
        text = None if choice is None else choice.text
        assert text == self.says, (
            f"{method} keeps what belongs to a call in its completion: {text!r}, not {self.says!r}"
        )
        assert completion.is_finished, f"{method} sets the finish reason of every choice of an answer that ended"
        assert completion.error is None, f"{method} sets an error only if the backend sent one: {completion.error}"

    def test_malformed_json_raises_only_errors_that_the_gateway_expects(self, dialect: Any) -> None:
        promise = "{} raises AttributeError, KeyError, TypeError or ValueError for JSON that does not fit the API: {}"
        for body in spoil(self.example_request):
            for name in ("read_messages", "read_tools", "read_token_options", "translate"):
                self._refuse(promise.format(name, body), getattr(dialect, name), body)
        for name, examples in (("read_answer", [self.example_answer]), ("read_chunk", self.example_chunks)):
            for example in examples:
                for body in spoil(example):
                    self._refuse(promise.format(name, body), getattr(dialect, name), body, Completion())

    def _refuse(self, promise: str, call: Callable[..., object], *arguments: Any) -> None:
        refusal(promise, MALFORMED, functools.partial(call, *copy.deepcopy(arguments)))

    def test_token_data_that_the_agent_requested_stays(self, dialect: Any) -> None:
        answer = copy.deepcopy(dict(self.example_answer))
        changed = dialect.strip(answer, TokenOptions(True, True))
        promise = "strip removes only data that the gateway requested, and returns whether it removed any"
        assert (changed, answer) == (False, self.example_answer), f"{promise}; with all requested: {changed}, {answer}"
        changed = dialect.strip(answer, TokenOptions(False, False))
        assert changed is (answer != self.example_answer), f"{promise}; with nothing requested: {changed}, {answer}"

    def test_an_error_has_the_form_of_the_api(self, dialect: Any) -> None:
        for status in (400, 401, 404, 429, 500, 503):
            for code in ("no_such_model", None):
                with promised("error_body(status, message, code) takes every status; code may be None"):
                    text = json.dumps(dialect.error_body(status, "what is wrong", code))
                    event = dialect.error_event(status, "what is wrong", code)
                assert "what is wrong" in text, f"error_body contains the message: {text}"
                assert b"what is wrong" in event, f"error_event contains the message: {event!r}"
                assert event.endswith(b"\n\n"), f"error_event ends a server-sent event with an empty line: {event!r}"


@pytest.mark.asyncio
class ProviderConformance:
    """Tests that every provider that speaks HTTP must pass.

    Subclass it and define one fixture, ``provider``.
    """

    def backend(self, provider: Any, endpoint: str) -> ModelBackend:
        """Returns a backend of the provider."""
        return ModelBackend(model="m", served_model="m", endpoint=endpoint, provider=provider, api_key=KEY)

    async def test_it_names_itself_and_dialects_that_are_installed(self, provider: Any) -> None:
        assert provider.name, "a provider has a name, the gen_ai.provider.name of its calls"
        type(provider)()  # the gateway creates it without arguments
        unknown = set(provider.dialects) - set(get_manager().components("dialect"))
        assert provider.dialects, "dialects names at least one dialect that the server speaks"
        assert not unknown, f"dialects names installed components of the kind dialect; {sorted(unknown)} are none"

    async def test_urls_are_below_the_endpoint_and_have_no_key(self, provider: Any) -> None:
        for endpoint in filter(None, ("http://127.0.0.1:8000/v1", provider.endpoint)):
            assert not endpoint.endswith("/"), f"endpoint has no slash at its end: {endpoint}"
            url = self.backend(provider, endpoint).url("chat/completions")
            assert str(url).startswith(endpoint.removesuffix("/v1")), f"url(endpoint, path) is below {endpoint}: {url}"
            assert KEY not in str(url), f"a key belongs into a header, not into the URL: {url}"

    async def test_the_key_is_in_a_header(self, provider: Any) -> None:
        headers = provider.authorize(KEY)
        assert any(KEY in value for value in headers.values()), (
            f"authorize(api_key) returns headers with the key: {headers}"
        )
        assert KEY not in str(vars(provider)), "a provider keeps no key: all its backends share it"

    async def test_a_request_is_sent_unchanged_and_any_answer_returned(self, provider: Any) -> None:
        asked: list[tuple[bytes, str | None]] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append((await request.read(), request.headers.get("x-request-id")))
            status = int(request.headers["x-status"])
            return web.Response(status=status, body=b'{"said": 1}', headers={"Location": "/elsewhere"})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            backend = self.backend(provider, f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
            async with aiohttp.ClientSession() as session:
                for status in (200, 307, 429, 500):
                    headers = {**provider.authorize(KEY), "x-request-id": str(status), "x-status": str(status)}
                    with promised("send returns every answer, also errors and redirects"):
                        found = await provider.send(session, backend, "chat/completions", b'{"a":  1}', headers)
                    async with found as got:
                        assert got.status == status, f"send returns the status of the server, {status}: {got.status}"
                        assert await got.content.readany() == b'{"said": 1}', "send returns the body of the answer"
        finally:
            await runner.cleanup()
        expected = [(b'{"a":  1}', str(status)) for status in (200, 307, 429, 500)]
        assert asked == expected, f"send sends body and headers once, byte for byte, and follows no redirect: {asked}"

    async def test_a_server_that_is_down_is_an_error_that_is_retried(self, provider: Any) -> None:
        backend = self.backend(provider, "http://127.0.0.1:9/v1")
        promise = "send raises TimeoutError, aiohttp.ClientError or OSError if no answer comes"
        async with aiohttp.ClientSession() as session:
            with promised(promise):
                try:
                    await provider.send(session, backend, "chat/completions", b"{}", {})
                except (TimeoutError, aiohttp.ClientError, OSError):
                    return
        raise AssertionError(f"{promise}; it returned an answer")
