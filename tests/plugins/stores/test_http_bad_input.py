"""Bad input: each case gets a 4xx answer with a code and a message and changes nothing in the store."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import EnqueueRolloutRequest
from agentlightning_plugins.stores.http.server import LightningStoreServer
from tests.plugins.stores.served import ask, claim, serve

LARGE = "x" * 10 * 2**20
SPAN = {"rollout_id": "ro-claimed", "attempt_id": "at-0", "trace_id": "1" * 32, "span_id": "2" * 16, "name": "call"}


class Request(NamedTuple):
    """One raw request, with the status and code of the expected answer."""

    method: str
    path: str
    body: Any = None
    status: int = 422
    code: str = "invalid"

    def __str__(self) -> str:
        return f"{self.method} {self.path} {str(self.body)[:60]}"


BAD_REQUESTS = [
    # not JSON
    Request("POST", "/queues/rollouts/enqueue", b"{", status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b"\xff\xfe", status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":[{"input":NaN}]}', status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":[{"input":"\\ud800"}]}', status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":' + b"[" * 5000, status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":[{"input":1e999}]}', status=400, code="malformed"),
    Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":[{"input":"\xff"}]}', status=400, code="malformed"),
    # an integer that is read exactly, not as the nearest float
    *(
        Request("POST", "/queues/rollouts/enqueue", b'{"rollouts":[{"input":%s%d}]}' % (b" " * pad, 2**64), status=422)
        for pad in range(5)
    ),
    # integers that no store can hold
    *(
        Request(method, path, body)
        for large in (2**63, 2**64, 10**30)
        for method, path, body in (
            ("POST", "/spans", {**SPAN, "sequence_id": large}),
            ("POST", "/spans/batch", {"spans": [{**SPAN, "sequence_id": large}]}),
            ("GET", f"/rollouts?limit={large}", None),
            ("GET", f"/rollouts?metadata=%7B%22step%22:{large}%7D", None),
            ("GET", f"/rollouts?limit=1&cursor={large}.1.1", None),
            ("GET", f"/resources/rs-0?version={large}", None),
            ("POST", "/resources/rs-0/rollback", {"version": large}),
            ("POST", "/queues/rollouts/dequeue", {"limit": large}),
            ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "config": {"max_attempts": large}}]}),
            ("POST", "/rollouts/ro-claimed/attempts/latest", {"spans_dropped": large}),
            ("POST", "/rollouts/delete", {"keep": large}),
            ("POST", "/runs/default/metrics", {"step": large, "values": {}}),
        )
    ),
    # numbers that are not finite
    Request("GET", "/spans?start_after=nan"),
    Request("GET", "/spans?start_before=inf"),
    # JSON that does not match the schema
    Request("POST", "/queues/rollouts/enqueue", status=422, code="invalid"),
    Request("POST", "/queues/rollouts/enqueue", [], status=422, code="invalid"),
    Request("POST", "/queues/rollouts/enqueue", {"rollouts": [{}]}, status=422, code="invalid"),
    Request("POST", "/queues/rollouts/enqueue", {"rollout": [{"input": 1}]}, status=422, code="invalid"),
    Request("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "mode": "x"}]}, status=422, code="invalid"),
    Request(
        "POST",
        "/queues/rollouts/enqueue",
        {"rollouts": [{"input": 1}, {"input": 2, "config": {"max_attempts": 0}}]},
        status=422,
        code="invalid",
    ),
    Request("POST", "/queues/rollouts/dequeue", {"limit": -1}, status=422, code="invalid"),
    Request("POST", "/queues/rollouts/dequeue", {"timeout": -1}, status=422, code="invalid"),
    Request("POST", "/queues/rollouts/dequeue", {"timeout": "soon"}, status=422, code="invalid"),
    Request("GET", "/rollouts?limit=-2", status=422, code="invalid"),
    Request("GET", "/rollouts?limit=many", status=422, code="invalid"),
    Request("GET", "/rollouts?colour=red", status=422, code="invalid"),
    Request("GET", "/rollouts?sort_by=colour", status=422, code="invalid"),
    Request("GET", "/rollouts?cursor=nonsense", status=422, code="invalid"),
    Request("GET", "/rollouts?metadata=%7B", status=400, code="malformed"),
    Request("GET", "/rollouts?metadata=7", status=422, code="invalid"),
    Request("POST", "/rollouts/search", {"limit": "5"}, status=422, code="invalid"),
    Request("POST", "/spans/search", {"limit": -2}, status=422, code="invalid"),
    Request("POST", "/rollouts/delete", {}, status=422, code="invalid"),
    Request("POST", "/rollouts/delete", {"keep": -1}, status=422, code="invalid"),
    Request("POST", "/rollouts/search", {"offset": -1}, status=422, code="invalid"),
    Request("POST", "/rollouts/search", {"filter_logic": "xor"}, status=422, code="invalid"),
    Request("POST", "/rollouts/ro-queued", {"status": None}, status=422, code="invalid"),
    Request("POST", "/rollouts/ro-queued", {"config": None}, status=422, code="invalid"),
    Request("POST", "/rollouts/ro-claimed/attempts/latest", {"spans_dropped": -1}, status=422, code="invalid"),
    Request("POST", "/spans", {"rollout_id": "ro-claimed"}, status=422, code="invalid"),
    Request("POST", "/resources", {"resources": {"prompt": {"resource_type": "spell"}}}, status=422, code="invalid"),
    Request("POST", "/resources", {"resources": {"prompt": 7}}, status=422, code="invalid"),
    Request("POST", "/runs/default/metrics", {"step": 1, "values": {"loss": "low"}}, status=422, code="invalid"),
    Request("GET", "/events?kinds=party", status=422, code="invalid"),
    # too large
    Request("POST", "/rollouts", {"input": {"part": LARGE}}, status=413, code="too_large"),
    Request(
        "POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1}, {"input": LARGE}]}, status=413, code="too_large"
    ),
    Request("POST", "/spans", {**SPAN, "attributes": {"text": LARGE}}, status=413, code="too_large"),
    Request("POST", "/spans/batch", {"spans": [SPAN, {**SPAN, "name": LARGE}]}, status=413, code="too_large"),
    Request("POST", "/resources", {"resources": {"prompt": LARGE}}, status=413, code="too_large"),
    Request("POST", "/waits/rollouts", {"rollout_ids": ["ro-claimed"] * 100_001}, status=422, code="invalid"),
    # unknown ids
    Request("GET", "/rollouts/ro-0", status=404, code="not_found"),
    Request("POST", "/rollouts/ro-0", {"mode": "train"}, status=404, code="not_found"),
    Request("POST", "/rollouts/ro-0/cancel", status=404, code="not_found"),
    Request("GET", "/rollouts/ro-0/attempts/latest", status=404, code="not_found"),
    Request("POST", "/rollouts/ro-0/attempts", {}, status=404, code="not_found"),
    Request("POST", "/rollouts/ro-claimed/attempts/at-0", {"status": "running"}, status=404, code="not_found"),
    Request("POST", "/waits/rollouts", {"rollout_ids": ["ro-0"], "timeout": 0}, status=404, code="not_found"),
    Request("POST", "/rollouts", {"input": 1, "resources_id": "rs-0"}, status=404, code="not_found"),
    Request("POST", "/spans/next", {"rollout_id": "ro-0", "attempt_id": "at-0"}, status=404, code="not_found"),
    Request("GET", "/workers/unknown", status=404, code="not_found"),
    Request("GET", "/resources/latest", status=404, code="not_found"),
    Request("GET", "/resources/rs-0", status=404, code="not_found"),
    Request("POST", "/runs/nowhere", {"status": "failed"}, status=404, code="not_found"),
    Request("GET", "/runs/nowhere", status=404, code="not_found"),
    Request("POST", "/spans/batch", {"spans": [SPAN]}, status=404, code="not_found"),
    Request("POST", "/rollouts/ro-claimed/attempts/at-0/release", status=404, code="not_found"),
    Request("POST", "/rollouts/ro-claimed/attempts/at-0/token", {}, status=404, code="not_found"),
    Request("POST", "/resources/rs-0/rollback", {"version": 1}, status=404, code="not_found"),
    # transitions that the lifecycle refuses
    Request("POST", "/rollouts/ro-queued", {"status": "succeeded"}, status=409, code="conflict"),
    Request("POST", "/rollouts/ro-queued/retry", status=409, code="conflict"),
    Request("POST", "/rollouts/ro-claimed/attempts", {}, status=409, code="conflict"),
    Request("POST", "/rollouts/delete", {"rollout_ids": ["ro-queued"]}, status=409, code="conflict"),
    # unknown routes
    Request("GET", "/nothing", status=404, code="no_route"),
    Request("DELETE", "/rollouts/ro-queued", status=405, code="no_route"),
]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_bad_input_gets_a_4xx_answer_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    store = create_store("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/store.db")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id="ro-claimed")])
    await store.dequeue_rollout("worker")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id="ro-queued")])
    before = await _everything(store)
    wrong = []
    async with LightningStoreServer(store, port=0) as server:
        for bad in BAD_REQUESTS:
            status, answer = await ask(server, bad.method, "/v1/agl" + bad.path, bad.body)
            if (status, answer["code"], set(answer)) != (bad.status, bad.code, {"code", "message"}):
                wrong.append(f"{bad}: {status} {str(answer)[:200]}")
            if not answer["message"] or len(answer["message"]) > 2000:
                wrong.append(f"{bad}: its message is {answer['message'][:200]!r}")
            if await _everything(store) != before:
                wrong.append(f"{bad}: changed something")
                before = await _everything(store)
    await store.close()
    assert wrong == []


async def _everything(store: LightningStore) -> Any:
    statistics = await store.statistics()
    return {**statistics, "uptime": 0}, list(await store.query_rollouts()), list(await store.query_workers())


async def test_a_body_that_is_too_large_is_refused_whether_compressed_or_not() -> None:
    async with serve() as (server, store):
        bomb = gzip.compress(b" " * (100 * 2**20), 1)
        assert len(bomb) < 2**20
        for body, headers in ((b" " * (65 * 2**20), {}), (bomb, {"content-encoding": "gzip"})):
            status, answer = await ask(server, "POST", "/v1/agl/rollouts", body, headers=headers)
            assert (status, answer["code"]) == (413, "too_large")
        assert (await store.statistics())["rollouts"] == 0


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_bodies_are_read(coding: str, compress: Any) -> None:
    async with serve() as (server, store):
        body = compress(b'{"input": "squeezed"}')
        status, _ = await ask(server, "POST", "/v1/agl/rollouts", body, headers={"content-encoding": coding})
        assert status == 201
        assert [rollout.input for rollout in await store.query_rollouts()] == ["squeezed"]


async def test_long_answers_are_compressed_if_the_client_accepts_it() -> None:
    async with serve() as (server, store):
        rollout = await claim(store, "x" * 100_000)
        url = f"{server.endpoint}/v1/agl/rollouts/{rollout.rollout_id}"
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            for accepted in ("gzip", "identity"):
                async with session.get(url, headers={"accept-encoding": accepted}) as response:
                    content = await response.read()
                    assert response.headers.get("content-encoding", "identity") == accepted
                    plain = gzip.decompress(content) if accepted == "gzip" else content
                    assert b"x" * 100_000 in plain
                    assert (len(content) < 10_000) == (accepted == "gzip")
