"""The pictures of the playground in the documentation, taken from a server on the default model.

python -m benchmarks.screenshots                       # starts a server of its own
python -m benchmarks.screenshots --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.check_serve import ServerProcess
from jetspec.models.hub import DEFAULT_MODEL

CHROMIUM = Path("/usr/bin/chromium")
MAX_BYTES = 250_000
PATIENCE_MS = 240_000
CHAT = "Explain why the sky is blue in simple words."
RACE = "Write a Python function that checks whether a number is prime."


def chat(page: Page) -> None:
    """An answer, one of whose tokens is looked at."""
    page.get_by_label("Your message").fill(CHAT)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".sum")).to_contain_text("rounds", timeout=PATIENCE_MS)
    page.locator("#thread").evaluate("thread => { thread.scrollTop = 0 }")
    page.locator(".token").nth(page.evaluate(TELLING_TOKEN)).click()


TELLING_TOKEN = """async () => {
    const { about } = await import("/static/answer.js");
    const spans = [...document.querySelectorAll(".token")].slice(0, 100);
    const lengths = spans.map((span) => about(span).round.tokens.length);
    return lengths.indexOf(Math.max(...lengths)) + 1;
}"""
"""The second token of the longest round near the beginning."""


def race(page: Page) -> None:
    """Both answers at their end. They are kept short: the picture holds no more."""
    page.locator("#length").fill("128")
    page.get_by_label("Your message").fill(RACE)
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".verdict")).to_contain_text("identical", timeout=PATIENCE_MS)


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
    expect(page.locator("#model")).not_to_be_empty(timeout=PATIENCE_MS)
    shot.act(page)
    path = folder / f"{shot.name}.png"
    page.screenshot(path=path, animations="disabled")
    page.close()
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; {MAX_BYTES} is the most")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; default: one that is started for this")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--browser", type=Path, default=CHROMIUM, help="a Chromium")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        if args.url:
            shoot(browser, args.url, args.out)
        else:
            with ServerProcess(DEFAULT_MODEL) as server:
                shoot(browser, server.url, args.out)
        browser.close()


def shoot(browser: Browser, url: str, folder: Path) -> None:
    for shot in SHOTS:
        print(take(browser, url, shot, folder))


if __name__ == "__main__":
    main()
