"""Programs as the documents of Agent Lightning print them: their names, arguments and order of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

import agentlightning as agl
from tests.algorithms.prompt_lab import BEST, TRAIN, VAL, Server, client, critic_and_editor, is_critic, phrases, worth


@agl.rollout
def agent(
    task: Mapping[str, Any],
    prompt_template: agl.PromptTemplate = agl.PromptTemplate("Answer: {question}"),  # noqa: B008 # as it is printed
) -> float:
    filled = prompt_template.format(question=task["question"])
    agl.emit_state(question=task["question"])
    agl.emit_state(draft=f"draft of {task['question']}")
    return worth(filled)


@agl.rollout
def promptless(task: Mapping[str, Any]) -> float:
    return 1.0


def test_apo_tunes_the_default_value_of_a_parameter_and_its_critic_sees_the_states(tmp_path: Path) -> None:
    with Server(critic_and_editor) as server:
        apo = agl.APO(
            client(server), gradient_model="critic", apply_edit_model="editor",
            beam_width=2, branch_factor=3, beam_rounds=4,
        )  # fmt: skip
        store = agl.create_store(f"sqlite:///{tmp_path}/store.db")
        run = agl.Trainer(algorithm=apo, store=store, n_runners=2).fit(agent, TRAIN, VAL)
        critics = [request.body["messages"][0]["content"] for request in server.requests if is_critic(request)]
    assert run.status == "succeeded"
    assert phrases(apo.get_best_prompt().template) == BEST
    assert apo.history[0].prompts["prompt_template"].template == "Answer: {question}"
    assert critics
    for text in critics:
        assert "1. question = train " in text
        assert "2. draft = draft of train " in text


def test_apo_without_any_prompt_is_refused_as_before() -> None:
    with Server(critic_and_editor) as server:
        apo = agl.APO(client(server), gradient_model="critic", apply_edit_model="editor")
        with pytest.raises(agl.ConfigError, match="no prompt to tune"):
            agl.Trainer(algorithm=apo, strategy="shm").fit(promptless, TRAIN, VAL)


def test_a_program_traces_with_a_plain_with_and_adapts_what_it_recorded() -> None:
    tracer = agl.OtelTracer()
    tracer.init()
    with tracer.trace_context("my-agent"), tracer.operation_context("step"):
        agl.emit_reward(0.5)
    spans = tracer.get_last_trace()
    tracer.teardown()
    assert agl.find_final_reward(spans) == 0.5
    assert agl.TraceToTriplet().adapt(spans) == []


async def test_a_loop_that_learns_continuously_polls_spans_and_publishes_resources() -> None:
    store = agl.InMemoryLightningStore()
    provider = TracerProvider()
    provider.add_span_processor(agl.LightningSpanProcessor(store))
    tracer = provider.get_tracer("the user's own")
    seen, cursor = [], None
    for number in range(3):
        with tracer.start_as_current_span(f"request {number}"):
            pass
        assert provider.force_flush()
        page = await store.poll_new_spans(cursor)
        cursor = page.cursor
        seen += [span.name for span in page]
        await store.update_resources("tuned", {"prompt": f"learned from {len(seen)} spans"})
    assert seen == ["request 0", "request 1", "request 2"]
    optimized = await store.get_optimized_resources()
    assert optimized is not None
    assert (optimized.version_id, optimized.resources["prompt"]) == (
        "tuned@3",
        agl.PromptTemplate("learned from 3 spans"),
    )
    provider.shutdown()
    await store.close()


async def test_an_urgent_task_goes_first() -> None:
    store = agl.InMemoryLightningStore()
    await store.enqueue_rollout("ordinary")
    await store.enqueue_rollout("urgent", priority=10)
    claimed = await store.dequeue_rollout("worker-1")
    assert claimed is not None
    assert claimed.input == "urgent"
    await store.close()


def test_state_is_recorded_as_json_and_needs_a_variable() -> None:
    with agl.DummyTracer().trace_context() as trace:
        agl.emit_state(question="where?", found=[{"page": 1}], odd=object)
    (span, _root) = trace.spans
    state = json.loads(str(span.attributes[agl.semconv.STATE]))
    assert (state["question"], state["found"]) == ("where?", [{"page": 1}])
    with pytest.raises(agl.ConfigError, match="at least one variable"):
        agl.emit_state()
