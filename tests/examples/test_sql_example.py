"""examples/sql: the problems, their reward, and the calls of the LangGraph agent that are trained on."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from examples.sql import agent as sql_agent
from examples.sql import problems as sql_problems

import agentlightning as agl
from agentlightning.testing.agent import Lab
from agentlightning_plugins.shared.scripted_model.server import Answer


def test_pairs_of_columns_of_a_sql_table_occur_in_only_one_split() -> None:
    found: dict[str, set[frozenset[str]]] = {}
    for split in ("train", "val", "test"):
        schemas = sql_problems.schemas(split)
        found[split] = {frozenset(pair) for schema in schemas for pair in (schema.numbers, schema.places)}
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(found.values(), 2))
    assert {name for pair in found["train"] for name in pair} == {*sql_problems.NUMBERS, *sql_problems.PLACES}


def test_the_right_query_of_a_sql_problem_earns_1_and_its_opposite_0(tmp_path: Path) -> None:
    found = sql_problems.make_problems("test", 50, folder=tmp_path)
    opposite = {">": "<", "<": ">", "=": "!=", "ASC": "DESC", "DESC": "ASC"}
    for task in found:
        assert sql_problems.reward(task, {"query": task["gold"]}, None) == 1.0
        wrong = re.sub(r"(?<= )(>|<|=|ASC|DESC)(?= )", lambda match: opposite[match[0]], task["gold"])
        assert wrong != task["gold"]
        count = "SELECT COUNT(*)" in wrong and sql_agent.run_query(task["database"], wrong) == sql_agent.run_query(
            task["database"], task["gold"]
        )
        assert sql_problems.reward(task, {"query": wrong}, None) == float(count)
        table = task["gold"].split()[3]
        for query in ("", "\0", f"DROP TABLE {table}", f"{task['gold']}; {task['gold']}"):
            assert sql_problems.reward(task, {"query": query}, None) == 0.0
    assert found == sql_problems.make_problems("test", 50, folder=tmp_path)


def test_the_rows_of_a_sql_query_that_sorts_are_compared_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a file #1.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t (n INT)")
        connection.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])
        connection.commit()
    task = {"database": str(file), "gold": "SELECT n FROM t ORDER BY n"}
    backwards = {"query": "SELECT n FROM t ORDER BY n DESC"}
    assert sql_problems.reward(task, backwards, None) == 0.0
    assert sql_problems.reward({**task, "gold": "SELECT n FROM t"}, backwards, None) == 1.0


def test_the_sql_agent_interrupts_an_endless_query_and_cuts_a_long_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_agent, "MAX_STEPS", 100_000)
    (task,) = sql_problems.make_problems("train", 1, folder=tmp_path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    assert sql_agent.run_query(task["database"], endless) == "error: interrupted"
    assert len(sql_agent.run_query(task["database"], "SELECT hex(zeroblob(9999))")) == sql_agent.MAX_RESULT
    assert sql_agent.run_query(task["database"], "SELECT 1; SELECT 2").startswith("error: You can only execute one")


async def test_only_queries_of_the_sql_agent_are_trained_on_and_a_rewrite_can_earn_the_reward(tmp_path: Path) -> None:
    task = next(task for task in sql_problems.make_problems("train", 5, folder=tmp_path) if " = " in task["gold"])
    column = task["gold"].split()[5]
    _, *places = re.findall(r"(\w+) TEXT", sql_agent.read_schema(task["database"]))
    (other,) = set(places) - {column}

    def answer(request: Any) -> Answer:
        instruction, user = (message["content"] for message in request.body["messages"])
        if instruction == sql_agent.CHECK:
            return Answer("no" if user.endswith(("no rows", "\n0")) else "yes")
        return Answer(task["gold"].replace(column, other) if instruction == sql_agent.WRITE else task["gold"])

    async with Lab(sql_agent.graph, answer, reward=sql_problems.reward) as lab:
        (rollout,) = await lab.run(dict(task))
        spans = await lab.spans(rollout)
    assert agl.find_final_reward(spans) == 1.0
    names = [one.metadata["agent_name"] for one in agl.TraceToTriplet().adapt(spans)]
    assert names == ["write", "check", "rewrite", "check"]
    trained = agl.TraceToTriplet(agent_match="^(write|rewrite)$").adapt(spans)
    assert [one.metadata["agent_name"] for one in trained] == ["write", "rewrite"]


def test_spider_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text(json.dumps([{"db_id": "pets", "question": "How many?", "query": "SELECT 1"}]))
    database = str(tmp_path / "database" / "pets" / "pets.sqlite")
    expected = [{"question": "How many?", "database": database, "gold": "SELECT 1"}]
    assert sql_problems.load_spider("dev", tmp_path) == expected
    with pytest.raises(FileNotFoundError, match=r"has no train_spider.json; see examples/sql/README.md"):
        sql_problems.load_spider("train", tmp_path)
