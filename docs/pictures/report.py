"""Makes the pictures of docs/guide/report.md: the demo's report, in a headless Chromium, on a laptop and on a phone.

    python docs/pictures/report.py [RUN]

Without a run, it runs the demo, which takes minutes. It needs what the tests need. Look at the pictures before you commit
them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import footplate as fp

HERE = Path(__file__).parent
COLOURS = 128
# Size of the window, colours, and the section at the top of the picture.
PICTURES = {
    "report-laptop-light": ((1280, 1150), "light", None),
    "report-phone-dark": ((390, 1250), "dark", "#predictions"),
}


def main() -> None:
    """Write the report, and take the pictures."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(directory) / "demo"
        if len(sys.argv) < 2:
            from footplate.demo.run import run as run_demo

            run_demo(run)
        take(fp.report(run, output=Path(directory) / "report.html"))


def take(report: Path) -> None:
    """Take all pictures."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for name, ((width, height), scheme, top) in PICTURES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(report.as_uri())
            if top:
                page.locator(top).evaluate("(section) => scrollTo(0, section.offsetTop - 12)")
            page.wait_for_timeout(1500)
            picture = HERE / f"{name}.png"
            page.screenshot(path=picture)
            Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
