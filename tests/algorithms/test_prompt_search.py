"""The parts of a prompt search: placeholders, the cache of model calls, the budget, what critics read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage, SearchBudget
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate, find_placeholders, fit, show_text
from agentlightning_algorithms.shared.prompt_search.chat import CachedCall, CallCache
from agentlightning_algorithms.shared.prompt_search.critique import read_prompt, shorten_middle
from tests.algorithms import test_apo, test_gepa
from tests.algorithms.prompt_lab import SEED, Server, critic_and_editor

ORIGINAL = PromptTemplate("Answer {question} in {style}, {score:.1f}.")
VALUES = {"question": "Q", "style": "S", "score": 0.25}


@pytest.mark.parametrize(
    ("edited", "filled"),
    [
        ("{style}: {question} {score}", "S: Q 0.25"),
        ("{score:.1f} {style} {question}", "0.2 S Q"),
        ('{question}{style}{score} as {"answer": 3}', 'QS0.25 as {"answer": 3}'),
        ('{question}{style}{score} as {"a": {"b": 1}}', 'QS0.25 as {"a": {"b": 1}}'),
        ("{question}{style}{score} and {other}", "QS0.25 and {other}"),
        ("{question}{style}{score} a } b { c", "QS0.25 a } b { c"),
        ("{question}{style}{score} {{kept}}", "QS0.25 {kept}"),
    ],
)
def test_an_edit_keeps_its_placeholders_and_other_braces_are_literal(edited: str, filled: str) -> None:
    assert fit(edited, ORIGINAL).format(**VALUES) == filled


@pytest.mark.parametrize(
    ("edited", "problem"),
    [
        ("nothing", "it lost the placeholders {question}, {score}, {style}"),
        ("{question} {style}", "it lost the placeholders {score}"),
        ("{question} {style} {score:zzz}", "it lost the placeholders {score}"),
    ],
)
def test_an_edit_that_loses_a_placeholder_is_refused(edited: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        fit(edited, ORIGINAL)


@given(st.text(alphabet="{}ab:! question", max_size=40))
def test_a_fitted_edit_can_be_formatted(noise: str) -> None:
    fitted = fit("{question}" + noise, PromptTemplate("{question}"))
    assert fitted.format(question="Q").startswith("Q")


LITERALS = st.text(alphabet='{}ab:!\n x"', max_size=12).map(lambda text: text.replace("{", "{{").replace("}", "}}"))
TEMPLATES = st.tuples(LITERALS, st.lists(st.tuples(st.sampled_from(["{x}", "{x!r}", "{y:>3}"]), LITERALS), max_size=4))


@given(TEMPLATES, st.booleans())
@example(('Answer in JSON, {{"a": {{"b": 1}}}}: ', [("{x}", "\n")]), True)
@example(("{{x}} ", [("{x}", "{{")]), False)
def test_repeated_edits_leave_the_rest_of_a_template_unchanged(
    parts: tuple[str, list[tuple[str, str]]], extended: bool
) -> None:
    template = parts[0] + "".join(field + literal for field, literal in parts[1])
    prompt = original = PromptTemplate(template)
    for _ in range(3):
        addition = "more" if extended else ""
        prompt = fit(read_prompt(f"<prompt>\n{show_text(prompt)}{addition}\n</prompt>"), prompt)
    values = {"x": "X", "y": "Y"}
    expected, found = original.format(**values), prompt.format(**values)
    assert found.replace("more", "").split() == expected.split() if extended else found == expected


def test_an_editor_sees_single_braces_and_may_answer_with_either_form() -> None:
    prompt = PromptTemplate('Answer {question} as {{"answer": 1}}.\n')
    assert show_text(prompt) == 'Answer {question} as {"answer": 1}.\n'
    for answer in ('Now answer {question} as {"answer": 1}.', 'Now answer {question} as {{"answer": 1}}.'):
        assert fit(answer, prompt).template == 'Now answer {question} as {{"answer": 1}}.\n'


def test_a_prompt_that_can_run_programs_is_not_tuned() -> None:
    with pytest.raises(ConfigError, match="POML runs JavaScript"):
        find_placeholders(PromptTemplate("<p>{{ question }}</p>", "poml"))


def test_placeholders_of_jinja_templates_are_checked() -> None:
    original = PromptTemplate("{% for q in questions %}{{ q }}{% endfor %} {{ style }}", "jinja")
    assert find_placeholders(original) == {"questions", "style"}
    assert fit("{{ style }}: {{ questions | join }}", original).engine == "jinja"
    for edited, problem in (
        ("{{ style }}", r"lost the placeholders \{\{ questions \}\}"),
        ("{{ style }} {{ questions }} {{ more }}", r"it has unknown placeholders \{\{ more \}\}"),
        ("{{ style }} {{ questions", "not a jinja template"),
    ):
        with pytest.raises(ConfigError, match=problem):
            fit(edited, original)


def test_a_call_cache_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    first = CachedCall(place="edit/1", model="m", answer="first\nanswer ü", prompt_tokens=3, completion_tokens=4)
    cache = CallCache(file)
    cache.record(first)
    cache.record(CachedCall(place="edit/2", model="m", answer="second"))
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1])):
        file.write_bytes(whole[:-cut])
        again = CallCache(file)
        assert again.calls == {"edit/1": first}
        again.record(CachedCall(place="edit/2", model="m", answer="other"))
        assert CallCache(file).calls["edit/2"].answer == "other"


def test_a_damaged_call_cache_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text('{"place": "a"\n' + json.dumps({"place": "b"}) + "\n")
    with pytest.raises(ConfigError, match="line 1: not a record"):
        CallCache(file)
    assert file.read_text().startswith('{"place": "a"\n')


def test_the_price_of_a_model_is_found_by_the_prefix_of_its_name() -> None:
    budget = SearchBudget(max_cost=1.0, prices={"gpt": (1.0, 2.0), "gpt-mini": (0.5, 1.0)})
    budget.spend([CallUsage("gpt-mini-2026-01-01", 1_000_000, 100_000), CallUsage("llama", 5_000_000, 0)])
    assert budget.metrics()["cost"] == pytest.approx(0.6)
    assert not budget.is_spent()
    assert budget.is_spent([CallUsage("gpt", 400_000, 0)])


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("Here:\n<prompt>\nDo {x}.\n</prompt>\nHope it helps", "Do {x}."),
        ("```text\nDo {x}.\n```", "Do {x}."),
        ("Do {x}.\n```\ncode\n```", "Do {x}.\n```\ncode\n```"),
        ("  Do {x}. ", "Do {x}."),
    ],
)
def test_the_prompt_is_extracted_from_an_editors_answer(answer: str, prompt: str) -> None:
    assert read_prompt(answer) == prompt


def test_the_middle_of_a_long_text_is_left_out() -> None:
    short = shorten_middle("a" * 500 + "b" * 500, 100)
    assert short == "a" * 50 + "\n[900 characters left out]\n" + "b" * 50


def test_a_candidate_is_unchanged_by_json_and_its_id_depends_on_its_prompts() -> None:
    seed = Candidate.of({"p": PromptTemplate("one"), "q": PromptTemplate("two")})
    child = Candidate.of({**seed.prompts, "q": PromptTemplate("three")}, seed, critique="c", round=1)
    assert Candidate.model_validate_json(child.model_dump_json()) == child
    assert child.edited == ("q",)
    assert child.parent_id == seed.candidate_id != child.candidate_id
    assert Candidate.of(dict(reversed(list(seed.prompts.items())))).candidate_id == seed.candidate_id
    assert child.diff(seed).splitlines()[-2:] == ["-two", "+three"]


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_feedback_reaches_the_reflection_on_its_prompt_only(name: str) -> None:
    def two_prompts(task: Any, planner: agl.PromptTemplate, writer: agl.PromptTemplate) -> float:
        agl.emit_feedback("a plan has three steps", prompt="planner")
        return 0.25

    def rate(task: Any, output: Any, rollout: agl.Rollout) -> tuple[float, str]:
        agl.emit_feedback("write whole sentences", prompt="writer")
        return 0.5, "the answer has no source"

    lab: Any = test_apo if name == "apo" else test_gepa
    with Server(critic_and_editor if name == "apo" else test_gepa.reflect) as server:
        settings = {"beam_rounds": 2, "beam_width": 1, "branch_factor": 2} if name == "apo" else {"max_rollouts": 60}
        texts = {"planner": f"Plan: {SEED}", "writer": f"Write: {SEED}"}
        lab.train(lab.make(server, **settings), agl.wrap(two_prompts, rate), texts, tracer="otel")
        asked = [request.body["messages"][0]["content"] for request in server.requests]
        asked = [text for text in asked if "<critique>" not in text]
    about = [(text.partition("Plan: ")[0].count("Write: ") == 0, text) for text in asked if "no source" in text]
    assert len(about) == len(asked) > 1
    assert {is_planner for is_planner, _ in about} == {True, False}
    for is_planner, text in about:
        assert ("a plan has three steps" in text) == is_planner
        assert ("write whole sentences" in text) != is_planner
