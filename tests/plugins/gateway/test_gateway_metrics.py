"""The gateway's Prometheus metrics, health, status and command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from pathlib import Path

import aiohttp
import openai
import pytest
import yaml
from click.testing import CliRunner
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.errors import ConfigError, StoreError
from agentlightning.run import attempt_token
from agentlightning_plugins.gateway.command import command
from agentlightning_plugins.gateway.operation import ask_gateway
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway
from tests.waiting import until


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the samples of a Prometheus text by name and label values; the values are sorted by label name."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


async def read(proxy: LLMProxy, path: str) -> str:
    url = proxy.endpoint.removesuffix("/v1") + path
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.text()


async def test_calls_tokens_and_times_are_counted() -> None:
    script = [Answer("ok"), Answer("ok"), Answer(status=400), Answer("cut here", cut_after=1)]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
            pass
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
                pass
        for name in ("absent-1", "absent-2"):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model=name, messages=HELLO)
        await case.proxy.resume(weight_version=3)
        seen = samples(await read(case.proxy, "/metrics"))
        assert seen["agl_gateway_calls_total"] == {
            ("m", "200"): 2,
            ("m", "400"): 1,
            ("m", "502"): 1,
            ("", "404"): 2,  # unknown names create no label values
        }
        assert seen["agl_gateway_tokens_total"]["output", "m"] >= 6
        assert seen["agl_gateway_call_seconds_count"]["m",] == 4
        assert seen["agl_gateway_first_token_seconds_count"]["m",] == 2
        assert seen["agl_gateway_incomplete_total"]["m",] == 2
        assert seen["agl_gateway_backend_up"] == {(server.endpoint, "m"): 1}
        assert (seen["agl_gateway_in_flight"], seen["agl_gateway_weight_version"]) == ({(): 0}, {(): 3})
        assert seen["agl_gateway_spans_dropped"] == {(): 0}


async def test_metrics_have_their_names_types_and_labels_before_the_first_call() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        await case.start()
        families = text_string_to_metric_families(await read(case.proxy, "/metrics"))
        described = {(family.name, family.type): family.samples for family in families}
        assert {name for name in described if name[0].startswith("agl")} == {
            *((f"agl_gateway_{name}", "counter") for name in ("calls", "tokens", "incomplete")),
            *((f"agl_gateway_{name}", "histogram") for name in ("call_seconds", "first_token_seconds")),
            *((f"agl_gateway_{name}", "gauge") for name in ("in_flight", "waiting", "paused", "weight_version")),
            *((f"agl_gateway_{name}", "gauge") for name in ("backend_up", "backend_in_flight")),
            *((f"agl_gateway_{name}", "gauge") for name in ("span_queue", "spans_dropped")),
        }
        (up,) = described["agl_gateway_backend_up", "gauge"]
        assert up.labels == {"model": "m", "backend": server.endpoint}


async def test_health_shows_whether_calls_are_served() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        assert json.loads(await read(case.proxy, "/health")) == {"status": "ok"}
        await case.proxy.pause()
        assert json.loads(await read(case.proxy, "/health")) == {"status": "paused"}
        await case.proxy.resume()
        assert json.loads(await read(case.proxy, "/status")) == await case.proxy.status()


async def test_agl_gateway_serves_rereads_its_models_and_shows_its_status(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    served = LightningStoreServer(store, port=0, token="a-secret")
    await served.start()
    async with ScriptedOpenAI() as first, ScriptedOpenAI() as second:
        config, output = tmp_path / "gateway.yaml", tmp_path / "output"
        config.write_text(yaml.safe_dump({"model_list": [entry(first.endpoint)], "budget": {"calls": 9}}))
        arguments = ["--config", str(config), "--store", served.endpoint, "--token", "a-secret", "--port", "0"]
        with output.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentlightning", "gateway", *arguments, stdout=file, stderr=file
            )
        try:
            await until(lambda: "Serving m at" in output.read_text() or process.returncode is not None)
            found = re.search(r"http://\S+:\d+", output.read_text())
            assert found is not None, output.read_text()
            rollout = await store.start_rollout({})
            url = f"{found[0]}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1"
            key = attempt_token.issue("a-secret", rollout.rollout_id, rollout.attempt.attempt_id, store.now())
            async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                await client.chat.completions.create(model="m", messages=HELLO)
                config.write_text(yaml.safe_dump({"model_list": [entry(second.endpoint)]}))
                process.send_signal(signal.SIGHUP)
                await until(lambda: "read again" in output.read_text())
                await client.chat.completions.create(model="m", messages=HELLO)
            assert (len(first.requests), len(second.requests)) == (1, 1)
            result = CliRunner().invoke(command, ["status", found[0]])
            assert "up" in result.output, result.output
            shown = CliRunner().invoke(command, ["status", found[0], "--json"])
            assert [row["endpoint"] for row in json.loads(shown.output)["backends"]] == [second.endpoint]
            paused = CliRunner().invoke(command, ["pause", found[0], "--token", "a-secret", "--drain", "300"])
            assert (paused.output, paused.exit_code) == ("paused\n", 0)
            resumed = CliRunner().invoke(command, ["resume", found[0], "--token", "a-secret", "--weight-version", "4"])
            assert resumed.output == "serving, weight version 4\n"
            assert isinstance(CliRunner().invoke(command, ["pause", found[0]]).exception, StoreError)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            assert len(await store.query_spans(rollout.rollout_id)) == 2, "spans are stored before the process ends"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await served.stop()
            await store.close()


def test_agl_gateway_names_missing_settings(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("model_list: [{model: m, endpoint: 'http://127.0.0.1:9/v1'}]\nbudgets: {calls: 1}\n")
    for arguments, says in (
        ([], "give --model NAME=URL"),
        (["--model", "m=http://h/v1", "--key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--config", str(config), "--store", "memory://"], "Did you mean 'budget'"),
    ):
        error = CliRunner().invoke(command, arguments).exception
        assert isinstance(error, ConfigError)
        assert says in str(error)
    with pytest.raises(StoreError, match="no gateway answers at http://127.0.0.1:9"):
        ask_gateway("http://127.0.0.1:9/v1", None, "status")
    with pytest.raises(ConfigError, match="not a URL"):
        ask_gateway("localhost", None, "status")


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (["--store", "http://given"], "http://of-the-environment", "http://given"),
        ([], "http://of-the-environment", "http://of-the-environment"),
        ([], None, "http://of-the-file"),
    ],
)
def test_the_store_option_takes_precedence_over_the_environment_and_the_file(
    arguments: list[str], variable: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def refuse(url: str, **_: object) -> None:
        opened.append(url)
        raise StoreError("not opened")

    monkeypatch.setattr("agentlightning.store.factory.create_store", refuse)
    file = tmp_path / "gateway.yaml"
    file.write_text("{model_list: [{model: m, endpoint: 'http://127.0.0.1:9/v1'}], store: 'http://of-the-file'}")
    CliRunner(env={"AGL_STORE": variable}).invoke(command, ["--config", str(file), *arguments])
    assert opened == [expected]
