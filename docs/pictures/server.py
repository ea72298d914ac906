"""Makes the pictures of docs/guide/server.md: real jobs, a real server, a headless Chromium, at two widths, light and dark.

    python docs/pictures/server.py

It takes two minutes, and needs what the tests need. Look at the pictures before you commit them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}
# The address of each page, and a text that it has when it is complete.
PAGES = {
    "list": ("#/", "vision"),
    "job": ("#/jobs/flowers_1", "As resolved"),
    "compare": ("#/compare/flowers_0,flowers_1", "time: backward"),
}
SMALL, LARGE = "n1-highcpu-8", "n1-highcpu-16"
PATIENCE_S = 300.0
COLOURS = 128


def main() -> None:
    """Run the jobs, and take the pictures."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory).resolve() / "flowers"
        work.mkdir()
        os.environ |= {"FOOTPLATE_HOME": str(work.parent / "home"), "FOOTPLATE_CPUS": "16"}
        os.chdir(work)
        from footplate.jobs.operations import Jobs
        from footplate.jobs.states import State

        jobs = Jobs.from_env()
        submit("census_1", SMALL, "team=tables", "--epochs", "many")
        submit("flowers_0", SMALL, "team=vision", "--epochs", "1")
        submit("flowers_2", SMALL, "team=vision", "--epochs", "9")
        jobs.cancel("flowers_2")
        for name in ("census_1", "flowers_0", "flowers_2"):
            jobs.wait(name)
        submit("flowers_1", SMALL, "team=vision,stage=test", "--epochs", "60", "--batch-size", "16")
        submit("nightly_7", LARGE, "team=vision", "--epochs", "1")
        until(lambda: list((work / "runs/flowers_1/checkpoints").glob("*.ckpt")))
        os.kill(jobs.store.processes("flowers_1")[0].pid, signal.SIGKILL)  # so that there is a second attempt
        until(lambda: jobs.find("flowers_1").attempt == 2 and jobs.store.state("flowers_1") == State.RUNNING)
        time.sleep(30)  # of curves
        server = subprocess.Popen(
            [sys.executable, "-m", "footplate", "server", "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            take(server.stdout.readline().split()[-1])
        finally:
            server.terminate()
            for name in ("nightly_7", "flowers_1"):
                jobs.cancel(name)
                jobs.wait(name)


def submit(name: str, machine: str, labels: str, *args: str) -> None:
    """Submit the example's program."""
    command = [
        "jobs", "submit", "training", name, "--package-path", str(EXAMPLES / "trainer"), "--module-name", "trainer.task",
        "--region", "us-central1", "--job-dir", f"runs/{name}", "--scale-tier", "CUSTOM", "--master-machine-type", machine,
        "--labels", labels, "--", *args,
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "footplate", *command], check=True, stdout=subprocess.DEVNULL)


def take(address: str) -> None:
    """Take all pictures."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                for name, (path, text) in PAGES.items():
                    page = context.new_page()
                    page.goto(f"{address}{path}")
                    page.get_by_text(text).first.wait_for()
                    page.wait_for_timeout(1500)
                    picture = HERE / f"server-{name}-{size}-{scheme}.png"
                    page.screenshot(path=picture, full_page=True)
                    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
                context.close()
        browser.close()


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


if __name__ == "__main__":
    main()
