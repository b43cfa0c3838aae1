"""The dashboard in a real browser, served by a real `agl store`."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page

from tests.plugins.dashboard.conftest import TOKEN, Served, sign_in
from tests.plugins.dashboard.filling import HOSTILE, RUN

PATHS = [
    "/",
    f"/runs/{RUN}",
    f"/runs/{RUN}?metric=clip_fraction",
    f"/runs/{RUN}/rollouts",
    f"/runs/{RUN}/rollouts?status=failed",
    f"/runs/{RUN}/rollouts/ro-step40-0-0",
    f"/runs/{RUN}/rollouts/ro-failed",
    f"/runs/{RUN}/rollouts/ro-huge",
    f"/runs/{RUN}/rollouts/ro-step39-0-0/tokens",
    f"/runs/{RUN}/rollouts/ro-step39-0-0/tokens?by=advantage",
    f"/runs/{RUN}/ledger",
    f"/runs/{RUN}/group?name=39-0-3",
    f"/runs/{RUN}/resources",
    f"/runs/{RUN}/resources/rs-prompts@3",
    f"/compare?a=math-baseline&b={RUN}",
    "/fleet",
]
HOSTILE_PATHS = [
    "/",
    "/runs/hostile",
    f"/runs/{RUN}/rollouts",
    f"/runs/{RUN}/rollouts?text=%3Cscript%3Edocument",
    f"/runs/{RUN}/rollouts/ro-hostile",
    f"/runs/{RUN}/rollouts/ro-hostile/tokens",
    "/runs/hostile/ledger",
    f"/runs/hostile/group?name={quote(HOSTILE, safe='')}",
    "/runs/hostile/resources",
    "/runs/math-baseline/resources",
    f"/compare?a=hostile&b={RUN}",
    "/fleet",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_accessible_and_fits_in_both_widths_and_colour_schemes(page: Page, path: str) -> None:
    page.goto(path)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] # one of the two
        found = Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == [], json.dumps(found)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_hostile_content_is_shown_as_text(page: Page, path: str) -> None:
    page.goto(path)
    text = page.locator("body").inner_text()
    assert "<script>document.title" in text
    assert page.locator("main img, main script, main [onload], main [onerror]").count() == 0
    assert page.title() != "owned"
    assert not set(text) & set("\x1b\u202e\u202c\u200b")
    assert "49" not in page.locator("h1").inner_text()


def test_hostile_content_reaches_the_json_twin_unchanged(page: Page) -> None:
    answer = page.request.get(f"/runs/{RUN}/rollouts/ro-hostile.json").json()
    assert answer["shown"]["error"]["message"] == HOSTILE
    assert answer["shown"]["conversations"][0]["messages"][-1]["text"] == HOSTILE


def test_a_page_shows_the_beginning_of_ten_megabytes_and_its_twin_all(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-huge")
    assert len(page.content()) < 200_000
    assert "10,000,000 characters" in page.locator(".message").last.inner_text()
    answer = page.request.get(f"/runs/{RUN}/rollouts/ro-huge.json").json()
    assert len(answer["shown"]["conversations"][0]["messages"][-1]["text"]) == 10_000_000


@pytest.mark.parametrize("path", [path for path in PATHS if "?" not in path])
def test_every_page_has_a_json_twin(page: Page, path: str) -> None:
    answer = page.request.get("/index.json" if path == "/" else f"{path}.json")
    assert answer.ok
    assert answer.json()


def test_signing_in_leads_back_to_the_page_and_puts_the_token_into_no_url(browser: Browser, served: Served) -> None:
    context = browser.new_context(base_url=served.url)
    page = context.new_page()
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    deep = f"/runs/{RUN}/rollouts/ro-failed"
    page.goto(deep)
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This token is wrong.").wait_for()
    assert context.cookies() == []
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{served.url}{deep}")
    (cookie,) = context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert TOKEN not in cookie["value"]
    assert not [url for url in seen if TOKEN in url]
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{served.url}/login")
    page.goto("/fleet")
    assert "/login?next=" in page.url
    context.close()


def test_filters_select_rollouts_and_pages_follow_each_other(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts")
    first = page.locator("[data-rows] tbody tr").count()
    page.get_by_role("link", name="Older").click()
    page.wait_for_url("**before=**")
    total = page.request.get(f"/runs/{RUN}/rollouts.json").json()["total"]
    assert (first, first + page.locator("[data-rows] tbody tr").count()) == (50, total)
    page.goto(f"/runs/{RUN}/rollouts")
    page.get_by_label("Status").select_option("succeeded")
    page.get_by_label("Step").fill("40")
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**min=0.5**")
    shown = page.locator("[data-rows] tbody tr").all_inner_texts()
    assert shown
    assert all("succeeded" in row and "\t40\t" in row and "\t1\t" in row for row in shown)


def test_the_search_finds_text_in_errors_and_in_messages(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("zerodivision")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=zerodivision**")
    assert page.locator("[data-rows] td.id").all_inner_texts() == ["ro-failed"]
    found = page.request.get(f"/runs/{RUN}/rollouts.json?text=Solve+the+problem&messages=1&status=failed").json()
    assert {"ro-failed", "ro-hostile"} <= {row["rollout_id"] for row in found["rollouts"]}
    assert page.request.get(f"/runs/{RUN}/rollouts.json?text=Solve+the+problem&status=failed").json()["rollouts"] == []


def test_keys_move_through_the_list_and_from_rollout_to_rollout(page: Page, served: Served) -> None:
    page.goto(f"/runs/{RUN}/rollouts?step=39")
    names = page.locator("[data-rows] td.id a").all_inner_texts()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{served.url}/runs/{RUN}/rollouts/{names[0]}")
    page.keyboard.press("j")
    page.wait_for_url(f"**/{names[1]}")
    page.keyboard.press("k")
    page.wait_for_url(f"**/{names[0]}")
    page.keyboard.press("u")
    page.wait_for_url("**/rollouts?step=39")


def test_a_point_of_the_curve_leads_to_the_rollouts_of_its_step(page: Page) -> None:
    page.goto(f"/runs/{RUN}")
    page.locator("#reward svg a[href*='ledger?step=40']").first.dispatch_event("click")
    page.wait_for_url("**/ledger?step=40")
    assert page.locator("[data-rows] tbody tr").count() == 16
    page.goto(f"/runs/{RUN}")
    assert page.locator("#reward svg a[href*='mode=val&step=40']").count() == 1


def test_a_rollout_shows_conversation_tools_attempts_error_and_spans(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step40-0-0")
    assert page.locator(".message .role").all_inner_texts() == ["system", "user", "assistant", "tool", "assistant"]
    assert '"expression": "17*250/100"' in page.locator(".call").inner_text()
    assert page.locator(".span").count() == 5
    page.goto(f"/runs/{RUN}/rollouts/ro-failed")
    assert "share = total / count" in page.locator(".problem").inner_text()
    page.get_by_role("link", name="Attempt 1").click()
    page.wait_for_url("**attempt=**")
    assert "Timed out" in page.locator(".problem").inner_text()


def test_the_ledger_leads_to_the_tokens_and_to_the_group(page: Page) -> None:
    page.goto(f"/runs/{RUN}")
    page.get_by_role("navigation", name="Run").get_by_role("link", name="Ledger").click()
    page.wait_for_url("**/ledger")
    outcomes = page.locator("[data-rows] .outcome").all_inner_texts()
    assert (outcomes.count("trained"), outcomes.count("flat group"), len(outcomes)) == (12, 4, 16)
    assert "75 %" in page.locator("tr.current").inner_text()
    page.get_by_role("link", name="39-0-3", exact=True).first.click()
    page.wait_for_url("**/group?name=39-0-3")
    assert "nothing to compare" in page.locator(".notice").inner_text()
    assert page.locator(".side .card").count() == 4
    assert page.locator(".side .role").first.inner_text() == "assistant"
    page.goto(f"/runs/{RUN}/group?name=39-0-0")
    page.locator(".side .outcome-trained").first.click()
    page.wait_for_url("**/tokens")
    assert page.locator(".token").count() == 14
    assert page.locator(".given").count() == 2
    assert page.locator(".boundary").count() == 2
    assert page.locator(".heat-n4").count() == 2
    page.get_by_role("link", name="Advantage").click()
    page.wait_for_url("**by=advantage**")
    assert page.locator(".heat-p4").count() == 12
    refused = page.request.get(f"/runs/{RUN}/rollouts/ro-step39-0-0/tokens.json?by=colour")
    assert (refused.status, "logprob, trainer, gap" in refused.text()) == (422, True)


def test_actions_label_retry_and_cancel_and_the_labelled_can_be_exported(page: Page, served: Served) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step38-1-1")
    page.get_by_label("Note").fill("misread the question")
    page.get_by_role("button", name="Bad").click()
    page.locator(".heading .label-bad").wait_for()
    page.goto(f"/runs/{RUN}/rollouts/{served.ids['queued']}")
    page.get_by_role("button", name="Cancel this rollout").click()
    page.locator(".status-cancelled").first.wait_for()
    page.get_by_role("button", name="Queue it again").click()
    page.locator(".status-requeuing, .status-queuing").first.wait_for()
    lines = page.request.get(f"/runs/{RUN}/labelled.jsonl").text().splitlines()
    found = {record["rollout_id"]: record for record in map(json.loads, lines)}
    assert found["ro-step38-1-1"]["label"] == "bad"
    assert found["ro-step38-1-1"]["note"] == "misread the question"
    assert found["ro-step38-1-1"]["conversations"][0]["messages"][-1]["role"] == "assistant"
    page.goto(f"/runs/{RUN}/rollouts?label=bad")
    assert "ro-step38-1-1" in page.locator("[data-rows] td.id").all_inner_texts()[0]


def test_a_prompt_shows_its_difference_and_can_be_promoted_without_showing_a_key(page: Page) -> None:
    page.goto(f"/runs/{RUN}/resources/rs-prompts@3")
    assert "step by step" in " ".join(page.locator("ins").all_inner_texts())
    assert "sk-not-to-be-shown" not in page.content()
    page.goto(f"/runs/{RUN}/resources/rs-prompts@1")
    page.get_by_role("button", name="Make it the latest").click()
    page.wait_for_url("**/rs-prompts%404")
    assert "latest" in page.locator(".heading").inner_text()


def test_the_lineage_of_a_prompt_search_is_a_tree_with_the_difference_from_the_parent(page: Page) -> None:
    page.goto("/runs/math-baseline/resources")
    best = page.locator("#lineage > ul > li > ul > li > ul > li")
    assert page.locator("#lineage li").count() == 4
    assert "Units are still there. <script>" in best.inner_text()
    best.get_by_role("link").click()
    page.wait_for_url("**/resources/rs-*")
    assert page.locator("ins").first.inner_text().strip() == "only"


def test_a_comparison_names_the_tasks_that_flipped_with_a_p_value(page: Page) -> None:
    page.goto(f"/compare?a=math-baseline&b={RUN}")
    text = page.locator("section", has_text="Tasks of the last validation").inner_text()
    assert "4 tasks in both runs: mean difference 0.25, p = 1." in text
    assert "2 gained, 1 lost" in text
    page.locator("td.num a[href$='/rollouts/ro-val-2']").click()
    page.wait_for_url("**/ro-val-2")


def test_a_page_that_is_open_shows_what_happens(page: Page, served: Served) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step39-1-1")
    page.locator("#live:not([hidden])").wait_for()
    other = page.context.new_page()
    other.goto(f"/runs/{RUN}")
    other.locator("#live:not([hidden])").wait_for()
    queued = page.request.post(
        "/v1/agl/rollouts",
        headers={"authorization": f"Bearer {TOKEN}", "agl-run": RUN},
        data={"input": "seen at once"},
    ).json()
    other.get_by_text(queued["rollout_id"]).wait_for()
    other.close()


def test_pages_work_without_javascript(browser: Browser, served: Served) -> None:
    context: BrowserContext = browser.new_context(base_url=served.url, java_script_enabled=False)
    page = context.new_page()
    sign_in(page, served.url)
    page.goto(f"/runs/{RUN}")
    assert page.locator("#reward svg.chart").count() == 1
    page.get_by_role("navigation", name="Run").get_by_role("link", name="Rollouts").click()
    page.get_by_label("Status").select_option("failed")
    page.get_by_role("button", name="Filter").click()
    page.get_by_role("link", name="ro-failed").click()
    assert "division by zero" in page.locator(".problem").inner_text()
    context.close()
