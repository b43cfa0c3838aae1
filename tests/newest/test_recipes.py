"""The pages of frameworks that need openai 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import NEWEST, check


@pytest.mark.parametrize("name", NEWEST)
async def test_the_agent_of_a_page_gives_a_triplet_with_tokens_for_each_call(name: str, tmp_path: Path) -> None:
    await check(name, tmp_path)
