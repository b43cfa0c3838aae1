"""A research agent of the OpenAI Agents SDK, as its author would write it: nothing in this file is about training."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from agents import Agent, function_tool

INDEX = Path(os.environ.get("SEARCH_INDEX", "runs/rag-index.sqlite"))
RESULTS = int(os.environ.get("SEARCH_RESULTS", "1"))
INSTRUCTIONS = "Answer the question. Search as often as you need, then answer with a few words only."


def find_paragraphs(query: str) -> str:
    """Returns the paragraphs that match best, by BM25; a word of the title counts as much as ten of the text."""
    words = re.findall(r"\w+", query)
    if not words:
        return "nothing found"
    sql = "SELECT title, text FROM paragraphs WHERE paragraphs MATCH ? ORDER BY bm25(paragraphs, 10, 1), rowid LIMIT ?"
    with closing(sqlite3.connect(f"{INDEX.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute(sql, (" OR ".join(f'"{word}"' for word in words), RESULTS))
        return "\n".join(f"{title}: {text}" for title, text in found) or "nothing found"


@function_tool
def search(query: str) -> str:
    """Search the encyclopedia for a person, a place or a thing."""
    return find_paragraphs(query)


MODEL = os.environ.get("OPENAI_MODEL", "unset")
agent = Agent(name="researcher", model=MODEL, instructions=INSTRUCTIONS, tools=[search])
