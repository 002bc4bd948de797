"""The page in a real browser, against a stand-in for the server."""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outpace._version import __version__
from tests.patience import PATIENCE
from tests.server.page_server import MODELS, WEB, PageServer, Refusal, Script, engine_status
from tests.server.test_client import real_server

sync_api = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root, and where /dev/shm is small, it would not start
PAGE_PATIENCE = 60_000  # milliseconds
expect.set_options(timeout=PAGE_PATIENCE)


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer().running() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PAGE_PATIENCE)
        yield launched
        launched.close()


@pytest.fixture
def script(server: PageServer) -> Script:
    """What the stand-in does in this test."""
    server.script = Script(status=engine_status())
    return server.script


@pytest.fixture
def open_page(server: PageServer, browser: Browser, script: Script) -> Iterator[Callable[..., Page]]:
    """Opens the page; in the end no script may have failed and no request may have left for another place."""
    faults: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(clock: bool = False, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(PAGE_PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        if clock:  # stands still until a test moves it
            page.clock.install(time=0)
            page.clock.pause_at(1000)
        page.goto(server.url)
        return page

    yield opened
    for context in contexts:
        context.close()
    # The browser itself writes one line for each answer that is an error; the tests of errors cause those.
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []
    assert [url for url in asked if not url.startswith(server.url)] == []
    assert set(script.paths) <= {"/", "/v1/models", "/v1/chat/completions", "/status", "/status/experts"} | _assets()


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


def _assets() -> set[str]:
    return {f"/web/{path.name}" for path in WEB.iterdir()}


def _say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def _answer(page: Page, name: str = "Answer") -> Locator:
    return page.get_by_role("article", name=name, exact=True).last


def _press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def _roles(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_streams_an_answer_with_its_numbers(page: Page, script: Script) -> None:
    script.hold = threading.Event()
    _say(page, "one two three")
    text = _answer(page).locator(".text")
    expect(text).to_have_text("You said:")
    expect(text).to_have_attribute("aria-busy", "true")
    expect(text).to_have_attribute("aria-live", "polite")
    expect(page.locator("#send")).to_have_text("Stop")
    script.hold.set()
    expect(text).to_have_text("You said: one two three")
    expect(text).to_have_attribute("aria-busy", "false")
    expect(_answer(page).locator("footer p")).to_have_text(
        re.compile(r"^5 tokens · [\d.\u202f]+ tokens/s · first token [\d.\u202f]+ m?s · prompt 13$")
    )
    expect(page.locator("#announce")).to_have_text("Answer complete")
    assert script.chats[0]["stream_options"] == {"include_usage": True}


def test_stop_keeps_the_text_and_cancels_the_request(page: Page, script: Script) -> None:
    script.hold = threading.Event()
    _say(page, "a b c")
    expect(_answer(page).locator(".text")).to_have_text("You said:")
    _press(page, "Stop")
    expect(_answer(page).locator("footer p")).to_have_text(re.compile(r"^about 2 tokens .*stopped$"))
    expect(page.locator("#send")).to_have_text("Send")
    assert script.cancelled.wait(PATIENCE)
    script.hold.set()
    _say(page, "next")
    expect(_answer(page).locator(".text")).to_have_text("You said: next")
    assert ("assistant", "You said:") in _roles(script.chats[1])


def test_edit_goes_on_from_the_edited_message(page: Page, script: Script) -> None:
    for text in ("first", "second", "third"):
        _say(page, text)
        expect(_answer(page).locator(".text")).to_have_text(f"You said: {text}")
    _press(page, "Edit message 2")
    page.get_by_role("textbox", name="Edit message 2").fill("other")
    _press(page, "Send again")
    expect(_answer(page).locator(".text")).to_have_text("You said: other")
    expect(page.locator("#turns > li")).to_have_count(2)
    assert _roles(script.chats[-1]) == [("user", "first"), ("assistant", "You said: first"), ("user", "other")]


def test_cancelled_edit_changes_nothing(page: Page, script: Script) -> None:
    _say(page, "hello")
    _press(page, "Edit message 1")
    page.get_by_role("textbox", name="Edit message 1").fill("changed")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("hello")
    expect(page.get_by_role("button", name="Edit message 1")).to_be_focused()
    assert len(script.chats) == 1


def test_regenerate_asks_again_with_the_settings_of_now(page: Page, script: Script) -> None:
    script.answer = lambda body: f"seed {body.get('seed')}"
    _say(page, "hello")
    expect(_answer(page).locator(".text")).to_have_text("seed None")
    page.get_by_label("Seed").first.fill("7")
    _press(page, "Regenerate")
    expect(_answer(page).locator(".text")).to_have_text("seed 7")
    expect(page.locator("#turns > li")).to_have_count(1)
    assert _roles(script.chats[1]) == [("user", "hello")]


def test_settings_reach_the_request(page: Page, script: Script) -> None:
    numbers = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 17,
        "seed": 1234,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
    }
    for name, value in numbers.items():
        page.locator(f"#{name}-A").fill(str(value))
    page.locator("#stop-A").fill("END\n\\n\\n")
    page.locator("#system-A").fill("Be brief.")
    page.locator("#model-A").select_option(MODELS[1])
    _say(page, "hello")
    expect(_answer(page).locator(".text")).to_have_text("You said: hello")
    sent = {name: value for name, value in script.chats[0].items() if name not in ("messages", "stream_options")}
    assert sent == {**numbers, "stop": ["END", "\n\n"], "model": MODELS[1], "stream": True}
    assert _roles(script.chats[0]) == [("system", "Be brief."), ("user", "hello")]
    _press(page, "Reset")
    _say(page, "again")
    expect(_answer(page).locator(".text")).to_have_text("You said: again")
    assert set(script.chats[1]) == {"messages", "model", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("name", "value", "said"), [("top_p", "2", "between 0 and 1"), ("seed", "1.5", "whole number")]
)
def test_a_wrong_setting_is_said_and_not_sent(page: Page, script: Script, name: str, value: str, said: str) -> None:
    page.locator(f"#{name}-A").fill(value)
    _say(page, "hello")
    expect(page.get_by_role("status")).to_contain_text(said)
    expect(page.locator(f"#{name}-A")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    assert script.chats == []


def test_side_by_side_asks_both_at_once_and_keeps_two_histories(page: Page, script: Script) -> None:
    script.answer = lambda body: f"from {body['model']} at {body.get('temperature')}"
    script.hold = threading.Event()
    expect(page.get_by_label("Temperature, B")).to_be_hidden()
    _press(page, "Compare")
    page.get_by_label("Temperature, A").fill("0.1")
    page.get_by_label("Temperature, B").fill("1.5")
    page.get_by_label("Model, B").select_option(MODELS[1])
    _say(page, "hello")
    expect(_answer(page, "Answer A").locator(".text")).to_have_text(f"from {MODELS[0]}")
    expect(_answer(page, "Answer B").locator(".text")).to_have_text(f"from {MODELS[1]}")  # both wait: they run together
    script.hold.set()
    expect(_answer(page, "Answer A").locator(".text")).to_have_text(f"from {MODELS[0]} at 0.1")
    expect(_answer(page, "Answer B").locator(".text")).to_have_text(f"from {MODELS[1]} at 1.5")
    _say(page, "more")
    expect(page.locator("#send")).to_have_text("Send")
    histories = {body["model"]: _roles(body)[1] for body in script.chats[2:]}
    assert histories == {
        MODELS[0]: ("assistant", f"from {MODELS[0]} at 0.1"),
        MODELS[1]: ("assistant", f"from {MODELS[1]} at 1.5"),
    }
    boxes = [_answer(page, f"Answer {letter}").bounding_box() for letter in "AB"]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


LONG = "an-organisation/a-model-with-a-long-name-that-was-tuned-for-something-special"


def test_item_19_long_names_of_models_can_be_told_apart_side_by_side(
    open_page: Callable[..., Page], script: Script
) -> None:
    script.models = (f"{LONG}-v1", f"{LONG}-v2")
    page = open_page(viewport={"width": 1000, "height": 700})
    _press(page, "Compare")
    page.get_by_label("Model, B").select_option(script.models[1])
    widths = [page.get_by_label(f"Model, {letter}").evaluate("one => one.clientWidth") for letter in "AB"]
    assert min(widths) > 200
    assert page.locator("#settings").evaluate("one => one.scrollWidth <= one.clientWidth")
    _say(page, "hello")
    for letter, name in zip("AB", script.models, strict=True):
        expect(page.get_by_label(f"Model, {letter}")).to_have_attribute("title", name)
        shown = _answer(page, f"Answer {letter}").locator("header .muted")
        expect(shown).to_contain_text(name)
        assert shown.evaluate("one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight")


def test_item_19_a_number_and_its_name_stay_in_one_line(open_page: Callable[..., Page], script: Script) -> None:
    script.status = engine_status([(1, 0, 4, 1500.0)], step_limit_ms=1991.0)
    page = open_page()
    shown = page.locator("#numbers small", has_text="limit")
    expect(shown).to_have_text("limit 1\u202f991")
    assert shown.evaluate("one => one.getClientRects().length") == 1


@pytest.mark.parametrize("width", [320, 1360])
def test_item_19_the_page_leads_to_the_description_of_the_api(
    browser: Browser, tokenizer: PreTrainedTokenizerFast, width: int
) -> None:
    with real_server(tokenizer) as url:
        page, faults, _ = _visit(browser, url, "/", viewport={"width": width, "height": 700})
        page.get_by_role("link", name="API", exact=True).click()
        expect(page.locator("details.route")).not_to_have_count(0)
        page.context.close()
    assert faults == []


def test_item_19_without_the_description_there_is_no_link(browser: Browser, tokenizer: PreTrainedTokenizerFast) -> None:
    with real_server(tokenizer, docs=False) as url:
        page, _, _ = _visit(browser, url, "/")
        expect(page.locator("#card")).to_have_text("fake")
        expect(page.get_by_role("link", name="API")).to_have_count(0)
        page.context.close()


def test_markdown_becomes_elements_and_html_stays_text(page: Page, script: Script) -> None:
    script.answer = lambda body: (
        "# Title\n\nSome **bold *and slanted***, `a < b`.\n\n1. one\n   - inner\n2. two\n\n> quoted\n\n"
        "```python\nif a < b:\n    pass\n```\n\n"
        "<img src=x onerror=alert(1)> <script>alert(1)</script> [text](http://example.com)"
    )
    _say(page, "hello")
    text = _answer(page).locator(".text")
    expect(text.locator("h3")).to_have_text("Title")
    expect(text.locator("strong em")).to_have_text("and slanted")
    expect(text.locator("p > code")).to_have_text("a < b")
    expect(text.locator("ol > li > ul > li")).to_have_text("inner")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("blockquote")).to_have_text("quoted")
    expect(text.locator("pre code")).to_have_text("if a < b:\n    pass")
    expect(text.locator("img, script, a")).to_have_count(0)
    expect(text).to_contain_text("<img src=x onerror=alert(1)> <script>alert(1)</script> [text](http://example.com)")


def test_copy(open_page: Callable[..., Page], script: Script) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    script.answer = lambda body: "see **this**"
    _say(page, "hello")
    _press(page, "Copy answer")
    expect(page.get_by_role("button", name="Copy answer")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "see **this**"


@pytest.mark.parametrize(
    ("status", "title"), [(429, "The server is busy (429)"), (503, "The engine is not ready (503)")]
)
def test_refusals_say_when_to_try_again(page: Page, script: Script, status: int, title: str) -> None:
    script.refusals = [Refusal(status, "The queue is full.", {"Retry-After": "7"})]
    _say(page, "hello")
    alert = page.get_by_role("alert").filter(has_text=title)
    expect(alert).to_contain_text("The queue is full.")
    expect(alert).to_contain_text("wait 7 s")
    _press(page, "Try again")
    expect(_answer(page).locator(".text")).to_have_text("You said: hello")
    expect(alert).to_have_count(0)


def test_an_error_in_the_stream_keeps_the_text(page: Page, script: Script) -> None:
    script.fail_after = 2
    _say(page, "hello")
    expect(page.get_by_role("alert").last).to_contain_text("The answer broke off")
    expect(page.get_by_role("alert").last).to_contain_text("The engine died; try again.")
    expect(_answer(page).locator(".text")).to_have_text("You said:")


def test_a_server_that_went_away_is_said(page: Page) -> None:
    expect(page.locator("#card")).to_have_text(", ".join(MODELS))
    page.context.set_offline(True)
    _say(page, "hello")
    expect(page.get_by_role("alert").last).to_contain_text("The server cannot be reached")


def test_asks_for_a_key_and_goes_on(open_page: Callable[..., Page], script: Script) -> None:
    script.key = "secret"
    page = open_page()
    for attempt, note in (("wrong", "asks for a key"), ("secret", "did not accept")):
        expect(page.locator("#key-note")).to_contain_text(note)
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        page.keyboard.type(attempt)
        page.keyboard.press("Enter")
    expect(page.locator("#card")).to_have_text(", ".join(MODELS))
    _say(page, "hello")
    expect(_answer(page).locator(".text")).to_have_text("You said: hello")
    assert page.evaluate("() => JSON.stringify(localStorage)") == "{}"
    page.reload()
    expect(page.locator("#card")).to_have_text(", ".join(MODELS))  # the tab still has it


def test_a_chat_is_kept_only_when_asked(page: Page) -> None:
    _say(page, "hello")
    expect(_answer(page).locator(".text")).to_have_text("You said: hello")
    page.reload()
    expect(page.locator("#turns > li")).to_have_count(0)
    page.get_by_label("Keep the chat in this browser").check()
    page.locator("#temperature-A").fill("0.5")
    page.locator("#model-A").select_option(MODELS[1])
    _say(page, "again")
    expect(_answer(page).locator(".text")).to_have_text("You said: again")
    expect(page.locator("#send")).to_have_text("Send")
    page.reload()
    expect(_answer(page).locator(".text")).to_have_text("You said: again")
    expect(page.locator("#temperature-A")).to_have_value("0.5")
    expect(page.locator("#model-A")).to_have_value(MODELS[1])
    _press(page, "New chat")
    expect(page.locator("#turns > li")).to_have_count(0)
    page.get_by_label("Keep the chat in this browser").uncheck()
    assert page.evaluate("() => localStorage.length") == 0


def test_light_and_dark(open_page: Callable[..., Page]) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    colours = light.evaluate(ground), dark.evaluate(ground)
    assert colours[0] != colours[1]
    light.get_by_label("Theme").select_option("dark")
    assert light.evaluate(ground) == colours[1]
    light.reload()
    assert light.evaluate(ground) == colours[1]
    light.get_by_label("Theme").select_option("auto")
    assert light.evaluate(ground) == colours[0]


def test_works_by_keyboard_alone(page: Page, script: Script) -> None:
    script.hold = threading.Event()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(_answer(page).locator(".text")).to_have_text("You said:")
    assert _roles(script.chats[0]) == [("user", "one\ntwo")]
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    script.hold.set()
    for _ in range(3):  # back over the message box, "Regenerate" and "Copy"
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("button", name="Edit message 1")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Edit message 1")).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    expect(_answer(page).locator(".text")).to_have_text("You said: three")
    expect(page.get_by_role("button", name="Send")).to_be_focused()  # not lost with the editor


def test_live_view_draws_the_steps(open_page: Callable[..., Page], script: Script) -> None:
    steps = [(step, 200 if step % 4 == 0 else 0, 16, 10.0 + step % 2) for step in range(100, 164)]
    script.status = engine_status(
        steps, running=5, waiting=2, num_blocks=1000, free_blocks=750, generated_tokens=500, step_limit_ms=8.0
    )
    page = open_page(clock=True)
    numbers = page.locator("#numbers")
    expect(numbers).to_contain_text("250 of 1\u202f000")
    expect(numbers).to_contain_text("10.5 ms limit 8")
    expect(page.locator("#state")).to_have_text("Working")
    expect(page.locator("#tokens-plot rect.decode")).to_have_count(64)
    expect(page.locator("#tokens-plot rect.prefill")).to_have_count(16)
    expect(page.locator("#time-plot rect")).to_have_count(64)
    expect(page.locator("#time-plot rect.over")).to_have_count(64)
    expect(page.locator("#time-plot line.limit title")).to_have_text("Limit 8 ms")
    expect(page.locator("#time-top")).to_have_text("Step time, max 11 ms, limit 8 ms")
    expect(page.get_by_role("img", name="the limit is 8 ms, and 64 took longer")).to_be_visible()
    expect(page.get_by_role("img", name="16 steps with both, at most 216 in a step")).to_be_visible()
    page.get_by_text("Steps as a table").click()
    script.status = {**script.status, "generated_tokens": 1500}
    page.clock.run_for(1000)
    expect(numbers).to_contain_text("Generated1\u202f000 tokens/s")
    expect(page.locator("#step-rows tr")).to_have_count(64)
    expect(page.locator("#step-rows tr").first).to_have_text("16301611")


def test_live_view_draws_the_limit_of_a_step_above_quick_ones(open_page: Callable[..., Page], script: Script) -> None:
    script.status = engine_status([(1, 0, 4, 5.0), (2, 0, 4, 10.0)], step_limit_ms=20.0)
    page = open_page()
    expect(page.locator("#time-plot line.limit")).to_have_attribute("y1", "0")
    heights = page.locator("#time-plot rect").evaluate_all("found => found.map((one) => one.getAttribute('height'))")
    assert heights == ["25", "50"], "the bars do not share the scale of the line"
    expect(page.locator("#time-plot rect.over")).to_have_count(0)
    script.status = engine_status([(1, 0, 4, 5.0)])
    expect(page.locator("#time-plot line.limit")).to_have_count(0)


def test_live_view_draws_the_load_of_experts(open_page: Callable[..., Page], script: Script) -> None:
    script.status = engine_status(expert_layers=[1, 3])
    script.experts = {"layers": [1, 3], "tokens": [], "imbalance": []}
    page = open_page(clock=True)
    plot = page.get_by_role("img", name="Load of")
    expect(plot).to_have_accessible_name("Load of experts, not known yet")
    page.wait_for_load_state("networkidle")  # the first answer has come: only then does it ask again
    script.experts = {"layers": [1, 3], "tokens": [[10, 10, 10], [0, 30, 6]], "imbalance": [1.0, 2.5]}
    with page.expect_response("**/status/experts"):
        page.clock.run_for(1000)
    expect(page.locator("#experts-title")).to_have_text("Experts, 2 layers of 3: max 2.5 times the mean")
    expect(plot).to_have_accessible_name(
        "Load of 3 experts in 2 layers, max 2.5 times the mean; the busiest is expert 1 of layer 3"
    )
    alphas = plot.evaluate(
        "found => [...found.getContext('2d').getImageData(0, 0, 3, 2).data].filter((_, at) => at % 4 === 3)"
    )
    assert alphas == pytest.approx([128, 128, 128, 0, 255, 64], abs=1)
    asked = script.paths.count("/status/experts")
    page.clock.run_for(3000)
    assert script.paths.count("/status/experts") == asked, "they are read every few seconds"


def test_live_view_shows_no_experts_where_there_are_none(page: Page, script: Script) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    expect(page.locator("#experts")).to_be_hidden()
    assert "/status/experts" not in script.paths


def test_live_view_says_that_the_engine_is_down_and_heals(open_page: Callable[..., Page], script: Script) -> None:
    script.status = engine_status(ready=False, why="the engine is being restarted")
    page = open_page(clock=True)
    expect(page.locator("#state")).to_have_text("Not ready: the engine is being restarted")
    script.key = "k"
    page.clock.run_for(1000)
    expect(page.locator("#state")).to_have_text("The server needs an API key")
    script.key, script.status = None, engine_status()
    page.clock.run_for(1000)
    expect(page.locator("#state")).to_have_text("Ready")


def test_live_view_asks_only_while_it_is_seen(open_page: Callable[..., Page], script: Script) -> None:
    page = open_page(clock=True)
    expect(page.locator("#state")).to_have_text("Ready")
    _press(page, "Engine")
    assert _status_requests(page, script) == 1
    script.status = engine_status(running=1)
    _press(page, "Engine")
    expect(page.locator("#state")).to_have_text("Working")
    page.evaluate("() => Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })")
    assert _status_requests(page, script) == 2
    page.evaluate("() => delete document.visibilityState")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    assert _status_requests(page, script) > 2


def _status_requests(page: Page, script: Script) -> int:
    """How many there were after five more seconds on the page's clock."""
    page.clock.run_for(5000)
    page.evaluate("async () => (await fetch('/v1/models')).text()")  # what was asked before has arrived with this
    return script.paths.count("/status")


def test_everything_has_a_name(page: Page, script: Script) -> None:
    script.answer = lambda body: "```python\nx\n```"
    _press(page, "Compare")
    _say(page, "hello")
    expect(page.locator("#send")).to_have_text("Send")
    _press(page, "Edit message 1")
    page.get_by_text("Steps as a table").click()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, meter, [role=img], [tabindex]")]
            .filter((one) => !(one.labels?.length && one.labels[0].textContent.trim()))
            .filter((one) => !(one.getAttribute("aria-label") || one.ariaLabelledByElements?.length))
            .filter((one) => !(one.tagName === "BUTTON" && one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate("() => [...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName)")
    assert levels[0] == "H1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page: Callable[..., Page], script: Script, scheme: str) -> None:
    """Text has a contrast of 4.5 to what is behind it (AA)."""
    page = open_page(color_scheme=scheme)
    script.answer = lambda body: "Text and `code`.\n\n> quoted\n\n```python\nx\n```"
    _press(page, "Compare")
    script.refusals = [Refusal(429, "Full.", {"Retry-After": "3"})]
    _say(page, "hello")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    low = page.evaluate(_CONTRAST)
    assert low == []


_CONTRAST = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
  };
  const texts = [...document.body.querySelectorAll("*")].filter((one) => one.checkVisibility())
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return texts.flatMap((one) => {
    const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    return ratio < 4.5 ? [`${one.outerHTML.slice(0, 80)} ${ratio.toFixed(2)}`] : [];
  });
}"""


@pytest.mark.parametrize("width", [320, 390, 768, 1360])
def test_nothing_sticks_out(open_page: Callable[..., Page], script: Script, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 700})
    script.answer = lambda body: "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```"
    _press(page, "Compare")
    _say(page, "z" * 300)
    expect(page.locator("#send")).to_have_text("Send")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.evaluate("() => document.querySelector('#scroll').scrollWidth") <= width
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()


def test_a_narrow_page_shows_one_panel_at_a_time(open_page: Callable[..., Page], script: Script) -> None:
    page = open_page(viewport={"width": 390, "height": 700})
    expect(page.locator("#engine")).to_be_hidden()
    assert "/status" not in script.paths
    _press(page, "Settings")
    expect(page.locator("#temperature-A")).to_be_visible()
    _press(page, "Engine")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("Ready")
    _press(page, "Engine")
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_page_is_small_and_has_nothing_inline() -> None:
    files = [Path(path) for path in WEB.iterdir()]
    assert sum(path.stat().st_size for path in files if path.stem != "docs") < 64 * 1024
    assert sum(path.stat().st_size for path in files if path.stem == "docs") < 8 * 1024
    for path in files:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        links = set(re.findall(r"https?://[^\s\"']+", text))
        assert links <= {"http://www.w3.org/2000/svg"}, path
    for name in ("index.html", "docs.html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", (WEB / name).read_text())


# The page of the real server


def _visit(browser: Browser, url: str, path: str, **options: Any) -> tuple[Page, list[str], list[str]]:
    """A page, what went wrong there, and what it asked for."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PAGE_PATIENCE)
    faults: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}{path}")
    return page, faults, asked


def test_the_api_is_described_without_asking_anyone_else(browser: Browser, tokenizer: PreTrainedTokenizerFast) -> None:
    with real_server(tokenizer) as url:
        page, faults, asked = _visit(browser, url, "/docs")
        expect(page.locator("#card")).to_have_text(f"Version {__version__}")
        route = page.locator("details.route", has_text="/v1/chat/completions")
        route.locator("summary").click()
        expect(route.get_by_role("row", name="temperature")).to_contain_text("number")
        expect(route.get_by_role("row", name="messages")).to_contain_text("(needed)")
        expect(page.locator("details.route")).not_to_have_count(0)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280
        page.context.close()
    assert faults == []
    assert [each for each in asked if not each.startswith(url)] == []


def test_a_server_with_a_key_can_be_used_from_a_browser(browser: Browser, tokenizer: PreTrainedTokenizerFast) -> None:
    with real_server(tokenizer, api_keys=("secret",)) as url:
        given = {"username": "anyone", "password": "secret"}  # what the browser's own dialog sends
        page, faults, _ = _visit(browser, url, "/", http_credentials=given)
        expect(page.locator("#card")).to_have_text("fake")
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator("#key-dialog")).to_be_hidden()
        _say(page, "hello")
        expect(_answer(page).locator(".text")).to_have_text("I am here.")
        page.goto(f"{url}/docs")
        expect(page.locator("details.route")).not_to_have_count(0)
        page.context.close()
        refused = browser.new_context()
        answer = refused.request.get(f"{url}/")
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
        refused.close()
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []
