"""Makes the pictures of docs/guide/report.md: reports of the demo, in a headless Chromium, on a laptop and on a phone.

    python docs/pictures/report.py [RUN SHORTER_RUN]

Without runs, it runs the demo twice, which takes minutes: once as it is, and once for three epochs. It needs what the tests
need. Look at the pictures before you commit them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import footplate as fp

HERE = Path(__file__).parent
COLOURS = 128
# Paths of this clone are shown as those of any other.
RENAME = """([from, to]) => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) walk.currentNode.nodeValue = walk.currentNode.nodeValue.replaceAll(from, to);
}"""
# The report of one run or of both, size of the window, colours, and the section at the top of the picture.
PICTURES = {
    "report-laptop-light": ("one", (1280, 1150), "light", None),
    "report-phone-dark": ("one", (390, 1250), "dark", "#predictions"),
    "report-phone-light": ("one", (390, 1250), "light", "#time"),
    "report-data-laptop-dark": ("one", (1280, 900), "dark", "#data"),
    "report-runs-laptop-dark": ("both", (1280, 1250), "dark", "#final"),
}


def main() -> None:
    """Write the reports, and take the pictures."""
    with tempfile.TemporaryDirectory() as directory:
        runs = [Path(argument) for argument in sys.argv[1:]]
        if not runs:
            from footplate.demo.run import run as run_demo

            runs = [Path(directory) / "demo", Path(directory) / "demo-short"]
            run_demo(runs[0])
            run_demo(runs[1], epochs=3)
        one = fp.report(runs[0], output=Path(directory) / "one.html")
        take({"one": one, "both": fp.report(*runs, output=Path(directory) / "both.html")})


def take(reports: Mapping[str, Path]) -> None:
    """Take all pictures."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for name, (which, (width, height), scheme, top) in PICTURES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(reports[which].as_uri())
            if top:
                page.locator(top).evaluate("(section) => scrollTo(0, section.offsetTop - 12)")
            page.wait_for_timeout(1500)
            page.evaluate(RENAME, [str(HERE.parent.parent), "~/footplate"])
            picture = HERE / f"{name}.png"
            page.screenshot(path=picture)
            Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
