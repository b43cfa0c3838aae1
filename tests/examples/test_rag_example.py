"""examples/rag: the questions, the index, their reward, and the agent of the OpenAI Agents SDK."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples.rag import agent as rag_agent
from examples.rag import problems as rag_problems

import agentlightning as agl
from agentlightning.testing.agent import Lab
from agentlightning_plugins.shared.scripted_model.server import Answer


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "an index #1.sqlite"
    monkeypatch.setattr(rag_agent, "INDEX", file)
    return file


def write_world(split: rag_problems.Split, index: Path) -> dict[str, rag_problems.Facts]:
    world = rag_problems.make_world(split)
    rag_problems.write_index(rag_problems.paragraphs(world), index)
    return world


def found_by(name: str, relation: str) -> str:
    return rag_agent.find_paragraphs(f"{relation} {name}")


def test_people_and_pairs_of_relations_of_rag_questions_occur_in_only_one_split() -> None:
    seen: dict[str, set[Any]] = {}
    for split in rag_problems.SPLITS:
        world = rag_problems.make_world(split)
        named = {*world, *(name for facts in world.values() for name in facts.values())}
        assert named == set(rag_problems.people(split))
        seen[split] = named | rag_problems.relation_pairs(split)
    assert all(
        seen[one].isdisjoint(seen[other]) for one, other in (("train", "val"), ("train", "test"), ("val", "test"))
    )
    pairs = rag_problems.relation_pairs("train")
    assert {first for first, _ in pairs} == {second for _, second in pairs} == set(rag_problems.RELATIONS)


def test_two_searches_for_the_right_people_lead_to_the_answer_of_a_rag_question(index: Path) -> None:
    world = write_world("test", index)
    for row in (row for row, _ in zip(rag_problems.row_stream("test", 0), range(50), strict=False)):
        first, second = row["question_decomposition"]
        start, relation = first["question"].split(" >> ")
        assert start in row["question"]
        middle, then = first["answer"], second["question"].split(" >> ")[1]
        assert world[start][relation] == middle
        assert world[middle][then] == second["answer"] == row["answer"]
        supporting = [found_by(start, relation), found_by(middle, then)]
        for step, text in zip((first, second), supporting, strict=True):
            part = row["paragraphs"][step["paragraph_support_idx"]]
            assert text == f"{part['title']}: {part['paragraph_text']}"
            assert text.endswith(f"{step['answer']}.")
        assert [part["is_supporting"] for part in row["paragraphs"]].count(True) == 2
    assert rag_agent.find_paragraphs('" OR *') == rag_agent.find_paragraphs("?") == "nothing found"
    assert rag_problems.make_problems("test", 20) == rag_problems.make_problems("test", 20)


def test_the_reward_of_a_rag_answer_is_its_best_f1_over_the_right_answers() -> None:
    def reward(answer: object) -> float:
        task = {"answers": ["the University of Oslo", "Oslo"]}
        return rag_problems.reward(task, SimpleNamespace(final_output=answer), None)

    assert reward("OSLO.") == reward("The university of Oslo") == 1.0
    assert reward("Bergen") == reward("") == reward(None) == 0.0
    assert reward("in Oslo") == pytest.approx(2 / 3)


async def test_the_rag_agent_searches_twice_and_its_three_model_calls_are_triplets(index: Path) -> None:
    world = write_world("train", index)
    row = next(rag_problems.row_stream("train", 0))
    start, relation = row["question_decomposition"][0]["question"].split(" >> ")

    def answer(request: Any) -> Answer:
        results = [message["content"] for message in request.body["messages"] if message["role"] == "tool"]
        match len(results):
            case 0:
                return Answer(tool_calls=[("search", {"query": f"{relation} {start}"})])
            case 1:
                assert results[0] == found_by(start, relation)
                return Answer(tool_calls=[("search", {"query": world[start][relation]})])
        return Answer(row["answer"])

    async with Lab(rag_agent.agent, answer, reward=rag_problems.reward) as lab:
        (rollout,) = await lab.run(dict(rag_problems.to_problem(row)))
        spans = await lab.spans(rollout)
    assert agl.find_final_reward(spans) == 1.0
    assert [one.metadata["agent_name"] for one in agl.TraceToTriplet().adapt(spans)] == ["researcher"] * 3


def test_musique_is_read_from_its_files_and_its_paragraphs_are_found(index: Path) -> None:
    part = {"idx": 0, "title": "Oslo", "paragraph_text": "Oslo is a city.", "is_supporting": True}
    row = {"question": "Which city?", "answer": "Oslo", "answer_aliases": ["Kristiania"], "paragraphs": [part, part]}
    for split in ("train", "dev"):
        (index.parent / f"musique_ans_v1.0_{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    expected = [{"question": "Which city?", "answers": ["Oslo", "Kristiania"]}]
    assert rag_problems.load_musique("dev", index.parent) == expected
    (index.parent / "index.sqlite").rename(index)
    assert rag_agent.find_paragraphs("cities") == "Oslo: Oslo is a city."
    with pytest.raises(FileNotFoundError, match=re.escape("has no musique_ans_v1.0_test.jsonl; see examples/rag")):
        rag_problems.load_musique("test", index.parent)
