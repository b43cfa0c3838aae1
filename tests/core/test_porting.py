"""Programs written for Agent Lightning 0.3, which run unchanged."""

from __future__ import annotations

import asyncio
import logging
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import PluginImportError, install_command
from agentlightning.store import LightningStoreServer
from agentlightning.types import LLM, EnqueueRolloutRequest, Hook, PromptTemplate, ProxyLLM, Span
from tests.source import run_python

SEEN: list[Any] = []


@pytest.fixture
def store() -> agl.LightningStore:
    return agl.InMemoryLightningStore()


async def run_agent(store: agl.LightningStore, agent: Any, *, tracer: agl.Tracer | None = None) -> agl.Rollout:
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(tracer or agl.DummyTracer())
    with runner.run_context(agent=agent, store=store):
        return await runner.step("a task", resources={"prompt_template": "plain text {x}"})


def rate(task: str, prompt_template: PromptTemplate) -> float:
    return float(prompt_template.format(x=task) == "plain text a task")


class Rater:
    """A callable object."""

    async def __call__(self, task: str, prompt_template: PromptTemplate) -> float:
        return rate(task, prompt_template)


@pytest.mark.parametrize("agent", [rate, Rater(), agl.rollout(rate)])
async def test_a_runner_accepts_everything_that_wrap_accepts(store: agl.LightningStore, agent: Any) -> None:
    rollout = await run_agent(store, agent)
    assert (rollout.status, agl.find_final_reward(await store.query_spans(rollout.rollout_id))) == ("succeeded", 1.0)


def test_a_runner_refuses_what_is_not_an_agent(store: agl.LightningStore) -> None:
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with pytest.raises(agl.ConfigError, match="7 is not an agent"), runner.run_context(agent=7, store=store):
        pass


class Introspective(agl.LitAgent[Any]):
    """An agent that reads the runner, tracer and trainer of its rollout."""

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        SEEN.append((self.runner, self.tracer))
        return 1.0 if self.trainer is None else float(self.trainer.max_concurrency)


async def test_a_running_agent_has_its_runner_and_tracer_as_attributes(store: agl.LightningStore) -> None:
    SEEN.clear()
    agent, tracer = Introspective(), agl.OtelTracer()
    rollout = await run_agent(store, agl.wrap(agent, reward=lambda task, output, rollout: output), tracer=tracer)
    assert rollout.status == "succeeded"
    ((runner, seen),) = SEEN
    assert isinstance(runner, agl.LitAgentRunner)
    assert seen is tracer
    with pytest.raises(AttributeError, match=r"Introspective\.tracer is available only while a rollout"):
        _ = agent.tracer
    agent.tracer = "its own"
    assert agent.tracer == "its own"


@pytest.mark.parametrize("strategy", ["shm", {"name": "cs", "n_runners": 1}])
def test_a_running_agent_can_read_settings_of_its_trainer(strategy: Any) -> None:
    store = agl.InMemoryLightningStore()
    agl.Trainer(store=store, strategy=strategy, tracer="dummy", trackers=[], max_concurrency=3).dev(
        Introspective(), [1]
    )
    (rollout,) = asyncio.run(store.query_rollouts()).items
    assert isinstance(rollout, agl.AttemptedRollout)
    assert (rollout.attempt.error, rollout.attempt.reward) == (None, 3.0)


async def test_an_agent_can_return_spans_of_opentelemetry(store: agl.LightningStore) -> None:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

    def agent(task: str) -> list[ReadableSpan]:
        with TracerProvider().get_tracer("mine").start_as_current_span("work") as span:
            span.set_attribute("agentlightning.reward.0.value", 0.5)
        assert isinstance(span, ReadableSpan)
        return [span]

    rollout = await run_agent(store, agent)
    assert rollout.status == "succeeded"
    (stored,) = await store.query_spans(rollout.rollout_id, name="work")
    assert stored.sequence_id > 0
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.reward == 0.5


def test_the_module_types_exports_resources_and_hooks() -> None:
    assert (LLM, ProxyLLM, PromptTemplate, Hook) == (agl.LLM, agl.ProxyLLM, agl.PromptTemplate, agl.Hook)
    from agentlightning import types

    assert types.NamedResources is agl.NamedResources
    assert types.ResourcesUpdate is agl.ResourcesUpdate
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from agentlightning.types import Nothing  # noqa: F401 # does not exist


class Custom(agl.Baseline):
    """A user's algorithm."""


def test_components_can_be_given_as_classes_and_import_paths() -> None:
    path = f"{Custom.__module__}.{Custom.__qualname__}"
    given: list[Any] = [Custom, path, path.replace(".Custom", ":Custom"), {"name": path, "n_epochs": 2}]
    made = [agl.Trainer(algorithm=algorithm).algorithm for algorithm in given]
    assert [type(algorithm).__name__ for algorithm in made] == ["Custom"] * 4
    assert isinstance(made[-1], agl.Baseline)
    assert made[-1].n_epochs == 2
    trainer = agl.Trainer(
        store=agl.InMemoryLightningStore,
        tracer=agl.DummyTracer,
        strategy=agl.SharedMemoryExecutionStrategy,
        runner=agl.LitAgentRunner,
        adapter=agl.TraceToTriplet,
    )
    assert isinstance(trainer.store, agl.InMemoryLightningStore)
    assert isinstance(trainer.tracer, agl.DummyTracer)
    assert isinstance(trainer.strategy, agl.SharedMemoryExecutionStrategy)
    assert (
        trainer.dev(rate, ["x"], reward=None).status == "failed"
    )  # it ran and failed because there is no prompt_template


def test_adapter_settings_without_a_name_apply_to_the_default_adapter() -> None:
    adapter: Any = agl.Trainer(adapter={"agent_match": "writer"}).adapter
    assert type(adapter) is agl.TraceToTriplet
    assert agl.Trainer(algorithm=agl.APO(), adapter={}).adapter.__class__ is agl.TraceToMessages


async def test_a_rollout_can_be_enqueued_with_the_fields_of_a_request(store: agl.LightningStore) -> None:
    request = EnqueueRolloutRequest(
        input={"n": 1}, mode="val", config=agl.RolloutConfig(max_attempts=3), rollout_id="ro-mine"
    )
    rollout = await store.enqueue_rollout(**request.model_dump())
    assert (rollout.rollout_id, rollout.mode, rollout.config.max_attempts) == ("ro-mine", "val", 3)


def test_links_and_tags_are_read_as_they_were_written() -> None:
    links = {"gen_ai.response.id": "r-1", "span_id": "ab" * 8}
    attributes = {**semconv.link_attributes(links), **semconv.tag_attributes(["fast", "good"])}
    span = agl.emit_reward(1.0, attributes=attributes, propagate=False)
    assert semconv.read_links(span) == list(links.items())
    assert semconv.read_tags(span) == ["fast", "good"]
    assert semconv.read_tags(Span.from_attributes(attributes={})) == []


@pytest.fixture
def other_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("a_library_of_this_test")
    yield logger
    for handler in [*logger.handlers, *logging.getLogger("agentlightning").handlers]:
        handler.close()
    logger.handlers.clear()
    logger.propagate = True


def test_setup_logging_writes_to_files_and_can_include_other_loggers(
    tmp_path: Path, other_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "agl.log"
    for _ in range(2):
        agl.setup_logging("INFO", console=False, files=path, apply_to=[other_logger.name])
    logging.getLogger("agentlightning.part").info("first")
    other_logger.info("second")
    agl.setup_logging("DEBUG", console=False, files={other_logger.name: tmp_path / "other.log"})
    other_logger.info("third")
    assert [line.split(": ")[-1] for line in path.read_text().splitlines()] == ["first", "second", "third"]
    assert "third" in (tmp_path / "other.log").read_text()
    assert "first" not in capsys.readouterr().err


async def test_the_server_accepts_requests_of_the_0_3_client(store: agl.LightningStore) -> None:
    import aiohttp

    rollout = await store.start_rollout("task")
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    span = {
        **agl.emit_message("hello", propagate=False).model_dump(mode="json"),
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": 5,
        "kind": "SpanKind.INTERNAL",  # 0.3 keeps these fields of OpenTelemetry
        "resource": {"attributes": {}, "schema_url": "", "other": 1},
        "links": [{"context": {"trace_id": "0" * 32, "span_id": "0" * 16, "is_remote": False, "trace_state": {}}}],
    }
    async with LightningStoreServer(store, port=0) as server, aiohttp.ClientSession() as session:

        async def post(path: str, body: Any) -> Any:
            async with session.post(f"{server.endpoint}/v1/agl{path}", json=body) as response:
                answer = await response.json()
                assert response.status < 300, answer
                return answer

        llm = {"resource_type": "llm", "endpoint": "http://x/v1", "model": "m", "sampling_parameters": {}}
        added = await post("/resources", {"main_llm": llm})
        assert added["resources"]["main_llm"]["model"] == "m"
        updated = await post(f"/resources/{added['resources_id']}", {"resources": {**llm, "model": "n"}})
        assert updated["resources"]["resources"]["model"] == "n"  # a resource with the name `resources`
        ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        assert await post("/spans/next", ids) == {"sequence_id": 1}
        assert (await post("/spans", span))["sequence_id"] == 5
        query = {"limit": -1, "offset": 0, "sort_by": None, "sort_order": "asc"}
        found = await post(f"/rollouts/{rollout_id}/attempts/search", query)
        assert [item["attempt_id"] for item in found["items"]] == [attempt_id]


LAPTOP = textwrap.dedent(
    """
    import importlib.metadata, sys

    absent = set("openai torch verl omegaconf hydra numpy transformers ray gepa tensordict safetensors".split())
    sys.modules.update(dict.fromkeys(absent))  # importing them fails
    distribution = importlib.metadata.distribution

    def find(name):
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    importlib.metadata.distribution = find
    """
)


def test_algorithms_can_be_imported_constructed_and_printed_without_their_packages() -> None:
    program = """
    import agentlightning as agl
    from agentlightning.algorithm import APO, VERL, Baseline

    config = {"data": {"train_batch_size": 64}, "trainer.n_gpus_per_node": 2}
    print(VERL(config).print_config())
    for algorithm in (VERL(config), APO()):
        try:
            agl.Trainer(algorithm=algorithm, strategy="shm").fit(lambda task: 1.0, [1])
        except ImportError as error:
            print("ERROR", error)
    for wrong in ({"data.train_files": 1}, {"data.train_batch_size": 33}):
        try:
            VERL(wrong)
        except agl.ConfigError as error:
            print("ERROR", error)
    try:
        from agentlightning.algorithm import GEPA
    except ImportError as error:
        print("ERROR", error)
    """
    output = run_python("-c", LAPTOP + textwrap.dedent(program))
    assert "verl is not installed here" in output
    assert "train_batch_size: 64" in output
    assert "max_prompt_length: 4096" in output
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    for expected, error in zip(
        [
            f"Install with: {install_command('verl')}",
            f"the algorithm 'apo' needs openai. Install with: {install_command('apo')}",
            "verl's data.train_files cannot be set",
            "train_batch_size = 33 is not a multiple",
            f"needs gepa, openai. Install with: {install_command('gepa')}",
        ],
        errors,
        strict=True,
    ):
        assert expected in error


def test_a_plugin_import_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(PluginImportError("no package")))
    assert isinstance(error, ImportError)
    assert isinstance(error, agl.PluginError)
    assert str(error) == "no package"


def test_without_its_plugin_the_old_names_say_how_to_install_it() -> None:
    program = """
        import sys
        sys.modules["agentlightning_plugins.legacy"] = None  # as if its folder did not exist
        try:
            import agentlightning.compat
        except ImportError as error:
            print(error)
    """
    said = run_python("-c", textwrap.dedent(program))
    assert "needs the plugin legacy" in said
    assert f"Install it with: {install_command('')}\n" in said
