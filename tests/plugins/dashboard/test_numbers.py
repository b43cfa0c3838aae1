"""The numbers on the pages and in the reports of four real runs are those of the store."""

from __future__ import annotations

import asyncio
import html
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.types import AttemptedRollout, Metrics
from agentlightning_plugins.dashboard.dashboard import Dashboard
from agentlightning_plugins.shared.rendering.text import show_number
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms import prompt_lab
from tests.algorithms.tiny_model import save_tiny_model
from tests.plugins.commands.agl_here import run_here

TOKEN = "a-token-of-the-test"
FAILING = """
import agentlightning as agl

@agl.rollout
def fails(task: dict, prompt: agl.PromptTemplate) -> float:
    if "less" in task["question"]:
        raise ValueError("no subtraction")
    return 0.25
"""


def answer(request: RecordedRequest) -> Answer:
    """The agent's model, critic and editor: with the word Add in its prompt, the agent is right."""
    asked = request.body["messages"][0]["content"]
    if request.body["model"] == "small":
        return Answer(str(sum(map(int, re.findall(r"\d+", asked)))) if "Add" in asked else "no idea")
    return Answer("<prompt>\nAdd the numbers. {question}\n</prompt>")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of the runs, each made by a command as a user would call it."""
    place = tmp_path_factory.mktemp("numbers")
    save_tiny_model(place / "model")
    few = {
        "baseline": ("algorithm.n_epochs=2", "algorithm.train_split=1.0"),
        "apo": tuple(f"algorithm.{key}=1" for key in ("beam_rounds", "beam_width", "branch_factor")),
        "grpo": (
            f"algorithm.model={place / 'model'}", "algorithm.steps=3", "algorithm.rollouts_per_task=2",
            "algorithm.eval_every=2", "algorithm.sampling.max_tokens=4", "algorithm.update.warmup_updates=0",
            "algorithm.experience.keep_flat_groups=true",
        ),
    }  # fmt: skip
    with prompt_lab.Server(answer) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "any")
        patch.setenv("OPENAI_MODEL", "small")
        patch.setenv("AGL_CRITIC_MODEL", "large")
        patch.setenv("OPENAI_BASE_URL", server.endpoint)
        for name, settings in few.items():
            assert run_here(place, "new", "agent", name, *([] if name == "baseline" else [f"--{name}"])).code == 0
            if name == "baseline":
                (place / name / "agent.py").write_text(FAILING.replace("fails", name))
            said = run_here(place, "train", f"{name}/config.yaml", "strategy=shm", *settings, module="agent")
            assert said.code == 0, said.stderr
        config = ("baseline/config.yaml", "strategy=shm", "-n", "3", "--run-dir", "runs/eval")
        assert run_here(place, "eval", *config, module="agent").code == 0
    return {path.name: path for path in (place / "runs").iterdir()}


class Shown:
    """The numbers of a page by name, from its HTML."""

    def __init__(self, page: str) -> None:
        self.html = html.unescape(page)
        cells = r'<span class="name">([^<]*)</span><span class="value">(?:<[^>]*>)*([^<]*)'
        self.figures = {name: value.strip() for name, value in re.findall(cells, self.html)}
        self.counts = {name: number(n) for n, name in re.findall(r"</span>([\d,]+) ([a-z]+)<", self.html)}
        self.points = re.findall(r"<title>(.*?)</title>", self.html)
        self.metrics = dict(re.findall(r'<figcaption>(\S+) <span class="faint">([^ <]*)', self.html))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def series(steps: Sequence[Metrics], name: str) -> list[tuple[int, float]]:
    return [(each.step, each.values[name]) for each in steps if name in each.values]


def means(rollouts: Sequence[AttemptedRollout], key: Callable[[AttemptedRollout], Any]) -> dict[Any, float]:
    """The mean rewards of the rollouts with each value of ``key``, in order of first occurrence."""
    found: dict[Any, list[float]] = {}
    for rollout in rollouts:
        found.setdefault(key(rollout), []).append(rollout.attempt.reward or 0.0)
    return {name: statistics.fmean(values) for name, values in found.items()}


async def check_lists(client: httpx.AsyncClient, rollouts: Sequence[AttemptedRollout], page: Shown) -> None:
    """Sorted lists have the store's rewards and durations, and errors are counted by type."""
    rewards = sorted((each.attempt.reward for each in rollouts if each.attempt.reward is not None), reverse=True)
    seconds = sorted((each.end_time or 0.0) - each.attempt.start_time for each in rollouts)
    for order, key, expected in (
        ("highest reward", "reward", rewards), ("lowest reward", "reward", rewards[::-1]),
        ("longest", "seconds", seconds[::-1]), ("shortest", "seconds", seconds),
    ):  # fmt: skip
        rows = (await client.get("/runs/default/rollouts.json", params={"sort": order})).json()["rollouts"]
        assert [row[key] for row in rows if row[key] is not None] == pytest.approx(expected[: len(rows)])
    failed = Counter(each.attempt.error.type for each in rollouts if each.status == "failed" and each.attempt.error)
    assert dict(re.findall(r'text=([A-Za-z]+)">(\d+)</a></td>', page.html)) == {
        name: str(count) for name, count in failed.items()
    }


async def check_training(
    client: httpx.AsyncClient, rollouts: Sequence[AttemptedRollout], steps: Sequence[Metrics], page: Shown
) -> None:
    """The result card, groups of the ledger, uses of versions and a comparison have the store's rewards."""

    def step_of(rollout: AttemptedRollout) -> Any:
        return (rollout.metadata or {}).get("step")

    evaluated = [step for step, _ in series(steps, "val_reward")]
    of_step = means([each for each in rollouts if each.mode == "val"], step_of)
    if len(evaluated) > 1 and evaluated[0] in of_step and "validation, before" in page.figures:
        ends = [of_step[step] for step in (evaluated[0], evaluated[-1])]
        shown = [page.figures[f"validation, {label}"] for label in ("before", "after", "difference")]
        assert shown == [f"{ends[0]:.3f}", f"{ends[1]:.3f}", f"{ends[1] - ends[0]:+.3f}"]

    ledger = (await client.get("/runs/default/ledger.json")).json()
    own = (
        [each for each in rollouts if each.mode == "train" and step_of(each) == ledger["step"]]
        if ledger["step"]
        else []
    )
    grouped = means(own, lambda each: str((each.metadata or {})["group"]))
    assert {name: group["reward"] for name, group in ledger["groups"].items()} == pytest.approx(grouped)
    text = html.unescape((await client.get("/runs/default/ledger")).text)
    found = re.findall(r"(\d+) rollouts?, (\d+) trained on, mean reward</span> (?:<[^>]*>)*([^<]*)", text)
    assert [shown for *_, shown in found] == [show_number(mean) for mean in grouped.values()]
    assert sum(int(number) for number, _, _ in found) == len(own)
    for name, mean in [*grouped.items()][:2]:
        side = html.unescape((await client.get("/runs/default/group", params={"name": name})).text)
        assert f"mean reward {show_number(mean)}</p>" in side

    versions = (await client.get("/runs/default/resources.json")).json()["versions"]
    used = [each for each in versions if each["use"]]
    for each in used:
        names = (each["version_id"], each["version_id"].partition("@")[0])
        assert each["use"]["step"] == min(step_of(one) for one in rollouts if one.resources_id in names)
        name = "reward" if each["use"]["mode"] == "train" else f"{each['use']['mode']}_reward"
        assert each["use"]["reward"] == dict(series(steps, name)).get(each["use"]["step"])

    compared = (await client.get("/compare", params={"a": "default", "b": "default"})).text
    last = {key: value for each in steps for key, value in each.values.items()}
    rows = re.findall(r'<tr><td>([^<]+)</td><td class="num">([^<]*)</td><td class="num">([^<]*)</td>', compared)
    assert {name: (one, other) for name, one, other in rows if name in last} == {
        name: (show_number(value),) * 2 for name, value in last.items()
    }
    if any(key.startswith("outcome/") for key in last):  # a training with weights has all of these
        assert all((found, grouped, used, of_step, "validation, difference" in page.figures))
    for count, difference in re.findall(r"<p>([\d,]+) tasks in both runs: mean difference ([^,]*),", compared):
        tasks = {json.dumps(each.input, sort_keys=True) for each in rollouts if each.mode == "val"}
        assert (int(count), difference) == (len(tasks), "0")


@pytest.fixture(params=["baseline", "apo", "grpo", "eval"])
def opened(request: pytest.FixtureRequest, runs: dict[str, Path]) -> tuple[str, Path]:
    return request.param, runs[request.param]


async def test_every_page_and_report_shows_the_numbers_of_the_store(opened: tuple[str, Path]) -> None:
    name, directory = opened
    store = agl.create_store(str(directory))
    server = agl.LightningStoreServer(store, port=0, token=TOKEN, pages=[Dashboard(store, [TOKEN], read_only=True)])
    await server.start()
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=server.endpoint, headers=headers, timeout=120) as client:

        async def read(path: str) -> Shown:
            answered = await client.get(path)
            assert answered.status_code == 200, answered.text
            return Shown(answered.text)

        rollouts, steps = (await store.query_rollouts()).items, (await store.query_metrics()).items
        counts = Counter(rollout.status for rollout in rollouts)
        spans = (await store.query_spans(None)).items
        last = {key: value for each in steps for key, value in each.values.items()}
        page, listed, fleet = [await read(path) for path in ("/runs/default", "/", "/fleet")]
        saved = Shown((directory / "report.html").read_text()) if name != "eval" else None
        report = json.loads((await asyncio.to_thread(run_here, directory, "report", ".", "--json")).stdout)
        top = json.loads((await asyncio.to_thread(run_here, directory, "top", ".", "--json")).stdout)

        # rollouts: their number, by status, and how many failed
        for shown in (page, listed, *([saved] if saved else [])):
            assert {key: value for key, value in shown.counts.items() if key in counts} == counts, name
            failed = f"{counts['failed']} of {len(rollouts)} rollouts failed"
            assert (failed in shown.html) is bool(counts["failed"])
        assert f"all {show_number(len(rollouts))}<" in page.html
        assert f"{len(rollouts)}</p>" in (await read("/runs/default/rollouts")).html
        for found in (report["rollouts"], top["rollouts"]):
            assert {key: value for key, value in found.items() if value} == counts

        # steps and metrics
        assert f"step {steps[-1].step}<" in page.html.replace(" ·", "<").replace("</p>", "<")
        assert report["step"] == top["step"] == steps[-1].step
        for key, value in page.metrics.items():
            assert value == show_number(series(steps, key)[-1][1]), key
        for key, summary in report["metrics"].items():
            values = [value for _, value in series(steps, key)]
            assert list(summary.values()) == [values[0], values[-1], min(values), max(values)], key
        reward = (series(steps, "reward") or series(steps, "val_reward"))[-1][1]
        assert listed.figures["reward"] == show_number(reward)
        assert top["reward"] == reward
        if "val_reward" in last:
            assert listed.figures["validation"] == show_number(last["val_reward"])
        for step, value in series(steps, "reward"):  # each point of the curve names its step and value
            assert any(re.match(rf"reward, {step}: {re.escape(f'{value:.4g}')[:5]}", each) for each in page.points)
        percents = [int(each) for each in re.findall(r"faint\"> (\d+) %</span></dd>", page.html)]
        assert sum(percents) == (100 if percents else 0)

        # what the run achieved, and what it cost
        shared = set(page.figures) & set(saved.figures) if saved else set()
        assert {key: page.figures[key] for key in shared} == {key: saved.figures[key] for key in shared if saved}
        assert name not in ("apo", "grpo") or {"model calls", "validation, difference"} <= shared
        if name == "apo":
            calls = sum(semconv.is_llm_call(span) for span in spans)
            log = (directory / "llm_calls.jsonl").read_text().splitlines()
            assert "confirmed_best" in last
            assert saved is not None
            assert number(saved.figures["model calls"]) == calls + len(log) == last["model_calls"]
        if name == "grpo":
            assert saved is not None
            assert number(saved.figures["model calls"]) == sum(value for _, value in series(steps, "calls"))
            entropies = [value for _, value in series(steps, "entropy")]
            words = f"{entropies[-1]:.3g} nats per token, {entropies[0]:.3g} at the start"
            assert words in page.html
            assert words in saved.html
            ledger = (await client.get("/runs/default/ledger.json")).json()
            outcomes = Counter(each["outcome"] for each in ledger["rollouts"])
            assert ledger["step"] == steps[-1].step
            recorded = steps[-1].values.items()
            assert outcomes == {key[8:]: int(value) for key, value in recorded if key[:8] == "outcome/" and value}

        # each point of a curve leads to the rollouts of its step
        for target in set(re.findall(r'href="(/runs/default/(?:rollouts|ledger)\?[^"]*step=\d+)"', page.html)):
            assert (await client.get(target.replace("?", ".json?"))).json()["rollouts"], (name, target)

        # workers and backends; the workers of a finished run have ended
        ended = (await client.get("/fleet.json")).json()["workers"]
        assert {worker["state"] for worker in [*ended, *top["workers"]]} <= {"ended"}, name
        assert int(fleet.figures.get("rollouts", "0").replace(",", "")) == len(rollouts)
        again = await read("/fleet")
        assert re.findall(r"newest ([\d,]+) calls?", fleet.html) == re.findall(r"newest ([\d,]+) calls?", again.html)

        await check_lists(client, rollouts, page)
        if name != "eval":
            await check_training(client, rollouts, steps, page)

        # each rollout's page: reward and status
        for rollout in [*rollouts[:3], *rollouts[-3:]]:
            assert isinstance(rollout, AttemptedRollout)
            own = await read(f"/runs/default/rollouts/{rollout.rollout_id}")
            given = rollout.attempt.reward
            assert own.figures["reward"] == show_number(given)
            metadata: dict[str, Any] = dict(rollout.metadata or {})
            if "step" in metadata:
                assert own.figures["step"] == str(metadata["step"])
    await server.stop()
    await store.close()
