"""How much the spans of an attempt and of a run may take, on every way into a store."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import agentlightning as agl
from agentlightning.errors import QuotaError
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.reply import Answer
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI
from agentlightning_plugins.shared.training_records.record import LedgerEntry
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store
from tests.waiting import LIMIT_S

PROTOBUF = "content-type: application/x-protobuf\r\n"
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AGL_ATTEMPT_MIB": "1", "AGL_ATTEMPT_SPANS": "50", "AGL_RUN_SPANS": "60"}.items():
        monkeypatch.setenv(name, value)


def spans_of(ids: tuple[str, str], number: int, **attributes: Any) -> list[dict[str, Any]]:
    found: dict[str, Any] = {"rollout_id": ids[0], "attempt_id": ids[1], "trace_id": "1" * 32, "name": "any"}
    return [{**found, "span_id": f"{next(_numbers):016x}", "attributes": attributes} for _ in range(number)]


def export_of(number: int, **resource: str) -> bytes:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    for name, text in resource.items():
        group.resource.attributes.add(key=name).value.string_value = text
    scope = group.scope_spans.add()
    for _ in range(number):
        scope.spans.add(name="any", trace_id=b"1" * 16, span_id=next(_numbers).to_bytes(8, "big"))
    return bytes(request.SerializeToString())


def attempt_of(store: StoreProcess, rollout_id: str) -> Any:
    return store.ask("GET", f"{AGL}/rollouts/{rollout_id}/attempts/latest", token=TOKEN).json()


@pytest.mark.parametrize("backend", ["memory://", "sqlite:///store.db"])
async def test_spans_above_a_quota_are_refused_and_counted_and_the_attempt_goes_on(
    tmp_path: Path, backend: str
) -> None:
    with running_store(tmp_path, backend=backend) as store:
        rollout_id, attempt_id, token = store.claim()
        ids = rollout_id, attempt_id
        bomb = gzip.compress(json.dumps({"spans": spans_of(ids, 2, text="x" * 2**20)}).encode())
        answer = store.ask("POST", f"{AGL}/spans/batch", bomb, token=token, headers="content-encoding: gzip\r\n")
        assert (answer.status, answer.json()["code"]) == (413, "over_quota")
        assert "limit of 1 MiB; raise AGL_ATTEMPT_MIB" in answer.json()["message"]
        many_containers = spans_of(ids, 1, lists=[[]] * 30_000)[0]
        assert store.post("/spans", many_containers, token=token).status == 413, "90 KB take 2 MB of memory"
        answer = store.ask("POST", "/v1/traces", export_of(30, text="x" * 100_000), token=token, headers=PROTOBUF)
        exported = ExportTraceServiceResponse.FromString(answer.body)
        assert exported.partial_success.rejected_spans == 30, "each span repeats its resource"
        assert "AGL_ATTEMPT_MIB" in exported.partial_success.error_message
        assert attempt_of(store, rollout_id)["spans_dropped"] == 33

        kept = spans_of(ids, 45)
        assert store.post("/spans/batch", {"spans": kept}, token=token).status == 201
        for _ in range(3):  # repeated spans do not count
            assert store.post("/spans/batch", {"spans": kept[:5]}, token=token).status == 201
        answer = store.post("/spans/batch", {"spans": spans_of(ids, 6)}, token=token)
        assert answer.status == 413
        assert "limit of 50; raise AGL_ATTEMPT_SPANS" in answer.json()["message"]
        assert store.post("/spans/batch", {"spans": spans_of(ids, 5)}, token=token).status == 201
        assert attempt_of(store, rollout_id)["status"] == "running"
        path = f"/rollouts/{rollout_id}/attempts/{attempt_id}"
        assert store.post(path, {"status": "succeeded", "spans_dropped": 1}).json()["spans_dropped"] == 39

        rollout_id, attempt_id, token = store.claim()
        answer = store.post("/spans/batch", {"spans": spans_of((rollout_id, attempt_id), 11)}, token=token)
        assert answer.status == 413
        assert "run 'default' has stored 50 spans" in answer.json()["message"]
        assert "AGL_RUN_SPANS" in answer.json()["message"]
        client = LightningStoreClient(store.url, TOKEN)
        with pytest.raises(QuotaError, match="AGL_RUN_SPANS"):
            await client.add_many_spans([agl.Span.model_validate(s) for s in spans_of((rollout_id, attempt_id), 11)])
        await client.close()


async def test_a_restarted_store_counts_the_spans_that_an_attempt_has_stored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = agl.create_store(url)
    rollout = await store.start_rollout({})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 45)])
    await store.close()
    store = agl.create_store(url)
    with pytest.raises(QuotaError, match="has stored 45 spans, and 6 more"):
        await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 6)])
    for _ in range(5):
        await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 1)])
    with pytest.raises(QuotaError, match="has stored 50 spans"):
        await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 1)])
    await store.close()


async def test_an_attempt_that_is_full_does_not_stop_the_records_of_the_trainer() -> None:
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout({})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 50)])
    with pytest.raises(QuotaError):
        await store.add_many_spans([agl.Span.model_validate(span) for span in spans_of(ids, 1)])
    entry = LedgerEntry(*ids, 1, "group", "failed").to_span()
    assert await store.add_span(entry) is not None
    await store.close()


def test_an_export_has_at_most_2000_spans(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        *_, token = store.claim()
        answer = store.ask("POST", "/v1/traces", export_of(2001), token=token, headers=PROTOBUF)
        assert answer.status == 413
        assert b"2001 spans, and 2000 are allowed" in answer.body


async def test_a_call_above_the_quota_is_answered_and_counted_as_lost() -> None:
    store = agl.InMemoryLightningStore(lease_s=LIMIT_S)
    long = Answer("x" * 2**18)  # with ids and log-probabilities more than 1 MiB
    async with ScriptedOpenAI([long]) as server:
        proxy = LLMProxy(model_list=[{"model": "m", "endpoint": server.endpoint}], store=store)
        await proxy.start()
        rollout = await store.start_rollout({})
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        async with aiohttp.ClientSession() as session:
            key = {"Authorization": f"Bearer {llm.api_key}"}
            async with session.post(f"{llm.endpoint}/chat/completions", json=body, headers=key) as answer:
                assert answer.status == 200
        await proxy.flush()
        await proxy.stop()
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        assert attempt.spans_dropped == 1
        assert not await store.query_spans(rollout.rollout_id)
    await store.close()


def test_a_limit_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ATTEMPT_MIB", "1e3")
    with pytest.raises(agl.ConfigError, match="AGL_ATTEMPT_MIB='1e3': give a whole number"):
        agl.InMemoryLightningStore()
