"""Limits of an attempt token, tested with a real store process."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.reward import find_final_reward
from agentlightning.types import Span
from agentlightning_plugins.shared.training_records.query import read_entry, read_rows
from agentlightning_plugins.shared.training_records.record import LedgerEntry, TrainedCall, TrainedRow, explain_unused
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store
from tests.source import REPO

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


def _export(
    store: StoreProcess,
    token: str,
    attributes: dict[str, Any],
    *,
    name: str = "any",
    kind: str = "application/x-protobuf",
) -> ExportTraceServiceResponse:
    """Sends one span by OTLP."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(name=name, trace_id=b"1" * 16)
    span.span_id = next(_numbers).to_bytes(8, "big")
    for key, value in attributes.items():
        span.attributes.add(key=key).value.double_value = value
    body = request.SerializeToString()
    if kind == "application/json":
        content = MessageToDict(request)
        ids = content["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        ids.update(traceId=span.trace_id.hex(), spanId=span.span_id.hex())
        body = json.dumps(content).encode()
    answer = store.ask("POST", "/v1/traces", body, token=token, headers=f"content-type: {kind}\r\n")
    assert answer.status == 200, answer
    response = ExportTraceServiceResponse()
    if kind == "application/json":
        return ParseDict(answer.json(), response)
    response.ParseFromString(answer.body)
    return response


def _reward(value: float) -> dict[str, Any]:
    return {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}


def _read_table() -> dict[str, bool]:
    """Returns whether an agent may write each name in the table of SECURITY.md."""
    text = (REPO / "SECURITY.md").read_text(encoding="utf-8").partition("## Who writes what")[2].partition("##")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name: row[3].strip() == "yes" for row in rows[1:] for name in re.findall("`([^`]+)`", row[1])}


@pytest.mark.parametrize("name", [name for name, is_allowed in _read_table().items() if not is_allowed])
def test_an_attempt_token_cannot_write_what_weights_are_trained_on(store: StoreProcess, name: str) -> None:
    rollout_id, attempt_id, token = store.claim()
    good = _span(rollout_id, attempt_id, {"mine": 1})
    forgeries: list[dict[str, Any]] = [_span(rollout_id, attempt_id, {name: -1.0})]
    if name.startswith(semconv.TRAINING):
        forgeries.append({**good, "name": name})
    elif name.startswith(semconv.TRAINING_ID):
        forgeries = [{**good, "span_id": name}]
    for forged in forgeries:
        for path, content in (("/spans", forged), ("/spans/batch", {"spans": [good, forged]})):
            answer = store.post(path, content, token=token)
            assert answer.status == 403
            assert name in answer.json()["message"]
        if forged["span_id"] != name:  # OTLP has binary ids
            for kind in ("application/x-protobuf", "application/json"):
                exported = _export(store, token, forged["attributes"], name=forged["name"], kind=kind)
                assert exported.partial_success.rejected_spans == 1
                assert name in exported.partial_success.error_message
        stripped = semconv.distrust(Span.from_attributes(**forged))
        assert stripped.attributes[semconv.UNTRUSTED] == [name]
        kept = {key: value for key, value in stripped.attributes.items() if key != semconv.UNTRUSTED}
        assert name not in (stripped.span_id, *kept)
        assert stripped.name != name
    assert store.post("/spans/search", {"rollout_id": rollout_id}).json()["total"] == 0
    assert re.search(rb"agl_store_refused_spans_total [1-9]", store.ask("GET", "/metrics", token=TOKEN).body)
    assert store.post("/spans/batch", {"spans": [good]}, token=token).status == 201
    if not name.startswith(semconv.TRAINING):
        assert store.post("/spans", forgeries[0], token=TOKEN).status == 201, "the gateway has the store's token"


def test_the_table_of_security_md_has_every_protected_name_and_some_that_agents_may_write(store: StoreProcess) -> None:
    table = _read_table()
    protected = {*semconv._PROTECTED, *(name for name, is_allowed in table.items() if not is_allowed)}
    assert protected == {name for name, is_allowed in table.items() if not is_allowed}
    assert all(any(name.startswith(prefix) for name in protected) for prefix in semconv._PROTECTED_PREFIXES)
    rollout_id, attempt_id, token = store.claim()
    allowed = {name: 0.5 for name, is_allowed in table.items() if is_allowed}
    assert len(allowed) > 2
    assert store.post("/spans", _span(rollout_id, attempt_id, allowed), token=token).status == 201
    assert _export(store, token, allowed).partial_success.rejected_spans == 0


@pytest.mark.parametrize("shown", ["attempt", "store"])
async def test_tokens_in_a_raw_answer_count_only_if_a_trusted_runner_recorded_them(
    store: StoreProcess, shown: str
) -> None:
    rollout_id, attempt_id, token = store.claim()
    answer = {"id": "c", "prompt_token_ids": [1], "choices": [{"token_ids": [2]}]}
    call = {"openinference.span.kind": "LLM", "output.value": json.dumps(answer)}
    content = {"spans": [_span(rollout_id, attempt_id, attributes) for attributes in (call, _reward(1.0))]}
    assert store.post("/spans/batch", content, token=token if shown == "attempt" else TOKEN).status == 201
    assert store.post(f"/rollouts/{rollout_id}/attempts/{attempt_id}", {"status": "succeeded"}).status == 200
    client = LightningStoreClient(store.url, TOKEN)
    spans = (await client.query_spans(rollout_id, attempt_id)).items
    await client.close()
    (triplet,) = TraceToTriplet().adapt(spans)
    assert find_final_reward(spans) == 1.0
    assert triplet.response["token_ids"] == ([] if shown == "attempt" else [2])
    assert explain_unused(triplet) == ("untrusted" if shown == "attempt" else "no_logprobs")


async def test_training_records_come_from_the_trainer_only_and_are_checked_when_they_arrive(
    store: StoreProcess,
) -> None:
    rollout_id, attempt_id, token = store.claim()
    entry = LedgerEntry(rollout_id, attempt_id, 1, "task", "trained", 1.0, {"c": "trained"})
    call = TrainedCall("c", 0, 2, 1.0)
    row = TrainedRow(rollout_id, attempt_id, 1, [1], [2, 3], [1, 1], [-0.5, -0.5], None, [call], 1.0)
    own = [json.loads(record.to_span().model_dump_json()) for record in (entry, row)]
    for record in own:
        taken = {**_span(rollout_id, attempt_id, {}), "span_id": record["span_id"]}  # the store ignores a second one
        assert store.post("/spans", taken, token=token).status == 403
        assert store.post("/spans", record, token=token).status == 403
    attributes = own[1]["attributes"]
    for name, value in {"ends": [10**9], "mask": [10**9], "starts": "ab", "outcome": "x", "token_ids": "AAA="}.items():
        broken = {**own[1], "attributes": {**attributes, f"{semconv.TRAINING}.{name}": value}}
        answer = store.post("/spans/batch", {"spans": [broken]})
        assert (answer.status, answer.json()["code"]) == (422, "invalid")
    assert store.post("/spans/batch", {"spans": own}).status == 201
    client = LightningStoreClient(store.url, TOKEN)
    assert await read_rows(client, rollout_id) == [row]
    assert read_entry((await client.query_spans(rollout_id)).items) == entry
    await client.close()


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
