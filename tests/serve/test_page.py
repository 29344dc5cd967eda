"""The playground in a browser, against a server with a tiny model."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the tests of the page need playwright")

from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from benchmarks.screenshots import CHROMIUM
from jetspec.engine.llm import LLM
from jetspec.serve.config import ServeConfig
from jetspec.types import Completion, SamplingParams, Update
from tests.serve.live import Live, tiny_llm

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
PROMPT = "ab"
IS_HIGH = "(frame) => frame.scrollHeight > frame.clientHeight"
KEY = "a-key-that-nobody-guesses"
Open = Callable[..., Page]

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"the tests of the page need a browser at {CHROMIUM}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    """Errors in the console. A test that causes errors removes them."""
    return []


@pytest.fixture
def open_page(browser: Browser, live: Live, errors: list[str]) -> Iterator[Open]:
    pages = []

    def open_page(url: str = live.url, size: str = "desktop", **options: Any) -> Page:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, **options)
        page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        pages.append(page)
        page.goto(url)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert errors == []


@pytest.fixture
def slow(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of at least 50 ms."""
    step = live.llm.engine.step

    def slow_step() -> list[Update]:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(live.llm.engine, "step", slow_step)


def ask(page: Page, prompt: str = PROMPT) -> None:
    page.get_by_label("Your message").fill(prompt)
    page.get_by_role("button", name="Send").click()


def body_of(request: Request) -> dict[str, Any]:
    return json.loads(request.post_data or "{}")


def answer_with(page: Page, chunk: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
    """The page gets this chunk as the response to every request."""
    body = f"data: {json.dumps(chunk)}\n\n{end}"
    page.unroute("**/chat/completions")
    page.route("**/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def own_answer(alone: LLM, prompt: str = PROMPT) -> Completion:
    return alone.chat([{"role": "user", "content": prompt}], SamplingParams(max_tokens=256))


def text_of(page: Page, selector: str) -> str:
    text = page.locator(selector).text_content()
    assert text is not None
    return text


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def in_module(page: Page, name: str, body: str, argument: Any) -> Any:
    """Runs the body of a function in which `module` is a module of the page and `given` the argument."""
    script = f"async (given) => {{ const module = await import('/static/{name}'); {body} }}"
    return page.evaluate(script, argument)


@pytest.mark.parametrize("size", SIZES)
def test_answer_streams_with_a_shade_per_round(open_page: Open, alone: LLM, size: str) -> None:
    page = open_page(size=size)
    assert fits(page)
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const note = () => window.lengths.add(document.querySelector(".answer").textContent.length);
            new MutationObserver(note).observe(document.getElementById("turns"), { childList: true, subtree: true });
        }"""
    )
    ask(page)
    own = own_answer(alone)
    expect(page.locator(".sum")).to_contain_text(f"{len(own.token_ids)} tokens in {own.stats.rounds} rounds")
    expect(page.locator(".sum")).to_contain_text(f"{own.stats.tokens_per_round:.2f} tokens per round, greedy")
    assert text_of(page, ".answer") == own.text
    assert page.evaluate("window.lengths.size") > 3, "the text came in one piece"
    assert {page.locator(f".answer .shade-{n}").count() > 0 for n in range(3)} == {True}
    assert float(text_of(page, "#speed")) > 0
    expect(page.locator("#yield")).to_have_text(f"{own.stats.tokens_per_round:.2f}")
    assert page.locator("#yield-bars rect").count() == min(own.stats.rounds, 48)
    assert fits(page)


@pytest.mark.parametrize("size", SIZES)
def test_tree_of_any_round_can_be_shown(open_page: Open, alone: LLM, size: str) -> None:
    page = open_page(size=size)
    ask(page)
    expect(page.locator(".sum")).to_contain_text("rounds")
    stats = own_answer(alone).stats
    expect(page.locator("#tree-title")).to_have_text(f"Round {stats.rounds}")
    best = max(range(stats.rounds), key=lambda n: stats.accepted_lengths[n])
    page.locator("#scrub").fill(str(best + 1))
    expect(page.locator("#tree-title")).to_have_text(f"Round {best + 1}")
    expect(page.locator("#tree g.kept")).to_have_count(stats.accepted_lengths[best] + 1)
    expect(page.locator("#tree g.bonus")).to_have_count(1)
    page.locator("#tree g.kept").last.hover()
    expect(page.locator("#tip")).to_contain_text("log-probability")
    assert fits(page)


@pytest.mark.parametrize("size", SIZES)
def test_race_ends_with_identical_texts(open_page: Open, alone: LLM, size: str) -> None:
    page = open_page(size=size)
    page.get_by_label("Your message").fill(PROMPT)
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("identical texts")
    own = own_answer(alone)
    assert text_of(page, ".plain .answer") == text_of(page, ".jetspec .answer") == own.text
    for lane, rounds in ((".plain", len(own.token_ids)), (".jetspec", own.stats.rounds)):
        expect(page.locator(f"{lane} .sum")).to_contain_text(f"{len(own.token_ids)} tokens in {rounds} rounds")
        assert float(text_of(page, f"{lane} .clock").removesuffix(" s")) > 0
    assert fits(page)


def test_requests_of_a_race_differ_in_tree_and_salt_only(open_page: Open) -> None:
    page = open_page()
    requests: list[dict[str, Any]] = []
    page.on("request", lambda request: requests.append(body_of(request)) if request.post_data else None)
    page.locator("#temperature").fill("0.8")
    page.locator("#length").fill("32")
    page.get_by_label("Your message").fill(PROMPT)
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("identical texts")
    expect(page.locator(".verdict")).to_contain_text("temperature 0.8")
    plain, jetspec = requests
    assert plain.pop("jetspec")["budget"] == 1 < jetspec.pop("jetspec")["budget"]
    assert plain.pop("cache_salt") != jetspec.pop("cache_salt")
    assert plain == jetspec
    assert (plain["temperature"], plain["max_tokens"]) == (0.8, 32)


def test_page_works_with_the_keyboard_alone(open_page: Open) -> None:
    page = open_page()
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator(".sum")).to_contain_text("rounds")
    page.keyboard.press("Shift+Tab")
    first = page.locator(".token").first
    expect(first).to_be_focused()
    expect(page.locator("#tip")).to_contain_text(re.compile("Round 1.*depth 1"))
    expect(page.locator("#tree-title")).to_have_text("Round 1")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tree-title")).to_have_text("Round 2")
    page.keyboard.press("ArrowUp")
    expect(first).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(".token").last).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    reached = []
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    controls = ["prompt", "race", "send", "tree-frame", "scrub", "budget", "width", "temperature", "length"]
    assert reached[: len(controls)] == controls
    page.locator("#prompt").focus()
    page.keyboard.type("hello")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".lane")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_conversation_continues_until_new_chat(open_page: Open) -> None:
    page = open_page()
    page.locator("#length").fill("32")
    ask(page, "x")
    expect(page.locator(".sum")).to_contain_text("rounds")
    with page.expect_request("**/chat/completions") as second:
        ask(page, "y")
    messages = body_of(second.value)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == page.locator(".answer").first.text_content()
    expect(page.locator(".sum").last).to_contain_text("rounds")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_request("**/chat/completions") as fresh:
        ask(page, "z")
    assert len(body_of(fresh.value)["messages"]) == 1
    expect(page.locator(".sum")).to_contain_text("rounds")


@pytest.mark.usefixtures("slow")
def test_new_chat_drops_a_running_answer(open_page: Open, live: Live) -> None:
    page = open_page()
    ask(page, "x")
    expect(page.locator(".token")).not_to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    with page.expect_request("**/chat/completions") as fresh:
        ask(page, "y")
    assert body_of(fresh.value)["messages"] == [{"role": "user", "content": "y"}]
    expect(page.locator(".token")).not_to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".sum")).to_have_text("stopped")
    live.wait_for_rest()


@pytest.mark.parametrize("most", [20, 100])
def test_length_is_limited_to_that_of_the_server(folder: Path, open_page: Open, most: int) -> None:
    with Live(tiny_llm(folder), ServeConfig(port=0, max_tokens=most)) as short:
        page = open_page(short.url)
        with page.expect_request("**/chat/completions") as requests:
            ask(page)
        assert most - 32 < body_of(requests.value)["max_tokens"] <= most
        expect(page.locator(".sum")).to_contain_text("rounds")


def test_page_asks_for_an_api_key(folder: Path, open_page: Open, errors: list[str]) -> None:
    with Live(tiny_llm(folder), ServeConfig(port=0, keys=(KEY,))) as locked:
        page = open_page(locked.url)
        door = page.get_by_role("dialog")
        for key, is_right in (("wrong", False), (KEY, True)):
            expect(door).to_contain_text("key is missing or wrong")
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
            expect(door).to_be_visible(visible=not is_right)
        ask(page)
        expect(page.locator(".sum")).to_contain_text("rounds")
        assert page.locator(".error").count() == 0
        page.evaluate("sessionStorage.clear()")
        page.reload()
        expect(door).to_be_visible()
        page.keyboard.press("Escape")
        expect(door).to_be_hidden()
        ask(page)
        expect(door).to_be_visible()
    assert len(errors) == 4 and all("401" in error for error in errors)
    errors.clear()


def test_race_needs_a_drafter(folder: Path, open_page: Open) -> None:
    with Live(LLM(folder, drafter="none", device="cpu"), ServeConfig(port=0)) as plain:
        page = open_page(plain.url)
        ask(page)
        expect(page.locator(".sum")).to_contain_text("rounds")
        for control in ("#race", "#budget", "#width"):
            expect(page.locator(control)).to_be_disabled()
        assert text_of(page, "#yield") == "1.00"


def test_errors_are_shown(open_page: Open, errors: list[str]) -> None:
    page = open_page()
    ask(page, "long " * 100)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The prompt is too long")
    assert page.get_by_label("Your message").input_value() == ("long " * 100).strip()
    page.route("**/chat/completions", lambda route: route.abort())
    ask(page)
    expect(alert).to_contain_text("The server cannot be reached")
    answer_with(page, {"choices": [{"index": 0, "delta": {"content": "half"}}]}, end="")
    ask(page)
    expect(alert).to_contain_text("The answer broke off")
    assert len(errors) == 2 and all(error.startswith("Failed to load resource") for error in errors)
    errors.clear()


def test_text_is_never_markup(open_page: Open) -> None:
    page = open_page()
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    answer_with(page, {"choices": [{"index": 0, "delta": {"content": text}}]})
    ask(page, text)
    expect(page.locator(".answer")).to_have_text(text)
    expect(page.locator(".asked")).to_have_text(text)
    assert page.locator("#turns img, #turns b").count() == 0


def test_page_loads_only_from_its_server(browser: Browser, live: Live) -> None:
    requests: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: requests.append(request.url))
    answer = page.goto(live.url)
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    expect(page.locator("#model")).not_to_be_empty()
    assert requests and all(url.startswith(live.url) for url in requests)
    page.close()


def test_theme_follows_the_system_until_switched(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    switch = page.get_by_role("button", name="Dark colours")
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    assert page.evaluate(background) == light
    switch.click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == dark


def random_tree(size: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    parents = [0, *(draw.randrange(max(0, n - 20), n) for n in range(1, size))]
    path = [0]
    while below := [n for n in range(1, size) if parents[n] == path[-1]]:
        path.append(draw.choice(below))
    scores = [-0.1 * n for n in range(size)]
    return {"tokens": ["word"] * size, "parents": parents, "scores": scores, "path": path, "bonus": "own"}


def test_folded_trees_count_all_nodes(open_page: Open) -> None:
    page = open_page()
    trees = [random_tree(size, seed) for seed, size in enumerate((1, 2, 16, 64, 300))]
    for most in (1, 3, 12, 1000):
        body = "return given.trees.map((tree) => module.arrange(tree, given.most));"
        for tree, drawn in zip(trees, in_module(page, "tree.js", body, {"trees": trees, "most": most}), strict=True):
            nodes = {entry["node"]: entry for entry in drawn["nodes"]}
            bonus = len(tree["tokens"])
            assert drawn["numRows"] <= most
            assert len(nodes) + drawn["numFolded"] == bonus + 1
            assert drawn["numFolded"] == 0 or most < 1000
            assert {*tree["path"], bonus} <= nodes.keys()
            assert all(nodes[entry["parent"]]["depth"] == entry["depth"] - 1 for n, entry in nodes.items() if n)
            assert {nodes[n]["row"] for n in (*tree["path"], bonus)} == {0}
            assert len({(entry["row"], entry["depth"]) for entry in nodes.values()}) == len(nodes)


def test_large_tree_fits_its_frame_until_unfolded(open_page: Open) -> None:
    page = open_page(size="phone")
    sizes = (12, 20, 40, 128, 300, 128)
    for number, size in enumerate(sizes):
        tree = random_tree(size, number) | {"tokens": ["w" * (1 + node % 9) for node in range(size)]}
        traced = {"round": 1, "tokens": [{"text": "own", "depth": 1}], "tree": tree, "tokens_per_s": 1.0}
        answer_with(page, {"choices": [{"index": 0, "delta": {"content": "own"}}], "jetspec": traced})
        ask(page)
        expect(page.locator("#tree-facts")).to_contain_text(f"{size} nodes")
        assert not page.locator("#tree-frame").evaluate(IS_HIGH)
    page.get_by_role("button", name=re.compile("Show \\d+ more")).click()
    expect(page.locator("#tree g")).to_have_count(sizes[-1] + 1)
    assert page.locator("#tree-frame").evaluate(IS_HIGH)
    assert fits(page)


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        (["The", " sky"], ["The sky"]),
        (["\ufffd\ufffd", "\ufffd", " hi"], ["", "😀 hi"]),
        (["a", "\ufffd", "\ufffd", "b", "<|end|>"], ["a", "ünknown", "b"]),
        (["x", "x", "x"], ["", "", "xxx"]),
        ([], ["text without tokens"]),
    ],
)
def test_pieces_add_up_to_the_text(open_page: Open, tokens: list[str], chunks: list[str]) -> None:
    """Also if tokens come before their text or are parts of a character."""
    body = """
        let waiting = given.tokens.map((text) => ({ text }));
        return given.chunks.map((text) => {
            const { pieces, waiting: rest } = module.split(text, waiting);
            waiting = rest;
            return pieces;
        });
    """
    shared = in_module(open_page(), "answer.js", body, {"tokens": tokens, "chunks": chunks})
    assert ["".join(piece["text"] for piece in pieces) for pieces in shared] == chunks
    named = [token["text"] for pieces in shared for piece in pieces for token in piece["tokens"]]
    assert named == tokens[: len(named)]
