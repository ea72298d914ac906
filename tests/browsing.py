"""A real Chromium for tests of pages, and checks of a page: its errors, requests, contrast and names.

A folder whose tests use the fixture `browser` imports it in its conftest.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from jobs.conftest import PATIENCE_S
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = {"laptop": (1280, 800), "phone": (390, 844)}
# Each width and each scheme once: colours don't depend on the width, nor the layout on the scheme.
LOOKS = [("laptop", "light"), ("phone", "dark")]
CONTRAST = """() => {
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
    }
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility() || one.closest("svg, option")) continue;
    const [a, b] = [light(parse(getComputedStyle(one).color).slice(0, 3)), light(behind(one))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) poor.push(one.textContent.trim().slice(0, 40));
  }
  return poor;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, a, input, select")].filter((one) => one.checkVisibility()
  && !(one.textContent.trim() || one.labels?.length || one.getAttribute("aria-label"))).map((one) => one.outerHTML)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "expected Chromium: apt-get install chromium"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=flags)
        yield started
        started.close()


def watched(page: Page) -> Page:
    """A page that fails its test if one of its scripts fails, or if it loads anything from elsewhere."""
    page.set_default_timeout(PATIENCE_S * 1000)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    page.on("pageerror", lambda error: refuse(str(error)))
    page.on(
        "request", lambda request: "127.0.0.1" in request.url or request.url.startswith("blob:") or refuse(request.url)
    )
    return page


def troubles_of(page: Page) -> list[str]:
    """A list that grows with each failed script, each warning of the browser, and each request."""
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
    page.on("request", lambda request: request.url.startswith(("data:", "blob:")) or troubles.append(request.url))
    return troubles
