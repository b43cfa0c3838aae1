"""``agl gateway`` as a service of its own, next to ``agl store``: runs, tokens, and what operators see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import openai
import pytest
import yaml
from aiohttp import web
from openai import AsyncOpenAI

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning.trainer import Trainer
from agentlightning.types import Span
from agentlightning_plugins.gateway.operation import ask_gateway
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.failures import check_messages
from tests.http_site import serving
from tests.plugins.commands.agl_here import run_here
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway
from tests.security.test_connections import many_files
from tests.waiting import LIMIT_S, until

OLD, NEW = "the-old-token-of-the-store", "the-new-token-of-the-store"


@contextlib.asynccontextmanager
async def service(
    log: Path, *arguments: str, **variables: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs an ``agl`` server; yields it with its URL."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")} | variables
    command = [sys.executable, "-m", "agentlightning", *arguments, "--port", "0"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=environment)

    def url() -> str | None:
        assert process.returncode is None, log.read_text()
        found = re.search(r"(?:Serving .*|Dashboard) at (http://\S+?:\d+)", log.read_text())
        return found and found[1]

    try:
        await until(url)
        yield process, url() or ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, model: ScriptedOpenAI | SimpleNamespace, finish_s: float = LIMIT_S, **variables: str
) -> AsyncIterator[tuple[str, str, asyncio.subprocess.Process]]:
    """Runs a store and a gateway that requires keys; yields the URLs of both, and the gateway."""
    config = folder / "gateway.yaml"
    models = [{"model": "m", "endpoint": model.endpoint}]
    config.write_text(yaml.safe_dump({"model_list": models, "require_keys": True, "finish_s": finish_s}))
    async with (
        service(folder / "store.log", "store", "--backend", "memory://", **variables) as (_, store_url),
        service(folder / "gateway.log", "gateway", "--config", str(config), "--store", store_url, **variables) as (
            process,
            gateway_url,
        ),
    ):
        yield store_url, gateway_url, process


async def test_a_gateway_logs_json_lines_with_the_id_of_the_request_which_its_answer_has_too(tmp_path: Path) -> None:
    store = LightningStoreServer(InMemoryLightningStore(), port=0)
    await store.start()
    arguments = ["--store", store.endpoint, "--model", "m=http://127.0.0.1:9/v1"]
    log = tmp_path / "log"
    async with (
        service(log, "gateway", *arguments, AGL_LOG_FORMAT="json") as (_, url),
        aiohttp.ClientSession() as session,
    ):
        body = {"model": "m", "messages": HELLO, "unheard_of": 1}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 502
            own_id = answer.headers["x-request-id"]
        async with session.get(f"{url}/health", headers={"X-Request-Id": "mine-1"}) as answer:
            assert answer.headers["x-request-id"] == "mine-1"
    await store.stop()
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (record,) = [record for record in records if "unheard_of" in record["message"]]
    assert (record["level"], record["request_id"], record["logger"]) == ("WARNING", own_id, "agentlightning")
    assert datetime.fromisoformat(record["time"]).tzinfo is not None


async def post(url: str, key: str | None) -> int:
    """Returns the status of a call with a key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session:
        body = {"model": "m", "messages": HELLO}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status


async def get(url: str, token: str) -> int:
    """Returns the status of a request with a token of the store."""
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status


async def test_servers_that_listen_on_every_address_print_a_url_that_clients_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    model = ("--model", "m=http://127.0.0.1:9/v1")
    existing = f"sqlite:///{tmp_path}/existing.db"
    await create_store(existing).close()
    commands = {
        "store": ("--backend", "memory://"),
        "dashboard": (existing,),
        "gateway": ("--store", f"sqlite:///{tmp_path}/gateway.db", *model),
    }
    async with contextlib.AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        for name, arguments in commands.items():
            token = {} if name == "gateway" else {"AGL_TOKEN": OLD}
            starting = service(tmp_path / f"{name}.log", name, *arguments, "--host", "0.0.0.0", **token)
            _, url = await stack.enter_async_context(starting)
            assert "0.0.0.0" not in url
            async with session.get(url) as response:
                assert response.status < 500
        # The command that the gateway prints finds the key of the operator, which is on this machine.
        assert (await asyncio.to_thread(ask_gateway, url, None, "status"))["backends"]


async def test_a_gateway_refuses_ended_attempts_of_every_run_and_ends_their_streams(tmp_path: Path) -> None:
    def script(request: RecordedRequest) -> Answer:
        return Answer("one two three", chunk_delay_s=LIMIT_S) if request.body.get("stream") else Answer("ok")

    async with ScriptedOpenAI(script) as model, fleet(tmp_path, model, AGL_TOKEN=OLD) as (store_url, url, _):
        everyone = LightningStoreClient(store_url, OLD)
        for run in ("default", "team-a", "team-b"):
            store = everyone.with_run(run)
            rollout = await store.start_rollout("task")
            ids = rollout.rollout_id, rollout.attempt.attempt_id
            key = store.attempt_token(*ids)
            assert await post(url, key) == 200
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "", max_retries=0) as client:
                stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
                await anext(stream)
                await store.update_attempt(*ids, status="succeeded")
                with pytest.raises(openai.APIError, match="is over"):
                    async for _ in stream:
                        pass
            assert await post(url, key) == 410, run

            spans: Sequence[Span] = ()
            while len(spans) < 2:
                spans = await store.query_spans(ids[0])
            late = {span.attributes[semconv.GATEWAY_COMPLETE]: semconv.LATE in span.attributes for span in spans}
            assert late == {True: False, False: True}
        await everyone.close()


@pytest.mark.slow
async def test_512_streams_of_one_attempt_at_once_all_end_and_ask_the_store_a_few_times(tmp_path: Path) -> None:
    number, begun, together = 512, 0, asyncio.Event()
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    chunk |= {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal begun
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        begun += 1
        if begun == number:
            together.set()
        await together.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(many_files())
        backend = await stack.enter_async_context(serving(web.post("/v1/{path:.*}", answer)))
        model = SimpleNamespace(endpoint=f"{backend}/v1")
        store_url, url, _ = await stack.enter_async_context(fleet(tmp_path, model, AGL_TOKEN=OLD))
        store = LightningStoreClient(store_url, OLD)
        stack.push_async_callback(store.close)
        rollout = await store.start_rollout("task")
        key = store.attempt_token(rollout.rollout_id, rollout.attempt.attempt_id)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        await stack.enter_async_context(session)

        async def stream() -> bool:
            body = {"model": "m", "messages": HELLO, "stream": True}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status == 200 and (await response.read()).endswith(b"data: [DONE]\n\n")

        async def count_requests() -> float:
            async with session.get(f"{store_url}/metrics", headers={"Authorization": f"Bearer {OLD}"}) as response:
                lines = (await response.text()).splitlines()
            return sum(
                float(line.split()[-1]) for line in lines if re.match(r"agl_store_requests_total.*/rollouts", line)
            )

        before = await count_requests()
        assert await asyncio.gather(*(stream() for _ in range(number))) == [True] * number
        assert await count_requests() < before + number / 8


async def test_an_idle_gateway_and_open_streams_follow_a_rotation_of_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"  # of the store, the gateway, the dashboard and the client, which runs in this process
    tokens.write_text(f"{OLD}\n")
    variables = {"AGL_TOKEN_FILE": str(tokens)}
    async with (
        ScriptedOpenAI() as model,
        fleet(tmp_path, model, **variables) as (store_url, url, _),
        service(tmp_path / "dashboard.log", "dashboard", store_url, **variables) as (_, dashboard_url),
    ):
        old, new = LightningStoreClient(store_url, OLD), LightningStoreClient(store_url, NEW)
        rollout = await old.start_rollout("task")
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        old_key, new_key = old.attempt_token(*ids), new.attempt_token(*ids)

        async def statuses() -> list[int]:
            operator = [await get(f"{url}/metrics", token) for token in (OLD, NEW)]
            calls = [await post(url, key) for key in (old_key, new_key)]
            pages = [
                await get(f"{at}/runs/default.json", token) for at in (store_url, dashboard_url) for token in (OLD, NEW)
            ]
            return [*operator, *calls, *pages]

        async def both() -> bool:
            return await statuses() == [200] * 8

        async def only_new() -> bool:
            return await statuses() == [401, 200] * 4

        assert await statuses() == [200, 401] * 4
        headers = {"Authorization": f"Bearer {OLD}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{store_url}/v1/agl/events") as events,
            session.get(f"{dashboard_url}/live/default") as live,
        ):
            for text in (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n"):
                tokens.write_text(text)
                await until(both)
            tokens.write_text(f"{NEW}\n")
            await until(only_new)
            monkeypatch.delenv("AGL_TOKEN", raising=False)
            monkeypatch.setenv("AGL_TOKEN_FILE", str(tokens))
            assert (await asyncio.to_thread(ask_gateway, url, None, "status"))["backends"], "operators may use it too"
            assert b"event:" not in await events.read(), "the stream ends with its token"
            await live.read()
        check_messages("a token is removed from the file", str(await get(f"{url}/metrics", OLD)))
        await old.close()
        await new.close()


async def test_a_configuration_names_a_gateway_of_its_own_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(
        "import agentlightning as agl\nfrom openai import OpenAI\n\n\n"
        "@agl.rollout\ndef agent(task, llm: agl.LLM):\n"
        "    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)\n"
        "    client.chat.completions.create(model=llm.model, messages=[{'role': 'user', 'content': task}])\n"
        "    return 1.0\n"
    )
    (tmp_path / "tasks.jsonl").write_text('"Say hello."\n')
    config = tmp_path / "config.yaml"

    def configure(**values: str) -> None:
        run = {"name": "team-a", "agent": "agent.py:agent", "algorithm": "baseline", "data": {"val": "tasks.jsonl"}}
        config.write_text(yaml.safe_dump({**run, **values}))

    async def agl_here(*arguments: str, token: str = OLD) -> tuple[int, str]:
        monkeypatch.setenv("AGL_TOKEN", token)
        said = await asyncio.to_thread(run_here, tmp_path, *arguments, module="agent")
        return said.code, said.stdout + said.stderr

    async with ScriptedOpenAI() as model, fleet(tmp_path, model, AGL_TOKEN=OLD) as (store_url, url, _):
        configure(gateway=url)
        code, said = await agl_here("train", "config.yaml", "--dry-run")
        assert (code, "give the store that it records in" in said) == (2, True), said
        configure(gateway=url, store=store_url)
        code, said = await agl_here("train", "config.yaml", "--dry-run")
        assert (code, f"ok    gateway      {url}" in said) == (0, True), said
        code, said = await agl_here("train", "config.yaml", "--dry-run", token=NEW)
        assert (code, "WRONG gateway" in said) == (2, True), said
        code, said = await agl_here("doctor", "config.yaml", "--tunes", "prompts")
        assert code == 0, said
        assert f"{url}/v1 answers; model m" in said
        code, said = await agl_here("train", "config.yaml")
        assert code == 0, said
        store = LightningStoreClient(store_url, OLD, run_id="team-a")
        (rollout,) = await store.query_rollouts()
        spans = await store.query_spans(rollout.rollout_id)
        assert [True for span in spans if span.attributes.get(semconv.GATEWAY_COMPLETE)] == [True]
        trainer = Trainer(algorithm="baseline", llm_proxy=url, store=store)
        assert trainer.llm_proxy is not None
        trainer.llm_proxy.store = store
        await trainer.llm_proxy.start()
        assert [entry["model"] for entry in trainer.llm_proxy.model_list] == ["m"]
        await trainer.llm_proxy.pause()
        assert await trainer.llm_proxy.drain(LIMIT_S)
        await trainer.llm_proxy.resume()
        with pytest.raises(ConfigError, match="leave `gateway`"):
            trainer.llm_proxy.update_model_list([])
        await store.close()


async def test_sigterm_ends_streams_of_a_gateway_that_do_not_end_by_themselves_with_an_error(tmp_path: Path) -> None:
    def script(request: RecordedRequest) -> Answer:
        return Answer("one two three", chunk_delay_s=LIMIT_S)

    async with ScriptedOpenAI(script) as model, fleet(tmp_path, model, 0.1, AGL_TOKEN=OLD) as (store_url, url, process):
        assert [await get(f"{url}/{path}", "") for path in ("livez", "readyz", "metrics")] == [200, 200, 401]
        headers = {"Authorization": f"Bearer {OLD}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/metrics") as metrics:
            assert "process_cpu_seconds_total" in await metrics.text()
        store = LightningStoreClient(store_url, OLD, run_id="team-a")
        rollout = await store.start_rollout("task")
        key = store.attempt_token(rollout.rollout_id, rollout.attempt.attempt_id)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "", max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            await anext(stream)
            process.terminate()
            with pytest.raises(openai.APIError) as caught:
                async for _ in stream:
                    pass
        check_messages("a gateway gets SIGTERM", str(caught.value))
        assert await process.wait() == 0
        (span,) = await store.query_spans(rollout.rollout_id)
        assert span.attributes[semconv.GATEWAY_COMPLETE] is False
        await store.close()


async def test_a_gateway_that_stops_waits_for_its_calls_and_is_not_ready() -> None:
    goes_on = asyncio.Event()
    async with ScriptedOpenAI([Answer("ok", until=goes_on)]) as model, gateway(model, finish_s=LIMIT_S) as case:
        _, client = await case.start()
        url = case.proxy.endpoint.removesuffix("/v1")
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:

            async def status() -> int:
                async with session.get(f"{url}/readyz") as response:
                    return response.status

            await until(lambda: model.requests)
            assert await status() == 200
            stopping = asyncio.create_task(case.proxy.stop())
            await asyncio.sleep(0)

            async def is_not_ready() -> bool:
                return await status() == 503

            await until(is_not_ready)
        goes_on.set()
        assert (await call).choices[0].message.content == "ok"
        await stopping


async def test_a_gateway_without_a_backend_that_is_up_is_not_ready() -> None:
    async with gateway(model_list=[entry("http://127.0.0.1:9/v1")], health_interval_s=0.01) as case:

        async def is_not_ready() -> bool:
            return await get(f"{case.proxy.endpoint.removesuffix('/v1')}/readyz", "") == 503

        await until(is_not_ready)
