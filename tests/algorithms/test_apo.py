"""APO on a task whose best prompt is known."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.testing.algorithm import AlgorithmConformance
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms.glossary import find_unexplained
from tests.algorithms.prompt_lab import (
    BEST,
    SEED,
    TRAIN,
    VAL,
    Server,
    agent,
    client,
    critic_and_editor,
    edit,
    is_critic,
    phrases,
    prompt_in,
    worth,
)
from tests.plugins.commands.agl_here import run_here
from tests.waiting import LIMIT_S


def test_a_prompt_that_makes_the_agent_crash_is_not_the_best_where_rewards_are_negative(server: ScriptedOpenAI) -> None:
    def costly(task: Mapping[str, Any], prompt: agl.PromptTemplate) -> float:
        if "TRAP" in prompt.template:
            raise RuntimeError("the prompt breaks the tool")
        return agent(task, prompt) - 2.0

    apo = make(server)
    train(apo, costly)
    tried = [candidate for candidate in apo.history if "TRAP" in candidate.prompts["prompt"].template]
    assert {candidate.batch_score for candidate in tried} <= {None, -2.0}
    assert tried
    assert phrases(apo.get_best_prompt().template) == BEST


@pytest.fixture
def server() -> Iterator[ScriptedOpenAI]:
    with Server(critic_and_editor) as scripted:
        yield scripted


def make(server: ScriptedOpenAI, **settings: Any) -> agl.APO:
    defaults = {"beam_width": 2, "branch_factor": 3, "beam_rounds": 4}
    return agl.APO(client(server), gradient_model="critic", apply_edit_model="editor", **{**defaults, **settings})


def train(
    apo: agl.APO,
    agent: Any = agent,
    resources: Any = None,
    train_dataset: Any = TRAIN,
    val_dataset: Any = VAL,
    **settings: Any,
) -> agl.LightningStore:
    store = settings.pop("store", None) or agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm=apo,
        store=store,
        strategy="shm",
        trackers=[],
        initial_resources=resources or {"prompt": SEED},
        **{"tracer": "dummy", **settings},
    )
    assert trainer.fit(agent, train_dataset, val_dataset).status == "succeeded"
    return store


def latest(store: agl.LightningStore) -> Any:
    update = asyncio.run(store.get_latest_resources())
    assert update is not None
    return update.resources


def asked(server: ScriptedOpenAI, model: str) -> list[str]:
    return [r.body["messages"][-1]["content"] for r in server.requests if r.body["model"] == model]


def test_apo_finds_the_best_prompt_and_publishes_it(server: ScriptedOpenAI) -> None:
    apo = make(server)
    store = train(apo, resources={"prompt": SEED, "llm": agl.LLM(endpoint="http://nowhere", model="m")})
    assert phrases(apo.get_best_prompt().template) == BEST
    assert latest(store)["prompt"] == apo.get_best_prompt()
    assert set(latest(store)) == {"prompt", "llm"}, "other resources stay published"
    assert apo.get_best().full_score == 1.0
    assert set(apo.get_best().task_scores) == {1.0}
    assert apo.stopped_because == "perfect_score"
    added = {line[1:] for line in apo.diff().splitlines() if line.startswith("+") and not line.startswith("+++")}
    assert added == BEST


def test_every_candidate_is_in_the_store_with_lineage_scores_and_its_rollouts(server: ScriptedOpenAI) -> None:
    apo = make(server, beam_rounds=2)
    store = train(apo)

    async def read() -> tuple[dict[str, Any], list[agl.Rollout]]:
        snapshots = {}
        for update in (await store.query_resources()).items:
            if "prompt_candidate" in update.resources:
                snapshots[update.resources_id] = update
        return snapshots, list((await store.query_rollouts()).items)

    snapshots, rollouts = asyncio.run(read())
    kept: list[Any] = [
        update.resources["prompt_candidate"] for update in snapshots.values()
    ]  # the newest version of each candidate
    assert {each.candidate_id: each for each in kept} == {each.candidate_id: each for each in apo.history}
    ids = {each.candidate_id for each in apo.history}
    for candidate in apo.history[1:]:
        assert candidate.parent_id in ids
        assert candidate.critique is not None
        assert candidate.critique.startswith("it lacks")
        assert candidate.edited == ("prompt",)
        assert candidate.batch_score in (None, worth(candidate.prompts["prompt"].template))
    assert any(candidate.batch_score for candidate in apo.history)
    for rollout in rollouts:
        assert rollout.resources_id in snapshots
        used = snapshots[rollout.resources_id].resources["prompt_candidate"]
        assert rollout.metadata is not None
        assert rollout.metadata["group"] == used.candidate_id


def test_the_same_seed_gives_the_same_lineage_and_another_seed_a_different_one(server: ScriptedOpenAI) -> None:
    def lineage(seed: int) -> tuple[list[Any], list[bytes]]:
        server.requests.clear()
        apo = make(server, seed=seed, beam_rounds=2)
        train(apo)
        return [candidate.model_dump() for candidate in apo.history], sorted(r.raw for r in server.requests)

    first = lineage(3)
    assert lineage(3) == first
    assert lineage(4) != first


def test_rollouts_that_fail_or_time_out_count_as_zero() -> None:
    async def fragile(task: Any, prompt: agl.PromptTemplate) -> float:
        agl.emit_reward(1.0)
        if task["question"] == "val 0":
            raise RuntimeError("after the reward")
        if task["question"] == "val 1":
            await asyncio.sleep(LIMIT_S)
        return 1.0

    class HastyStore(agl.InMemoryLightningStore):
        """Reaches the timeout of a batch when a rollout is left that does not end."""

        async def wait_for_rollouts(self, rollout_ids: Any, *, timeout: float | None = None) -> Any:
            if timeout is not None and len(rollout_ids) == 4:
                assert timeout == 200.0
                await super().wait_for_rollouts([each for n, each in enumerate(rollout_ids) if n != 1])
                timeout = 0.0
            return await super().wait_for_rollouts(rollout_ids, timeout=timeout)

    with Server([Answer("no prompt")]) as server:  # so that only the seed prompt runs on validation tasks
        apo = make(server, beam_rounds=1, rollout_batch_timeout=200.0)
        store = train(apo, fragile, val_dataset=VAL[:4], store=HastyStore())
    assert apo.history[0].full_score == 0.5
    statuses = [rollout.status for rollout in asyncio.run(store.query_rollouts()).items if rollout.mode == "val"]
    assert statuses == ["failed", "cancelled", "succeeded", "succeeded"]


def unrewarded(task: Any, prompt: agl.PromptTemplate) -> None:
    """Returns no reward."""


def broken(task: Any, prompt: agl.PromptTemplate) -> float:
    agl.emit_reward(1.0)
    raise LookupError("the tool is down")


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (unrewarded, "none of the first 14 rollouts has a reward: return a number from the agent"),
        (broken, "all of the first 14 rollouts failed: 14 x LookupError: 'the tool is down'"),
    ],
)
def test_without_rewards_the_run_ends_with_the_reason(server: ScriptedOpenAI, agent: Any, reason: str) -> None:
    with pytest.raises(agl.LightningError) as raised:
        train(make(server), agent)
    assert reason.replace("'", "") in str(raised.value).replace("'", "")
    assert server.requests == []


# The end of the run cancels calls of the critic; the socket of an unfinished connection is closed when it is collected.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_without_an_initial_validation_children_without_rewards_end_the_run(server: ScriptedOpenAI) -> None:
    with pytest.raises(agl.LightningError, match="has a reward"):
        train(make(server, run_initial_validation=False), unrewarded)
    assert len(server.requests) <= 12, "at most one round of critics and editors"


def test_the_critic_gets_rollouts_with_errors_and_messages_and_the_editor_gets_the_critique() -> None:
    def model(request: RecordedRequest) -> Answer:
        if request.body["model"] == "agent":
            return Answer("the agent's own answer")
        return critic_and_editor(request)

    with Server(model) as server:

        def talker(task: Any, prompt: agl.PromptTemplate, llm: agl.LLM) -> float:
            import openai

            with openai.OpenAI(base_url=llm.endpoint, api_key="any") as chat:
                chat.chat.completions.create(
                    model="agent", messages=[{"role": "user", "content": prompt.format(**task)}]
                )
            if task["question"].endswith("7"):
                raise ValueError("seven is too many")
            return 0.25

        llm = agl.LLM(endpoint=server.endpoint, model="agent")
        apo = make(server, beam_rounds=1, beam_width=1, branch_factor=2, gradient_batch_size=40)
        store = agl.create_store("memory://")
        agl.Trainer(
            algorithm=apo, store=store, strategy="shm", trackers=[], initial_resources={"prompt": SEED, "llm": llm}
        ).fit(talker, TRAIN[:8], VAL)
        critic = asked(server, "critic")[0]
        editor = asked(server, "editor")[0]
    assert SEED in critic
    assert 'status="succeeded" reward="0.25"' in critic
    assert 'status="failed" reward="none"' in critic
    assert "ValueError: seven is too many" in critic
    assert "[user] Answer the question: train 3" in critic
    assert "[assistant] the agent's own answer" in critic
    assert "it lacks" in editor
    assert "{question}" in editor
    assert apo.budget.metrics()["model_calls"] == apo.n_rollouts + 4, "model calls of the agent count too"


def test_the_critic_gets_the_standard_output_of_a_command_agent(server: ScriptedOpenAI) -> None:
    program = "import os, sys; print('I was told:', os.environ['AGL_PROMPT_PROMPT']); print('no idea', sys.argv[1])"
    command = agl.CommandAgent([sys.executable, "-c", program, "{task}"], reward=lambda task, output, rollout: 0.5)
    train(make(server, beam_rounds=1, beam_width=1, branch_factor=1), command, tracer="otel")
    critic = asked(server, "critic")[0]
    assert f"<output>I was told: {SEED}\nno idea" in critic
    assert "train" in critic.split("no idea")[1]


def test_several_prompts_are_tuned_in_turn_and_other_prompts_stay_unchanged(server: ScriptedOpenAI) -> None:
    def two_prompts(task: Any, resources: agl.NamedResources) -> float:
        texts = {name: value.template for name, value in resources.items() if isinstance(value, agl.PromptTemplate)}
        assert texts["fixed"] == "keep me {question}"
        return (worth(texts["planner"]) + worth(texts["writer"])) / 2

    resources = {"planner": SEED, "writer": "Write: {question} and {style}", "fixed": "keep me {question}"}
    apo = make(server, prompts=["planner", "writer"], branch_factor=6, beam_rounds=6, target_score=0.75)
    store = train(apo, two_prompts, resources)
    assert {name for candidate in apo.history[1:] for name in candidate.edited} == {"planner", "writer"}
    assert all(len(candidate.edited) == 1 for candidate in apo.history[1:])
    assert (apo.get_best().full_score or 0.0) >= 0.75
    assert apo.stopped_because == "target_score"
    assert latest(store)["fixed"] == agl.PromptTemplate("keep me {question}")
    assert "{style}" in apo.get_best_prompt("writer").template
    with pytest.raises(agl.ConfigError, match="2 prompts are tuned; name one of: planner, writer"):
        apo.get_best_prompt()
    assert '<other_prompt name="writer">' in asked(server, "critic")[0]


def test_an_edit_that_loses_a_placeholder_is_repaired_or_dropped() -> None:
    def careless(request: RecordedRequest) -> Answer:
        messages = request.body["messages"]
        if is_critic(request):
            return critic_and_editor(request)
        repairs = "RULE-A" in edit(request)  # only this child is repaired when asked
        if len(messages) == 3 and repairs:
            assert "it lost the placeholders {question}" in messages[2]["content"]
            return Answer(edit(request))
        return Answer(edit(request).replace("{question}", "it"))

    with Server(careless) as server:
        apo = make(server, beam_rounds=1, branch_factor=8)
        train(apo)
    assert [phrases(each.prompts["prompt"].template) for each in apo.history] == [set(), {"RULE-A"}]


def test_a_failing_model_call_is_retried_and_then_skipped() -> None:
    seen: dict[bytes, int] = {}

    def flaky(request: RecordedRequest) -> Answer:
        seen[request.raw] = seen.get(request.raw, 0) + 1
        if is_critic(request) and "train 5" in request.body["messages"][0]["content"]:
            return Answer(status=400, error="refused")
        if seen[request.raw] == 1:
            return Answer(status=503) if len(seen) % 2 else Answer("")
        return critic_and_editor(request)

    with Server(flaky) as server:
        apo = make(server, gradient_batch_size=4)
        train(apo)
        refused = [r for r in server.requests if is_critic(r) and "train 5" in r.body["messages"][0]["content"]]
    assert phrases(apo.get_best_prompt().template) == BEST
    assert refused
    assert all(seen[request.raw] == 1 for request in refused), "a refused call is not retried"


def test_when_no_model_call_succeeds_the_run_fails_and_keeps_the_seed_prompt() -> None:
    with Server([Answer(status=401, error="wrong key")]) as server:
        apo = make(server)
        with pytest.raises(
            agl.LightningError, match="learned nothing because its model calls failed: AuthenticationError"
        ):
            train(apo)
    assert apo.stopped_because == "model_calls_failed"
    assert apo.get_best_prompt() == agl.PromptTemplate(SEED)


@pytest.mark.parametrize(
    "budget",
    [
        {"max_calls": 7},
        {"max_tokens": 3000},
        {"max_cost": 0.003, "prices": {"critic": (1.0, 1.0), "editor": (1.0, 1.0)}},
    ],
)
def test_a_budget_ends_the_search(server: ScriptedOpenAI, budget: dict[str, Any]) -> None:
    apo = make(server, beam_width=1, branch_factor=2, **budget)
    train(apo)
    assert apo.stopped_because == "budget"
    assert apo.budget.is_spent()
    assert apo.budget.metrics()["model_calls"] == len(server.requests)
    if "max_calls" in budget:
        assert len(server.requests) == 7
    else:
        largest = 1000  # tokens of a call; two were in flight when the limit was reached
        assert 3000 <= apo.budget.metrics()["tokens"] <= 3000 + 2 * largest
    assert all(apo.results.of(each.candidate_id, "train") for each in apo.history), "paid candidates are tried"


def test_patience_ends_the_search(server: ScriptedOpenAI) -> None:
    apo = make(server, beam_rounds=20, patience=2, perfect_score=None)
    train(apo)
    assert apo.stopped_because == "patience"
    assert phrases(apo.get_best_prompt().template) == BEST


def test_without_an_initial_validation_the_seed_prompt_runs_only_together_with_its_children(
    server: ScriptedOpenAI,
) -> None:
    apo = make(server, run_initial_validation=False, beam_rounds=1)
    store = train(apo)
    assert apo.get_best() is not apo.history[0]
    steps = [metrics.step for metrics in asyncio.run(store.query_metrics()).items]
    assert steps == [1]


def test_prompts_of_the_user_replace_the_built_in_prompts_for_critic_and_editor(server: ScriptedOpenAI) -> None:
    apo = make(
        server,
        beam_rounds=1,
        gradient_prompts="MINE <prompt>\n{prompt}\n</prompt> {rollouts}",
        edit_prompts=[agl.PromptTemplate("JINJA <prompt>\n{{ prompt }}\n</prompt> {{ critique }}", "jinja")],
    )
    train(apo)
    assert all(text.startswith("MINE") for text in asked(server, "critic"))
    assert all(text.startswith("JINJA") for text in asked(server, "editor"))
    assert len(apo.history) > 1


def test_all_candidates_of_a_round_run_concurrently() -> None:
    numbers = itertools.count()
    running: set[str] = set()
    met = threading.Event()

    def different(request: RecordedRequest) -> Answer:
        return Answer("wrong" if is_critic(request) else f"{SEED} {next(numbers)}")

    async def meeting(task: Any, prompt: agl.PromptTemplate) -> float:
        """On validation tasks, waits for all children of the round."""
        if task["question"].startswith("val"):
            running.add(prompt.template)
            if len(running) == 8:
                met.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_S):
                    while not met.is_set():  # noqa: ASYNC110 # the agent's loop is not the test's
                        await asyncio.sleep(0.01)
        return 0.5 if prompt.template == SEED else 0.6

    with Server(different) as server:
        apo = make(server, beam_rounds=1, branch_factor=4, val_batch_size=2, run_initial_validation=False)
        train(apo, meeting, max_concurrency=64)
    assert met.is_set()


def test_a_child_runs_while_other_children_are_still_being_made(server: ScriptedOpenAI) -> None:
    tried = threading.Event()
    seen: list[bool] = []

    class HeldBack(agl.APO):
        async def make_child(self, *args: Any) -> Any:
            """Holds back the first child until another child runs."""
            if args[-1] % 1000 == 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LIMIT_S):
                        while not tried.is_set():  # noqa: ASYNC110 # the agent's loop is not the search's
                            await asyncio.sleep(0.01)
                seen.append(tried.is_set())
            return await super().make_child(*args)

    def noting(task: Any, prompt: agl.PromptTemplate) -> float:
        if phrases(prompt.template):
            tried.set()
        return worth(prompt.template)

    apo = HeldBack(client(server), gradient_model="critic", apply_edit_model="editor", branch_factor=6, beam_rounds=1)
    train(apo, noting)
    assert seen == [True]
    assert len(apo.history) > 2


def test_the_cost_of_a_model_without_a_price_is_reported_as_unknown_and_not_as_zero(
    server: ScriptedOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="agentlightning")
    store = train(make(server, beam_rounds=1, prices={"critic": (1.0, 1.0)}))
    assert re.search(r"cost/critic 0\.\d+", caplog.text)
    assert "cost/editor" not in caplog.text
    last = dict(asyncio.run(store.query_metrics()).items[-1].values)
    assert last["cost/critic"] == last["cost"] > 0
    assert "cost/editor" not in last
    store = train(make(server, beam_rounds=1))
    assert not any(name.startswith("cost") for name in asyncio.run(store.query_metrics()).items[-1].values)


def test_metrics_of_each_round_are_recorded(server: ScriptedOpenAI) -> None:
    store = train(make(server, beam_rounds=2))
    first, second, third = asyncio.run(store.query_metrics()).items
    assert [first.step, second.step, third.step] == [0, 1, 2]
    assert first.values["reward"] == 0.0
    assert third.values["best_score"] >= second.values["best_score"] > 0
    assert third.values["model_calls"] == 24
    assert third.values["progress"] == 1.0


def make_at(endpoint: str, **settings: Any) -> agl.APO:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0)
    defaults = {"beam_width": 1, "branch_factor": 2, "beam_rounds": 2, "val_batch_size": 3}
    return agl.APO(client, gradient_model="critic", apply_edit_model="editor", **{**defaults, **settings})


class TestConformance(AlgorithmConformance):
    agent = staticmethod(agent)
    train_dataset = TRAIN[:6]
    val_dataset = VAL[:3]
    initial_resources: ClassVar = {"prompt": SEED, "llm": agl.LLM(endpoint="http://127.0.0.1:9", model="unused")}
    bad_settings: ClassVar = [
        {"beam_width": 0},
        {"patience": 0},
        {"max_calls": 0},
        {"max_cost": 1.0},
        {"rollout_batch_timeout": 0},
        {"gradient_prompts": []},
    ]
    is_resumable = False  # ``test_apo_resume.py`` kills more often

    @pytest.fixture
    def make_algorithm(self, server: ScriptedOpenAI) -> Any:
        return functools.partial(make_at, server.endpoint)

    def learned(self, algorithm: Any) -> Mapping[str, agl.PromptTemplate]:
        return {"prompt": algorithm.get_best_prompt()}


@pytest.mark.parametrize(
    ("resources", "settings", "complaint"),
    [
        ({"llm": agl.LLM(endpoint="http://nowhere", model="m")}, {}, "there is no prompt to tune"),
        ({"prompt": SEED}, {"prompts": "promt"}, r"prompts = \['promt'\]: the prompts of this run are prompt"),
        ({"prompt": "{a.b}"}, {}, "prompt 'prompt': .*not a plain name"),
        (
            {"prompt": SEED, "page": agl.PromptTemplate("<p>{{ question }}</p>", "poml")},
            {},
            "prompt 'page': a prompt of engine 'poml' cannot be tuned.*name the other prompts in `prompts`",
        ),
    ],
)
def test_a_run_without_a_tunable_prompt_is_refused_before_any_model_call(
    server: ScriptedOpenAI, resources: Any, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(agl.ConfigError, match=complaint):
        train(make(server, **settings), resources=resources)
    assert server.requests == []


def test_the_error_about_a_missing_api_key_names_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(agl.ConfigError, match="set OPENAI_API_KEY"):
        train(agl.APO())
    with pytest.raises(agl.ConfigError, match="has found nothing yet"):
        agl.APO().get_best_prompt()


def test_apo_tunes_the_prompt_of_an_agent_of_a_framework() -> None:
    from agents import Agent

    def model(request: RecordedRequest) -> Answer:
        if request.body["model"] in ("critic", "editor"):
            return critic_and_editor(request)
        instructions = next(m["content"] for m in request.body["messages"] if m["role"] == "system")
        return Answer("good" if "RULE-A" in instructions else "bad")

    with Server(model) as scripted:
        writer = Agent(name="writer", instructions="Answer politely.", model="gpt-4.1-mini")
        wrapped = agl.wrap(
            writer,
            reward=lambda task, output, rollout: float(str(output.final_output) == "good"),
            prompts={"writer.instructions": "instructions"},
        )
        apo = make(scripted, beam_rounds=2, target_score=1.0)
        store = agl.create_store("memory://")
        agl.Trainer(
            algorithm=apo,
            store=store,
            strategy="shm",
            trackers=[],
            initial_resources={"llm": agl.LLM(endpoint=scripted.endpoint, model="agent", api_key="any")},
        ).fit(wrapped, [f"train {number}" for number in range(10)], ["val 1", "val 2"])
    assert "RULE-A" in apo.get_best_prompt().template
    assert apo.get_best().full_score == 1.0
    assert prompt_in(next(r for r in scripted.requests if is_critic(r))) == "Answer politely."


@pytest.mark.slow
def test_a_configuration_file_and_environment_variables_are_enough_to_run_apo(
    server: ScriptedOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps(TRAIN))
    (tmp_path / "config.yaml").write_text(
        json.dumps(
            {
                "name": "prompts",
                "agent": "tests.algorithms.prompt_lab:agent",
                "data": {"train": "tasks.json", "val": {"source": "tasks.json", "limit": 4}},
                "resources": {"prompt": SEED},
                "tracer": "dummy",
                "strategy": "shm",
                "algorithm": {
                    "name": "apo",
                    "gradient_model": "critic",
                    "apply_edit_model": "editor",
                    "beam_width": 2,
                    "target_score": 1.0,
                    "prices": {"critic": [1.0, 2.0], "editor": [1.0, 2.0]},
                    "max_cost": 10.0,
                },
            }
        )
    )
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("OPENAI_BASE_URL", server.endpoint)
    said = run_here(tmp_path, "train", "config.yaml")
    assert said.code == 0, said.stderr
    run = tmp_path / "runs" / "prompts"
    added = {line[1:] for line in (run / "prompts.diff").read_text().splitlines()[3:] if line.startswith("+")}
    assert added == BEST
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-2]
    assert find_unexplained(last) == {"step", "time"}
    assert last["reward"] == 1.0
    assert 0 < last["cost"] < 10
    assert {name for name in last if name.startswith("cost/")} == {"cost/critic", "cost/editor"}
    best = (run / "prompts" / "prompt.txt").read_text()
    assert phrases(best) == BEST
    report = (run / "report.md").read_text()
    table = report.split("## Candidates\n\n")[1].split("\n\n")[0].splitlines()
    assert table[0] == "| candidate | round | score | on a batch | parent | critique |"
    assert len(table) - 2 == last["candidates"]
    assert "it lacks " in table[3]
    assert table[3].split("|")[5].strip() in table[2], "the first child's parent is the seed"
    calls = [json.loads(line) for line in (run / "llm_calls.jsonl").read_text().splitlines()]
    assert len(calls) == last["model_calls"] == len(server.requests)
