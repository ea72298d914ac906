"""The page, in a real browser without a network: its contents and actions, at both widths, and with the keyboard only."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from jobs.conftest import PATIENCE_S, Bench
from playwright.sync_api import Browser, Page, expect, sync_playwright

from server.conftest import Server, config

pytestmark = pytest.mark.engine

expect.set_options(timeout=PATIENCE_S * 1000)
WIDTHS = {"laptop": (1280, 800), "phone": (390, 844)}
PROGRAM = """
out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
long = "what_somebody_has_measured_under_a_name_that_is_longer_than_a_phone_is_wide"
(out / "metrics.csv").write_text(f"step,epoch,train_loss,val_loss,{long}\\n10,0,2.0,,1\\n20,0,1.5,1.75,1\\n")
print("<script>document.title = 'attacked'</script> & \\x1b[31mred\\x1b[0m", flush=True)
until_there("go-on")
print("it goes on", flush=True)
until_there("go-" + sys.argv[1])
sys.exit(2)
"""
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
VISIBLE = """(visible) => {
  Object.defineProperty(document, "hidden", { value: !visible, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
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


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield watched(context.new_page())
    context.close()


def watched(page: Page) -> Page:
    """A page that fails its test if one of its scripts fails, or if it loads anything from elsewhere."""
    page.set_default_timeout(PATIENCE_S * 1000)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    page.on("pageerror", lambda error: refuse(str(error)))
    page.on("request", lambda one: "127.0.0.1" in one.url or one.url.startswith("blob:") or refuse(one.url))
    return page


def submit(server: Server, bench: Bench, name: str) -> None:
    bench.program(PROGRAM)
    body = {
        "jobId": name, "packagePath": str(bench.directory / "trainer"), "args": [name],
        "config": {**config(bench, jobDir=str(bench.directory / f"out-{name}")), "labels": {"team": "vision"}},
    }  # fmt: skip
    found = server("POST", "/api/jobs", body)
    assert found.status == 201, found.body


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
  const home = document.getElementById("main");
  home.replaceChildren();
  const series = [{ name: "loss", x: values.map((_, index) => index), y: values }];
  charts(home, [{ title: "loss", x: "step", unit: "", series }], "");
  await new Promise((resolve) => setTimeout(() => requestAnimationFrame(resolve), 100));
  return [home.querySelector("path.curve, circle.dot").getAttribute("d") ?? "", home.querySelector("svg").outerHTML];
}"""


@pytest.mark.parametrize("values", [[1e308], [1e308, 1.0], [-1.7e308, 1.7e308], [5e-324], [1e-320, 5e-324]])
def test_a_chart_of_extreme_values_has_a_curve(server: Server, page: Page, values: list[float]):
    page.goto(f"{server.url}/#/check")
    curve, drawing = page.evaluate(EXTREME, [values])
    assert curve.startswith("M")
    assert "NaN" not in drawing
    assert "Infinity" not in drawing


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
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
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
