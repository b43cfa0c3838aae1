"""Load balancing: shares, stickiness, health checks, and changes of the model list."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConfigError
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.provider import OpenAICompatible
from agentlightning_plugins.gateway.backends.upstream import HealthCheck
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway
from tests.port import reserve_port
from tests.waiting import until

ROLLOUTS = [f"ro-{number:06x}" for number in range(4000)]


def table(*hosts: str, **more: Any) -> ModelTable:
    return ModelTable([entry(f"http://{host}/v1", **more) for host in hosts])


def first_of(models: ModelTable) -> dict[str, str]:
    return {rollout: models.route("m", rollout, 0.0)[0].endpoint for rollout in ROLLOUTS}


def test_rollouts_are_spread_by_weight() -> None:
    models = ModelTable([entry("http://a/v1", weight=3), entry("http://b/v1", weight=1)])
    counts = Counter(first_of(models).values())
    assert counts["http://a/v1"] / len(ROLLOUTS) == pytest.approx(0.75, abs=0.03)
    calls = Counter(models.route("m", None, 0.0)[0].endpoint for _ in ROLLOUTS)
    assert calls["http://a/v1"] / len(ROLLOUTS) == pytest.approx(0.75, abs=0.05), "calls without a rollout"


async def test_entries_that_differ_only_in_their_key_share_the_calls_and_are_counted_separately() -> None:
    async with ScriptedOpenAI(api_key="first") as server, aiohttp.ClientSession() as session:
        entries = [entry(server.endpoint, api_key=key) for key in ("first", "second")]
        models = ModelTable(entries)
        shares = Counter(models.route("m", rollout, 0.0)[0].api_key for rollout in ROLLOUTS)
        assert shares["second"] / len(ROLLOUTS) == pytest.approx(0.5, abs=0.03)
        models.backends[0].mark("gone")
        models.update(entries)
        assert [backend.is_up for backend in models.backends] == [False, True]
        async with (
            gateway(model_list=entries) as case,
            session.get(case.proxy.endpoint.removesuffix("v1") + "metrics") as answer,
        ):
            lines = [line for line in (await answer.text()).splitlines() if "backend_up{" in line]
    endpoints = (server.endpoint, f"{server.endpoint}#2")
    assert lines == [f'agl_gateway_backend_up{{backend="{endpoint}",model="m"}} 1.0' for endpoint in endpoints]


async def test_entries_with_the_same_endpoint_are_health_checked_separately() -> None:
    models = ModelTable([entry("http://127.0.0.1:1/v1", api_key=key) for key in ("first", "second")])
    check = asyncio.create_task(HealthCheck(models, interval_s=0.01).run())
    await until(lambda: not any(backend.is_up for backend in models.backends))
    check.cancel()
    await asyncio.gather(check, return_exceptions=True)


def test_adding_a_backend_moves_rollouts_only_to_the_new_backend() -> None:
    before, after = first_of(table("a", "b", "c")), first_of(table("d", "c", "b", "a"))
    moved = [rollout for rollout in ROLLOUTS if before[rollout] != after[rollout]]
    assert {after[rollout] for rollout in moved} == {"http://d/v1"}
    assert len(moved) / len(ROLLOUTS) == pytest.approx(0.25, abs=0.03)


def test_a_new_model_list_keeps_the_health_of_unchanged_backends() -> None:
    models = table("a", "b")
    a, b = models.backends
    a.mark("gone")
    models.update([entry("http://a/v1"), entry("http://b/v1", api_key="another")])
    assert models.backends[0] is a
    assert models.backends[1] is not b


def test_invalid_weights_and_prices_are_refused() -> None:
    for key, value, says in [
        ("weight", 0, "above 0"),
        ("weight", "much", "above 0"),
        ("price", 3, "give input_per_million"),
        ("price", {"input": 3}, "no setting 'input'"),
        ("price", {"input_per_million": -1}, "0 or more"),
    ]:
        with pytest.raises(ConfigError, match=says):
            ModelTable([entry("http://a/v1", **{key: value})])


def server_to_come() -> ScriptedOpenAI:
    """Returns a model server that has an address but does not listen yet."""
    server = ScriptedOpenAI()
    server._port = reserve_port()
    return server


async def test_health_checks_notice_that_a_backend_goes_down_and_comes_back() -> None:
    late = server_to_come()
    async with ScriptedOpenAI() as server:
        models = ModelTable([entry(server.endpoint), entry(late.endpoint)])
        alive, dead = models.backends
        check = asyncio.create_task(HealthCheck(models, interval_s=0.05).run())
        try:
            await until(lambda: not dead.is_up)
            assert alive.is_up
            assert all(models.route("m", rollout, 0.0)[0] is alive for rollout in ROLLOUTS[:50])
            async with late:
                await until(lambda: dead.is_up)
                check.cancel()
                await asyncio.gather(check, return_exceptions=True)
        finally:
            check.cancel()
    firsts = {models.route("m", rollout, 0.0)[0].endpoint for rollout in ROLLOUTS[:50]}
    assert firsts == {alive.endpoint, dead.endpoint}


async def test_a_busy_backend_is_down_only_after_three_checks() -> None:
    checks = 0

    async def stays_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal checks
        checks += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stays_silent, "127.0.0.1", 0) as server:
        models = table(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (backend,) = models.backends
        check = asyncio.create_task(HealthCheck(models, interval_s=0.01, timeout_s=0.5).run())
        await until(lambda: checks == 3)
        assert backend.is_up
        await until(lambda: not backend.is_up)
        check.cancel()
        await asyncio.gather(check, return_exceptions=True)
    assert "did not answer for 0.5 s, 3 times" in (backend.failure or "")


async def test_an_error_in_one_provider_does_not_stop_the_health_checks_of_other_providers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Strange(OpenAICompatible):
        def url(self, endpoint: str, path: str) -> str:
            raise LookupError(f"no {path} here")

    models = table("127.0.0.1:1", "127.0.0.1:2")
    strange, gone = models.backends
    strange.provider = Strange()
    check = asyncio.create_task(HealthCheck(models, interval_s=0.01).run())
    await until(lambda: not gone.is_up)
    gone.mark(None)
    await until(lambda: not gone.is_up)
    check.cancel()
    await asyncio.gather(check, return_exceptions=True)
    assert strange.is_up, "its health is unknown"
    assert caplog.text.count("no models here") == 1


async def test_a_backend_that_cannot_be_reached_is_down_until_it_answers_again() -> None:
    late = server_to_come()
    async with contextlib.AsyncExitStack() as stack:
        sound = await stack.enter_async_context(ScriptedOpenAI())
        stack.push_async_exit(late)
        case = await stack.enter_async_context(gateway(sound, late, health_interval_s=0.05))

        async def late_is_down() -> bool:
            return [b["up"] for b in (await case.proxy.status())["backends"]] == [True, False]

        await until(late_is_down)
        for _ in range(6):
            _, client = await case.start()
            await client.chat.completions.create(model="m", messages=HELLO)
        assert len(sound.requests) == 6
        await late.__aenter__()
        while not late.requests:
            _, client = await case.start()
            await client.chat.completions.create(model="m", messages=HELLO)


async def test_a_call_is_not_retried_if_the_backend_does_not_answer_in_time() -> None:
    async with ScriptedOpenAI([Answer(delay_s=30)]) as server, gateway(server, read_timeout_s=0.2) as case:
        rollout, client = await case.start()
        with pytest.raises(Exception, match="did not answer in time"):
            await client.chat.completions.create(model="m", messages=HELLO)
        assert len(server.requests) == 1
        assert (await case.span(rollout)).attributes["error.type"] == "504"
