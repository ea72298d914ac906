"""The page, in a real browser without a network: its contents and actions, at both widths, and with the keyboard only."""

from __future__ import annotations

import json
import re
import sqlite3
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from browsing import CONTRAST, LOOKS, UNNAMED, WIDTHS, watched
from jobs.conftest import PATIENCE_S, Bench, until
from playwright.sync_api import Browser, Page, expect

from footplate.jobs.backends.local import machine
from server.conftest import TRAINS, Server, config

pytestmark = pytest.mark.engine

expect.set_options(timeout=PATIENCE_S * 1000)
PROGRAM = """
out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
long = "what_somebody_has_measured_under_a_name_that_is_longer_than_a_phone_is_wide"
(out / "metrics.csv").write_text(f"step,epoch,train_loss,val_loss,{long}\\n10,0,2.0,,1\\n20,0,1.5,1.75,1\\n")
parts = {"input": 0.5, "step": 1.0, "validation": 0.25, "checkpoint": 0.25}
window = {"batches": 20, "wall_s": 2.0, "seconds": parts, "samples": 64}
(out / "monitor.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in [
    {"kind": "start", "time": time.time(), "step": 0, "world_size": 2, "setup_s": 0.0},
    {"kind": "window", "time": time.time() + 2.0, "step": 20, **window},
    {"kind": "advice", "time": time.time() + 2.0, "rule": "input", "text": "Set <i>num_threads=8</i>: up to 2.5×."},
]))
print("<script>document.title = 'attacked'</script> & \\x1b[31mred\\x1b[0m", flush=True)
until_there("go-on")
print("it goes on", flush=True)
until_there("go-" + sys.argv[1])
sys.exit(2)
"""
VISIBLE = """(visible) => {
  Object.defineProperty(document, "hidden", { value: !visible, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield watched(context.new_page())
    context.close()


def submit(
    server: Server, bench: Bench, name: str, program: str = PROGRAM, args: list[str] | None = None, **spec: str
) -> None:
    bench.program(program)
    body = {
        "jobId": name, "packagePath": str(bench.directory / "trainer"), "args": args or [name],
        "config": {**config(bench, jobDir=str(bench.directory / f"out-{name}"), **spec), "labels": {"team": "vision"}},
    }  # fmt: skip
    answer = server("POST", "/api/jobs", body)
    assert answer.status == 201, answer.body


def test_a_job_is_followed_cancelled_resubmitted_and_deleted(server: Server, bench: Bench, page: Page):
    page.goto(f"{server.url}/")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    submit(server, bench, "flowers_1")
    page.get_by_role("link", name="flowers_1").click()  # it has come by itself
    output = page.get_by_role("log")
    expect(output).to_contain_text("<script>document.title = 'attacked'</script> & red")
    assert page.title() == "flowers_1 · Footplate"
    (bench.directory / "go-on").touch()
    expect(output).to_contain_text("it goes on")
    expect(page.get_by_role("heading", name="flowers_1 running")).to_be_visible()
    loss = page.get_by_role("img", name="loss by step. train_loss: from 2 to 1.5")
    loss.focus()
    page.keyboard.press("End")
    expect(page.get_by_text("step 20: train_loss 1.5, val_loss 1.75")).to_be_visible()
    expect(page.get_by_role("img", name="Memory by seconds")).to_be_visible()
    expect(page.get_by_role("img", name="Time by cause by seconds. rest of the step: 50.0 % in total")).to_be_visible()
    expect(page.get_by_role("img", name="Samples per second by seconds. samples/s: from 32")).to_be_visible()
    expect(page.get_by_role("listitem").filter(has_text="Set <i>num_threads=8</i>: up to 2.5×.")).to_be_visible()
    causes = page.get_by_role("table", name="Time by cause")
    expect(causes.get_by_role("row", name="waiting for input")).to_contain_text("$")
    expect(page.get_by_role("img", name="Time by cause: training")).to_be_visible()
    expect(page.get_by_text("Price: $0.19 an hour (if it ran on 1 n1-standard-4")).to_be_visible()
    expect(page.get_by_label("The specification as submitted")).to_contain_text("pythonModule: trainer.task")
    expect(page.get_by_label("The specification as resolved")).to_contain_text("machineType: n1-standard-4")

    page.get_by_role("button", name="Cancel").focus()  # with the keyboard alone
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("Cancel flowers_1?")
    page.keyboard.press("Escape")
    assert server("GET", "/api/jobs/flowers_1").json["state"] == "RUNNING"
    page.keyboard.press("Enter")  # the focus is where it was
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="flowers_1 cancelled")).to_be_visible()
    expect(page.get_by_text("cancelled by the user").first).to_be_visible()

    (bench.directory / "go-flowers_1").touch()
    page.get_by_role("button", name="Resubmit").click()
    page.get_by_role("button", name="Resubmit", exact=True).click()
    expect(page.get_by_role("heading", name="flowers_1 failed")).to_be_visible()
    expect(page.get_by_role("cell", name="ended with exit code 2")).to_be_visible()
    expect(causes.get_by_role("row", name="ended, before it was continued")).to_be_visible()
    expect(page.get_by_role("table", name="Attempts").get_by_role("row")).to_have_count(3)
    expect(output).to_contain_text("master-0 (2)it goes on")
    page.get_by_label("Attempt").select_option("2")
    expect(output).not_to_contain_text("master-0it goes on")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert "[2 master-0] it goes on" in download.value.path().read_text()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    expect(page.get_by_role("link", name="flowers_1")).to_have_count(0)


EXTREME = """async ([values]) => {
  const { charts } = await import("/charts.js");
  const home = document.createElement("section");
  document.getElementById("main").replaceChildren(home);
  const series = [{ name: "loss", x: values.map((_, index) => index), y: values }];
  charts(home, [{ title: "loss", x: "step", unit: "", series }], "");
  await new Promise((resolve) => setTimeout(() => requestAnimationFrame(resolve), 100));
  return [home.querySelector("path.curve, circle.dot").getAttribute("d") ?? "", home.querySelector("svg").outerHTML];
}"""


def test_a_chart_of_extreme_values_has_a_curve(server: Server, page: Page):
    page.goto(f"{server.url}/#/check")
    for values in ([1e308], [1e308, 1.0], [-1.7e308, 1.7e308], [5e-324], [1e-320, 5e-324]):
        curve, drawing = page.evaluate(EXTREME, [values])
        assert curve.startswith("M"), values
        assert "NaN" not in drawing, values
        assert "Infinity" not in drawing, values


CHARTS = """async () => {
  const { charts } = await import("/charts.js");
  const main = document.getElementById("main");
  const x = Array.from({ length: 101 }, (_, index) => index * 1000);
  const figure = (title, y) => ({ title, x: "step", unit: "", series: [{ name: title, x, y }] });
  main.replaceChildren();
  charts(main, [figure("loss", x.map((at) => at / 1000)), figure("rate", x.map((at) => 1e5 - at))], "");
}"""
TICKS = """(name) => [...document.querySelectorAll(`[aria-label^="${name} by"] text`)].map((one) => one.textContent)"""


def test_charts_with_the_same_axis_zoom_together(server: Server, page: Page):
    page.goto(f"{server.url}/#/check")
    page.evaluate(CHARTS)
    loss, rate = (page.get_by_role("img", name=f"{name} by step") for name in ("loss", "rate"))
    reset = page.get_by_role("button", name="Reset the zoom of loss")
    expect(reset).to_be_hidden()
    box = loss.bounding_box()
    assert box is not None
    width = box["width"] - 70  # the edges of the axis
    page.mouse.move(box["x"] + 58 + width * 0.2, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 58 + width * 0.4, box["y"] + 80, steps=4)
    page.mouse.up()
    expect(rate).to_have_accessible_name(re.compile("Zoomed to step 2[01]\\d\\d\\d"))
    zoomed = [float(text) for text in page.evaluate(TICKS, "loss")]
    assert 19_000 <= min(tick for tick in zoomed if tick > 100) < max(zoomed) <= 42_000
    assert max(tick for tick in zoomed if tick <= 100) <= 50  # the y axis fits what is shown
    loss.hover()
    expect(page.get_by_text(re.compile("step [23]\\d000: loss [23]\\d"))).to_be_visible()
    reset.click()
    expect(rate).not_to_have_accessible_name(re.compile("Zoomed"))
    expect(loss).to_be_focused()

    page.keyboard.press("+")
    expect(page.get_by_text("Zoomed to step 25000 to step 75000.")).to_be_visible()
    page.keyboard.press("Shift+ArrowRight")
    expect(rate).to_have_accessible_name(re.compile("Zoomed to step 37500 to step 87500"))
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("step 38000: loss 38")).to_be_visible()
    page.keyboard.press("Escape")
    expect(loss).not_to_have_accessible_name(re.compile("Zoomed"))
    page.keyboard.press("+")
    loss.dblclick()
    expect(reset).to_be_hidden()


FLOOD = """async (count) => {
  const { logs } = await import("/logs.js");
  const home = document.getElementById("main");
  home.replaceChildren();
  const text = (first) => JSON.stringify(Array.from({ length: 500 }, (_, index) => (
    { attempt: 1, source: "master-0", text: `line ${first + index} of a loss that a program prints\\n` })));
  const events = new ReadableStream({
    start(stream) {
      const encode = new TextEncoder();
      for (let first = 0; first < count; first += 500) {
        stream.enqueue(encode.encode(`event: lines\\ndata: ${text(first)}\\n\\n`));
      }
      stream.enqueue(encode.encode("event: end\\ndata: {}\\n\\n"));
      stream.close();
    },
  });
  window.fetch = async () => new Response(events);
  let added = 0;
  const count_added = (found) => { for (const one of found) added += one.addedNodes.length; };
  const watching = new MutationObserver(count_added);
  watching.observe(home, { childList: true, subtree: true });
  const output = logs(home, "flood");
  const said = home.querySelector(".said");
  while (said.textContent !== "complete") await new Promise((resolve) => setTimeout(resolve, 20));
  const lines = home.querySelector(".lines");
  output.end();
  return [added, lines.childElementCount, lines.firstChild.textContent, lines.lastChild.textContent];
}"""


def test_a_flood_of_output_is_drawn_in_few_batches(server: Server, page: Page):
    page.goto(f"{server.url}/#/check")
    added, kept, first, last = page.evaluate(FLOOD, 100_000)
    assert kept == 5000
    assert first == "master-0line 95000 of a loss that a program prints"
    assert last == "master-0line 99999 of a loss that a program prints"
    assert added < 50_000  # most lines came and went between two drawings


@pytest.mark.usefixtures("nightly")
def test_a_tuning_shows_its_trials_as_a_table_and_as_parallel_coordinates(server: Server, bench: Bench, page: Page):
    program = """
    import argparse
    parser = argparse.ArgumentParser()
    for name in ("--layers", "--kind", "--job-dir"):
        parser.add_argument(name)
    args, _ = parser.parse_known_args()
    if args.kind == "<b>bad</b>":
        sys.exit(2)
    line = {"accuracy": args.layers, "global_step": "10"}
    Path(os.environ["CLOUD_ML_HP_METRIC_FILE"]).write_text(json.dumps(line) + "\\n")
    """
    params = [
        {"parameterName": "layers", "type": "INTEGER", "minValue": 1, "maxValue": 2},
        {"parameterName": "kind", "type": "CATEGORICAL", "categoricalValues": ["relu", "<b>bad</b>"]},
    ]
    spec: Any = {
        "goal": "MAXIMIZE", "algorithm": "GRID_SEARCH", "hyperparameterMetricTag": "accuracy", "maxTrials": 4,
        "maxParallelTrials": 4, "params": params,
    }  # fmt: skip
    submit(server, bench, "tuned_1", textwrap.dedent(program), hyperparameters=spec)
    bench.jobs.wait("tuned_1")
    page.goto(f"{server.url}/#/jobs/tuned_1")
    section = page.get_by_role("region", name="Trials", exact=True)
    expect(section).to_contain_text("accuracy is maximized. 4 of 4 trials have begun. The best is tuned_1_trial_3.")
    rows = section.get_by_role("row")
    expect(rows).to_have_count(5)
    expect(rows.nth(1)).to_contain_text("trial 3")
    expect(rows.nth(1)).to_contain_text("succeeded")
    expect(rows.nth(4)).to_contain_text("<b>bad</b>")
    # A line for each trial; the best one stands out.
    expect(section.locator("polyline")).to_have_count(4)
    expect(section.locator("polyline.best title")).to_have_text("trial 3: 2, relu, 2")
    expect(section.locator("polyline.open")).to_have_count(2)
    for size in WIDTHS.values():
        page.set_viewport_size({"width": size[0], "height": size[1]})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRAST) == []
    section.get_by_role("link", name="trial 3").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("tuned_1_trial_3")


def test_a_hang_is_shown_with_its_stacks(server: Server, bench: Bench, page: Page):
    page.goto(f"{server.url}/#/jobs/nightly_1")
    expect(page.locator(".history")).to_be_visible()
    expect(page.locator(".hangs")).to_be_hidden()

    sentence = "rank 1 is in `<b>train</b>` (train.py:7) since 41 s; rank 0 waits for it in all_reduce 12"
    (bench.jobs.home.attempt("nightly_1", 1) / "hang-1.txt").write_text(f"{sentence}\n\nrank 0: process 7\n")
    page.reload()
    expect(page.locator(".hangs summary")).to_have_text(f"attempt 1: {sentence}")
    expect(page.locator(".hangs pre")).to_be_hidden()
    page.locator(".hangs summary").click()
    expect(page.locator(".hangs pre")).to_contain_text("rank 0: process 7")


LASTS = """
out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
now = time.time()
(out / "monitor.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in [
    {"kind": "start", "time": now, "step": 0, "total_steps": 7330},
    {"kind": "window", "time": now + 1.0, "step": 10, "batches": 10, "wall_s": 1.0, "seconds": {"step": 1.0}},
]))
until_there("go-" + sys.argv[1])
"""


def test_a_running_job_shows_its_time_left_and_a_queued_one_its_place(server: Server, bench: Bench, page: Page):
    cores = machine.resources().cpus
    submit(server, bench, "lasts_1", LASTS)
    server.is_in("RUNNING", "lasts_1")
    page.goto(f"{server.url}/#/jobs/lasts_1")
    expect(page.get_by_text(re.compile("^about 1[12] min left$"))).to_be_visible()

    for name in ("waits_1", "waits_2"):
        submit(server, bench, name, "", scaleTier="CUSTOM", masterType="n1-standard-96")
    page.goto(f"{server.url}/#/jobs/waits_2")
    place = page.locator(".expected")
    expect(place).to_have_text(re.compile(f"^2nd of 2 in the queue; waits for {cores:.6g} vCPU \\([\\d.]+ free\\)"))
    assert server("GET", "/api/jobs/waits_1").json["queue"]["position"] == 1
    assert server("GET", "/api/jobs/lasts_1").json["queue"] is None
    server("POST", "/api/jobs/waits_1/cancel")
    expect(place).to_have_text(re.compile("^1st of 1 in the queue"))
    server("POST", "/api/jobs/waits_2/cancel")
    expect(place).to_have_count(0)
    (bench.directory / "go-lasts_1").touch()
    page.goto(f"{server.url}/#/jobs/lasts_1")
    expect(page.get_by_role("heading", name="lasts_1 succeeded")).to_be_visible()
    expect(place).to_have_count(0)


SPEAKS = """
for number in range(6000):
    print(f"step {number}")
    if number in (3, 2000, 5990):
        print(f"<b>A Warning</b> at {number}")
"""


def test_the_whole_output_is_searched(server: Server, bench: Bench, page: Page):
    submit(server, bench, "speaks_1", SPEAKS)
    server.is_in("SUCCEEDED", "speaks_1")
    page.goto(f"{server.url}/#/jobs/speaks_1")
    output, matches = page.get_by_role("log"), page.get_by_role("region", name="Lines that were found")
    expect(output).to_contain_text("step 5999")
    expect(output).not_to_contain_text("at 2000")  # only the end is loaded
    page.get_by_label("Search in all output").fill("b>a warning")
    expect(matches.locator("> div")).to_have_text([
        "master-0:5<b>A Warning</b> at 3", "master-0:2003<b>A Warning</b> at 2000", "master-0:5994<b>A Warning</b> at 5990",
    ])  # fmt: skip
    expect(matches.locator("mark")).to_have_text(["b>A Warning"] * 3)
    expect(output).to_be_hidden()
    expect(page.get_by_text("3 of 3 lines")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 of 3 lines")).to_be_visible()
    expect(matches.locator(".current")).to_contain_text("at 3")
    page.keyboard.press("Shift+Enter")
    page.get_by_role("button", name="Previous hit").click()
    expect(matches.locator(".current")).to_contain_text("at 2000")
    page.get_by_label("Search in all output").fill("no such (line")
    expect(page.get_by_text("0 lines")).to_be_visible()
    page.get_by_label("Search in all output").fill("")
    expect(output).to_contain_text("step 5999")
    expect(matches).to_be_hidden()


@pytest.mark.slow
def test_a_button_profiles_a_running_job(server: Server, bench: Bench, page: Page):
    submit(server, bench, "traced_1", TRAINS)
    bench.there("trains-traced_1")
    server.is_in("RUNNING", "traced_1")
    profile = "/api/jobs/traced_1/profile"
    assert server("GET", profile).json["state"] == "idle"
    assert server("POST", f"{profile}?steps=0").status == 422
    assert server("POST", "/api/jobs/nobody_1/profile").status == 404
    page.goto(f"{server.url}/#/jobs/traced_1")
    expect(page.locator(".profile")).to_be_hidden()
    page.get_by_role("button", name="Profile").click()
    expect(page.locator(".profile pre")).to_contain_text("Profile of steps ")
    expect(page.locator(".profile pre")).to_contain_text("trace-rank0.json.gz")
    page.reload()
    expect(page.locator(".profile pre")).to_contain_text("Profile of steps ")

    # A program asks for another one.
    asked = server("POST", f"{profile}?steps=3")
    assert (asked.status, asked.json["state"]) == (202, "waiting")
    made = until(lambda: (seen := server("GET", profile).json)["state"] in ("done", "failed") and seen)
    assert (made["state"], made["error"]) == ("done", None)
    assert made["summary"].startswith("Profile of steps ")
    assert (Path(made["directory"]) / "trace-rank0.json.gz").exists()

    (bench.directory / "go-traced_1").touch()
    expect(page.get_by_role("button", name="Delete")).to_be_visible()
    expect(page.get_by_role("button", name="Profile")).to_have_count(0)
    assert server("GET", "/api/jobs/traced_1/wait?timeout=120").json["state"] == "SUCCEEDED"
    again = server("POST", profile)
    assert (again.status, again.message) == (409, "traced_1 is SUCCEEDED: only a running job has a profile.")
    # The files outlast the process.
    assert server("GET", profile).json["state"] == "done"
    assert server("DELETE", "/api/jobs/traced_1").status == 204
    assert server("GET", profile).status == 404


@pytest.mark.usefixtures("nightly")
def test_the_replicas_stay_in_their_card(server: Server, bench: Bench, page: Page):
    page.set_viewport_size({"width": 1440, "height": 900})
    with closing(sqlite3.connect(bench.jobs.home.root / "jobs.db")) as store, store:
        long = "ended with exit code 2 " + "x" * 120
        store.execute("UPDATE processes SET outcome = ? WHERE job = 'nightly_1'", (long,))
    page.goto(f"{server.url}/#/jobs/nightly_1")
    table = page.locator(".replicas table")
    expect(table).to_contain_text("xxxx")
    overflows = "() => [...document.querySelectorAll('section')].some((card) => card.scrollWidth > card.clientWidth)"
    assert not page.evaluate(overflows)


def test_more_tabs_than_a_browser_has_connections_show_a_job_that_runs(server: Server, bench: Bench, browser: Browser):
    (bench.directory / "go-on").touch()
    submit(server, bench, "tabs_1")
    context = browser.new_context()
    for _ in range(7):
        page = context.new_page()
        page.goto(f"{server.url}/#/jobs/tabs_1")
        expect(page.get_by_role("log")).to_contain_text("attacked")
        page.evaluate(VISIBLE, False)
    (bench.directory / "go-tabs_1").touch()
    server.is_in("FAILED", "tabs_1")
    page = context.pages[0]
    page.evaluate(VISIBLE, True)
    expect(page.get_by_text("complete", exact=True)).to_be_visible()  # what came meanwhile is there
    expect(page.get_by_role("log")).to_contain_text("it goes on")
    context.close()


@pytest.fixture(scope="module")
def nightly(server: Server, bench: Bench) -> None:
    """Two jobs that have ended."""
    (bench.directory / "go-on").touch()
    for name in ("nightly_1", "nightly_2"):
        (bench.directory / f"go-{name}").touch()
        submit(server, bench, name)
        server.is_in("FAILED", name)


@pytest.mark.usefixtures("nightly")
def test_jobs_are_filtered_and_the_address_keeps_the_filter(server: Server, page: Page):
    page.goto(f"{server.url}/")
    expect(page.get_by_role("link", name="nightly_1")).to_be_visible()
    page.get_by_label("Name").fill("_2")
    expect(page.get_by_role("link", name="nightly_1")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("link", name="nightly_2")).to_be_visible()
    expect(page.get_by_role("link", name="nightly_1")).to_have_count(0)
    page.get_by_label("State").select_option("RUNNING")
    expect(page.get_by_text("No job matches the filter.")).to_be_visible()


COMPARED = """
out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
rate = float(sys.argv[sys.argv.index("--rate") + 1])
(out / "metrics.csv").write_text(f"step,epoch,train_loss,val_<b>loss\\n10,0,{2 * rate},1\\n20,0,{rate},1\\n")
(out / "monitor.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in [
    {"kind": "start", "time": time.time(), "step": 0},
    {"kind": "window", "time": time.time() + 2.0, "step": 20, "batches": 20, "wall_s": 2.0,
     "seconds": {"input": rate, "step": 2.0 - rate}, "samples": 64},
]))
"""


def test_jobs_are_compared_side_by_side(server: Server, bench: Bench, browser: Browser, page: Page):
    for name, rate in (("rate_1", "0.25"), ("rate_2", "0.5")):
        submit(server, bench, name, COMPARED, args=[name, "--rate", rate])
        server.is_in("SUCCEEDED", name)
    page.goto(f"{server.url}/#/?name=rate_")
    page.get_by_role("checkbox", name="Compare rate_1").press("Space")
    expect(page.get_by_text("Choose another job to compare.")).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("Compare \\d jobs"))).to_have_count(0)
    page.get_by_role("checkbox", name="Compare rate_2").check()
    page.get_by_role("link", name="Compare 2 jobs").click()
    expect(page).to_have_url(f"{server.url}/#/compare/rate_1,rate_2")

    differences = page.get_by_role("table", name="Differences of the specifications")
    expect(differences.get_by_role("row", name="--rate")).to_have_text("--rate0.250.5")
    expect(differences.get_by_role("row", name="argument 1")).to_have_text("argument 1rate_1rate_2")
    expect(differences.get_by_role("row", name="region")).to_have_count(0)
    facts = page.get_by_role("table", name="The jobs")
    expect(facts.get_by_role("row", name="Goodput")).to_have_text(re.compile(r"^Goodput[\d.]+ %[\d.]+ %$"))
    expect(facts.get_by_role("row", name="Steps trained again")).to_have_text("Steps trained again00")
    expect(facts.get_by_role("row", name="Cost")).to_have_text(re.compile(r"^Cost\$[\d.]+\$[\d.]+$"))
    values = page.get_by_role("table", name="Final values")
    expect(values.get_by_role("row", name="train_loss")).to_have_text("train_loss0.250.5")
    expect(values.get_by_role("row", name="val_<b>loss")).to_have_text("val_<b>loss11")
    expect(values.get_by_role("row", name="time: waiting for input")).to_have_text(
        "time: waiting for input12.5 %25.0 %"
    )
    curves = page.get_by_role(
        "img", name=re.compile("^loss by step. rate_1 train_loss: from 0.5 .* rate_2 train_loss: from 1 to 0.5")
    )
    expect(curves).to_be_visible()
    colours = "(one) => [...one.querySelectorAll('.curve')].map((path) => getComputedStyle(path).stroke)"
    first, second = curves.evaluate(colours)
    assert first != second

    page.goto(f"{server.url}/#/compare/rate_1,no_such_job")
    expect(page.get_by_text("There is no job no_such_job.")).to_be_visible()
    expect(page.get_by_text("The specifications are equal.")).to_be_visible()
    for name, scheme in LOOKS:
        width = WIDTHS[name]
        context = browser.new_context(viewport=dict(zip(("width", "height"), width, strict=True)), color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        page = watched(context.new_page())
        page.goto(f"{server.url}/#/compare/rate_1,rate_2")
        expect(page.get_by_role("table", name="Final values")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width[0]
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(UNNAMED) == []
        context.close()


def test_a_job_is_checked_before_it_is_submitted(server: Server, bench: Bench, page: Page):
    bench.program("")
    page.goto(f"{server.url}/")
    page.get_by_role("link", name="Check a config.yaml").click()
    page.get_by_label("config.yaml").fill("trainingInput:\n  masterTyp: n1-standard-4\n  region: us-central1\n")
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("heading", name="The job has problems")).to_be_visible()
    expect(page.get_by_text('there is no such key. Did you mean "masterType"?')).to_be_visible()
    page.get_by_label("config.yaml").fill(
        "trainingInput:\n  pythonModule: trainer.task\n  region: us-central1\n  jobDir: gs://my-bucket/my_job\n"
    )
    page.get_by_label("Backend").select_option("vertex")
    page.get_by_label("project").fill("my-project")
    page.get_by_label("Package directory on the server's machine").fill(str(bench.directory / "trainer"))
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("heading", name="The job is valid")).to_be_visible()
    expect(page.get_by_label("As resolved")).to_contain_text("machineType: n1-standard-4")
    expect(page.get_by_label("Request to vertex")).to_contain_text("projects/my-project/locations/us-central1")


@pytest.mark.usefixtures("nightly")
def test_where_the_output_is_that_cant_be_shown_stands_in_its_place(server: Server, bench: Bench, page: Page):
    with closing(sqlite3.connect(bench.jobs.home.root / "jobs.db")) as store, store:
        store.execute("UPDATE jobs SET host = 'elsewhere' WHERE name = 'nightly_2'")
    page.goto(f"{server.url}/#/jobs/nightly_2")
    expect(
        page.get_by_text("nightly_2 runs on elsewhere, and its logs are on that machine: ask there.")
    ).to_be_visible()
    expect(page.locator("#alert")).to_be_empty()


@pytest.mark.usefixtures("nightly")
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_is_readable_at_every_width_and_in_both_schemes(server: Server, browser: Browser, width, scheme):
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    context = browser.new_context(viewport=size, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    page = watched(context.new_page())
    for path, there in (("/", "nightly_1"), ("/#/jobs/nightly_1", "As resolved"), ("/#/check", "Check a job")):
        page.goto(f"{server.url}{path}")
        expect(page.get_by_text(there).first).to_be_visible()
        expect(page.get_by_text("live", exact=True).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(UNNAMED) == []
    context.close()


def test_a_page_of_another_site_can_do_nothing(server: Server, page: Page):
    page.goto("about:blank")
    attack = f"""async () => {{
      const tried = [];
      for (const options of [{{}}, {{method: "POST"}}, {{method: "POST", mode: "no-cors", body: "{{}}"}}]) {{
        try {{ tried.push((await fetch("{server.url}/api/jobs", options)).type); }} catch {{ tried.push("refused"); }}
      }}
      return tried;
    }}"""
    before = server("GET", "/api/jobs").json
    assert json.dumps(page.evaluate(attack)) in (
        '["refused", "refused", "opaque"]',
        '["refused", "refused", "refused"]',
    )
    assert server("GET", "/api/jobs").json == before


@pytest.mark.usefixtures("nightly")
def test_the_token_is_asked_for_and_kept_for_the_tab(serve, page: Page):
    server = serve(FOOTPLATE_TOKEN="s3cret-s3cret-s3cret")
    page.goto(f"{server.url}/")
    token = page.get_by_role("textbox", name="Token")
    token.fill("a tökén that no header can have")
    page.keyboard.press("Enter")
    expect(token).to_have_value("a tökén that no header can have")  # it is not taken
    expect(page.get_by_text("The server refused this token.")).to_be_hidden()
    token.fill("not-the-token-not-the-token")
    page.keyboard.press("Enter")
    expect(token).to_have_value("")  # it is asked for again
    expect(page.get_by_text("The server refused this token. Try again.")).to_be_visible()
    token.fill("s3cret-s3cret-s3cret")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="nightly_1")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="nightly_1")).to_be_visible()
    assert page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
