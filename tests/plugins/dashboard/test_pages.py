"""The dashboard in a real browser, served by a store server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.plugins.dashboard.conftest import TOKEN, Served, sign_in
from tests.plugins.dashboard.filling import HOSTILE, RUN

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATHS = {
    "/": "hostile",
    f"/runs/{RUN}": "charts, an id, hostile",
    f"/runs/{RUN}?metric=clip_fraction": "charts",
    f"/runs/{RUN}/rollouts": "hostile, an id",
    f"/runs/{RUN}/rollouts?text=%3Cscript%3Edocument": "hostile",
    f"/runs/{RUN}/rollouts/ro-step40-0-0": "",
    f"/runs/{RUN}/rollouts/ro-failed": "",
    f"/runs/{RUN}/rollouts/ro-huge": "",
    f"/runs/{RUN}/rollouts/ro-hostile": "hostile",
    f"/runs/{RUN}/rollouts/ro-step39-0-0/tokens": "",
    f"/runs/{RUN}/rollouts/ro-step39-0-0/tokens?by=advantage": "",
    f"/runs/{RUN}/rollouts/ro-hostile/tokens": "hostile",
    f"/runs/{RUN}/ledger": "charts, an id",
    f"/runs/{RUN}/group?name=39-0-3": "",
    f"/runs/{RUN}/resources": "",
    f"/runs/{RUN}/resources/rs-prompts@3": "",
    "/runs/math-baseline/resources": "charts, hostile",
    f"/compare?a=math-baseline&b={RUN}": "charts",
    f"/compare?a=hostile&b={RUN}": "hostile",
    "/runs/hostile": "hostile",
    "/runs/hostile/ledger": "hostile",
    f"/runs/hostile/group?name={quote(HOSTILE, safe='')}": "hostile",
    "/runs/hostile/resources": "hostile",
    "/fleet": "hostile",
}
"""The content of each page."""
MEASURE = """() => {
    const right = each => each.getBoundingClientRect().right;
    const charts = [...document.querySelectorAll("main svg.chart")].filter(chart => chart.checkVisibility());
    const id = document.querySelector("td.id a");
    if (id) id.textContent = "ro-0123456789abcdef";
    return {
        width: document.documentElement.scrollWidth,
        charts: charts.map(chart => ({
            right: Math.max(...[chart, ...chart.querySelectorAll("text")].map(right)),
            letters: 12 * chart.getBoundingClientRect().width / chart.viewBox.baseVal.width,
            scrolls: [chart.parentElement, chart.parentElement.parentElement].some(e => e.scrollWidth > e.clientWidth),
        })),
        id: id && { lines: id.getClientRects().length, fits: right(id) <= right(id.closest("td")) },
    };
}"""


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The tests of a path run one after another, so that they share the loaded page."""
    return str(request.param)


@pytest.fixture
def shown(page: Page, served: Served, path: str) -> Page:
    if page.url != served.url + path:
        page.goto(path)
    return page


def test_a_page_is_accessible_in_both_colour_schemes(shown: Page) -> None:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(shown).response["violations"]
    shown.emulate_media(color_scheme="dark")
    found += shown.evaluate("axe.run({ runOnly: ['color-contrast'] })")["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == [], json.dumps(found)


def test_hostile_content_is_shown_as_text(shown: Page, path: str) -> None:
    text = shown.locator("body").inner_text()
    assert "<script>document.title" in text or "hostile" not in PATHS[path]
    assert shown.locator("main img, main script, main [onload], main [onerror]").count() == 0
    assert shown.title() != "owned"
    assert not set(text) & set("\x1b\u202e\u202c\u200b")
    assert "49" not in shown.locator("h1").inner_text()


def test_a_page_has_a_json_twin_and_without_actions_a_read_only_one(shown: Page, served: Served, path: str) -> None:
    where, _, query = path.partition("?")
    answer = shown.request.get(f"{'/index' if where == '/' else where}.json?{query}")
    assert answer.ok
    assert answer.json()
    answer = shown.request.get(served.read_only_url + path, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.ok
    main = answer.text().partition("<main")[2]
    assert len(main) > 300
    assert 'method="post"' not in main


def test_a_page_fits_in_both_widths_and_on_a_phone_its_charts_and_ids_do_too(shown: Page, path: str) -> None:
    widths = [shown.evaluate(MEASURE)["width"]]
    shown.set_viewport_size({"width": 390, "height": 844})
    measured = shown.evaluate(MEASURE)
    widths.append(measured["width"])
    assert widths <= [1280, 390] or "hostile" in path, "texts without spaces"
    assert len(measured["charts"]) >= (2 if "charts" in PATHS[path] else 0)
    for chart in measured["charts"]:
        assert chart["right"] <= 390
        assert chart["letters"] >= 9, "pixels"
        assert not chart["scrolls"]
    assert measured["id"] == {"lines": 1, "fits": True} if "an id" in PATHS[path] else True


def test_a_prompt_search_shows_how_scores_and_task_rewards_are_distributed(page: Page) -> None:
    page.goto("/runs/math-baseline/resources")
    assert page.locator("#distributions figcaption").all_inner_texts() == [
        "Scores of the candidates 4 values",
        "Task rewards of the seed 5 values",
        "Task rewards of the best candidate 5 values",
    ]
    bars = page.locator("#distributions svg").last.locator("rect title").all_text_contents()
    assert sum(int(bar.rpartition(": ")[2]) for bar in bars) == 5
    data = page.request.get("/runs/math-baseline/resources.json").json()
    shown = data["distributions"]
    assert sorted(shown[0]["values"]) == [0.4, 0.5, 0.6, 0.9]
    assert shown[2]["values"] == [1.0, 1.0, 0.5, 1.0, 1.0]
    page.goto(f"/runs/math-baseline/resources/{data['candidates'][0]['version_id']}")
    assert page.locator("main figcaption").all_inner_texts() == ["Task rewards 5 values"]


def test_the_fleet_shows_each_backend_with_health_latency_tokens_and_cost(page: Page) -> None:
    page.goto("/fleet")
    backend = page.locator("#backends article").filter(has_text="http://gpu-2:8000/v1")
    text = backend.inner_text()
    assert "qwen3-4b" in text
    assert backend.locator(".status").inner_text() == "ok"
    (shown,) = [each for each in page.request.get("/fleet.json").json()["backends"] if "gpu-2" in each["endpoint"]]
    assert shown["latency_s"] == pytest.approx(2.1)
    assert (shown["failed"], shown["output_tokens"]) == (0, 24 * shown["calls"])
    assert shown["cost"] == pytest.approx(0.0002 * shown["calls"])
    figures = dict(pairwise(text.splitlines()))
    assert figures["latency, median"] == "2.1 s"
    assert int(figures["output tokens"].replace(",", "")) == shown["output_tokens"]
    assert float(figures["cost"]) == pytest.approx(shown["cost"], abs=1e-4)


def test_a_hostile_backend_is_shown_as_text(page: Page) -> None:
    page.goto("/fleet")
    text = page.locator("#backends article").filter(has=page.locator(".status-failing")).inner_text()
    assert text.count("<script>document.title") == 3, "model, endpoint and error"


def test_hostile_content_reaches_the_json_twin_unchanged(page: Page) -> None:
    answer = page.request.get(f"/runs/{RUN}/rollouts/ro-hostile.json").json()
    assert answer["shown"]["error"]["message"] == HOSTILE
    assert answer["shown"]["conversations"][0]["messages"][-1]["text"] == HOSTILE


def test_a_page_shows_only_the_beginning_of_a_huge_text_and_its_json_twin_all_of_it(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-huge")
    assert len(page.content()) < 200_000
    assert "1,000,000 characters" in page.locator(".message").last.inner_text()
    answer = page.request.get(f"/runs/{RUN}/rollouts/ro-huge.json").json()
    assert len(answer["shown"]["conversations"][0]["messages"][-1]["text"]) == 1_000_000


def test_the_header_of_a_run_names_its_last_step(page: Page) -> None:
    page.goto(f"/runs/{RUN}")
    assert "step 40" in page.locator("#head p").inner_text()


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


def test_filters_select_rollouts_and_older_rollouts_are_on_the_next_page(page: Page) -> None:
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


def test_keyboard_shortcuts_move_through_the_list_and_from_rollout_to_rollout(page: Page, served: Served) -> None:
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
    page.locator("#reward .wide-only a[href*='ledger?step=39']").dispatch_event("click")
    page.wait_for_url("**/ledger?step=39")
    assert page.locator("[data-rows] tbody tr").count() == 16
    page.goto(f"/runs/{RUN}")
    assert page.locator("#reward .wide-only a[href*='mode=val&step=40']").count() == 1


def test_a_rollout_shows_conversation_tools_attempts_error_and_spans(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step40-0-0")
    assert page.locator(".message .role").all_inner_texts() == ["system", "user", "assistant", "tool", "assistant"]
    assert '"expression": "17*250/100"' in page.locator(".call").inner_text()
    assert page.locator(".span").count() == 6
    assert page.locator("dt:text-is('tool calls left as text') + dd").inner_text() == "1"
    page.goto(f"/runs/{RUN}")
    assert "3 tool calls of the step are text" in page.locator("body").inner_text()
    page.goto(f"/runs/{RUN}/rollouts/ro-failed")
    assert "share = total / count" in page.locator(".problem").inner_text()
    page.get_by_role("link", name="Attempt 1").click()
    page.wait_for_url("**attempt=**")
    assert "Timed out" in page.locator(".problem").inner_text()


def test_the_ledger_leads_to_the_tokens_and_to_the_group(page: Page) -> None:
    page.goto(f"/runs/{RUN}")
    page.get_by_role("navigation", name="Run").get_by_role("link", name="Ledger").click()
    page.wait_for_url("**/ledger")
    groups = page.locator("[data-rows] > details")
    assert groups.count() == 4
    assert "4 rollouts, 0 trained on" in groups.last.locator("summary").inner_text()
    assert groups.last.locator("tbody tr").first.is_hidden()
    groups.last.locator("summary").click()
    assert groups.last.locator("[title='all rollouts of its task have the same reward']").count() == 4
    outcomes = page.locator("[data-rows] .outcome").all_text_contents()
    assert (outcomes.count("trained"), outcomes.count("flat group"), len(outcomes)) == (12, 4, 16)
    assert "75 %" in page.locator("tr.current").inner_text()
    groups.last.get_by_role("link", name="side by side").click()
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


def test_the_histograms_of_a_step_show_reward_tokens_and_calls_and_lead_to_rollouts(page: Page) -> None:
    page.goto(f"/runs/{RUN}/ledger")
    charts = page.locator("section.charts figure")
    assert [charts.nth(place).locator("figcaption").inner_text().split(" rollouts")[0] for place in range(3)] == [
        "Reward",
        "Sampled tokens",
        "Model calls",
    ]
    assert charts.nth(2).locator("rect title").all_text_contents() == ["2: 16"]
    bar = charts.nth(0).locator("a").last
    count = (bar.get_attribute("aria-label") or "").removeprefix("1: ")
    bar.click()
    page.wait_for_url("**/rollouts?mode=train&step=39&min=0.5&max=1.5")
    assert page.locator("table.rows tbody tr").count() == int(count)


def test_a_model_call_of_the_waterfall_leads_to_its_tokens(page: Page) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step39-0-0")
    spans = page.locator(".waterfall details")
    assert [name for name in spans.locator(".span-name").all_text_contents() if "training" in name] == []
    spans.filter(has_text="chat qwen3-4b").last.locator("summary").click()
    page.get_by_role("link", name="Tokens of this call").last.click()
    page.wait_for_url("**/tokens#call-resp-ro-step39-0-0-2")
    assert page.locator("[id='call-resp-ro-step39-0-0-2']").is_visible()


def test_rollouts_can_be_labelled_cancelled_and_retried_and_labelled_rollouts_exported(
    page: Page, served: Served
) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step38-1-1")
    shown = page.get_by_label("Feedback").inner_text().split()
    assert shown[1:5] == ["solver", "expected", "42,", "not"]
    page.get_by_label("Note").fill("misread the question")
    page.get_by_role("button", name="Bad").click()
    page.locator(".heading .label-bad").wait_for()
    page.goto(f"/runs/{RUN}/rollouts/{served.ids['queued']}")
    page.get_by_role("button", name="Cancel this rollout").click()
    page.locator(".status-cancelled").first.wait_for()
    page.get_by_role("button", name="Queue this rollout again").click()
    page.locator(".status-requeuing, .status-queuing").first.wait_for()
    lines = page.request.get(f"/runs/{RUN}/labelled.jsonl").text().splitlines()
    found = {record["rollout_id"]: record for record in map(json.loads, lines)}
    assert found["ro-step38-1-1"]["label"] == "bad"
    assert found["ro-step38-1-1"]["note"] == "misread the question"
    (feedback,) = found["ro-step38-1-1"]["feedback"]
    assert feedback["prompt"] == "solver"
    assert feedback["text"].startswith("expected 42, not ")
    assert found["ro-step38-1-1"]["conversations"][0]["messages"][-1]["role"] == "assistant"
    page.goto(f"/runs/{RUN}/rollouts?label=bad")
    assert "ro-step38-1-1" in page.locator("[data-rows] td.id").all_inner_texts()[0]


def test_a_prompt_shows_its_difference_and_can_be_promoted_without_showing_a_key(page: Page) -> None:
    page.goto(f"/runs/{RUN}/resources/rs-prompts@3")
    assert "step by step" in " ".join(page.locator("ins").all_inner_texts())
    assert "sk-not-to-be-shown" not in page.content()
    page.goto(f"/runs/{RUN}/resources/rs-prompts@1")
    page.get_by_role("button", name="Make this the latest").click()
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
    candidate = page.locator("section.card", has_text="Critique of the parent")
    text = candidate.inner_text()
    assert "0.9" in text
    assert "0.6" in text
    assert "Units are still there. <script>document.title" in text
    assert not set(text) & set("\x1b\u202e\u200b")
    assert candidate.locator("ins, del, img, script").count() == 0


def test_a_comparison_names_the_tasks_that_flipped_with_a_p_value(page: Page) -> None:
    page.goto(f"/compare?a=math-baseline&b={RUN}")
    text = page.locator("section", has_text="Tasks of the last validation").inner_text()
    assert "4 tasks in both runs: mean difference 0.25, p = 1." in text
    assert "2 gained, 1 lost" in text
    page.locator("td.num a[href$='/rollouts/ro-val-2']").click()
    page.wait_for_url("**/ro-val-2")


def test_an_open_page_shows_new_rollouts_without_a_reload(page: Page, served: Served) -> None:
    page.goto(f"/runs/{RUN}/rollouts/ro-step39-1-1")
    page.locator("#live:not([hidden])").wait_for()
    other = page.context.new_page()
    other.goto(f"/runs/{RUN}")
    other.locator("#live:not([hidden])").wait_for()
    queued = page.request.post(
        "/v1/agl/rollouts", headers={"authorization": f"Bearer {TOKEN}", "agl-run": RUN}, data={"input": "seen at once"}
    ).json()
    other.get_by_text(queued["rollout_id"]).wait_for()
    other.close()


def test_pages_work_without_javascript(browser: Browser, served: Served) -> None:
    context = browser.new_context(base_url=served.url, java_script_enabled=False)
    page = context.new_page()
    sign_in(page)
    page.goto(f"/runs/{RUN}")
    assert page.locator("#reward svg.chart:visible").count() == 1
    page.get_by_role("navigation", name="Run").get_by_role("link", name="Rollouts").click()
    page.get_by_label("Status").select_option("failed")
    page.get_by_role("button", name="Filter").click()
    page.get_by_role("link", name="ro-failed").click()
    assert "division by zero" in page.locator(".problem").inner_text()
    context.close()
