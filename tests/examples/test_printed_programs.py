"""Programs as the documents of Agent Lightning print them: their names, arguments and order of calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from opentelemetry.sdk.trace import TracerProvider
from pyarrow import parquet

import agentlightning as agl
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.configuration.sources import load_attribute
from tests.algorithms.prompt_lab import BEST, TRAIN, VAL, Server, client, critic_and_editor, is_critic, phrases, worth
from tests.algorithms.server_thread import threads_for_servers
from tests.plugins.commands.agl_here import run_here
from tests.source import REPO


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
            beam_width=2, branch_factor=3, beam_rounds=8,
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


_CALC_AGENT = """
import json, logging, os, re, sys, urllib.request

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

task = json.loads(os.environ["AGL_TASK_INPUT"])
question = task if sys.argv[1:] else task["question"]
model = sys.argv[2] if sys.argv[1:] else os.environ["AGL_MODEL_NAME"]
call = {"model": model, "messages": [{"role": "user", "content": question}]}
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", call)["choices"][0]["message"]["content"]
answer = re.sub(r"\\s", "", said) or "None"
print("Extracted answer:", answer) if sys.argv[1:] else logging.info("Answer: %s", answer)
post(os.environ["AGL_EVENT_URL"], {"event_type": "agent_output", "data": {"answer": answer, "raw_response": said}})
"""
"""Reads, calls, prints and posts as the programs of the two examples of 1.0 do, without AutoGen and its calculator."""


@pytest.mark.parametrize("example", ["calc_x", "math"])
def test_the_two_examples_of_1_0_that_the_page_about_migration_shows_train(example: str, tmp_path: Path) -> None:
    page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```(?:yaml|python)\n# (\w+\.(?:yaml|py))(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text("#" + text)
    for name in ("calc_agent.py", "qa_agent.py"):
        (tmp_path / name).write_text(_CALC_AGENT)
    rows = [{"question": f"{number} plus 2", "result": str(number + 2), "answer": number + 2} for number in range(7)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    (tmp_path / "gsm8k_sample.jsonl").write_text("\n".join(map(json.dumps, rows)))
    here = {
        "model": str(CHECKPOINT),
        "device": "cpu",
        "dtype": "float32",
        "steps": 1,
        "tasks_per_step": 2,
        "eval_every": 0,
    }
    here |= {"sampling.max_tokens": 16, "rollouts_per_task": 2, "experience.keep_flat_groups": True}
    settings = [f"algorithm.{name}={json.dumps(value)}" for name, value in here.items()]
    with threads_for_servers():
        done = run_here(tmp_path, "train", f"{example}.yaml", *settings, "--run-dir", "run")
    assert done.code == 0, done.stderr
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (step,) = [found for found in lines if "loss" in found]
    assert (step["rollouts"], step["rollouts_without_reward"], step["calls_without_tokens"]) == (4.0, 0.0, 0.0)
    scored = load_attribute(f"{tmp_path}/{'calc_x' if example == 'calc_x' else 'gsm8k'}.py:reward")
    with contextlib.chdir(tmp_path):
        task = rows[0] if example == "calc_x" else rows[0]["question"]
        said = [f"03:00 INFO Answer: {text}\nExtracted answer: {text}" for text in ("2", "3")]
        assert [scored(task, output, None) for output in said] == [1.0, 0.0]
