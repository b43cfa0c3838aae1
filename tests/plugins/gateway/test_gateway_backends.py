"""Choice, retries and replacement of backends, and errors for the agent."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning.errors import ConfigError
from agentlightning.event import AttemptFinished, Event, RolloutFinished, RolloutStarted
from agentlightning.resources import LLM, ProxyLLM
from agentlightning_plugins.gateway import access
from agentlightning_plugins.gateway.access import EndedAttempts, InFlightCalls
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.failures import check_messages
from tests.plugins.gateway.gateway_setup import HELLO, PROVIDER_KEY, entry, gateway
from tests.port import reserve_port
from tests.waiting import until


async def read_stream(client: openai.AsyncOpenAI, pieces: list[str]) -> None:
    async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")


@pytest.mark.parametrize("failure", [Answer(status=500), Answer(status=409), Answer(status=408), Answer(cut_after=0)])
async def test_a_temporary_failure_is_retried_and_recorded_once(failure: Answer) -> None:
    async with ScriptedOpenAI([failure, failure, Answer("at last")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].message.content == "at last"
        assert len(server.requests) == 3
        assert (await case.span(rollout)).status.status_code == "OK"


async def test_a_call_is_retried_if_its_answer_breaks_off() -> None:
    async with ScriptedOpenAI([Answer("half", cut_after=1), Answer("whole")]) as server, gateway(server) as case:
        _, client = await case.start()
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].message.content == "whole"


async def test_retry_after_is_honoured() -> None:
    script = [Answer(status=429, headers={"Retry-After": "0.6"}), Answer()]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, client = await case.start()
        start = time.monotonic()
        await client.chat.completions.create(model="m", messages=HELLO)
        assert time.monotonic() - start >= 0.6


async def test_retry_after_of_an_error_that_is_not_json_is_honoured_and_relayed() -> None:
    busy = Answer(status=429, body=b"<h1>busy</h1>", content_type="text/html", headers={"Retry-After": "0.6"})
    async with ScriptedOpenAI([busy]) as server, gateway(server, num_retries=1) as case:
        _, client = await case.start()
        start = time.monotonic()
        with pytest.raises(openai.RateLimitError, match="answered 429: <h1>busy") as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
    assert time.monotonic() - start >= 0.6
    headers = caught.value.response.headers
    assert (headers["Retry-After"], headers["Content-Type"]) == ("0.6", "application/json")


async def test_a_retry_after_beyond_the_maximum_ends_the_retries() -> None:
    script = [Answer(status=429, error="come back tomorrow", headers={"Retry-After": "86400"})]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.RateLimitError, match="come back tomorrow") as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.response.headers["Retry-After"] == "86400"
        assert len(server.requests) == 1
        span = await case.span(rollout)
        assert (span.status.status_code, span.status.description) == ("ERROR", "come back tomorrow")
        assert span.attributes["error.type"] == "429"
        assert span.attributes["agentlightning.gateway.complete"] is False


async def test_an_error_caused_by_the_request_is_not_retried() -> None:
    async with ScriptedOpenAI([Answer(status=400, error="no such thing")]) as server, gateway(server) as case:
        _, client = await case.start()
        with pytest.raises(openai.BadRequestError, match="no such thing"):
            await client.chat.completions.create(model="m", messages=HELLO)
        assert len(server.requests) == 1


async def test_without_retries_the_agent_gets_the_first_failure() -> None:
    async with ScriptedOpenAI([Answer(status=503), Answer()]) as server, gateway(server, num_retries=0) as case:
        _, client = await case.start()
        with pytest.raises(openai.InternalServerError, match="scripted error"):
            await client.chat.completions.create(model="m", messages=HELLO)


async def test_calls_fail_over_to_a_backend_that_works() -> None:
    async with ScriptedOpenAI([Answer(status=500)]) as broken, ScriptedOpenAI() as sound:
        dead = entry(f"http://127.0.0.1:{reserve_port()}/v1")
        models = [dead, entry(broken.endpoint), entry(sound.endpoint)]
        async with gateway(model_list=models, num_retries=0) as case:
            for _ in range(6):
                _, client = await case.start()
                assert (await client.chat.completions.create(model="m", messages=HELLO)).choices
        assert len(sound.requests) == 6


def test_a_backend_that_has_just_failed_is_tried_last() -> None:
    table = ModelTable([entry(f"http://h{number}/v1") for number in range(3)])
    first, second, third = table.route("m", "ro-1", now=10.0)
    first.retry_at = 11.0
    assert table.route("m", "ro-1", now=10.0) == [second, third, first]
    assert table.route("m", "ro-1", now=11.0) == [first, second, third]
    starts = {table.route("m", None, now=20.0)[0].endpoint for _ in range(100)}
    assert len(starts) == 3  # calls without a rollout go to any of the backends


def test_an_invalid_model_list_changes_no_label_of_the_current_backends() -> None:
    entries = [{**entry("http://h/v1"), "api_key": key} for key in "abc"]
    table = ModelTable(entries[:2])
    labels = [backend.label for backend in table.backends]
    assert labels == ["http://h/v1", "http://h/v1#2"]
    with pytest.raises(ConfigError):
        table.update([*entries[1:], {"model_name": 1}])
    assert [backend.label for backend in table.backends] == labels
    table.update(entries[1:])
    assert [backend.label for backend in table.backends] == labels


async def test_an_unreachable_backend_is_named_in_an_openai_error() -> None:
    endpoint = f"http://127.0.0.1:{reserve_port()}/v1"
    async with gateway(model_list=[entry(endpoint)], num_retries=0) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.InternalServerError, match=endpoint) as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (502, "backend_unreachable")
        assert (await case.span(rollout)).status.status_code == "ERROR"


async def test_a_stream_that_breaks_off_raises_in_the_agent_and_is_recorded_as_incomplete() -> None:
    async with ScriptedOpenAI([Answer("Hello, world", cut_after=2)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        pieces: list[str] = []
        with pytest.raises(openai.APIError) as caught:
            await read_stream(client, pieces)
        check_messages("a model server breaks off an answer", str(caught.value))
        assert "".join(pieces) == "Hello, w"
        span = await case.span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False
        assert span.status.status_code == "ERROR"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"<html>welcome</html>", "text/html"),
        (b'{"not": "a completion"}', "application/json"),
        (b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n', "text/event-stream"),
        (b"data: {half a chu", "text/event-stream"),
    ],
)
async def test_a_call_with_an_invalid_answer_fails_and_is_recorded_as_incomplete(
    body: bytes, content_type: str
) -> None:
    async with ScriptedOpenAI([Answer(body=body, content_type=content_type)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        is_stream = content_type == "text/event-stream"
        call = read_stream(client, []) if is_stream else client.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(openai.APIError, match="backend"):
            await call
        span = await case.span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False
        assert span.status.status_code == "ERROR"


async def test_an_error_page_becomes_an_openai_error() -> None:
    script = [Answer(status=502, body=b"<h1>nginx</h1>", content_type="text/html")]
    async with ScriptedOpenAI(script) as server, gateway(server, num_retries=0) as case:
        _, client = await case.start()
        with pytest.raises(openai.InternalServerError, match="answered 502: <h1>nginx</h1>"):
            await client.chat.completions.create(model="m", messages=HELLO)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b'{"model": "n", "messages": []}', 404, "no model 'n'; models: m"),
        ("/v1/chat/completions", b"{half", 400, "not JSON"),
        ("/v1/chat/completions", b'["m"]', 400, "'model'"),
        ("/v1/audio/speech", b'{"model": "m"}', 404, "/v1/chat/completions"),
        ("/somewhere", b"", 404, "/v1/chat/completions"),
    ],
)
async def test_a_request_with_an_unknown_model_or_path_or_an_invalid_body_is_refused(
    path: str, body: bytes, status: int, says: str
) -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case, aiohttp.ClientSession() as session:
        root = case.proxy.endpoint.removesuffix("/v1")
        async with session.post(root + path, data=body) as response:
            assert response.status == status
            error = json.loads(await response.read())["error"]
        assert says in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not server.requests


async def test_models_are_listed() -> None:
    models = [entry("http://127.0.0.1:1/v1"), entry("http://127.0.0.1:1/v1", model="org/other")]
    async with gateway(model_list=models) as case:
        client = case.client(case.proxy.endpoint)
        assert [model.id async for model in client.models.list()] == ["m", "org/other"]
        assert (await client.models.retrieve("org/other")).id == "org/other"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("absent")


async def test_all_calls_of_a_rollout_go_to_one_backend_and_rollouts_are_spread_over_backends() -> None:
    async with ScriptedOpenAI() as one, ScriptedOpenAI() as two, gateway(one, two) as case:
        for _ in range(24):
            _, client = await case.start()
            counts = len(one.requests), len(two.requests)
            for _ in range(3):
                await client.chat.completions.create(model="m", messages=HELLO)
            gained = {len(one.requests) - counts[0], len(two.requests) - counts[1]}
            assert gained == {0, 3}
        assert one.requests
        assert two.requests


async def test_a_new_model_list_applies_from_the_next_call_on() -> None:
    release = asyncio.Event()
    slow, fast = ScriptedOpenAI([Answer("old", until=release)]), ScriptedOpenAI([Answer("new")])
    async with slow, fast, gateway(slow) as case:
        _, client = await case.start()
        in_flight = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: bool(slow.requests))
        case.proxy.update_model_list([entry(fast.endpoint)])
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].message.content == "new"
        release.set()
        assert (await in_flight).choices[0].message.content == "old"
        with pytest.raises(ConfigError, match=r"no key 'endpint'.*'endpoint'"):
            case.proxy.update_model_list([{"model": "m", "endpint": "http://x/v1"}])
        assert (await client.chat.completions.create(model="m", messages=HELLO)).choices


async def test_the_served_model_name_and_forced_sampling_parameters_reach_the_backend() -> None:
    params = {"model": "hosted_vllm/org/served", "api_key": PROVIDER_KEY}
    async with ScriptedOpenAI() as server:
        model = {
            "model_name": "m",
            "litellm_params": params | {"api_base": server.endpoint + "/"},
            "sampling_parameters": {"temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "logit_bias": None},
        }
        async with gateway(model_list=[model]) as case:
            rollout, client = await case.start()
            penalties: Any = {"frequency_penalty": 0, "logit_bias": {"5": -9}}
            await client.chat.completions.create(model="m", messages=HELLO, temperature=0.2, seed=4, **penalties)
            span = await case.span(rollout)
        body = server.requests[0].body
    assert (body["model"], body["temperature"], body["top_p"], body["seed"]) == ("org/served", 1.0, 1.0, 4)
    assert server.requests[0].headers["Authorization"] == f"Bearer {PROVIDER_KEY}"
    assert span.attributes["gen_ai.request.temperature"] == 1.0
    assert span.attributes["agentlightning.gateway.replaced"] == ["logit_bias", "temperature"]
    assert (span.attributes["gen_ai.request.model"], span.attributes["gen_ai.provider.name"]) == ("m", "vllm")


async def test_sampling_defaults_fill_in_parameters_that_a_request_omits() -> None:
    async with ScriptedOpenAI() as server:
        model = entry(server.endpoint, sampling_defaults={"temperature": 0.7, "top_p": 0.9})
        async with gateway(model_list=[model]) as case:
            rollout, client = await case.start()
            await client.chat.completions.create(model="m", messages=HELLO, temperature=0.2)
            span = await case.span(rollout)
        body = server.requests[0].body
    assert (body["temperature"], body["top_p"]) == (0.2, 0.9)
    assert (span.attributes["gen_ai.request.temperature"], span.attributes["gen_ai.request.top_p"]) == (0.2, 0.9)


@pytest.mark.parametrize("own", [{}, {"max_tokens": 5}, {"max_completion_tokens": 5}])
async def test_a_default_length_limit_applies_unless_the_request_sets_a_limit_by_either_name(
    own: dict[str, Any],
) -> None:
    async with ScriptedOpenAI() as server:
        async with gateway(model_list=[entry(server.endpoint, sampling_defaults={"max_tokens": 9})]) as case:
            _, client = await case.start()
            await client.chat.completions.create(model="m", messages=HELLO, **own)
        body = server.requests[0].body
    assert {name: body[name] for name in ("max_tokens", "max_completion_tokens") if name in body} == (
        own or {"max_tokens": 9}
    )


async def test_the_seed_of_a_call_depends_on_the_rollouts_seed_and_the_number_of_the_call() -> None:
    async with ScriptedOpenAI() as server, gateway(model_list=[entry(server.endpoint, seed_calls=True)]) as case:

        async def seeds(metadata: dict[str, int], attempts: int) -> list[list[int | None]]:
            rollout = await case.store.enqueue_rollout("task", metadata=metadata)
            found = []
            for _ in range(attempts):
                attempted = await case.store.start_attempt(rollout.rollout_id)
                attempt_id = attempted.attempt.attempt_id
                llm = case.proxy.as_resource(rollout.rollout_id, attempt_id)
                client = case.client(llm.endpoint)
                for _ in range(3):
                    await client.chat.completions.create(model="m", messages=HELLO, seed=4)
                recorded = await case.spans(attempted)
                sent = [request.body.get("seed") for request in server.requests[-3:]]
                assert sorted(sent) == sorted(span.attributes["gen_ai.request.seed"] for span in recorded)
                found.append(sent)
                await case.store.update_attempt(rollout.rollout_id, attempt_id, status="failed")
            return found

        first, again = await seeds({"seed": 7}, 2)
        (same,) = await seeds({"seed": 7}, 1)
        (other,) = await seeds({"seed": 8}, 1)
        (unseeded,) = await seeds({}, 1)
    assert first == again == same
    assert len({*first, *other}) == 6
    assert unseeded == [4, 4, 4]


async def test_calls_of_an_attempt_that_is_over_are_refused() -> None:
    async def call_until_refused(client: openai.AsyncOpenAI) -> openai.APIStatusError:
        while True:
            try:
                await client.chat.completions.create(model="m", messages=HELLO)
            except openai.APIStatusError as error:
                return error

    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        await case.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        error = await call_until_refused(client)
        assert (error.status_code, error.code) == (410, "attempt_over")
        assert rollout.attempt.attempt_id in error.message
        again = await case.store.start_attempt(rollout.rollout_id)
        await asyncio.sleep(0.1)
        retry = case.client(case.proxy.as_resource(again.rollout_id, again.attempt.attempt_id).endpoint)
        await retry.chat.completions.create(model="m", messages=HELLO)
        await case.store.cancel_rollout(rollout.rollout_id)
        assert (await call_until_refused(retry)).status_code == 410


async def test_calls_of_an_unknown_attempt_are_relayed() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        client = case.client(case.proxy.as_resource("ro-unknown", "at-unknown").endpoint)
        assert (await client.chat.completions.create(model="m", messages=HELLO)).choices
        await case.proxy.flush()


def test_the_number_of_remembered_ended_attempts_is_bounded() -> None:
    ended = EndedAttempts(InFlightCalls(), limit=10)
    for number in range(50):
        ended.note(AttemptFinished(rollout_id=f"ro-{number}", attempt_id="at-1", status="failed"))
        ended.note(RolloutFinished(rollout_id=f"ro-{number}", status="failed"))
        ended.note(RolloutStarted(rollout_id=f"ro-{number}", attempt_id="at-2"))
    assert ended.is_over(("ro-49", "at-1"))
    assert ended.is_over(("ro-49", "at-0"))
    assert not ended.is_over(("ro-49", "at-2"))
    assert not ended.is_over(("ro-0", "at-1"))
    assert len(ended._attempts) == len(ended._rollouts) == 10


async def test_the_gateway_keeps_following_events_after_any_error_of_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange:
        turn = 0

        async def subscribe(self, kinds: Any, *, every_run: bool) -> AsyncIterator[Event]:
            self.turn += 1
            if self.turn == 1:
                raise LookupError("no such kind")
            yield AttemptFinished(rollout_id="ro-1", attempt_id="at-1", status="failed")

    monkeypatch.setattr("agentlightning_plugins.gateway.access._RECONNECT_S", 0.01)
    ended, store = EndedAttempts(InFlightCalls()), Strange()
    following = asyncio.create_task(ended.follow(store))  # follow() needs only subscribe()
    await until(lambda: ended.is_over(("ro-1", "at-1")))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert "no such kind" in caplog.text


async def test_an_attempt_whose_end_no_event_reported_is_refused_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ended = InMemoryLightningStore(), EndedAttempts(InFlightCalls())
    rollout = await store.start_rollout("task")
    attempt = rollout.rollout_id, rollout.attempt.attempt_id
    await ended.ask(store, attempt)
    await store.update_attempt(*attempt, status="succeeded")  # ``ended`` does not follow the events
    await ended.ask(store, attempt)
    assert not ended.is_over(attempt)
    later = time.monotonic() + 61.0
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: later))
    await ended.ask(store, attempt)
    assert ended.is_over(attempt)
    await store.close()


async def test_the_log_names_a_query_that_timed_out(caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        async def query_attempts(self, rollout_id: str) -> Any:
            raise TimeoutError

    ended = EndedAttempts(InFlightCalls())
    await ended.ask(Silent(), ("ro-1", "at-1"))  # ask() needs only query_attempts()
    assert caplog.messages == ["the status of attempt at-1 cannot be read, so its calls continue: TimeoutError"]
    assert not ended.is_over(("ro-1", "at-1"))


async def test_resources_contain_the_address_of_the_gateway() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        proxy = case.proxy
        resource = proxy.as_resource(sampling_parameters={"temperature": 0.3})
        assert isinstance(resource, ProxyLLM)
        assert (resource.model, resource.endpoint, resource.sampling_parameters) == (
            "m",
            proxy.endpoint,
            {"temperature": 0.3},
        )
        assert resource.api_key
        bound = proxy.as_resource("ro-1", "at-1")
        assert type(bound) is LLM
        assert bound.endpoint == resource.get_base_url("ro-1", "at-1")
        with pytest.raises(ValueError, match="together"):
            proxy.as_resource("ro-1")
        with pytest.raises(ConfigError, match=r"no model 'n'.*Models: m"):
            proxy.as_resource(model="n")
        proxy.update_model_list([entry(server.endpoint), entry(server.endpoint, model="o")])
        with pytest.raises(ConfigError, match="Models: m, o"):
            proxy.as_resource()


async def test_start_and_stop_can_be_repeated() -> None:
    proxy = LLMProxy(model_list=[entry("http://127.0.0.1:1/v1")], store=InMemoryLightningStore())
    with pytest.raises(ConfigError, match="start it first"):
        proxy.as_resource()
    for _ in range(2):
        await proxy.start()
        await proxy.start()
        running, endpoint = [proxy.is_running], proxy.endpoint
        await proxy.stop()
        await proxy.stop()
        running.append(proxy.is_running)
        assert running == [True, False]
        assert proxy.endpoint == endpoint
        await proxy.flush()


def test_a_gateway_that_listens_on_every_interface_states_a_reachable_address() -> None:
    host = LLMProxy(host="0.0.0.0", port=4000).endpoint.removeprefix("http://").removesuffix(":4000/v1")
    assert host != "0.0.0.0"
    assert socket.gethostbyname(host)


async def test_invalid_settings_are_refused_with_a_fix() -> None:
    with pytest.raises(ConfigError, match="LLMProxy\\(store=...\\)"):
        await LLMProxy().start()
    with pytest.raises(ConfigError, match="modes: thread, process"):
        LLMProxy(launch_mode="fork")
    with pytest.raises(ConfigError, match="num_retries"):
        LLMProxy(num_retries=-1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            await LLMProxy(port=port, store=InMemoryLightningStore()).start()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"model": "m"}, "needs 'endpoint'"),
        ({"model": "m", "endpoint": "localhost:80"}, "not an http"),
        ({"model": "m", "endpoint": "http://user:pw@h/v1"}, "credentials"),
        ({"model_name": "m", "litellm_params": {"model": "hosted_vllm/x"}}, "needs 'api_base'"),
        ({"model_name": "m", "litellm_params": {"model": "cohere/x"}}, "needs 'api_base'"),
        ({"model_name": "m", "litellm_params": {"model": "x", "api_bse": ""}}, "Did you mean 'api_base'"),
        ({"model": "m", "endpoint": "http://h/v1", "api_key": "os.environ/NOT_SET"}, "NOT_SET, which is not set"),
        ({"model": "m", "endpoint": "http://h/v1", "api_key": "${NOT_SET}"}, "NOT_SET, which is not set"),
        ("m", "give a mapping"),
    ],
)
def test_errors_of_a_model_list_name_the_problem(bad: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LLMProxy(model_list=[entry("http://h/v1"), bad])
    assert "model_list[1]" in str(caught.value)


def test_keys_can_come_from_the_environment_and_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-2")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h/v1")
    monkeypatch.setenv("EMPTY_KEY", "")
    table = ModelTable(
        [
            {"model": "a", "endpoint": "http://h/v1", "api_key": "os.environ/SOME_KEY"},
            {"model": "c", "endpoint": "http://h/v1", "api_key": "${SOME_KEY}"},
            {"model": "d", "endpoint": "http://h/v1", "api_key": "${EMPTY_KEY}"},
            {"model_name": "b", "litellm_params": {"model": "openai/b"}},
        ]
    )
    for name, key in (("a", "secret-1"), ("b", "secret-2"), ("c", "secret-1")):
        (backend,) = table.route(name, None, 0.0)
        assert backend.authorize({})["Authorization"] == f"Bearer {key}"
        assert key not in repr(backend)
    assert table.route("d", None, 0.0)[0].api_key is None, "an empty variable, as compose files set it, gives no key"


def test_a_new_model_list_renumbers_the_entries_of_one_endpoint() -> None:
    def entries(*names: str) -> list[dict[str, Any]]:
        common = {"api_base": "http://h/v1", "api_key": "k"}
        return [{"model_name": "m", "litellm_params": {"model": f"openai/{name}", **common}} for name in names]

    table = ModelTable(entries("a", "b"))
    _, second = table.backends
    table.update(entries("b", "c"))
    assert table.backends[0] is second
    assert [backend.label for backend in table.backends] == ["http://h/v1", "http://h/v1#2"]
