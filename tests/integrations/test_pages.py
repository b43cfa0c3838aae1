"""The pages of docs/integrations: the agent of each runs, and the table says what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import FRAMEWORKS, MAIN, NEWEST, PAGES, check, read_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' dependencies


@pytest.mark.parametrize("name", MAIN)
async def test_the_agent_of_a_page_gives_a_triplet_with_tokens_for_each_call(name: str, tmp_path: Path) -> None:
    await check(name, tmp_path)


def test_the_table_has_a_row_for_each_page_whose_agent_is_tested() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"features"}
    assert pages == set(read_rows()) == {*MAIN, *NEWEST, *FRAMEWORKS}
