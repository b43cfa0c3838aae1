"""Limits of an attempt token, tested with a real store process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning.reward import find_final_reward
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store

_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    folder: Path = tmp_path_factory.mktemp("store")
    backend = "memory://" if request.param == "memory" else f"sqlite:///{folder}/store.db"
    with running_store(folder, backend=backend) as process:
        yield process


def _span(rollout_id: str, attempt_id: str, attributes: dict[str, Any]) -> dict[str, Any]:
    span_id = f"{next(_numbers):016x}"
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": "1" * 32, "span_id": span_id}
    return {**ids, "name": "any", "attributes": attributes}


def _export(store: StoreProcess, token: str, attributes: dict[str, Any]) -> ExportTraceServiceResponse:
    """Sends one span by OTLP."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(name="any", trace_id=b"1" * 16)
    span.span_id = next(_numbers).to_bytes(8, "big")
    for name, value in attributes.items():
        span.attributes.add(key=name).value.double_value = value
    headers = "content-type: application/x-protobuf\r\n"
    answer = store.ask("POST", "/v1/traces", request.SerializeToString(), token=token, headers=headers)
    assert answer.status == 200, answer
    response: ExportTraceServiceResponse = ExportTraceServiceResponse.FromString(answer.body)
    return response


def _reward(value: float) -> dict[str, Any]:
    return {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}


@pytest.mark.parametrize(
    "name",
    ["agentlightning.gateway.complete", "agentlightning.gateway.cost", "agentlightning.weight_version"],
)
def test_an_attempt_token_cannot_write_attributes_reserved_for_the_gateway(store: StoreProcess, name: str) -> None:
    rollout_id, attempt_id, token = store.claim()
    forged = _span(rollout_id, attempt_id, {name: -1.0})
    good = _span(rollout_id, attempt_id, {"mine": 1})
    for path, content in (("/spans", forged), ("/spans/batch", {"spans": [good, forged]})):
        answer = store.post(path, content, token=token)
        assert answer.status == 403
        assert name in answer.json()["message"]
    exported = _export(store, token, {name: -1.0})
    assert exported.partial_success.rejected_spans == 1
    assert name in exported.partial_success.error_message
    assert store.post("/spans/search", {"rollout_id": rollout_id}).json()["total"] == 0
    assert store.post("/spans/batch", {"spans": [good]}, token=token).status == 201
    assert store.post("/spans", forged, token=TOKEN).status == 201, "the gateway has the store's token"


async def test_an_attempt_token_cannot_change_the_reward_after_the_end_of_the_attempt(store: StoreProcess) -> None:
    rollout_id, attempt_id, token = store.claim()
    ids = rollout_id, attempt_id
    assert store.post("/spans", _span(*ids, _reward(0.25)), token=token).status == 201
    assert store.post(f"/rollouts/{rollout_id}/attempts/{attempt_id}", {"status": "succeeded"}).status == 200

    assert store.post("/spans", _span(*ids, _reward(1.0)), token=token).status == 201
    assert store.post("/spans/batch", {"spans": [_span(*ids, _reward(1.0))]}, token=token).status == 201
    assert _export(store, token, {"agentlightning.reward.0.value": 1.0}).partial_success.rejected_spans == 0
    assert store.post("/spans", _span(*ids, {"agentlightning.late": False}), token=token).status == 403

    client = LightningStoreClient(store.url, TOKEN)
    spans = await client.query_spans(rollout_id, attempt_id)
    await client.close()
    assert [span.attributes.get("agentlightning.late", False) for span in spans] == [False, True, True, True]
    assert find_final_reward(spans) == 0.25


def test_a_span_number_that_would_block_later_spans_is_refused(store: StoreProcess) -> None:
    rollout_id, attempt_id, token = store.claim()
    stalling = {**_span(rollout_id, attempt_id, {}), "sequence_id": 2**63 - 1}
    assert store.post("/spans", stalling, token=token).status == 422
    assert _export(store, token, {"agentlightning.span_sequence_id": 2.0**63}).partial_success.rejected_spans == 1
    answer = store.post("/spans/batch", {"spans": [_span(rollout_id, attempt_id, {})]}, token=token)
    assert (answer.status, answer.json()) == (201, {"sequence_ids": [1]})


def test_a_request_that_an_attempt_token_does_not_allow_is_refused_before_its_body_is_read(store: StoreProcess) -> None:
    _, _, token = store.claim()
    for path in ("/rollouts/search", "/queues/rollouts/enqueue", "/runs"):
        assert store.ask("POST", AGL + path, b"{", token=token).status == 403
