"""GEPA with the same store, agents and budgets as APO."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.trace import get_tracer

import agentlightning as agl
from agentlightning.event import ResourcesPublished, StepFinished
from agentlightning.testing.algorithm import AlgorithmConformance
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms.prompt_lab import BEST, SEED, TRAIN, VAL, WORTH, Server, agent, client, phrases


def reflect(request: RecordedRequest) -> Answer:
    """Adds a phrase, chosen by a hash of the examples, to the instructions."""
    asked = request.body["messages"][0]["content"]
    found = re.search(r"```\n(.*?)\n```", asked, re.DOTALL)
    assert found is not None
    missing = sorted(set(WORTH) - phrases(found[1]))
    digest = hashlib.blake2b(" ".join(re.findall(r"train \d+", asked)).encode(), digest_size=4).digest()
    more = f"\n{missing[int.from_bytes(digest) % len(missing)]}" if missing else ""
    return Answer(f"```\n{found[1]}{more}\n```")


@pytest.fixture
def server() -> Iterator[ScriptedOpenAI]:
    with Server(reflect) as scripted:
        yield scripted


def make(server: ScriptedOpenAI, **settings: Any) -> Any:
    defaults = {"reflection_model": "reflector", "max_rollouts": 300}
    return agl.GEPA(client(server), **{**defaults, **settings})


def train(gepa: Any, agent: Any = agent, resources: Any = None, **settings: Any) -> agl.LightningStore:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm=gepa,
        store=store,
        strategy="shm",
        initial_resources=resources or {"prompt": SEED},
        **{"tracer": "dummy", "trackers": [], **settings},
    )
    assert trainer.fit(agent, TRAIN, VAL).status == "succeeded"
    return store


def test_gepa_finds_the_best_prompt_and_offers_the_same_results_as_apo(server: ScriptedOpenAI) -> None:
    gepa = make(server, target_score=1.0)
    store = train(gepa)
    assert phrases(gepa.get_best_prompt().template) == BEST
    assert gepa.stopped_because == "target_score"
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert latest.resources == {"prompt": gepa.get_best_prompt()}
    ids = {candidate.candidate_id for candidate in gepa.history}
    assert all(candidate.parent_id in ids for candidate in gepa.history[1:])
    assert phrases(gepa.diff()) >= BEST
    last = asyncio.run(store.query_metrics()).items[-1].values
    assert last["reward"] == 1.0
    assert last["model_calls"] == len(server.requests)


def test_a_budget_of_calls_or_rollouts_ends_the_search(server: ScriptedOpenAI) -> None:
    gepa = make(server, max_calls=2)
    train(gepa)
    assert len(server.requests) == 2
    assert gepa.stopped_because == "budget"
    gepa = make(server, max_rollouts=30)
    store = train(gepa)
    assert gepa.stopped_because == "rollouts"
    assert 14 < len(asyncio.run(store.query_rollouts())) <= 30


def test_gepa_reserves_the_model_calls_that_the_confirmation_needs(server: ScriptedOpenAI) -> None:
    """Of 200 calls, 80 are reserved for two prompts on 40 tasks, even if minibatches have only 3 tasks."""

    def calling(task: Any, prompt: agl.PromptTemplate) -> float:
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        with get_tracer(__name__).start_as_current_span("chat", attributes=attributes):
            return 0.5

    gepa = make(server, max_calls=200, max_rollouts=2000)
    trainer = agl.Trainer(
        algorithm=gepa, store="memory://", strategy="shm", trackers=[], initial_resources={"prompt": SEED}
    )
    trainer.fit(calling, TRAIN, [{"question": f"val {number}"} for number in range(40)])
    assert gepa.stopped_because == "budget"
    assert 120 <= gepa.budget.metrics()["model_calls"] <= 120 + 7


def test_the_same_seed_gives_the_same_lineage(server: ScriptedOpenAI) -> None:
    def lineage(seed: int) -> list[Any]:
        gepa = make(server, seed=seed, max_rollouts=80)
        train(gepa)
        return [(each.candidate_id, each.parent_id, each.score) for each in gepa.history]

    assert lineage(1) == lineage(1) != lineage(2)


def test_a_resumed_search_repeats_no_model_call_and_no_rollout(server: ScriptedOpenAI, tmp_path: Path) -> None:
    runs = 0

    def counting(task: Any, prompt: agl.PromptTemplate) -> float:
        nonlocal runs
        runs += 1
        return agent(task, prompt)

    def fit(gepa: Any, resume: bool) -> None:
        agl.Trainer(
            algorithm=gepa,
            store=f"sqlite:///{tmp_path / 'store.db'}",
            strategy="shm",
            tracer="dummy",
            trackers=[],
            run_dir=tmp_path / "run",
            resume=resume,
            initial_resources={"prompt": SEED},
        ).fit(counting, TRAIN, VAL)

    first = make(server, max_rollouts=40)
    fit(first, resume=False)
    calls, ran = len(server.requests), runs
    again = make(server, max_rollouts=40)
    fit(again, resume=True)
    assert (len(server.requests), runs) == (calls, ran)
    assert again.history == first.history
    longer = make(server, max_rollouts=120)
    fit(longer, resume=True)
    ids = [[each.candidate_id for each in search.history] for search in (first, longer)]
    assert ids[1][: len(ids[0])] == ids[0]
    assert runs > ran


def test_a_failing_model_ends_the_search_and_keeps_the_seed_prompt() -> None:
    with Server([Answer(status=401, error="wrong key")]) as server:
        gepa = make(server)
        with pytest.raises(
            agl.LightningError, match="learned nothing because its model calls failed: AuthenticationError"
        ):
            train(gepa)
    assert gepa.stopped_because == "model_calls_failed"
    assert gepa.get_best_prompt() == agl.PromptTemplate(SEED)


def test_an_edit_without_its_placeholder_is_repaired() -> None:
    def careless(request: RecordedRequest) -> Answer:
        if len(request.body["messages"]) == 1:
            return Answer("```\nforgot it\n```")
        assert "it lost the placeholders {question}" in request.body["messages"][-1]["content"]
        return reflect(request)

    with Server(careless) as server:
        gepa = make(server, max_rollouts=40)
        train(gepa)
    assert len(gepa.history) > 1
    assert all("{question}" in each.prompts["prompt"].template for each in gepa.history)


def test_prompts_of_several_resources_are_tuned(server: ScriptedOpenAI) -> None:
    def two_prompts(task: Any, planner: agl.PromptTemplate, writer: agl.PromptTemplate) -> float:
        return (agent(task, planner) + agent(task, writer)) / 2

    gepa = make(server, max_rollouts=120)
    train(gepa, two_prompts, {"planner": SEED, "writer": SEED})
    assert {name for candidate in gepa.history for name in candidate.edited} == {"planner", "writer"}
    assert gepa.get_best().score > 0


def test_several_prompts_are_edited_together_each_with_its_own_reflection_prompt(server: ScriptedOpenAI) -> None:
    def two_prompts(task: Any, planner: agl.PromptTemplate, writer: agl.PromptTemplate) -> float:
        return (agent(task, planner) + agent(task, writer)) / 2

    own = {"planner": "You edit plans.\n```\n<curr_param>\n```\n<side_info>"}
    gepa = make(server, max_rollouts=100, prompts_per_child=2, reflection_prompt=own)
    train(gepa, two_prompts, {"planner": SEED, "writer": SEED})
    parents = {each.candidate_id for each in gepa.history}
    assert {"planner", "writer"} in [set(each.edited) for each in gepa.history[1:]]
    assert all(each.parent_id in parents for each in gepa.history[1:]), "what was made in between is no candidate"
    asked = [request.body["messages"][0]["content"] for request in server.requests]
    assert {each.startswith("You edit plans.") for each in asked} == {True, False}


def test_a_subclass_chooses_the_prompt_that_a_child_edits(server: ScriptedOpenAI) -> None:
    class OnlyWriter(agl.GEPA):
        def choose_names(self, parent: Any, turn: int) -> list[str]:
            return ["writer"]

    def two_prompts(task: Any, planner: agl.PromptTemplate, writer: agl.PromptTemplate) -> float:
        return (agent(task, planner) + agent(task, writer)) / 2

    gepa = OnlyWriter(client(server), reflection_model="reflector", max_rollouts=100)
    train(gepa, two_prompts, {"planner": SEED, "writer": SEED})
    assert {name for candidate in gepa.history for name in candidate.edited} == {"writer"}


def test_the_cost_of_reflections_has_its_own_limit_which_the_calls_of_agents_do_not_use(server: ScriptedOpenAI) -> None:
    prices = {"reflector": (1e6, 0.0)}  # each token of a request costs 1
    whole = make(server, prices=prices)
    train(whole)
    limit = whole.reflection_budget.metrics()["cost"] / 2
    n_calls = len(server.requests)
    half = make(server, prices=prices, max_reflection_cost=limit)
    train(half)
    assert half.stopped_because == "budget"
    assert 0 < len(server.requests) - n_calls < n_calls
    half.budget.spend([CallUsage("reflector", 10**9)])  # as an agent's
    assert half.reflection_budget.metrics()["cost"] < 2 * limit
    with pytest.raises(agl.ConfigError, match="needs the price of 'reflector'"):
        make(server, max_reflection_cost=1.0)


def test_a_tracker_is_a_callback_of_every_round_and_candidate(server: ScriptedOpenAI) -> None:
    class Callback:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def start(self, run: Any, directory: Path | None) -> None:
            self.events.clear()

        def on_event(self, event: Any) -> None:
            self.events.append(event)

        def close(self) -> None:
            pass

    callback, gepa = Callback(), make(server, max_rollouts=100)
    train(gepa, trackers=[callback])
    steps = [event for event in callback.events if isinstance(event, StepFinished)]
    assert {"best_score", "progress", "candidates"} <= steps[1].values.keys()
    assert steps[-1].values["progress"] == 1.0
    published = {event.resources_id for event in callback.events if isinstance(event, ResourcesPublished)}
    assert len(published) >= len(gepa.history), "each candidate is a snapshot"


def make_at(endpoint: str, **settings: Any) -> Any:
    from openai import AsyncOpenAI

    defaults = {"reflection_model": "reflector", "max_rollouts": 60}
    return agl.GEPA(AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0), **{**defaults, **settings})


class TestConformance(AlgorithmConformance):
    agent = staticmethod(agent)
    train_dataset = TRAIN[:6]
    val_dataset = VAL[:3]
    initial_resources: ClassVar = {"prompt": SEED, "llm": agl.LLM(endpoint="http://127.0.0.1:9", model="unused")}
    bad_settings: ClassVar = [{"minibatch_size": 0}, {"reflection_prompt": "no gaps"}, {"max_cost": 1.0}]
    is_resumable = True

    @pytest.fixture
    def make_algorithm(self, server: ScriptedOpenAI) -> Any:
        return functools.partial(make_at, server.endpoint)

    def learned(self, algorithm: Any) -> Mapping[str, agl.PromptTemplate]:
        return {"prompt": algorithm.get_best_prompt()}


def test_gepa_is_created_by_its_name() -> None:
    trainer = agl.Trainer(algorithm={"name": "gepa", "max_rollouts": 7, "prompts": ["writer"]}, trackers=[])
    assert isinstance(trainer.algorithm, agl.GEPA)
    assert trainer.algorithm.max_rollouts == 7
