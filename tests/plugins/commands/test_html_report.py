"""``agl report --html``: one self-contained page, in which hostile content is text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agentlightning as agl
from agentlightning.cli import cli
from agentlightning.plugin.registry import PluginManager
from agentlightning_algorithms.shared.prompt_search.candidate import CANDIDATE_NAME, Candidate
from agentlightning_plugins.commands.report import command
from agentlightning_plugins.commands.report.report import write_html, write_report
from agentlightning_plugins.shared.monitoring.metrics import make_series, sum_phases
from agentlightning_plugins.shared.rendering.text import show_text
from agentlightning_plugins.shared.training_records.record import LedgerEntry

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe\u200b{{7*7}}%s&amp;"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[tuple[agl.LightningStore, Path]]:
    """A finished run of two evaluations with a hostile task, error, reply, metric and resource."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"key": "k", "seed": HOSTILE}))
    store = agl.create_store(f"sqlite:///{directory}/store.db")
    for step, reward in ((0, 0.0), (2, 1.0)):
        for task in range(8):
            await _run(store, "val", {"step": step, "task_id": task}, reward if task else 0.0)
        await store.add_metrics(step, {"val_reward": reward * 7 / 8, "val_s": 2.0})
    for place in range(4):
        rollout = await _run(store, "train", {"step": 0, "group": "g"}, float(place > 1))
        entry = LedgerEntry(
            rollout.rollout_id, rollout.attempt.attempt_id, 1, "g", "flat_group" if place else "trained"
        )
        await store.add_many_spans([entry.to_span()])
    await store.add_metrics(1, {"reward": 0.5, "reward_std": 0.5, "rollouts": 4.0, "sample_s": 3.0, "entropy": 1.0})
    await store.add_metrics(2, {"entropy": 0.5, "calls": 12.0})
    await store.add_resources({HOSTILE: HOSTILE})
    yield store, directory
    await store.close()


async def _run(store: agl.LightningStore, mode: Any, metadata: dict[str, Any], reward: float) -> agl.AttemptedRollout:
    await store.enqueue_rollout({"question": HOSTILE}, mode=mode, metadata=metadata)
    rollout = await store.dequeue_rollout()
    assert rollout is not None
    messages = json.dumps([{"role": "user", "content": HOSTILE}])
    reply = json.dumps([{"role": "assistant", "content": f"{HOSTILE} {reward}"}])
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": messages, "gen_ai.output.messages": reply}
    where = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.add_span(agl.Span.from_attributes(attributes=attributes, name="chat", **where))
    await store.update_attempt(*where.values(), status="succeeded", reward=reward)
    return rollout


async def test_the_page_shows_the_whole_run_and_loads_no_other_file(run: tuple[agl.LightningStore, Path]) -> None:
    page = (await write_html(*run)).read_text()
    for part in ("validation, before", "+0.875", "95 %:", "Before: reward 0.0", "After: reward 1.0", "entropy by step"):
        assert part in page
    assert re.search(r"<td class=\"num\">25 %</td><td>3 flat group</td>", page)
    assert re.search(r"sampling</dt><dd>3.0 s<", page)
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", _without_text(page))


async def test_the_interval_of_the_reward_excludes_rollouts_without_a_reward(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    for step in (1, 2):
        values = {"reward": 0.5, "reward_std": 0.5, "rollouts": 104.0, "rollouts_left_out": 4.0}
        await store.add_metrics(step, values)
    page = (await write_html(store, tmp_path)).read_text()
    assert "reward, 1: 0.5 (0.402 to 0.598)" in page
    assert [point["low"] for point in make_series((await store.query_metrics()).items, "reward")] == [0.402] * 2


async def test_the_phases_of_a_step_are_counted_once_and_add_up_to_its_time(tmp_path: Path) -> None:
    """A step of ``grpo`` waits while it samples, writes its checkpoint during the next step, and lasts 13 s."""
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    sampled = {"sample_s": 6.0, "wait_s": 6.1, "prepare_s": 0.5, "train_s": 5.0, "record_s": 0.2, "publish_s": 0.4}
    await store.add_metrics(1, {**sampled, "checkpoint_s": 9.0, "checkpoint_wait_s": 0.8, "seconds": 13.0})
    page = (await write_html(store, tmp_path)).read_text()
    rows = dict(re.findall(r"</span>([a-z ]+)</dt><dd>([\d.]+ m?s)<", page.partition("<h2>Time by phase</h2>")[2]))
    assert (rows["sampling"], rows["waiting for checkpoints"]) == ("6.1 s", "800 ms")
    seconds = [float(text.partition(" ")[0]) / (1000 if text.endswith("ms") else 1) for text in rows.values()]
    assert sum(seconds) == pytest.approx(13.0)


async def test_the_phases_of_a_verl_step_come_from_verls_own_timings() -> None:
    store = agl.create_store("memory://")
    spent = {"gen": 6.0, "old_log_prob": 1.0, "adv": 0.5, "update_actor": 4.0, "update_weights": 0.5, "step": 12.1}
    await store.add_metrics(1, {"record_s": 0.1, **{f"timing_s/{name}": value for name, value in spent.items()}})
    phases = {each["name"]: each["seconds"] for each in sum_phases((await store.query_metrics()).items)}
    assert phases == {
        "sampling": 6.0, "preparing": 1.5, "training": 4.0, "publishing weights": 0.5, "writing records": 0.1
    }  # fmt: skip


async def test_hostile_content_is_shown_as_text(run: tuple[agl.LightningStore, Path]) -> None:
    page = (await write_html(*run)).read_text()
    assert page.count("&lt;script&gt;alert(1)") >= 5
    assert not re.search(r"<(script|img|iframe)", page)
    assert not re.search("[\x1b\u202e\u200b]", page)
    assert show_text("a\x1b[0m\u202eb") == "a⟨001B⟩[0m⟨202E⟩b"
    assert len(show_text("x" * 10_000_000)) < 30_000


def _without_text(page: str) -> str:
    return page.replace("src=x", "")


def test_the_command_writes_the_page_to_the_given_path(run: tuple[agl.LightningStore, Path], tmp_path: Path) -> None:
    PluginManager().hook.add_commands(cli=cli)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli, ["report", str(run[1]), "--html", str(page)])
    assert (result.exit_code, result.output.strip()) == (0, str(page))
    assert page.read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(cli, ["report", str(run[1]), "--html", str(tmp_path / "no" / "page.html")])
    assert "cannot be written" in str(refused.exception or refused.output)


def test_the_page_is_in_the_run_directory_when_a_run_has_ended(tmp_path: Path) -> None:
    trainer = agl.Trainer(algorithm="baseline", run_dir=tmp_path / "r", trackers=[])
    trainer.fit(_rewarded, [1, 2], [3])
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<h1>r</h1>" in page
    assert "succeeded" in page


def _rewarded(task: int) -> float:
    return 1.0


def test_a_prompt_search_shows_its_best_prompt_with_the_difference(tmp_path: Path) -> None:
    async def write() -> str:
        (tmp_path / "run.json").write_text('{"key": "k"}')
        store = agl.create_store(f"sqlite:///{tmp_path}/store.db")
        try:
            prompt = agl.PromptTemplate("Answer.\nBe long.", "f-string")
            seed = Candidate.of({"p": prompt}, full_score=0.25, task_scores=(0.0, 0.0, 0.0, 1.0))
            better = agl.PromptTemplate("Answer.\nBe short.", "f-string")
            best = Candidate.of({"p": better}, seed, full_score=1.0, task_scores=(1.0,) * 4, critique="too long")
            for place, candidate in enumerate((seed, best)):
                await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE_NAME: candidate})
            return (await write_html(store, tmp_path)).read_text()
        finally:
            await store.close()

    page = asyncio.run(write())
    assert "Be <del>long</del><ins>short</ins>." in page
    assert "+0.750" in page
    assert "too long" in page
    names = ("Scores of the candidates", "Task rewards of the seed", "Task rewards of the best candidate")
    drawn = [page.split(f"<figcaption>{name} ")[1].split("</svg>")[0] for name in names]
    bars = [re.findall(r"<title>([^<]*): (\d+)</title></rect>", chart) for chart in drawn]
    assert [count for _, count in bars[0]] == ["1", "1"]
    assert bars[1:] == [[("0", "3"), ("1", "1")], [("1", "4")]]


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_the_page_says_whether_fresh_rollouts_confirmed_the_best_candidate(
    tmp_path: Path, is_confirmed: bool
) -> None:
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    seed = Candidate.of({"p": agl.PromptTemplate("first")}, full_score=0.5)
    best = Candidate.of({"p": agl.PromptTemplate("better")}, seed, full_score=0.9)
    for place, candidate in enumerate((seed, best)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE_NAME: candidate})
    await store.add_metrics(1, {"confirmed_first": 0.5, "confirmed_best": 0.625, "confirmed_p": 0.25})
    await store.add_resources((best if is_confirmed else seed).prompts)
    page = (await write_html(store, tmp_path)).read_text()
    assert ("<h2>Best prompt</h2>" in page) == is_confirmed
    assert ("<h2>Best candidate, not published</h2>" in page) != is_confirmed
    assert "0.500 with the first prompt, 0.625 with this prompt (one-sided p = 0.25): not confirmed" in page
    report = (await write_report(store, tmp_path)).read_text()
    assert (
        "- fresh rollouts: 0.500 with the first prompt, 0.625 with the best (one-sided p = 0.25): not confirmed"
        in report
    )


async def test_a_prompt_that_no_fresh_rollouts_compared_with_the_first_is_not_confirmed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    seed = Candidate.of({"p": agl.PromptTemplate("first")}, full_score=0.5)
    best = Candidate.of({"p": agl.PromptTemplate("better")}, seed, full_score=0.9)
    for place, candidate in enumerate((seed, best)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE_NAME: candidate})
    await store.add_resources(seed.prompts)
    assert "not confirmed" not in (await write_report(store, tmp_path)).read_text(), "the first prompt is published"
    await store.add_resources(best.prompts)
    assert "- best prompt: not confirmed" in (await write_report(store, tmp_path)).read_text()
    assert "Not confirmed: no fresh rollouts" in (await write_html(store, tmp_path)).read_text()


async def test_of_candidates_with_the_same_score_the_page_shows_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    seed = Candidate.of({"p": agl.PromptTemplate("first")}, full_score=0.5)
    tied, best = (Candidate.of({"p": agl.PromptTemplate(text)}, seed, full_score=0.9) for text in ("tied", "best"))
    for place, candidate in enumerate((seed, tied, best)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE_NAME: candidate})
    await store.add_resources(best.prompts)
    page = (await write_html(store, tmp_path)).read_text()
    assert '<h3>p</h3>\n<pre class="block">best</pre>' in page.partition("<h2>Best prompt</h2>")[2]


def test_the_command_writes_html(tmp_path: Path) -> None:
    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path}/store.db")
        await store.add_metrics(1, {"reward": 0.5})
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text(json.dumps({"key": "k", "seed": 0}))
    page = tmp_path / "a.html"
    said = CliRunner().invoke(command, [str(tmp_path), "--html", str(page)])
    assert said.output == f"{page}\n"
