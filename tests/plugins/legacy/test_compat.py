"""``import agentlightning.compat``: the names of Agent Lightning 0.3."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning_plugins.legacy.compat import MODULES, NAMES
from tests.source import REPO, run_python

PREAMBLE = """
import json, sys, warnings
import agentlightning.compat
import agentlightning as agl

seen = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, filename, lineno, *rest: seen.append(
    [category.__name__, filename, str(message)]
)
"""


def run_old_program(program: str) -> tuple[str, list[str]]:
    """Runs a program after ``import agentlightning.compat``; returns what it printed and the warnings."""
    output = run_python("-c", PREAMBLE + textwrap.dedent(program) + "\nprint('WARNINGS', json.dumps(seen))")
    printed, _, warned = output.partition("WARNINGS ")
    warnings: list[list[str]] = json.loads(warned)
    assert {category for category, _, _ in warnings} == {"DeprecationWarning"}
    assert {file for _, file, _ in warnings} == {"<string>"}, "a warning names the line of the program"
    return printed, [message for _, _, message in warnings]


def test_names_of_0_3_can_be_imported_from_their_old_modules() -> None:
    printed, warned = run_old_program(
        """
        from agentlightning.llm_proxy import LLMProxy
        from agentlightning.store.base import LightningStore, UNSET
        from agentlightning.store.memory import InMemoryLightningStore
        from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
        from agentlightning.store.threading import LightningStoreThreaded
        from agentlightning.tracer.base import Tracer
        from agentlightning.tracer.otel import OtelTracer
        from agentlightning.tracer.agentops import AgentOpsTracer
        from agentlightning.adapter.messages import TraceToMessages
        from agentlightning.algorithm.apo import APO
        from agentlightning.algorithm.verl import VERL
        from agentlightning.verl import VERL
        from agentlightning.verl.trainer import VERL
        from agentlightning.runner.agent import LitAgentRunner
        from agentlightning.reward import emit_reward
        from agentlightning.emitter import find_final_reward
        from agentlightning.semconv import AGL_ANNOTATION, AGL_REWARD, LightningSpanAttributes
        from agentlightning.utils.otel import make_link_attributes, make_tag_attributes
        from agentlightning.types.core import Rollout
        import agentlightning.store.memory

        assert agentlightning.store.memory.InMemoryLightningStore is agl.InMemoryLightningStore
        assert (LLMProxy, VERL, APO, Tracer, Rollout) == (agl.LLMProxy, agl.VERL, agl.APO, agl.Tracer, agl.Rollout)
        assert LightningStoreThreaded(store := InMemoryLightningStore()) is store
        assert find_final_reward([emit_reward(0.5, propagate=False)]) == 0.5
        print(AGL_ANNOTATION, AGL_REWARD, LightningSpanAttributes.REWARD.value)
        print(make_link_attributes({"a": "b"}), make_tag_attributes(["x"]))
        """
    )
    assert printed.splitlines() == [
        "agentlightning.annotation agentlightning.reward agentlightning.reward",
        "{'agentlightning.link.0.key_match': 'a', 'agentlightning.link.0.value_match': 'b'} "
        "{'agentlightning.tag.0': 'x'}",
    ]
    assert len(warned) == 25
    for expected in (
        "agentlightning.llm_proxy.LLMProxy is of Agent Lightning 0.3; use agentlightning.LLMProxy",
        "agentlightning.store.base.UNSET is of Agent Lightning 0.3; use agentlightning.types.UNSET",
        "agentlightning.reward.emit_reward is of Agent Lightning 0.3; use agentlightning.emit_reward",
        "agentlightning.emitter.find_final_reward is of Agent Lightning 0.3; use agentlightning.find_final_reward",
        "agentlightning.semconv.AGL_REWARD is of Agent Lightning 0.3; use agentlightning.semconv.SPAN_REWARD",
        "agentlightning.utils.otel.make_tag_attributes is of Agent Lightning 0.3; "
        "use agentlightning.semconv.tag_attributes",
    ):
        assert expected in warned


def test_arguments_and_methods_of_0_3_are_accepted() -> None:
    printed, warned = run_old_program(
        """
        import asyncio

        class Agent(agl.LitAgent):
            def __init__(self):
                super().__init__(trained_agents="writer")

            def rollout(self, task, resources, rollout):
                return float(task)

        store = agl.InMemoryLightningStore()
        trainer = agl.Trainer(
            n_workers=1,
            algorithm={"type": "agentlightning.algorithm.Baseline", "n_epochs": 1},
            strategy={"type": "shm"},
            store=store,
            tracer="dummy",
            trackers=[],
            daemon=True,
        )
        print(trainer.dev(Agent(), [1, 2]).status, trainer.n_runners, Agent().trained_agents)

        async def use_proxy():
            proxy = agl.LLMProxy()
            proxy.set_store(store)
            print(proxy.is_running(), bool(proxy.is_running))
            await proxy.restart()
            print(proxy.is_running())
            await proxy.stop()

        asyncio.run(use_proxy())
        client = agl.LightningStoreClient(server_address="http://127.0.0.1:4747", request_timeout=3)
        print(client.run_id)
        """
    )
    assert printed.splitlines() == ["succeeded 1 writer", "False False", "True", "default"]
    assert [re.sub(r" is of Agent Lightning 0\.3; use .*", "", message) for message in warned] == [
        "Trainer(n_workers=)",
        'Trainer(algorithm={"type": ...})',
        'Trainer(strategy={"type": ...})',
        "Trainer(daemon=)",
        "LitAgent(trained_agents=)",
        "LitAgent(trained_agents=)",
        "LLMProxy.set_store(store)",
        "LLMProxy.is_running()",
        "LLMProxy.restart()",
        "LLMProxy.is_running()",
        "LightningStoreClient(request_timeout=)",
        "LightningStoreClient(server_address=)",
    ]


def test_the_error_for_an_unknown_name_refers_to_a_similar_name_and_the_migration_page() -> None:
    printed, _ = run_old_program(
        """
        import agentlightning.store.memory
        agentlightning.store.memory.InMemoryLightningStore
        try:
            agentlightning.store.memory.InMemoryLightningStor
        except AttributeError as error:
            print(error)
        try:
            from agentlightning import Nothing
        except ImportError as error:
            print(error)
        """
    )
    first, second = printed.splitlines()
    assert "Did you mean 'InMemoryLightningStore'? See docs/migration.md" in first
    assert second.startswith("there is no agentlightning.Nothing;")


def test_spans_are_found_by_links_as_in_0_3() -> None:
    from agentlightning_plugins.legacy import compat

    spans = [agl.emit_annotation({"conversation": name}, propagate=False) for name in ("a", "b")]
    linked = agl.emit_reward(1.0, attributes=agl.semconv.link_attributes({"conversation": "b"}), propagate=False)
    links = compat.extract_links_from_attributes(linked.attributes)
    assert compat.query_linked_spans(spans, links) == [spans[1]]
    by_id = [compat.LinkPydanticModel("span_id", spans[0].span_id)]
    assert compat.query_linked_spans(spans, by_id) == [spans[0]]
    assert compat.extract_tags_from_attributes(agl.semconv.tag_attributes(["x"])) == ["x"]


def test_without_compat_the_names_of_0_3_are_not_available() -> None:
    program = """
    import sys, agentlightning as agl
    print(hasattr(agl, "configure_logger"), "agentlightning.llm_proxy" in sys.modules)
    """
    assert run_python("-c", textwrap.dedent(program)).strip() == "False False"


def test_the_migration_page_lists_every_name() -> None:
    page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
    listed: set[Any] = set(re.findall(r"`([^`]+)`", page))
    modules = {f"agentlightning.{module}" for module in MODULES}
    assert modules - listed == set()
    assert set(NAMES) - listed == set()
    assert set(agl.__all__) - listed == set(), "the page must state whether 0.3 had the name"


@pytest.mark.parametrize(
    "line",
    ["from agentlightning import DevTaskLoader", "from agentlightning.llm_proxy import LLMProxy",
     "import agentlightning.store.memory", "import agentlightning as agl; agl.BaseTracer"],
    ids=["name", "module", "submodule", "attribute"],
)  # fmt: skip
def test_an_old_name_without_the_line_that_restores_it_names_the_page(line: str) -> None:
    program = f"""
        try:
            {line}
        except (ImportError, AttributeError) as error:
            print(error)
        import agentlightning
        print(hasattr(agentlightning, "no_such_name"))
    """
    said = run_python("-c", textwrap.dedent(program))
    assert "import agentlightning.compat" in said
    assert "docs/migration.md" in said
    assert said.endswith("False\n")


def test_only_an_import_of_an_unknown_module_is_an_error() -> None:
    program = "import importlib.util, agentlightning; print(importlib.util.find_spec('agentlightning.no_such_module'))"
    assert run_python("-c", program) == "None\n"


async def test_links_without_attributes_are_stored_as_empty_ones() -> None:
    store = agl.InMemoryLightningStore()
    server = agl.LightningStoreServer(store, port=0)
    await server.start()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    span = agl.Span.from_attributes(**ids, sequence_id=1, attributes={}).model_dump(mode="json")
    context = {"trace_id": span["trace_id"], "span_id": span["span_id"], "is_remote": False, "trace_state": {}}
    span["links"] = [{"context": context, "attributes": None}]
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{server.endpoint}/v1/agl/spans", json=span)
    assert answer.status_code in (200, 201), answer.text
    (stored,) = await store.query_spans(rollout.rollout_id)
    assert [dict(link.attributes) for link in stored.links] == [{}]
    await server.stop()
    await store.close()


def test_linked_spans_are_found_among_spans_of_opentelemetry_and_requests_may_be_called_rollouts() -> None:
    printed, warned = run_old_program(
        """
        import asyncio
        from opentelemetry.sdk.trace import TracerProvider
        from agentlightning.emitter import query_linked_spans
        from agentlightning.utils.otel import LinkPydanticModel
        from agentlightning.types import EnqueueRolloutRequest

        span = TracerProvider().get_tracer("t").start_span("a", attributes={"id": "x"})
        other = TracerProvider().get_tracer("t").start_span("b", attributes={"id": "x"})
        trace_id = format(span.get_span_context().trace_id, "032x")
        links = [LinkPydanticModel("id", "x"), LinkPydanticModel("trace_id", trace_id)]
        assert query_linked_spans([other, span], links) == [span]

        async def enqueue():
            store = agl.InMemoryLightningStore()
            queued = await store.enqueue_many_rollouts(rollouts=[EnqueueRolloutRequest(input=1)])
            print(len(queued), (await store.query_rollouts(limit=0)).total)
            await store.close()

        asyncio.run(enqueue())
        """
    )
    assert printed == "1 1\n"
    assert any("enqueue_many_rollouts(requests)" in line for line in warned)


def test_the_raw_request_of_the_gateway_of_0_3_is_a_model_call_whose_tokens_an_agent_cannot_claim() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None}]}
    answer = {"message": {"role": "assistant", "content": "it's 4"}, "finish_reason": "stop"}
    raw = {
        "model": "qwen", "id": "chatcmpl-1", "temperature": 0.5, "prompt_token_ids": str([1, 2]),
        "messages": str([{"role": "user", "content": "What's 2 + 2?"}]),
        "choices": str([{**answer, "index": 0, "logprobs": logprobs, "token_ids": [7]}]),
    }  # fmt: skip
    place: dict[str, Any] = {"rollout_id": "ro-1", "attempt_id": "at-1", "start_time": 1.0, "end_time": 2.0}
    named = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "qwen", "gen_ai.response.id": "chatcmpl-1"}
    request = agl.Span.from_attributes(name="litellm_request", span_id="1" * 16, attributes=named, **place)
    attributes = {f"llm.hosted_vllm.{name}": value for name, value in raw.items()}
    call = agl.Span.from_attributes(name="raw_gen_ai_request", parent_id="1" * 16, attributes=attributes, **place)
    (triplet,) = agl.TraceToTriplet().adapt([request, call])
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [7])
    assert triplet.response["logprobs"] == [-0.5]
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "What's 2 + 2?"}]
    assert triplet.response["raw_content"] == [{"role": "assistant", "content": "it's 4"}]
    (claimed,) = agl.TraceToTriplet().adapt([agl.semconv.distrust(call)])
    assert claimed.response["token_ids"] == []
    for text in ("[" * 10_000, "[{1: 2}]", "[open('x')]"):
        hostile = {**attributes, "llm.hosted_vllm.choices": text}
        assert agl.semconv.read_output_messages(call.model_copy(update={"attributes": hostile})) == []


@pytest.mark.parametrize(
    ("name", "attributes", "reward"),
    [
        ("reward.task", {"agentops.task.output": '{"type": "reward", "value": 0.25}'}, 0.25),
        ("agentlightning.annotation", {"reward": 0.5}, 0.5),
        ("reward.task", {"agentops.entity.output": '{"type": "reward", "value": 1}'}, 1.0),
        ("agentlightning.reward", {"reward": 0.75}, 0.75),
        ("reward.task", {"agentops.task.output": '{"type": "reward", "value": null}'}, None),
        ("search.task", {"agentops.task.output": '{"type": "answer", "value": 1}'}, None),
        ("search.task", {"agentops.task.output": "no JSON", "reward": 1.0}, None),
    ],
)
def test_rewards_of_earlier_releases_are_read(name: str, attributes: dict[str, Any], reward: float | None) -> None:
    span = agl.Span.from_attributes(attributes=attributes, name=name)
    assert agl.is_reward_span(span) is (reward is not None)
    assert agl.find_final_reward([span]) == reward
    assert [dimension.value for dimension in agl.get_rewards_from_span(span)] == ([] if reward is None else [reward])
