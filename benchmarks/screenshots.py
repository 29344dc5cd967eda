"""`screenshots`: pictures of the playground for the documentation, from a server on the default model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.options import examples
from benchmarks.servers import ServerProcess
from jetspec.models.hub import DEFAULT_MODEL

CHROMIUM = Path("/usr/bin/chromium")
MAX_BYTES = 250_000
TIMEOUT_MS = 240_000
EPILOG = examples("screenshots", "screenshots --url http://127.0.0.1:8000")
CHAT = "Explain why the sky is blue in simple words."
RACE = "Write a Python function that checks whether a number is prime."


def chat(page: Page) -> None:
    """Send a message and select a token of the answer."""
    page.get_by_label("Your message").fill(CHAT)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".sum")).to_contain_text("rounds", timeout=TIMEOUT_MS)
    page.locator("#thread").evaluate("thread => { thread.scrollTop = 0 }")
    page.locator(".token").nth(page.evaluate(TELLING_TOKEN)).click()


TELLING_TOKEN = """async () => {
    const { about } = await import("/static/answer.js");
    const spans = [...document.querySelectorAll(".token")].slice(0, 100);
    const lengths = spans.map((span) => about(span).round.tokens.length);
    return lengths.indexOf(Math.max(...lengths)) + 1;
}"""
"""Index of the second token of the longest round near the beginning."""


def race(page: Page) -> None:
    """Race to the end of both answers, short enough for the picture."""
    page.locator("#length").fill("128")
    page.get_by_label("Your message").fill(RACE)
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("identical", timeout=TIMEOUT_MS)


@dataclass(frozen=True)
class Shot:
    name: str
    size: tuple[int, int]
    scheme: Literal["light", "dark"]
    act: Callable[[Page], None]


SHOTS = [
    Shot("playground", (1280, 800), "light", chat),
    Shot("playground_race", (1280, 800), "dark", race),
    Shot("playground_phone", (390, 844), "light", chat),
]


def take(browser: Browser, url: str, shot: Shot, folder: Path) -> Path:
    width, height = shot.size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=shot.scheme)
    page.goto(url)
    expect(page.locator("#model")).not_to_be_empty(timeout=TIMEOUT_MS)
    shot.act(page)
    path = folder / f"{shot.name}.png"
    page.screenshot(path=path, animations="disabled")
    page.close()
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; {MAX_BYTES} is the most")
    return path


def screenshots(
    url: Annotated[str | None, typer.Option(help="A running server; by default one is started.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("docs/images"),
    browser: Annotated[Path, typer.Option(help="A Chromium.")] = CHROMIUM,
) -> None:
    """Take the pictures of the playground for the documentation."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, ExitStack() as stack:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        where = url or stack.enter_context(ServerProcess(DEFAULT_MODEL)).url
        for shot in SHOTS:
            print(take(chromium, where, shot, out))
        chromium.close()
