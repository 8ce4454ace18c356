"""The page of a run in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from reported_run import make_reported_run

from launcher.report.compare import compare
from launcher.report.compared import read_compared
from launcher.report.write import write_comparison, write_run
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, RankError
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write

DRAWN = """
canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.some((value, at) => at % 4 === 3 && value > 0);
}
"""
"""Whether a canvas has any pixel that is not transparent."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    found = make_reported_run(tmp_path_factory.mktemp("runs") / "mine")
    write_run(found, found.report)
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    found = make_reported_run(tmp_path_factory.mktemp("runs") / "<b>hostile", hostile=True)
    write_run(found, found.report)
    return found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    runs = [make_reported_run(folder / f"steps={steps}", steps) for steps in (30, 60)]
    write_comparison(compare(read_compared(runs)), folder / "report.html")
    return folder / "report.html"


def scroll_through(page: Page) -> None:
    """Bring every part of the page into the window, because charts are drawn when they are near."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for place in range(0, height, 600):
        page.evaluate(f"scrollTo({{top: {place}, behavior: 'instant'}})")
        page.wait_for_timeout(50)


def groups(page: Page) -> int:
    return page.locator("button.group").count()


def expect_groups(page: Page, text: str) -> None:
    expect(page.locator("#rollouts [role=status]")).to_have_text(f"{text} of 120 in the page")


def test_every_chart_is_drawn_and_nothing_is_fetched(opened, run):
    page = opened.goto(run.report.as_uri())
    scroll_through(page)
    titles = page.locator("#curves .chart h4").all_inner_texts()
    assert {"Reward", "Entropy", "Length of answers", "Time of a step"} <= set(titles)
    canvases = page.locator("section:not(#rollouts) > :not(details) .plot canvas")
    assert canvases.count() >= len(titles)
    for place in range(canvases.count()):
        assert canvases.nth(place).evaluate(DRAWN), place
    assert {"generate", "train"} <= set(page.locator(".shares .what").all_inner_texts())
    assert opened.requests == [run.report.as_uri()]


@pytest.mark.parametrize("width", [390, 768, 1920])
def test_no_page_scrolls_sideways(opened, run, several, width):
    for file in (run.report, several):
        page = opened.goto(file.as_uri())
        scroll_through(page)
        for box in page.locator("details").all():
            box.evaluate("box => { box.open = true }")
        if groups(page):
            page.locator('input[name="sampled"]').check()
            page.wait_for_timeout(300)
            page.locator("button.group").first.click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_charts_below_the_window_are_drawn_without_scrolling(opened, run, several):
    for file in (run.report, several):
        page = opened.goto(file.as_uri())
        expect(page.locator(".plot:not(details .plot):not(:has(canvas))")).to_have_count(0)
        assert page.locator(".plot canvas").count() > 5


def test_all_charts_are_on_paper(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("#groups .plot")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#curves .plot:not(details .plot):not(:has(canvas))").count() == 0


def test_the_value_under_the_cursor_is_said_as_recorded_and_smoothed(opened, run):
    page = opened.goto(run.report.as_uri())
    page.locator("#groups .u-over").first.hover(position={"x": 150, "y": 60})
    readout = page.locator("#groups .chart .readout").first.inner_text()
    assert re.fullmatch(r"step \d+: [\d.]+ \(smoothed [\d.]+\)", readout)


def test_an_odd_chart_fills_its_row(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("#groups .plot canvas")
    for grid in page.locator("#groups .charts").all():
        right = grid.bounding_box()["x"] + grid.bounding_box()["width"] if grid.bounding_box() else 0
        cards = [box for card in grid.locator(".chart").all() if (box := card.bounding_box())]
        assert not cards or abs(cards[-1]["x"] + cards[-1]["width"] - right) < 2


def test_a_run_that_learns_begins_with_its_lesson_and_asks_no_question(opened, run):
    page = opened.goto(run.report.as_uri())
    headings = page.locator("h2").all_inner_texts()
    assert headings[:3] == ["Findings", "The lesson", "Curves"]
    steps = page.locator("#lesson h3").all_inner_texts()
    assert steps == ["Step 10", "Step 60"]
    prompt = page.locator("#lesson .passage").first
    assert prompt.locator(".token.control").all_text_contents() == ["<user>", "<model>"]
    answer = page.locator("#lesson .passage").nth(1)
    assert "\\boxed{" in answer.locator(".token.learned").all_text_contents()


def test_a_failed_run_begins_with_its_message_and_its_traceback(opened, tmp_path):
    run = make_reported_run(tmp_path / "failed", steps=5)
    run.done.unlink()
    append(run.attempts_ledger, AttemptStart(3, 2e9))
    append(run.attempts_ledger, AttemptEnd(3, 2.1e9, "crashed", step=4, rank=1, error="ValueError: no column"))
    run.attempt(3).folder.mkdir(parents=True)
    trace = 'Traceback (most recent call last):\n  File "reward.py", line 3\nValueError: no column <b>answer</b>'
    write(run.attempt(3).error(1), RankError(1, "n1", 4, "reward", "ValueError: no column <b>answer</b>", trace))
    write_run(run, run.report)
    page = opened.goto(run.report.as_uri())
    assert page.locator("h2").first.inner_text() == "Why it ended"
    assert page.locator("#findings .message").inner_text().endswith("ValueError: no column <b>answer</b>")
    assert page.locator("#findings pre").inner_text() == trace


def test_legends_of_a_comparison_have_what_differs_and_the_best_is_named(opened, several):
    page = opened.goto(several.as_uri())
    page.wait_for_selector("#groups .legend li")
    assert page.locator("#groups .legend").first.locator("li").all_inner_texts() == ["steps=60", "steps=30"]
    assert page.locator("#runs p").first.inner_text().startswith("Best by mean_reward (highest, mean of the last 10")
    assert page.locator("#runs tr.marked").inner_text().startswith("steps=60")


@pytest.mark.parametrize(("width", "folded"), [(390, True), (1280, False)])
def test_the_filter_is_folded_on_a_phone_so_that_the_first_rollout_is_near(opened, run, width, folded):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("button.group")
    assert page.locator("form.filter").is_visible() != folded
    top = page.locator("#rollouts").bounding_box()["y"]
    if folded:
        assert page.locator("button.group").first.bounding_box()["y"] - top < 844  # the window of a phone


def test_filters_choose_groups(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("button.group")
    expect_groups(page, "120 groups")
    page.fill('input[name="first"]', "11")
    page.fill('input[name="last"]', "20")
    expect_groups(page, "20 groups")
    assert set(page.locator("button.group .step").all_inner_texts()) <= {f"step {step}" for step in range(11, 21)}
    page.check('input[name="sampled"]')
    expect_groups(page, "1 group")
    assert page.locator("button.group .step").all_inner_texts() == ["step 20"]
    page.click('button[type="reset"]')
    expect_groups(page, "120 groups")
    page.select_option('select[name="signal"]', "no")
    expect(page.locator("button.group.signal")).to_have_count(0)
    assert groups(page) > 0
    page.fill('input[name="text"]', "no such text")
    expect_groups(page, "0 groups")


def test_answers_are_beside_one_another_and_their_tokens_have_the_asked_colour(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("button.group")
    page.check('input[name="sampled"]')
    page.wait_for_timeout(300)
    page.locator("button.group").first.click()
    cards = page.locator("article.answer")
    assert cards.count() == 4
    assert "reward" in cards.first.locator("header").inner_text()
    tokens = cards.first.locator(".part-answer span[data-at]")
    assert "".join(tokens.all_text_contents()).count("\\boxed{9}<end>") == 2
    assert cards.first.locator("summary").all_inner_texts() == [
        "prompt, 3 tokens",
        "reasoning, 10 tokens",
        "not written by the model, 2 tokens",
        "reasoning, 10 tokens",
        "output of the program",
    ]
    colour = "token => getComputedStyle(token).backgroundColor"
    seen = set()
    for mode in ("mask", "surprise", "difference", "none"):
        page.select_option('select[name="mode"]', mode)
        seen.add(page.locator("article.answer .part-answer span[data-at]").first.evaluate(colour))
    assert len(seen) == 4
    page.locator("article.answer .part-answer span[data-at]").first.hover()
    assert "log-prob" in (page.locator("article.answer .part-answer span[data-at]").first.get_attribute("title") or "")


def test_one_problem_can_be_followed_over_the_steps(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("button.group")
    page.locator("#rollouts details.more > summary").click()
    row = page.locator("#rollouts details.more tbody tr").first
    assert row.locator("td").nth(2).inner_text() == "0"  # groups with signal: those without any are first
    row.locator("button").click()
    page.wait_for_selector(".history canvas")
    steps = [int(text.removeprefix("step ")) for text in page.locator("button.group .step").all_inner_texts()]
    assert steps == sorted(steps)
    assert len(steps) > 1
    page.get_by_role("button", name="Show all problems").click()
    expect_groups(page, "120 groups")


def test_the_page_can_be_used_with_the_keyboard(opened, run):
    page = opened.goto(run.report.as_uri())
    page.wait_for_selector("button.group")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator('input[name="sampled"]').focus()
    page.keyboard.press("Space")
    page.wait_for_timeout(300)
    page.locator("button.group").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("button.group").first.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Same problem over the steps"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, run, several, scheme):
    opened.page.emulate_media(color_scheme=scheme)
    for file in (run.report, several):
        page = opened.goto(file.as_uri())
        scroll_through(page)
        if groups(page):
            page.check('input[name="sampled"]')
            page.wait_for_timeout(300)
            page.locator("button.group").first.click()
        found = Axe().run(page).response["violations"]
        grave = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in grave] == []


def test_no_text_of_a_run_is_executed_or_hidden(opened, hostile):
    page = opened.goto(hostile.report.as_uri())
    page.wait_for_selector("button.group")
    page.check('input[name="sampled"]')
    page.wait_for_timeout(300)
    page.locator("button.group").first.click()
    for box in page.locator("details").all():
        box.evaluate("box => { box.open = true }")
    page.wait_for_timeout(300)
    scroll_through(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("h1").inner_text() == "<b>hostile"
    answer = page.locator("article.answer").first
    text = answer.locator(".part-answer, .part-reasoning").first.text_content() or ""
    assert "</script><script>window.hacked = 1</script><img src=x" in text
    assert "{{ 7 * 7 }}\\u{202e}gnp.exe\\u{2066}\\u{0}\\u{1b}[31m\\u{2028}\\u{d83d}" in text
    assert "\\u{202e}" in (page.locator("#time table").text_content() or "")
