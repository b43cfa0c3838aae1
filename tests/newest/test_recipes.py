"""The frameworks of docs/frameworks.md that need openai 3."""

from __future__ import annotations

from pathlib import Path

from tests.recipes import describe, read_row, run


async def test_an_agent_of_pydantic_ai_gives_a_triplet_with_tokens_for_each_call(tmp_path: Path) -> None:
    is_recorded, is_streamed = await run("Pydantic AI", "otel", tmp_path)
    row = read_row("Pydantic AI")
    expected = describe({"otel": is_recorded}, is_streamed=is_streamed)
    assert {name: row[name] for name in expected} == expected
