"""Keys of attempts, and calls of attempts that end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.resources import LLM
from agentlightning.run import attempt_token
from agentlightning.runner import LitAgentRunner
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.tracer import DummyTracer
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.gateway import recorder
from agentlightning_plugins.gateway.access import Authenticator
from agentlightning_plugins.gateway.backends import model_table
from agentlightning_plugins.gateway.backends.provider import KeyRedactor
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import HELLO, PROVIDER_KEY, Case, entry, gateway
from tests.waiting import LIMIT_S, until

BODY: Mapping[str, Any] = {"model": "m", "messages": HELLO}


def key_of(case: Case, rollout: AttemptedRollout) -> str:
    llm = case.proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model="m")
    assert isinstance(llm, LLM)
    assert llm.api_key is not None
    return llm.api_key


async def post(url: str, headers: Mapping[str, str], body: Mapping[str, Any] = BODY) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_an_attempt_token_names_its_attempt_and_cannot_be_forged() -> None:
    secret, now = attempt_token.derive_secret("the-store's-token"), time.time()
    token = attempt_token.mint(secret, "ro-1", "at-1", now + 60)
    assert attempt_token.read(secret, token, now)[:2] == ("ro-1", "at-1")
    with pytest.raises(ValueError, match="expired"):
        attempt_token.read(secret, token, now + 61)
    other = attempt_token.derive_secret("another")
    payload, signature = token.split(".")
    forged = attempt_token.mint(other, "ro-1", "at-2", now + 60).split(".")[0] + "." + signature
    for bad in (forged, payload, token[:-1], "agl-", "", "agl-é." + signature, token.removeprefix("agl-")):
        with pytest.raises(ValueError, match="not signed"):
            attempt_token.read(secret, bad, now)
    with pytest.raises(ValueError, match="not signed"):
        attempt_token.read(other, token, now)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_a_key_attributes_a_call_whose_url_names_no_attempt(header: str) -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, _ = await case.start()
        key = key_of(case, rollout)
        headers = {header: f"Bearer {key}" if header == "Authorization" else key}
        status, _ = await post(f"{case.proxy.endpoint}/chat/completions", headers)
        assert status == 200
        assert (await case.span(rollout)).attributes["response_token_ids"]
        assert server.requests[0].headers["Authorization"] == f"Bearer {PROVIDER_KEY}"
        assert key not in str(dict(server.requests[0].headers))


async def test_if_keys_are_required_only_the_key_of_the_attempt_is_accepted() -> None:
    async with ScriptedOpenAI() as server, gateway(server, require_keys=True) as case:
        rollout, client = await case.start()
        other, _ = await case.start()
        await client.with_options(api_key=key_of(case, rollout)).chat.completions.create(**BODY)
        with pytest.raises(openai.AuthenticationError, match="the key of this call was not issued for an attempt"):
            await client.chat.completions.create(**BODY)
        with pytest.raises(openai.PermissionDeniedError, match="is for attempt"):
            await client.with_options(api_key=key_of(case, other)).chat.completions.create(**BODY)
        stranger = attempt_token.mint(b"guess", rollout.rollout_id, rollout.attempt.attempt_id, time.time() + 9)
        with pytest.raises(openai.AuthenticationError, match="AGL_TOKEN"):
            await client.with_options(api_key=stranger).chat.completions.create(**BODY)
        status, error = await post(f"{case.proxy.endpoint}/chat/completions", {})
        assert (status, error["error"]["code"]) == (401, "wrong_key")
        assert len(server.requests) == 1
        assert len(await case.spans(rollout)) == 1


async def test_on_loopback_a_call_without_a_key_is_relayed_and_recorded_in_no_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedOpenAI() as server, gateway(server, require_keys=None, budget={"calls": 1}) as case:
        rollout, client = await case.start()
        for _ in range(2):
            await client.chat.completions.create(**BODY)  # another agent, which knows the ids
        own = client.with_options(api_key=key_of(case, rollout))
        completion = await own.chat.completions.create(**BODY)
        (span,) = await case.spans(rollout)
        assert span.attributes["gen_ai.response.id"] == completion.id
        assert len(server.requests) == 3
    (record,) = [record for record in caplog.records if "without the key" in record.message]
    assert rollout.attempt.attempt_id in record.message
    assert "api_key=llm.api_key" in record.message


async def test_a_malformed_foreign_or_expired_key_is_refused_on_loopback_too() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        attempt = rollout.rollout_id, rollout.attempt.attempt_id
        own = key_of(case, rollout)
        foreign = attempt_token.mint(b"another process", *attempt, time.time() + 60)
        url = f"{client.base_url}chat/completions"
        assert (await post(url, {"Authorization": f"Bearer {own}"}))[0] == 200
        assert (await post(url, {"Authorization": f"Bearer {foreign}"}))[0] == 200, "checked only with a store token"
        other = attempt_token.mint(b"another process", rollout.rollout_id, "at-2", time.time() + 60)
        assert (await post(url, {"Authorization": f"Bearer {other}"}))[0] == 403
        assert (await post(f"{case.proxy.endpoint}/chat/completions", {"x-api-key": foreign}))[0] == 401
        expired = attempt_token.mint(b"another process", *attempt, time.time() - 1)
        assert (await post(url, {"Authorization": f"bearer  {other}"}))[0] == 403, "the scheme is case-insensitive"
        for key in ("agl-", "agl-x", "agl-W10.x", "agl-bnVsbA.x", "agl-eyJhIjoxfQ.x", expired):
            assert (await post(url, {"Authorization": f"Bearer {key}"}))[0] == 401
        store: Any = case.store
        store.token = "the-stores-token"
        own = key_of(case, rollout)
        assert (await post(url, {"Authorization": f"Bearer {own}"}))[0] == 200
        expired = attempt_token.mint(attempt_token.derive_secret(store.token), *attempt, time.time() - 1)
        for key in (foreign, expired, f"{own}x", own[:-1], own.replace(".", " .")):
            status, error = await post(url, {"Authorization": f"Bearer {key}"})
            assert status == 401, key
            assert own not in str(error)
        assert len(await case.spans(rollout)) == len(server.requests)


async def test_a_restarted_gateway_refuses_calls_of_attempts_that_ended_before_the_restart() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        ended, ended_client = await case.start()
        _, live_client = await case.start()
        await ended_client.chat.completions.create(**BODY)
        await case.store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status="succeeded")
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="is over"):
                await ended_client.chat.completions.create(**BODY)
            await case.proxy.stop()
            await case.proxy.start()
        calls: list[str] = []
        store: Any = case.store
        query = store.query_attempts

        async def counted(rollout_id: str, **options: Any) -> Any:
            calls.append(rollout_id)
            return await query(rollout_id, **options)

        store.query_attempts = counted
        for _ in range(3):
            await live_client.chat.completions.create(**BODY)
            with pytest.raises(openai.APIStatusError, match="is over"):
                await ended_client.chat.completions.create(**BODY)
        assert len(calls) == 2, "the store is queried once for each attempt"


@pytest.mark.parametrize("event", ["a restart", "a slow store", "a failed note"])
async def test_an_attempt_whose_call_was_repeated_successfully_does_not_fail(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [Answer(status=500), Answer("ok")]
    async with ScriptedOpenAI(script) as server, gateway(server, num_retries=0) as case:
        store: Any = case.store
        update = store.update_attempt

        async def update_slowly(*arguments: Any, metadata: Any = None, **changes: Any) -> Any:
            if event == "a slow store" and metadata == {MODEL_ERROR: None}:
                await asyncio.sleep(0.2)
            updated = await update(*arguments, **changes, **({} if metadata is None else {"metadata": metadata}))
            if event == "a failed note" and metadata != {MODEL_ERROR: None}:
                raise StoreError("the answer was lost")
            return updated

        monkeypatch.setattr(recorder, "_STORE_WAIT_S", 0.1 if event == "a slow store" else LIMIT_S)
        store.update_attempt = update_slowly
        rollout, client = await case.start()
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**BODY)
        if event == "a restart":
            await case.proxy.stop()
            await case.proxy.start()
        await client.chat.completions.create(**BODY)
        store.update_attempt = update
        ended = await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
        assert (ended.status, ended.error) == ("succeeded", None)


async def test_an_expired_key_is_refused_even_if_it_was_accepted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore()
    authenticator = Authenticator(store, is_required=True, operator_key="k", believes_urls=False)
    now = store.now()
    key = attempt_token.mint(attempt_token.derive_secret(None), "ro-1", "at-1", now + 60)
    headers = {"Authorization": f"Bearer {key}"}
    assert authenticator.authenticate(headers, None) == ("ro-1", "at-1")
    monkeypatch.setattr(store, "now", lambda: now + 61)
    with pytest.raises(agl.LightningError, match="expired"):
        authenticator.authenticate(headers, None)


async def test_an_idle_gateway_reads_the_key_of_a_provider_again_when_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_table, "READ_S", 0.01)
    keys = tmp_path / "key"
    keys.write_text("sk-the-old-provider-key\n")
    async with ScriptedOpenAI() as server:
        models = [{"model": "m", "endpoint": server.endpoint, "api_key": f"file:{keys}"}]
        async with gateway(model_list=models) as case:

            async def shows(key: str) -> bool:
                await post(f"{case.proxy.endpoint}/chat/completions", {})
                return server.requests[-1].headers["Authorization"] == f"Bearer {key}"

            assert await shows("sk-the-old-provider-key")
            keys.write_text("")
            await until(lambda: "the keys stay as they were" in caplog.text)
            assert await shows("sk-the-old-provider-key")
            keys.write_text("sk-the-new-provider-key\n")
            await until(lambda: shows("sk-the-new-provider-key"))
    assert caplog.text.count("the keys stay as they were") == 1
    with pytest.raises(agl.ConfigError, match=r"model_list\[0\]: api_key: the token file .*none cannot be read"):
        agl.LLMProxy(model_list=[{**models[0], "api_key": f"file:{tmp_path}/none"}])


async def test_beyond_loopback_keys_are_required_for_everything_except_health() -> None:
    async with ScriptedOpenAI() as server:
        store = InMemoryLightningStore()
        store.token = "the-stores-token"
        proxy = LLMProxy(model_list=[entry(server.endpoint)], store=store, host="0.0.0.0")
        await proxy.start()
        try:
            port = proxy.endpoint.rsplit(":", 1)[1].removesuffix("/v1")
            root = f"http://127.0.0.1:{port}"
            assert (await post(f"{root}/v1/chat/completions", {"Authorization": "Bearer agentlightning"}))[0] == 401
            async with aiohttp.ClientSession() as session:
                seen = {}
                for path in ("health", "status", "metrics", "v1/models", "anthropic/v1/models/m"):
                    async with session.get(f"{root}/{path}") as response:
                        seen[path] = response.status
                rollout = await store.start_rollout("a task")
                llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
                for name, path, key in (
                    ("known", "status", "the-stores-token"),
                    ("models of operator", "v1/models", "the-stores-token"),
                    ("models of agent", "v1/models", llm.api_key),
                ):
                    async with session.get(f"{root}/{path}", headers={"Authorization": f"Bearer {key}"}) as known:
                        seen[name] = known.status
            assert {name for name, status in seen.items() if status == 401} == {
                "status", "metrics", "v1/models", "anthropic/v1/models/m"
            }  # fmt: skip
            assert {name for name, status in seen.items() if status == 200} == {
                "health", "known", "models of operator", "models of agent"
            }  # fmt: skip
        finally:
            await proxy.stop()
            await store.close()


async def test_the_runner_gives_the_agent_a_key_of_its_attempt() -> None:
    keys: list[str | None] = []

    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        keys.append(llm.api_key)
        async with AsyncOpenAI(base_url=case.proxy.endpoint, api_key=llm.api_key, max_retries=0) as client:
            await client.chat.completions.create(**BODY)
        return 1.0

    async with ScriptedOpenAI() as server, gateway(server, require_keys=True) as case:
        runner = LitAgentRunner[Any](DummyTracer())
        with runner.run_context(agent=agent, store=case.store):
            rollout = await runner.step({}, resources={"llm": case.proxy.as_resource(model="m")})
        assert rollout.status == "succeeded"
        await case.proxy.flush()
        names = [span.name for span in await case.store.query_spans(rollout.rollout_id)]
        assert any(
            "response_token_ids" in span.attributes for span in await case.store.query_spans(rollout.rollout_id)
        ), names
        (key,) = keys
        assert key is not None
        published = (await case.store.get_latest_resources()).model_dump_json()
        assert key not in published


async def test_calls_in_flight_are_cancelled_when_their_attempt_ends() -> None:
    async with ScriptedOpenAI([Answer(delay_s=60)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        call = asyncio.create_task(client.chat.completions.create(**BODY))
        await until(lambda: bool(server.requests))
        await case.store.cancel_rollout(rollout.rollout_id)
        with pytest.raises(openai.APIStatusError, match="is over") as caught:
            await call
        assert caught.value.status_code == 410
        assert (await case.proxy.status())["in_flight"] == 0
        span = await case.span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False


async def test_a_stream_ends_with_an_error_event_when_its_attempt_ends() -> None:
    script = [Answer("a very long answer indeed", chunk_delay_s=60)]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        stream = await client.chat.completions.create(**BODY, stream=True)
        await case.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        with pytest.raises(openai.APIError, match="is over"):
            async for _ in stream:
                pass
        span = await case.span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False
        assert span.status.status_code == "ERROR"


async def test_web_pages_get_no_answer_from_a_gateway_on_loopback() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        root = case.proxy.endpoint.removesuffix("/v1")
        own = root.removeprefix("http://")
        for path in ("/v1/chat/completions", "/v1/models", "/health", "/status", "/metrics", "/pause"):
            for headers in ({"Host": "rebound.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
                status, error = await post(root + path, headers)
                assert (status, error["error"]["code"]) == (403, "not_local")
        assert not server.requests
        assert (await post(f"{root}/v1/chat/completions", {"Host": f"localhost:{own.partition(':')[2]}"}))[0] == 200
        assert (await post(f"{root}/v1/chat/completions", {"Origin": root}))[0] == 200


async def test_a_gateway_that_requires_keys_answers_under_any_host_name() -> None:
    async with ScriptedOpenAI() as server, gateway(server, require_keys=True) as case:
        rollout, _ = await case.start()
        headers = {"Host": "models.example", "Authorization": f"Bearer {key_of(case, rollout)}"}
        assert (await post(f"{case.proxy.endpoint}/chat/completions", headers))[0] == 200


async def test_pausing_needs_the_operators_key_if_the_store_has_no_token() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        root = case.proxy.endpoint.removesuffix("/v1")
        for path in ("pause", "drain", "resume"):
            for key in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer guess"}, {"x-api-key": "\xff"}):
                assert (await post(f"{root}/{path}", key, {}))[0] == 401
        assert not (await case.proxy.status())["paused"]
        known = {"Authorization": f"Bearer {case.proxy.operator_key}"}
        assert (await post(f"{root}/pause", known, {}))[1]["paused"]
        assert (await post(f"{root}/resume", known, {}))[0] == 200
        assert case.proxy.operator_key not in str(await case.proxy.status())


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_a_key_that_a_provider_quotes_in_an_error_is_redacted(status: int) -> None:
    quoting = Answer(status=status, error=f"the key {PROVIDER_KEY} is no good")
    async with ScriptedOpenAI([quoting]) as server, gateway(server, num_retries=0) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**BODY)
        assert PROVIDER_KEY not in str(caught.value) + caught.value.response.text
        assert PROVIDER_KEY not in (await case.span(rollout)).model_dump_json()
        assert PROVIDER_KEY not in str(await case.proxy.status())


SPLIT = "sk-the/real-provider-key"
FORMS = {
    "plain": SPLIT,
    "escaped slash": SPLIT.replace("/", "\\/"),
    "unicode escapes": "".join(f"\\u{ord(char):04X}" for char in SPLIT),
    "one unicode escape": SPLIT.replace("k", "\\u006b", 1),
    "escaped twice": SPLIT.replace("/", "\\\\/").replace("r", "\\\\u0072"),
    "percent": "".join(f"%{ord(char):02x}" for char in SPLIT),
    "quoted": quote(SPLIT, safe=""),
    "percent twice": quote(quote(SPLIT, safe="")),
    "html": SPLIT.replace("/", "&#x2F;").replace("-", "&#45;"),
    "hex": SPLIT.encode().hex(),
    **{
        f"base64 after {prefix!r}": base64.b64encode((prefix + SPLIT).encode()).decode()
        for prefix in ("", "u:", ":", "Bearer ")
    },
    "base64 for urls": base64.urlsafe_b64encode(f"~~?{SPLIT}~~?".encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_key_in_an_answer_is_redacted_in_every_common_form(form: str) -> None:
    shown = FORMS[form]
    core = shown[6:-6]
    choice = f'{{"index":0,"delta":{{"content":"{shown}"}},"finish_reason":"stop"}}'
    event = f': {shown}\n\ndata: {{"id":"x","choices":[{choice}]}}'
    whole = {"id": "x", "choices": [{"index": 0, "message": {"content": "KEY"}, "finish_reason": "stop"}]}
    header = {"x-request-id": shown, "x-key": shown}
    script = [
        Answer(body=json.dumps(whole).replace("KEY", shown).encode(), headers=header),
        Answer(body=f"{event}\n\ndata: [DONE]\n\n".encode(), content_type="text/event-stream", headers=header),
        Answer(status=400, error=shown, headers=header),
    ]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedOpenAI(lambda request: script[len(server.requests) % 3 - 1]))
        models = [entry(server.endpoint) | {"api_key": SPLIT}]
        async with gateway(model_list=models, num_retries=0) as case:
            rollout, client = await case.start()
            seen = ""
            async with aiohttp.ClientSession() as session:
                for url in (client.base_url, f"{case.proxy.endpoint}/"):
                    for stream in (False, True, False):
                        body = {**BODY, "stream": stream}
                        async with session.post(f"{url}chat/completions", json=body) as response:
                            text = await response.text()
                            assert "***" in text
                            seen += f"{text} {response.headers}"
            spans = "".join(span.model_dump_json() for span in await case.spans(rollout))
    assert len(server.requests) == 6
    for secret in (core, SPLIT, json.dumps(core)[1:-1]):
        assert secret not in seen + spans


async def test_a_key_that_a_stream_sends_in_pieces_is_not_recorded() -> None:
    pieces = [SPLIT[:5], SPLIT[5:9], SPLIT[9:]]
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    script = [Answer(body=events.encode(), content_type="text/event-stream")]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedOpenAI(script))
        async with gateway(model_list=[entry(server.endpoint) | {"api_key": SPLIT}]) as case:
            rollout, client = await case.start()
            async for _ in await client.chat.completions.create(**BODY, stream=True):
                pass
            span = await case.span(rollout)
            assert span.attributes["agentlightning.gateway.complete"]
            assert SPLIT not in span.model_dump_json()
            assert "***" in span.attributes["gen_ai.output.messages"]


async def test_a_key_that_is_an_ordinary_word_is_not_redacted_in_answers() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedOpenAI([Answer("The list is EMPTY.")]))
        async with gateway(model_list=[entry(server.endpoint) | {"api_key": "EMPTY"}]) as case:
            _, client = await case.start()
            answer = await client.chat.completions.create(**BODY)
            assert answer.choices[0].message.content == "The list is EMPTY."


async def test_a_key_in_an_error_event_of_a_stream_is_redacted() -> None:
    event = b'data: {"error": {"message": "the key %b is no good"}}\n\n' % PROVIDER_KEY.encode()
    quoting = Answer(body=event, content_type="text/event-stream")
    async with ScriptedOpenAI([quoting]) as server, gateway(server, num_retries=0) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.APIError, match=r"the key \*\*\* is no good"):
            async for _ in await client.chat.completions.create(**BODY, stream=True):
                pass
        assert PROVIDER_KEY not in (await case.span(rollout)).model_dump_json()


def test_a_gateway_that_other_machines_reach_without_keys_needs_a_second_setting() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):  # nothing is bound
        with pytest.raises(agl.ConfigError, match="anyone could use the providers' keys"):
            agl.LLMProxy(host=host, require_keys=False)
        agl.LLMProxy(host=host, require_keys=False, admit_strangers=True)
        agl.LLMProxy(host=host)
    agl.LLMProxy(host="127.0.0.1", require_keys=False)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_key_in_an_error_in_utf_16_is_redacted(encoding: str) -> None:
    shown = KeyRedactor(SPLIT).redact_error(f"the key {SPLIT} is no good".encode(encoding))
    assert b"***" in shown
    assert SPLIT not in shown.decode(encoding, errors="replace")
