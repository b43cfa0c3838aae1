"""Hostile spans of attempts, given to everything that reads spans: nothing but the attempt itself may fail."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.errors import AdapterError
from agentlightning.reward import get_rewards_from_span
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning_algorithms.baseline import _summarize
from agentlightning_algorithms.grpo.episode import describe_episodes, read_episode
from agentlightning_algorithms.grpo.experience import build_experience, training_spans
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.prompt_search.critique import show_rollouts
from agentlightning_algorithms.shared.prompt_search.trial import read_trial_result
from agentlightning_algorithms.shared.rollout_result import read_result
from agentlightning_plugins.adapters import TraceToTransitions
from agentlightning_plugins.dashboard import rollout as rollout_page
from agentlightning_plugins.dashboard.dashboard import Dashboard
from agentlightning_plugins.shared.chat_history import TraceToMessages, select_examples, select_pairs
from agentlightning_plugins.shared.statistics.comparison import compare_rollouts
from agentlightning_plugins.shared.training_records.record import RECORDS, LedgerEntry
from agentlightning_plugins.shared.trajectories import TraceToTrajectories
from agentlightning_plugins.trackers.shared import make_row
from tests.plugins.commands.agl_here import run_here
from tests.process import cpu_unit_s
from tests.security.fuzz import change
from tests.security.loop_watch import Turn, watch_loop

_SEEDS = 300
_VOCABULARY = 50
_CREDIT = ("identical", "nearest", "discounted", {"name": "intermediate", "tool_success": 0.1})
_TEXT = "x" * 2000
_DEEP = ["[" * 100_000, '{"a":' * 50_000, "[NaN," + "[" * 90_000, "[" * 90 + "]" * 90, "[" * 700 + "]" * 700]
_VALUES: list[Any] = [
    *_DEEP, 1e308, -1e308, 2**63 - 1, -(2**63), -1, 0, 0.5, True, None, "", "x", "NaN", "1e400", "\x00\x1b[2J", _TEXT,
    "9" * 5000, [], {}, [None], [[]], [1.5], [-1], [10**9], [2**40], list(range(300)), {"a": {"b": [1]}}, ["x", 1],
    '[{"role": 1, "content": {"a": 1}}]', '[{"role": "assistant", "tool_calls": [1, null, {"function": "f"}]}]',
    '[{"role": ["user"], "parts": 5}]', '[{"parts": [1, null, {"type": "text", "content": {"a": NaN}}]}]',
    '[{"role": "user", "content": [1, {"type": "text"}, {"type": "image_url", "image_url": 3}]}]',
    '[{"role": "assistant", "content": "\\ud800"}]', '[{"function": "f"}, {"name": 3}, 4]', '{"choices": 5}',
    '{"choices": [{"token_ids": ["a"], "logprobs": {"content": [1]}}], "id": {"a": 1}}',
    '[{"role": "assistant", "parts": [{"type": "tool_call", "arguments": %s}]}]' % ("[" * 400 + "]" * 400),
]  # fmt: skip


def _messages(role: str, text: str, **more: Any) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], **more}])


def _trace(rollout_id: str, attempt_id: str) -> list[dict[str, Any]]:
    """Returns the spans of an attempt with two model calls, a tool and rewards, as JSON."""
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": "1" * 32}
    asked, said = _messages("user", "2 + 3?"), _messages("assistant", "5")
    call = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.input.messages": asked}
    call |= {"gen_ai.output.messages": said, "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 2}
    tokens = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "logprobs": [-0.1, -0.2]}
    gateway = {**tokens, "agentlightning.gateway.complete": True, "agentlightning.weight_version": 1}
    tool_call = {"id": "t", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    raw = {"id": "c2", "prompt_token_ids": [1], "choices": [{"token_ids": [5], "finish_reason": "stop"}]}
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
    contents: list[tuple[str, str | None, dict[str, Any]]] = [
        ("agent", None, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "a"}),
        ("chat m", "agent", {**call, "gen_ai.response.id": "c1", "gen_ai.request.temperature": 0.7}),
        ("POST", "chat m", {**call, **gateway, "gen_ai.response.id": "c1", "gen_ai.request.temperature": 1.0}),
        ("LLM", "agent", {"openinference.span.kind": "LLM", "output.value": json.dumps(raw), "llm.model_name": "m"}),
        ("tool", "agent", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}),
        ("old", "agent", {"gen_ai.prompt.0.content": "hi", "gen_ai.completion.0.content": "ho", **call}),
        ("answer", "agent", {**call, "gen_ai.output.messages": json.dumps([{"tool_calls": [tool_call]}])}),
        ("agentlightning.reward", "agent", {**reward, **semconv.link_attributes({"gen_ai.response.id": "c1"})}),
        ("agentlightning.reward", "agent", {**reward, "agentlightning.reward.1.name": "style",
                                            "agentlightning.reward.1.value": 1}),
    ]  # fmt: skip
    names = {name: f"{place + 1:016x}" for place, (name, _, _) in enumerate(contents)}
    return [
        {**ids, "span_id": f"{place + 1:016x}", "parent_id": names.get(parent or ""), "name": name}
        | {"start_time": 1e9 + place, "end_time": 1e9 + place + 1.5, "attributes": attributes}
        for place, (name, parent, attributes) in enumerate(contents)
    ]


_NAMES = [
    *sorted({name for span in _trace("r", "a") for name in span["attributes"]}),
    "gen_ai.tool.definitions", "gen_ai.system_instructions", "gen_ai.response.finish_reasons", "agentlightning.tag.0",
    "agentlightning.choice.1.response_token_ids", "agentlightning.weight_versions", "agentlightning.training.ends",
    "gen_ai.prompt.²1.content", "gen_ai.prompt." + "9." * 3000, "llm.tools.0.tool.json_schema", "agentops.task.output",
    "gen_ai.tool.call.id", "agentlightning.operation.name", "gen_ai.completion.0.tool_calls.0.arguments",
    "agentlightning.link.0.value_match", "error.type", "agentlightning.gateway.cost", "agentlightning.gateway.backend",
]  # fmt: skip
_FIELDS: dict[str, tuple[Any, ...]] = {
    "start_time": (1e308, -1e308, 0.0, -1.0, 1e18, None),
    "end_time": (1e308, -1e308, 0.0, 1e18, None),
    "parent_id": ("0" * 15 + "1", "x", None),
    "name": (*RECORDS, _TEXT, "", "chat (cached)", "agentlightning.rollout"),
    "status": ({"status_code": "ERROR", "description": _TEXT}, {"status_code": "OK"}),
    "events": ([{"name": "exception", "attributes": {"exception.message": _TEXT}, "timestamp": 1e308}],),
}


def hostile_spans(chance: random.Random, rollout_id: str, attempt_id: str) -> list[Span]:
    """Returns the spans of an attempt with random changes; those that no store accepts are left out."""
    spans = []
    for number, span in enumerate(_trace(rollout_id, attempt_id)):
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            if chance.random() < 0.2:
                name = chance.choice(list(_FIELDS))
                span[name] = chance.choice(_FIELDS[name])
            elif chance.random() < 0.3:
                span["attributes"] = change(span["attributes"], chance)
            elif isinstance(span["attributes"], dict):
                known = list(span["attributes"]) if chance.random() < 0.5 else _NAMES
                span["attributes"] = {**span["attributes"], chance.choice(known or _NAMES): chance.choice(_VALUES)}
        try:
            made = Span.model_validate({**span, "sequence_id": number + 1})
        except ValueError:
            continue
        is_own = chance.random() < 0.5  # a tracer in a runner records what an agent does, too
        spans.append(semconv.distrust(made) if is_own else made)
    return spans


def make_adapters() -> list[TraceAdapter[Any]]:
    triplets = [TraceToTriplet(), TraceToTriplet(agent_match="a"), *(TraceToTriplet(credit=rule) for rule in _CREDIT)]
    others: list[TraceAdapter[Any]] = [TraceToMessages(), TraceToTransitions(), TraceToTrajectories()]
    return [*triplets, *others, agl.LlmProxyTraceToTriplet()]


async def _store(seeds: int) -> tuple[agl.LightningStore, list[Rollout]]:
    """Returns a store with an ended rollout for each seed."""
    store = agl.create_store("memory://")
    await store.add_metrics(1, {"outcome/trained": 1.0, "reward": 0.5})
    ended = []
    for seed in range(seeds):
        chance = random.Random(seed)
        metadata = {"step": 0, "group": f"g{seed // 8}", "task_id": seed % 8, "label": "good"}
        started = await store.start_rollout({"n": seed % 8}, mode="train", metadata=metadata, worker_id="w")
        ids = started.rollout_id, started.attempt.attempt_id
        spans = hostile_spans(chance, *ids)
        await store.add_many_spans(spans)
        reward = agl.find_final_reward(spans) if chance.random() < 0.5 else agl.types.UNSET
        await store.update_attempt(*ids, status="succeeded", reward=reward)
        rollout = await store.get_rollout_by_id(ids[0])
        assert rollout is not None
        ended.append(rollout)
    return store, ended


async def test_adapters_and_algorithms_read_hostile_spans_or_leave_out_their_attempt() -> None:
    store, rollouts = await _store(_SEEDS)
    adapters, outcomes = make_adapters(), {"read": 0, "refused": 0}
    episodes, results, trials = [], [], []
    for rollout in rollouts:
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        for adapter in adapters:
            try:
                adapter.adapt(spans)
                outcomes["read"] += 1
            except AdapterError:
                outcomes["refused"] += 1
        assert all(abs(reward.value) <= semconv.MAX_REWARD for span in spans for reward in get_rewards_from_span(span))
        json.dumps(make_row(rollout, spans))
        episodes.append(read_episode(rollout, spans, adapters[2]))
        results.append(await read_result(store, rollout))
        trials.append(await read_trial_result(store, rollout, TraceToMessages()))
    assert min(outcomes.values()) > 20, outcomes
    experience = build_experience(episodes, ExperienceSettings(), max_length=1000, vocabulary=_VOCABULARY)
    assert len(experience.rows) > _SEEDS / 10
    assert all(max(*row.prompt_ids, *row.response_ids) < _VOCABULARY for row in experience.rows)
    describe_episodes(episodes)
    records = training_spans(experience, 1, episodes=episodes)
    await store.add_many_spans(records)
    assert len(records) == len(experience.rows) + len(episodes), "each attempt is in the ledger"
    _summarize(results)
    show_rollouts(trials, "prompt")
    assert [example async for example in select_examples(store)]
    assert [pair async for pair in select_pairs(store)]
    await compare_rollouts(store, "g0", "g1")
    await store.close()


async def test_pages_show_hostile_spans(caplog: pytest.LogCaptureFixture) -> None:
    store, rollouts = await _store(_SEEDS // 2)
    server = agl.LightningStoreServer(store, port=0, pages=[Dashboard(store)])
    await server.start()
    pages = ["", "/rollouts", "/rollouts?text=x&messages=1", "/ledger", "/ledger?step=1", "/labelled.jsonl"]
    pages += [f"/group?name=g{number}" for number in range(_SEEDS // 16)]
    for rollout in rollouts:
        pages += [f"/rollouts/{rollout.rollout_id}", f"/rollouts/{rollout.rollout_id}/tokens"]
    twins = [f"{path}.json{sign}{query}" for path, sign, query in (page.partition("?") for page in pages if page)]
    failed = []
    async with aiohttp.ClientSession(server.endpoint, timeout=aiohttp.ClientTimeout(20)) as session:
        for page in [*pages, *(twin for twin in twins if "jsonl" not in twin)]:
            async with session.get(f"/runs/default{page}") as answer:
                body = await answer.read()
            if answer.status != 200:
                failed.append((page, answer.status, body[-300:]))
            elif "json" in page:
                list(map(orjson.loads, body.splitlines() if "jsonl" in page else [body]))
        for page in ("/fleet", "/fleet.json"):
            async with session.get(page) as answer:
                assert answer.status == 200
    await server.stop()
    assert failed == [], caplog.text[-3000:]


def test_commands_show_and_export_hostile_spans(tmp_path: Path) -> None:
    async def fill() -> list[str]:
        source, rollouts = await _store(_SEEDS // 15)
        store = agl.create_store(f"sqlite:///{tmp_path / 'agl.db'}")
        ids = []
        for rollout in rollouts:
            assert isinstance(rollout, AttemptedRollout)
            spans = await source.query_spans(rollout.rollout_id)
            own = await store.start_rollout(rollout.input, mode="train", metadata=rollout.metadata)
            changes = {"rollout_id": own.rollout_id, "attempt_id": own.attempt.attempt_id}
            await store.add_many_spans([span.model_copy(update=changes) for span in spans])
            await store.update_attempt(*changes.values(), status="succeeded", reward=rollout.attempt.reward)
            ids.append(own.rollout_id)
        await store.close()
        return ids

    ids = asyncio.run(fill())
    commands = [["rollouts", "list"], ["ledger"], ["ledger", "--step", "1"], ["compare", "g0", "g1"], ["top", "--once"]]
    commands += [["rollouts", "export", "r.jsonl"], ["spans", "export", "s.jsonl"]]
    commands += [["rollouts", "export", "sft.jsonl", "--format", "openai-sft", "--min-reward", "0"]]
    for rollout_id in ids:
        commands += [["rollouts", "show", rollout_id], ["rollouts", "show", rollout_id, "--json"]]
        commands += [["spans", "list", rollout_id], ["tokens", rollout_id]]
    failed = [(command, said) for command in commands if (said := run_here(tmp_path, *command)).code != 0]
    assert failed == []


async def _add_calls(store: agl.LightningStore, name: str, calls: int) -> str:
    """Adds an attempt with calls of one conversation, each of which records its 60 messages."""
    rollout = await store.start_rollout("task", metadata={"group": name, "label": "good"})
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 30
    for number in range(calls):
        asked = json.dumps([*before, {"role": "user", "content": f"question {number}"}])
        call = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": asked, "gen_ai.response.id": f"c{number}"}
        call["gen_ai.output.messages"] = _messages("assistant", f"answer {number}")
        await store.add_span(Span.from_attributes(attributes=call, name="chat", **ids))
    await store.update_attempt(*ids.values(), status="succeeded")
    return rollout.rollout_id


@pytest.mark.serial
async def test_pages_about_many_calls_take_linear_time() -> None:
    store = agl.create_store("memory://")
    few, many = [await _add_calls(store, f"g{calls}", calls) for calls in (200, 800)]
    server = agl.LightningStoreServer(store, port=0, pages=[Dashboard(store)])
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:

        async def measure(path: str) -> float:
            began = time.process_time()
            async with session.get(f"/runs/default{path}") as answer:
                assert answer.status == 200
                await answer.read()
            return time.process_time() - began

        for path in ("/rollouts/{}.json", "/group?name=g{}"):
            costs = {}
            for calls, rollout_id in ((200, few), (800, many)):
                page = path.format(rollout_id if "rollouts" in path else calls)
                costs[calls] = min([await measure(page) for _ in range(2)])
            assert costs[800] < 9 * costs[200], f"{path}: 4 times the calls; {costs}"
    await server.stop()
    await store.close()


@pytest.mark.serial
async def test_no_page_holds_the_loop_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rollouts = await _store(_SEEDS // 10)
    large = await _add_calls(store, "large", 400)
    ids = {"rollout_id": large, "attempt_id": (await store.query_attempts(large)).items[0].attempt_id}
    for content in ("x" * 2**21, list(range(2**18)), [["x", 1]] * 50_000, {"a": [{"b": [1]}] * 30_000}):
        message = json.dumps([{"role": "user", "content": [content]}])
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": message, "other": content}
        await store.add_span(Span.from_attributes(attributes=attributes, name="chat", **ids))
    pages = ["", "/rollouts", "/rollouts?text=never&messages=1", "/ledger", "/ledger?step=1", "/labelled.jsonl"]
    pages += ["/group?name=g0", "/group?name=large", "/resources"]
    for rollout_id in (large, *(rollout.rollout_id for rollout in rollouts[:8])):
        pages += [f"/rollouts/{rollout_id}", f"/rollouts/{rollout_id}.json", f"/rollouts/{rollout_id}/tokens"]
    server = agl.LightningStoreServer(store, port=0, pages=[Dashboard(store)])
    await server.start()
    gc.disable()  # as in `agl store`, which collects rarely
    with watch_loop(monkeypatch, "agl-store-server") as longest:
        async with aiohttp.ClientSession(f"{server.endpoint}/runs/default/") as session:
            for page in pages:
                limit, turns = 0.05 / 0.06 * cpu_unit_s(), list[Turn]()
                for _ in range(3):  # other processes of a busy machine make a turn longer, never shorter
                    longest.clear()
                    async with session.get(f"/runs/default{page}") as answer:
                        assert answer.status == 200
                        await answer.read()
                    turns.append(longest[0])
                    if longest[0].cpu_s < limit:
                        break
                assert min(turns).cpu_s < limit, (page, turns)
    gc.enable()
    await server.stop()
    await store.close()


async def test_a_page_leaves_out_what_is_too_large_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = agl.create_store("memory://")
    rollout_id = await _add_calls(store, "g", 30)
    (rollout,) = await store.query_rollouts()
    assert isinstance(rollout, AttemptedRollout)
    entry = LedgerEntry(rollout_id, rollout.attempt.attempt_id, 1, "g", "stale")
    await store.add_span(entry.to_span())
    monkeypatch.setattr(rollout_page, "MAX_BYTES", 20_000)
    monkeypatch.setattr(rollout_page.read_attempt, "__defaults__", (20_000,))
    server = agl.LightningStoreServer(store, port=0, pages=[Dashboard(store)])
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:
        async with session.get(f"/runs/default/rollouts/{rollout_id}.json") as answer:
            shown = (await answer.json())["shown"]
        async with session.get(f"/runs/default/rollouts/{rollout_id}") as answer:
            html = await answer.text()
        async with session.get("/runs/default/labelled.jsonl") as answer:
            line = orjson.loads(await answer.read())
    await server.stop()
    await store.close()
    assert 0 < len(shown["spans"]) < 20
    assert (shown["span_total"], shown["outcome"]) == (30, "stale")
    assert shown["spans_left_out"] == line["spans_left_out"] == 30 - len(shown["spans"])
    assert f"The last {shown['spans_left_out']} of" in html
