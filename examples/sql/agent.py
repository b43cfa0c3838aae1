"""A text-to-SQL agent of LangGraph, as its author would write it: nothing in this file is about training.

write -> execute -> check -> end
            ^         |
            +-- rewrite, at most twice
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

WRITE = "Write one SQLite query that answers the question. Answer with the query only."
CHECK = "Does the result show that the query is right? Answer yes or no."
REWRITE = "The query is wrong. Write a better one. Answer with the query only."
MAX_REWRITES = 2
MAX_ROWS = 20
MAX_RESULT = 500
MAX_STEPS = 10_000_000

model = ChatOpenAI(
    model_name=os.environ.get("OPENAI_MODEL", "unset"),
    openai_api_key=SecretStr(os.environ.get("OPENAI_API_KEY", "unset")),
)


class State(TypedDict, total=False):
    """State that the nodes share; the input is a question and the file of an SQLite database."""

    question: str
    database: str
    schema: str
    query: str
    result: str
    is_right: bool
    rewrites: int


def open_database(database: str) -> closing[sqlite3.Connection]:
    """Opens a database for reading; a query of more than about ten million steps is stopped."""
    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda data: data.decode(errors="replace")
    steps = iter(range(MAX_STEPS // 10_000))
    connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
    return closing(connection)


def run_query(database: str, query: str) -> str:
    """Returns the first rows of a query's result, or the error of SQLite, as a text."""
    try:
        with open_database(database) as connection:
            rows = connection.execute(query).fetchmany(MAX_ROWS)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"error: {error}"
    return ", ".join(" ".join(map(str, row)) for row in rows)[:MAX_RESULT] or "no rows"


def read_schema(database: str) -> str:
    """Returns the statements that create the tables of a database."""
    with open_database(database) as connection:
        return "\n".join(row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table'"))


async def ask(instruction: str, *parts: str) -> str:
    """Calls the model."""
    answer = await model.ainvoke([("system", instruction), ("user", "\n".join(parts))])
    return str(answer.content).strip()


async def write(state: State) -> State:
    """Writes the first query."""
    schema = read_schema(state["database"])
    return {"schema": schema, "query": await ask(WRITE, schema, state["question"]), "rewrites": 0}


def execute(state: State) -> State:
    """Runs the query."""
    return {"result": run_query(state["database"], state["query"])}


async def check(state: State) -> State:
    """Asks whether the query is right."""
    verdict = await ask(CHECK, state["question"], state["query"], state["result"])
    return {"is_right": verdict.lower().startswith("yes")}


async def rewrite(state: State) -> State:
    """Writes another query."""
    query = await ask(REWRITE, state["schema"], state["question"], state["query"], state["result"])
    return {"query": query, "rewrites": state["rewrites"] + 1}


def after_check(state: State) -> str:
    """Returns the node that follows a check."""
    return END if state["is_right"] or state["rewrites"] >= MAX_REWRITES else "rewrite"


builder: Any = StateGraph(State)
builder.add_node("write", write).add_node("execute", execute).add_node("check", check).add_node("rewrite", rewrite)
builder.add_edge(START, "write").add_edge("write", "execute").add_edge("execute", "check")
builder.add_conditional_edges("check", after_check, ["rewrite", END]).add_edge("rewrite", "execute")
graph = builder.compile()
