"""The dashboard's answers: access, forms, paging, `--read-only`, and `agl dashboard`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest

from agentlightning import DummyTracer, InMemoryLightningStore, LightningStoreServer, emit_state
from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptFailure, EnqueueRolloutRequest, PromptTemplate
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_plugins.dashboard.dashboard import Dashboard
from agentlightning_plugins.dashboard.resources import list_resources, show_resources
from agentlightning_plugins.dashboard.rollouts import select
from agentlightning_plugins.dashboard.runs import compare_tasks, show_run
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.monitoring.evaluation import CANDIDATE
from agentlightning_plugins.shared.rendering.text import find_difference, show_task
from agentlightning_plugins.shared.training_records.record import OUTCOMES, Outcome, TrainedCall, TrainedRow
from tests.port import reserve_port
from tests.process import wait_for
from tests.source import REPO
from tests.waiting import LIMIT_S


async def _fill(store: LightningStore, count: int) -> list[str]:
    requests = [EnqueueRolloutRequest(input=f"task {i}", metadata={"step": i % 7}) for i in range(count)]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def test_cursors_page_through_all_rollouts_once_while_new_rollouts_arrive() -> None:
    store = InMemoryLightningStore()
    ids = await _fill(store, 230)
    seen: list[str] = []
    cursor = None
    while True:
        found = await select(store, {}, cursor)
        seen += [row["rollout_id"] for row in found["rollouts"]]
        cursor = found["next"]
        if cursor is None:
            break
        await _fill(store, 3)
    assert seen == ids[::-1]


async def test_rollouts_are_sorted_by_reward_and_time_and_those_without_a_value_come_last() -> None:
    store = InMemoryLightningStore()
    for number, reward in enumerate([0.5, None, -1.0, 2.0] * 20):
        rollout = await store.start_rollout(f"task {number}")
        status = "failed" if reward is None else "succeeded"
        await store.update_attempt(rollout.rollout_id, "latest", status=status, reward=reward)

    async def page(sort: str, first: int = 0) -> list[Any]:
        field = "input" if sort == "oldest" else "reward"
        return [row[field] for row in (await select(store, {"sort": sort}, first))["rollouts"]]

    assert await page("highest reward") == [2.0] * 20 + [0.5] * 20 + [-1.0] * 10
    assert await page("highest reward", 50) == [-1.0] * 10 + [None] * 20
    assert (await page("lowest reward"))[:20] == [-1.0] * 20
    assert (await page("oldest"))[:2] == ["task 0", "task 1"]
    took = [row["seconds"] for row in (await select(store, {"sort": "longest"}))["rollouts"]]
    assert took == sorted(took, reverse=True)
    with pytest.raises(ConfigError, match="sort='best' is not a sort; allowed are highest reward, lowest reward"):
        await select(store, {"sort": "best"})


async def test_a_run_shows_what_its_prompt_search_achieved_and_its_errors_by_type() -> None:
    store = InMemoryLightningStore()
    seed = Candidate.of({"p": PromptTemplate("Answer.")}, full_score=0.5, task_scores=(0.0, 1.0))
    best = Candidate.of({"p": PromptTemplate("Answer briefly.")}, seed, full_score=1.0, task_scores=(1.0, 1.0))
    for place, candidate in enumerate((seed, best)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE: candidate})
    await store.add_resources(best.prompts)
    found = {"confirmed_first": 0.4, "confirmed_best": 0.8, "confirmed_p": 0.01, "confirmed_gain": 0.35}
    await store.add_metrics(1, {"candidates": 2.0, "model_calls": 7.0, **found})
    for message in ("one", "two"):
        rollout = await store.start_rollout("task")
        error = AttemptFailure(type="ValueError", message=message, traceback="")
        await store.update_attempt(rollout.rollout_id, "latest", status="failed", error=error)
    shown = await show_run(Visit(store, {"run_id": "default"}, {}))
    outcome = shown["outcome"]
    assert [(label, mean) for label, mean, _ in outcome["rows"]] == [
        ("before", 0.5),
        ("after", 1.0),
        ("difference", 0.5),
    ]
    assert outcome["confirmation"] == {"first": 0.4, "best": 0.8, "p": 0.01, "gain": 0.35, "verdict": "confirmed"}
    assert outcome["prompts"][0][2] == [("same", "Answer"), ("add", " briefly"), ("same", ".")]
    assert (outcome["is_published"], outcome["costs"]) == (True, [("model calls", 7.0)])
    assert (shown["errors"], shown["errors_of"]) == ([{"type": "ValueError", "count": 2, "message": "two"}], 2)


@pytest.mark.parametrize(("p_value", "verdict"), [(0.01, "confirmed"), (0.4, "not confirmed"), (None, "not confirmed")])
async def test_the_pages_of_resources_say_whether_the_gain_of_the_published_prompt_is_confirmed(
    p_value: float | None, verdict: str
) -> None:
    store = InMemoryLightningStore()
    seed = Candidate.of({"p": PromptTemplate("Answer.")}, full_score=0.5)
    best = Candidate.of({"p": PromptTemplate("Answer briefly.")}, seed, full_score=1.0)
    for place, candidate in enumerate((seed, best)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE: candidate})
    fresh = {} if p_value is None else {"confirmed_first": 0.4, "confirmed_best": 0.8, "confirmed_p": p_value}
    await store.add_metrics(1, {"candidates": 2.0, "best_score": 1.0, **fresh})
    assert (await list_resources(Visit(store, {"run_id": "default"}, {})))["verdicts"] == {}, "a trial is not published"
    latest = await store.add_resources(best.prompts)
    assert (await list_resources(Visit(store, {"run_id": "default"}, {})))["verdicts"] == {best.candidate_id: verdict}
    for shown in ("rs-1", latest.resources_id):
        found = await show_resources(Visit(store, {"run_id": "default", "resources_id": shown}, {}))
        assert found["verdicts"] == {best.candidate_id: verdict}
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
    ):
        for path, label in (("", "published, "), ("/rs-1", ""), (f"/{latest.resources_id}", "")):
            async with client.get(f"{server.endpoint}/runs/default/resources{path}") as answer:
                assert f">{label}{verdict}</span>" in await answer.text()
    await store.add_resources(seed.prompts)
    assert (await list_resources(Visit(store, {"run_id": "default"}, {})))["verdicts"] == {}, "nothing was gained"


async def test_the_versions_of_weights_have_the_step_and_the_reward_of_their_rollouts() -> None:
    store = InMemoryLightningStore()
    for step, (train, val) in enumerate([(0.25, 0.5), (0.75, 1.0)], 1):  # evaluates the weights before the step
        for mode in ("train", "val"):
            update = await store.update_resources(f"rs-{mode}-{step}", {"prompt": PromptTemplate(f"{mode} {step}")})
            request = {"mode": mode, "resources_id": update.resources_id, "metadata": {"step": step}}
            await store.start_rollout("task", **request)
        await store.add_metrics(step, {"reward": train, "val_reward": val})
    await store.update_resources("rs-unused", {"prompt": PromptTemplate("unused")})
    shown = await list_resources(Visit(store, {"run_id": "default"}, {}))
    used = [each["use"] and tuple(each["use"].values()) for each in shown["versions"]]
    assert used == [None, (2, "val", 1.0), (2, "train", 0.75), (1, "val", 0.5), (1, "train", 0.25)]


async def test_a_filter_without_an_index_continues_where_the_previous_page_ended() -> None:
    store = InMemoryLightningStore()
    ids = await _fill(store, 500)
    seen: list[str] = []
    cursor = None
    while cursor is not None or not seen:
        found = await select(store, {"text": "TASK 4"}, cursor)
        seen += [row["rollout_id"] for row in found["rollouts"]]
        cursor = found["next"]
    assert seen == [ids[i] for i in reversed(range(500)) if str(i).startswith("4")]
    assert len((await select(store, {"step": "3"}))["rollouts"]) == 50
    assert (await select(store, {"step": "3"}))["total"] == len(range(3, 500, 7))


async def test_a_search_does_not_begin_a_chunk_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore()
    await _fill(store, 1000)
    asked, query_rollouts = [], InMemoryLightningStore.query_rollouts

    async def slow_query(self: InMemoryLightningStore, **options: Any) -> Any:
        asked.append(options)
        await asyncio.sleep(0.05)
        return await query_rollouts(self, **options)

    monkeypatch.setattr(InMemoryLightningStore, "query_rollouts", slow_query)
    found = await select(store, {"text": "nowhere"})
    # Of 0.12 s, counting takes 0.05 s and the first chunk as long, so that a second one would end too late.
    assert (found["searched"], found["next"], len(asked)) == (200, 800, 2)


async def test_runs_without_a_validation_are_compared_by_their_newest_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    query_rollouts = InMemoryLightningStore.query_rollouts

    async def query(self: InMemoryLightningStore, **conditions: Any) -> Any:
        asked.append(conditions)
        return await query_rollouts(self, **conditions)

    store = InMemoryLightningStore()
    await _fill(store, 3)
    monkeypatch.setattr(InMemoryLightningStore, "query_rollouts", query)
    assert await compare_tasks([(store, ()), (store, ())]) is None
    assert [conditions.get("metadata") for conditions in asked] == [None, None]  # no database has an index for None
    assert all(conditions["limit"] <= 400 for conditions in asked)


async def test_runs_are_compared_by_all_tasks_of_their_last_validation() -> None:
    sides = []
    for name in ("a", "b"):
        store = InMemoryLightningStore().with_run(name)
        for task in range(450):
            rollout = await store.start_rollout(task, mode="val", metadata={"step": 4})
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", reward=1.0)
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=task, mode="train", metadata={"step": 4}) for task in range(450)]
        )
        await store.add_metrics(4, {"val_reward": 1.0})
        sides.append((store, (await store.query_metrics()).items))
    compared = await compare_tasks(sides)
    assert compared is not None
    assert compared["count"] == 450


async def test_a_crash_is_not_the_best_answer_of_a_comparison_where_rewards_are_negative() -> None:
    sides = []
    for name, rewards in (("a", [-1.0, -2.0]), ("b", [-1.0, None])):
        store = InMemoryLightningStore().with_run(name)
        for task, reward in enumerate(rewards):
            rollout = await store.start_rollout({"question": f"task {task}"}, mode="val", metadata={"step": 1})
            status = "failed" if reward is None else "succeeded"
            await store.update_attempt(rollout.rollout_id, "latest", status=status, reward=reward)
        await store.add_metrics(1, {"val_reward": -1.0})
        sides.append((store, (await store.query_metrics()).items))
    compared = await compare_tasks(sides)
    assert compared is not None
    assert (compared["count"], compared["difference"]) == (2, 0.0)


def test_texts_are_compared_by_word_and_longer_texts_by_line_or_as_a_whole() -> None:
    assert find_difference("a b", "a c") == [("same", "a "), ("remove", "b"), ("add", "c")]
    words = "word " * 2000
    assert find_difference(f"{words}\na", f"{words}\nb") == [("same", f"{words}\n"), ("remove", "a"), ("add", "b")]
    lines = "a\n" * 2000
    assert find_difference(lines, f"{lines}b") == [("remove", lines), ("add", f"{lines}b")]
    assert find_difference(lines, lines) == [("same", lines)]


def test_every_outcome_has_a_meaning() -> None:
    assert set(OUTCOMES) == set(get_args(Outcome))


def test_a_task_is_shown_as_text() -> None:
    assert show_task("plain") == show_task({"question": "plain"}) == "plain"
    assert show_task({"question": "1 + 1?", "n": 2, "tags": ["a"]}) == 'question: 1 + 1?, n: 2, tags: ["a"]'
    assert [show_task(task) for task in ({}, [1], None)] == ["{}", "[1]", "null"]


def test_what_takes_too_long_to_compare_counts_as_replaced() -> None:
    before, after = "a b " * 370, "b a a " * 250  # about as long as a prompt; a full comparison takes a minute
    pieces = find_difference(before, after)
    assert "".join(text for kind, text in pieces if kind != "add") == before
    assert "".join(text for kind, text in pieces if kind != "remove") == after
    assert 1 < len(pieces) < 100


async def test_a_cut_prompt_shows_its_last_tokens_with_their_ids() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout({"question": "?"})
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    call = TrainedCall("c", 0, 1, 1.0)
    texts = {2499: ""}  # a token without its own text
    row = TrainedRow(*ids, 1, list(range(2500)), [7000], [1], [-0.1], None, [call], 1.0, texts=texts)
    await store.add_span(row.to_span())
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
        client.get(f"{server.endpoint}/runs/default/rollouts/{ids[0]}/tokens") as answer,
    ):
        page = await answer.text()
    prompt = page.partition("<summary>Prompt, the last 2,000 tokens</summary>")[2].partition("</details>")[0]
    assert [int(shown) for shown in re.findall(r"⟨(\d+)⟩", prompt)] == list(range(500, 2500))


async def test_the_page_of_a_rollout_shows_how_the_states_variables_change() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with DummyTracer().trace_context(**ids, store=store):
        emit_state(question="where?", draft="<b>here</b>")
        emit_state(question="where?", draft=["there"])
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
        client.get(f"{server.endpoint}/runs/default/rollouts/{rollout.rollout_id}") as answer,
    ):
        page = await answer.text()
    section = page.partition('<h2 id="states-title">')[2].partition("</section>")[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section, re.DOTALL)
    rows = [(name, " ".join(value.split())) for name, value in zip(cells[1::3], cells[2::3], strict=True)]
    assert rows[:2] == [("question", "where?"), ("draft", "&lt;b&gt;here&lt;/b&gt;")]
    assert [name for name, _ in rows[2:]] == ["draft"], "only the draft has changed"
    assert "there" in rows[2][1]


async def test_an_unknown_filter_value_run_or_rollout_is_named() -> None:
    store = InMemoryLightningStore()
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
    ):
        async with client.get(f"{server.endpoint}/runs/default/rollouts.json?status=done") as answer:
            assert answer.status == 422
            assert "succeeded" in (await answer.json())["message"]
        huge = "9" * 5000
        for page, name in (
            ("/index", "before"),
            ("/runs/default/rollouts", "before"),
            ("/runs/default/resources", "offset"),
        ):
            for wrong in ("x", "-1", huge):
                async with client.get(f"{server.endpoint}{page}.json", params={name: wrong}) as answer:
                    assert answer.status == 422
                    assert f"{name}='{wrong[:40]}' is not a whole number" in (await answer.json())["message"]
        async with client.get(f"{server.endpoint}/runs/default/rollouts/nothing") as answer:
            assert answer.status == 404
        for page in ("", "/rollouts", "/ledger", "/resources"):
            async with client.get(f"{server.endpoint}/runs/nothing{page}") as answer:
                assert (answer.status, "Not found" in await answer.text()) == (404, True)
        async with client.get(f"{server.endpoint}/runs/nothing.json") as answer:
            assert (await answer.json())["message"] == "this store has no run 'nothing'; its newest runs: none yet"


async def test_without_a_token_only_programs_and_pages_of_this_machine_are_answered() -> None:
    store = InMemoryLightningStore()
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
    ):
        for headers, status in (({}, 200), ({"host": "evil.example"}, 403), ({"origin": "https://evil.example"}, 403)):
            async with client.get(server.endpoint, headers=headers) as answer:
                assert answer.status == status


async def test_a_form_needs_its_token_and_must_come_from_our_own_page() -> None:
    store = InMemoryLightningStore()
    (rollout_id,) = await _fill(store, 1)
    async with (
        LightningStoreServer(store, port=0, pages=[Dashboard(store)]) as server,
        aiohttp.ClientSession() as client,
    ):
        page = f"{server.endpoint}/runs/default/rollouts/{rollout_id}"
        async with client.get(page) as answer:
            match = re.search(r'name="form_token" value="(\w+)"', await answer.text())
            assert match is not None
            policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        right = {"form_token": match[1]}
        for form, headers in (({}, {}), ({"form_token": "0" * 64}, {}), (right, {"sec-fetch-site": "cross-site"})):
            async with client.post(f"{page}/cancel", data=form, headers=headers) as answer:
                assert answer.status == 403
        async with client.post(f"{page}/cancel", data={"form_token": "x" * 70_000}) as answer:
            assert answer.status == 413
        found = await store.get_rollout_by_id(rollout_id)
        assert found is not None
        assert found.status == "queuing"
        async with client.post(f"{page}/cancel", data=right, allow_redirects=False) as answer:
            assert answer.status == 303
        found = await store.get_rollout_by_id(rollout_id)
        assert found is not None
        assert found.status == "cancelled"


async def test_a_forged_or_expired_session_cookie_is_refused_and_scripts_can_use_a_bearer_token() -> None:
    store = InMemoryLightningStore()
    dashboard = Dashboard(store, ["right"])
    server = LightningStoreServer(store, port=0, token="right", pages=[dashboard])
    async with server, aiohttp.ClientSession() as client:
        for value in ("9999999999.00." + "0" * 64, "1.00." + "0" * 64, "9999999999.00.\u00e9", "x", ""):
            headers = {"cookie": f"agl_session_{server.port}={value}"}
            async with client.get(f"{server.endpoint}/index.json", headers=headers) as answer:
                assert answer.status == 401
        for token, status in (("right", 200), ("wrong", 401)):
            headers = {"authorization": f"Bearer {token}"}
            async with client.get(f"{server.endpoint}/index.json", headers=headers) as answer:
                assert answer.status == status


async def test_servers_of_one_store_accept_the_sessions_and_forms_of_each_other() -> None:
    store = InMemoryLightningStore()
    (rollout_id,) = await _fill(store, 1)
    servers = [LightningStoreServer(store, port=0, token="t", pages=[Dashboard(store, ["t"])]) for _ in range(2)]
    async with servers[0] as one, servers[1] as other, aiohttp.ClientSession() as client:
        path = f"/runs/default/rollouts/{rollout_id}"
        async with client.post(f"{one.endpoint}/login", data={"token": "t"}, allow_redirects=False) as answer:
            (cookie,) = answer.cookies.values()
        # A browser that sees both behind one address sends one cookie, whose name has the port of that address.
        headers = {"host": f"127.0.0.1:{one.port}", "cookie": f"{cookie.key}={cookie.value}"}
        async with client.get(f"{one.endpoint}{path}", headers=headers) as answer:
            match = re.search(r'name="form_token" value="(\w+)"', await answer.text())
            assert match is not None
        forged, right = {"form_token": "0" * 64}, {"form_token": match[1]}
        for form, statuses in ((forged, (403, 403)), (right, (303, 303))):
            for action, status in zip((f"{path}/cancel", "/logout"), statuses, strict=True):
                url = f"{other.endpoint}{action}"
                async with client.post(url, data=form, headers=headers, allow_redirects=False) as answer:
                    assert answer.status == status, action
        assert answer.cookies[cookie.key].value == ""
        found = await store.get_rollout_by_id(rollout_id)
        assert found is not None
        assert found.status == "cancelled"


async def test_signing_in_never_redirects_to_another_site() -> None:
    store = InMemoryLightningStore()
    dashboard = Dashboard(store, ["right"])
    server = LightningStoreServer(store, port=0, token="right", pages=[dashboard])
    async with server, aiohttp.ClientSession() as client:
        for target in ("//evil.example", "https://evil.example", "/\\evil.example", "/\nx"):
            form = {"token": "right", "next": target}
            async with client.post(f"{server.endpoint}/login", data=form, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["location"]) == (303, "/")


async def test_read_only_has_no_actions() -> None:
    store = InMemoryLightningStore()
    (rollout_id,) = await _fill(store, 1)
    dashboard = Dashboard(store, read_only=True)
    async with LightningStoreServer(store, port=0, pages=[dashboard]) as server, aiohttp.ClientSession() as client:
        page = f"{server.endpoint}/runs/default/rollouts/{rollout_id}"
        async with client.get(page) as answer:
            assert "<form" not in (await answer.text()).partition("<main")[2]
        async with client.post(f"{page}/cancel") as answer:
            assert answer.status in (404, 405)


def _read(url: str, token: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@contextlib.contextmanager
def _serve(folder: Path, *arguments: str, token: str = "") -> Iterator[str]:
    """Runs a command of `agl` with a dashboard; yields the URL of its first page as JSON."""
    log = folder / f"{arguments[0]}.log"
    url = f"http://127.0.0.1:{(port := reserve_port())}/index.json"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *arguments, "--port", str(port)],
            cwd=REPO, env={**os.environ, "AGL_TOKEN": token}, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return bool(_read(url)[0])
        return False

    try:
        wait_for(answers, process, log)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()
    finally:
        process.kill()


def test_agl_dashboard_and_agl_store_show_a_store_and_a_store_server(tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path / 'store.db'}"

    async def prepare() -> None:
        store = create_store(store_url)
        await store.create_run("a run of mine")
        await store.close()

    asyncio.run(prepare())
    with _serve(tmp_path, "store", "--backend", store_url, token="t") as page:
        assert (_read(page)[0], _read(page, "t")[1]["total"]) == (401, 1)
        with _serve(tmp_path, "dashboard", page.removesuffix("/index.json"), token="t") as second:
            assert (_read(second)[0], _read(second, "t")[1]["total"]) == (401, 1)
    with _serve(tmp_path, "dashboard", str(tmp_path)) as page:
        assert _read(page)[1]["runs"][0]["name"] == "a run of mine"


def test_agl_dashboard_shows_and_compares_all_runs_of_a_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    async def train(name: str, rewards: list[float]) -> None:
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text("{}")
        store = create_store(f"sqlite:///{runs / name / 'store.db'}")
        await store.create_run("word-adder", config={"name": name})
        await store.add_metrics(1, {"val_reward": sum(rewards)})
        for number, reward in enumerate(rewards):
            rollout = await store.start_rollout(f"task {number}", mode="val", metadata={"step": 1}, worker_id=name)
            await store.update_attempt(rollout.rollout_id, "latest", status="succeeded", reward=reward)
        await store.update_run("default", "succeeded")
        if name == "first":
            other = store.with_run("apo")
            await other.create_run("another", run_id="apo")
            await other.enqueue_rollout("open")
        await store.close()

    asyncio.run(train("first", [0.0, 0.0, 1.0]))
    asyncio.run(train("second", [1.0, 1.0, 1.0]))
    with _serve(tmp_path, "dashboard", str(runs)) as page:
        root = page.removesuffix("/index.json")
        assert [(run["run_id"], run["total"], run["val_reward"]) for run in _read(page)[1]["runs"]] == [
            ("second", 3, 3.0),
            ("first:apo", 1, None),
            ("first", 3, 1.0),
        ]
        assert [_read(f"{root}/runs/first:{name}.json")[0] for name in ("apo", "no-such-run")] == [200, 404]
        comparison = _read(f"{root}/compare.json?a=first&b=second")[1]
        assert [run["run_id"] for run in comparison["runs"]] == ["first", "second"]
        assert (comparison["tasks"]["count"], comparison["tasks"]["gained"]) == (3, 2)
        rollout_id = comparison["tasks"]["flipped"][0]["rollouts"][0]
        assert _read(f"{root}/runs/first/rollouts/{rollout_id}.json")[0] == 200
        assert _read(f"{root}/runs/second/rollouts/{rollout_id}.json")[0] == 404
        assert [_read(f"{root}/{path}.json")[0] for path in ("runs/first", "runs/..", "runs/third", "fleet")] == [
            200,
            404,
            404,
            200,
        ]
        fleet = _read(f"{root}/fleet.json")[1]
        assert (fleet["statistics"]["rollouts"], fleet["total"]) == (7, 2)
        assert {worker["worker_id"] for worker in fleet["workers"]} == {"first", "second"}
