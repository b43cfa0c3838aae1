"""All attacks at once on a store with its pages, a gateway and a policy server, while a run trains over them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
import secrets
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.errors import AdapterError
from agentlightning.run import attempt_token
from agentlightning.types import Rollout
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.algorithms.tiny_model import save_tiny_model
from tests.security import test_gateway_fuzz, test_policy_server_fuzz
from tests.security.fuzz import MIB, Findings, Grammar, fuzz
from tests.security.gateway_process import port_of, process, text_of
from tests.security.store_process import AGL, TOKEN
from tests.security.test_span_fuzz import hostile_spans, make_adapters
from tests.source import REPO

_SECONDS = 120.0
_STALL_S = 0.5
_GROWTH = 200 * MIB
_URL = r"(?:Serving .* at http://127\.0\.0\.1:|\"port\": )(\d+)"
_HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def _watched(module: str) -> tuple[str, str]:
    """Returns the arguments of Python that run a module and write the stalls of its loops."""
    program = f"import sys; sys.path.insert(0, {str(REPO)!r}); from tests.security.loop_watch import print_stalls; "
    return "-c", f"{program}print_stalls({_STALL_S}); import runpy; runpy.run_module({module!r}, run_name='__main__')"


def _token(rollout: Rollout) -> str:
    assert isinstance(rollout, agl.types.AttemptedRollout)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    return f"Bearer {attempt_token.mint(attempt_token.derive_secret(TOKEN), *ids, time.time() + 3600)}"


def _store_grammar(rollout: agl.types.AttemptedRollout, port: int) -> Grammar:
    """Returns requests to a store with the token of an attempt, and without a token."""
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    spans = [span.model_dump(mode="json") for seed in range(20) for span in hostile_spans(random.Random(seed), *ids)]
    bodies: list[dict[str, Any]] = [{"spans": spans[start : start + 7]} for start in range(0, len(spans), 7)]
    bodies += [*spans, {"rollout_attempt_ids": [ids]}, {"resourceSpans": [{"scopeSpans": [{"spans": spans[:3]}]}]}]
    attempt = f"{AGL}/rollouts/{ids[0]}/attempts/{ids[1]}"
    paths = [
        f"{AGL}/spans/batch",
        f"{AGL}/spans",
        "/v1/traces",
        attempt,
        f"{AGL}/rollouts/{ids[0]}",
        f"{AGL}/spans/ids",
    ]
    paths += ["/metrics", "/openapi.json", "/readyz", "/runs/default", "/login", f"/runs/default/rollouts/{ids[0]}"]
    return Grammar(paths, bodies, [*[_token(rollout)] * 4, "Bearer agl-x.y", "Basic x"], port, health=f"{AGL}/health")


async def _attack_as_agent(url: str, gateway: str, task: Any, rollout: Rollout) -> float:
    """An agent that writes hostile spans, with its token and through its runner's tracer, and calls its gateway."""
    assert isinstance(rollout, agl.types.AttemptedRollout)
    chance = random.Random(task)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    headers = {"Authorization": _token(rollout)}
    async with aiohttp.ClientSession(headers=headers) as session:
        for span in hostile_spans(chance, *ids):
            async with session.post(f"{url}{AGL}/spans", json=span.model_dump(mode="json")) as answer:
                assert answer.status < 500
        body = json.dumps(chance.choice(test_gateway_fuzz.GATEWAY_BODIES))
        async with session.post(f"{gateway}/v1/chat/completions", data=body) as answer:
            assert answer.status < 500
    store = LightningStoreClient(url, TOKEN)
    for span in hostile_spans(chance, *ids):
        with contextlib.suppress(agl.ConfigError):  # the trainer's token may write a record, but not a malformed one
            await store.add_many_spans([span])
    await store.close()
    return chance.random()


def _train_until(end: float, url: str, gateway: str) -> int:
    """Runs the algorithm ``baseline`` again and again; returns the number of runs, each of which has ended well."""
    runs = 0
    while time.monotonic() < end or not runs:
        store = agl.create_store(url, token=TOKEN, run=f"run-{runs}")

        async def agent(task: Any, rollout: Rollout) -> float:
            return await _attack_as_agent(url, gateway, task, rollout)

        tasks = list(range(8 * runs, 8 * runs + 8))
        agl.Trainer(algorithm="baseline", store=store, trackers=[]).fit(agl.rollout(agent), tasks)
        asyncio.run(_check_run(store))
        runs += 1
    return runs


async def _check_run(store: agl.LightningStore) -> None:
    rollouts = (await store.query_rollouts()).items
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 8
    for rollout in rollouts:
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        for adapter in make_adapters():
            with contextlib.suppress(AdapterError):
                adapter.adapt(spans)
    await store.close()


async def _read_pages(end: float, url: str) -> int:
    """Opens pages until the time is over; returns their number."""
    read = 0
    async with aiohttp.ClientSession(url, headers=_HEADERS) as session:
        while time.monotonic() < end:
            async with session.get("/index.json") as answer:
                runs = [run["run_id"] for run in (await answer.json())["runs"]]
            for run in ["default", *runs]:
                async with session.get(f"/runs/{run}/rollouts.json") as answer:
                    ids = [each["rollout_id"] for each in (await answer.json())["rollouts"]]
                pages = ["", "/rollouts?text=x&messages=1", "/ledger", "/resources", "/labelled.jsonl"]
                for page in [*pages, *(f"/rollouts/{rollout_id}" for rollout_id in ids[:5])]:
                    async with session.get(f"/runs/{run}{page}") as answer:
                        await answer.read()
                        assert answer.status == 200, (run, page)
                    read += 1
    return read


@pytest.mark.soak
async def test_two_minutes_of_attacks_stall_no_server_fill_no_memory_and_end_no_run(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    save_tiny_model(tmp_path / "model")
    logs = {name: tmp_path / f"{name}.log" for name in ("store", "policy", "gateway")}
    async with contextlib.AsyncExitStack() as stack:

        async def serve(name: str, module: str, *arguments: str) -> tuple[int, int]:
            """Starts a server; returns its process id and its port."""
            started = await stack.enter_async_context(process(logs[name], *_watched(module), *arguments))
            return started.pid, await port_of(started, logs[name], _URL)

        backend = ["--backend", f"sqlite:///{tmp_path}/store.db", "--token", TOKEN, "--port", "0"]
        store_pid, store_port = await serve("store", "agentlightning", "store", *backend)
        model = ["--model", str(tmp_path / "model"), "--model-name", "m", "--threads", "1", "--prefix-cache-mb", "16"]
        policy_pid, policy_port = await serve("policy", "agentlightning_algorithms.shared.policy.server", *model)
        key = re.search(r'"key": "([^"]+)"', text_of(logs["policy"]))
        assert key is not None
        url = f"http://127.0.0.1:{store_port}"
        options = ["--store", url, "--token", TOKEN, "--port", "0", "--model", f"m=http://127.0.0.1:{policy_port}/v1"]
        gateway_pid, gateway_port = await serve("gateway", "agentlightning", "gateway", *options)
        store = LightningStoreClient(url, TOKEN)
        rollout = await store.start_rollout({})
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        await store.close()
        attack = functools.partial(fuzz, seconds=_SECONDS, seed=seed, wanted=set(), clients=2)
        end = time.monotonic() + _SECONDS
        *found, runs, pages = await asyncio.gather(
            attack(_store_grammar(rollout, store_port), store_pid),
            attack(test_policy_server_fuzz.make_grammar(tmp_path / "model", key[1], policy_port), policy_pid),
            attack(test_gateway_fuzz.make_grammar(ids, gateway_port), gateway_pid),
            asyncio.to_thread(_train_until, end, url, f"http://127.0.0.1:{gateway_port}"),
            _read_pages(end, url),
        )
    problems = []
    for name, findings in zip(logs, found, strict=True):
        assert isinstance(findings, Findings)
        log, growth = text_of(logs[name]), findings.memory_growth
        problems += [*findings.bad, *re.findall("STALL.*|Traceback(?s:.{,3000})", log)]
        problems += [f"{name} grew by {growth / MIB:.0f} MiB"] if growth > _GROWTH else []
    assert problems == [], (seed, [getattr(each, "statuses", None) for each in found])
    assert runs >= 1
    assert pages >= 10
