"""Reports in a real browser: charts, controls, widths, schemes, paper, and data that tries to be markup."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browsing import CONTRAST, LOOKS, UNNAMED, WIDTHS, troubles_of
from deltalake import write_deltalake
from jobs.conftest import until
from playwright.sync_api import Browser, Page, expect

import footplate as fp
from reporting.runs import full_run, monitor_rows, samples, write_hparams, write_metrics, write_monitor

pytestmark = pytest.mark.engine

SCROLL = """async () => {
  for (let y = 0; y < document.body.scrollHeight; y += 500) {
    scrollTo(0, y);
    await new Promise((resolve) => setTimeout(resolve, 60));
  }
}"""
UNDRAWN = """() => [...document.querySelectorAll("figure.chart")].filter((one) => one.checkVisibility()
  && !one.querySelector(".main-svg .xy, .main-svg .subplot")).map((one) => one.querySelector("figcaption").textContent)"""
HEADINGS = "() => [...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))"
OVERFLOWS = (
    "() => [...document.querySelectorAll('section')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
)
PATHS = "() => [...document.querySelectorAll('.canvas')][0].querySelectorAll('.scatterlayer .trace').length"
INK = "() => getComputedStyle(document.querySelector('.canvas .xtick text')).fill"
ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"


def look_at_all(page: Page) -> None:
    """Scroll through a page until all of its charts are drawn. A busy machine may draw later than it scrolls."""

    def all_drawn() -> bool:
        page.evaluate(SCROLL)
        return page.evaluate(UNDRAWN) == []

    until(all_drawn)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return fp.report(full_run(tmp_path_factory.mktemp("full") / "flowers"))


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a report in a window. The test fails at its end if the page had an error, or asked for anything."""
    opened: list[tuple[Path, list[str]]] = []
    contexts = []

    def open_report(path: Path, width: str = "laptop", scheme: str = "light") -> Page:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))  # pyright: ignore[reportArgumentType]
        page = contexts[-1].new_page()
        opened.append((path, troubles_of(page)))
        page.goto(path.as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    for path, troubles in opened:
        assert troubles == [path.as_uri()]


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_report_is_readable_at_every_width_and_in_both_schemes(full, visit, width, scheme):
    page = visit(full, width, scheme)
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    look_at_all(page)
    assert page.evaluate(UNDRAWN) == []
    assert page.evaluate("document.querySelectorAll('figure.chart').length") >= 10
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    assert page.evaluate(OVERFLOWS) == 0
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []
    levels = page.evaluate(HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_report_shows_all_that_the_run_has(full, visit):
    page = visit(full)
    expect(page).to_have_title("flowers · Footplate")
    main = page.locator("main")
    for text in (
        "finished", "2 × cpu", "0123456789abcdef, with changes", "52% of the time waits for input", "320.4 samples/s",
        "Rank 1 worked longest in 3 of 3 comparisons: 13.0 s, 13.0% above the median.", "50 steps had to be trained again.",
        "rank 1 is in `train` (train.py:7) since 41 s", "The measured memory", "48 of 60 predictions are right (80.00%).",
        "val_loss is 2.5", "python train.py --lr 0.001", "With seed 7.", "Every second of the run, by its cause.",
        "1.6 GFLOP/s", "images, 1",
    ):  # fmt: skip
        expect(main).to_contain_text(text)
    assert page.locator(".gallery img").count() == 28
    assert page.locator(".gallery .no-picture").count() == 0
    expect(page.get_by_role("img", name=re.compile("^loss. train_loss: from 1.9"))).to_be_visible()


def test_the_controls_change_all_curves_and_the_charts_follow_the_scheme_of_the_system(full, visit):
    page = visit(full)
    page.wait_for_selector(".canvas .scatterlayer")
    assert page.evaluate(PATHS) == 2
    slider = page.get_by_label("Smoothing")
    slider.fill("0.9")
    expect(page.locator("#smoothing-value")).to_have_text("0.9")
    until(lambda: page.evaluate(PATHS) == 4)  # the raw curves stay, faint
    data = page.evaluate("document.querySelector('.canvas').data.map((trace) => trace.y)")
    assert np.std(np.diff(data[1])) < np.std(np.diff(data[0])) / 2
    page.get_by_label("Logarithmic axis").check()
    until(lambda: page.evaluate("document.querySelector('.canvas').layout.yaxis.type") == "log")
    page.get_by_label("Horizontal axis").select_option("minutes")
    until(lambda: page.evaluate("document.querySelector('.canvas').layout.xaxis.title.text") == "minutes of training")
    times = page.evaluate("document.querySelector('.canvas').data[0].x")
    assert times == sorted(times)
    assert times[-1] < 2

    page.wait_for_selector(".canvas .xtick text")
    light = page.evaluate(INK)
    page.emulate_media(color_scheme="dark")
    assert light == "rgb(26, 34, 48)"
    until(lambda: page.evaluate(INK) == "rgb(231, 235, 241)")


def test_paper_has_every_chart_and_every_folded_part(full, visit):
    page = visit(full, scheme="dark")
    assert len(page.pdf()) > 50_000
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate(UNDRAWN) == []


def test_no_name_and_no_value_becomes_markup(tmp_path, visit):
    run = tmp_path / "<script>window.attacked = 1<"
    write_metrics(run)
    text = (run / "metrics.csv").read_text().replace("val_acc", f"val_{ATTACK}")
    (run / "metrics.csv").write_text(text)
    rows = monitor_rows(100)
    rows[0] |= {"device": ATTACK, "precision": ATTACK}
    rows[-2] |= {"text": ATTACK}
    rows[3]["seconds"] |= {ATTACK: 0.5}
    write_monitor(run, rows)
    table = tmp_path / f"table <b>{'x' * 5}"
    write_deltalake(table, samples().rename_columns(["image", ATTACK, "</script><script>window.attacked=1", "note"]))
    write_hparams(
        run, long="x" * 300, **{"y" * 100: ATTACK, ATTACK: ATTACK, "val_table": f"{table}@0", "</script>": "</script>"}
    )
    labels = pa.array([ATTACK, "</script>", "%{x}"] * 20)
    pq.write_table(
        pa.table({"label": labels, "prediction": labels.take(pa.array(np.arange(60)[::-1]))}),
        run / "predictions.parquet",
    )
    (run / "hang-1.txt").write_text(f"{ATTACK}\n{ATTACK}\n")
    alert = {"rule": ATTACK, "text": ATTACK, "step": ATTACK, "time_s": ATTACK}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    environment = dict.fromkeys(("host", "cpu", "command", "directory", "cores", "recorded", "python"), ATTACK)
    environment |= {"git": {"commit": ATTACK}, "devices": [ATTACK], "packages": {ATTACK: ATTACK}}
    (run / "environment.json").write_text(json.dumps(environment))
    choice = dict.fromkeys(("on", "kind", "devices", "fits", "memory", "step_s", "hours", "usd"), ATTACK)
    (run / "plan.json").write_text(json.dumps({"model": ATTACK, "batch_size": ATTACK, "choices": [choice]}))

    page = visit(fp.report(run), "phone")
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    look_at_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"][0]
    assert page.evaluate("window.attacked") is None
    assert page.evaluate(UNDRAWN) == []
    assert page.locator("script:not([type])").count() == 2
    assert page.locator("img:not([src^='data:'])").count() == 0
    expect(page.get_by_role("heading", level=1)).to_have_text("<script>window.attacked = 1<")
    # Plotly shows the name as it is, too.
    expect(page.locator(".legendtext", has_text="<script>window.attacked = 1</script>").first).to_be_visible()
    expect(page.locator("dd", has_text="<script>").first).to_be_visible()


def test_the_policy_of_the_page_forbids_requests_and_other_scripts(full, browser: Browser):
    page = browser.new_page()
    page.goto(full.as_uri())
    added = """() => {
      const script = document.createElement("script");
      script.textContent = "window.attacked = 1";
      document.body.append(script);
      return window.attacked ?? "refused";
    }"""
    assert page.evaluate(added) == "refused"
    asked = "async () => { try { await fetch('https://example.org/'); return 'asked'; } catch { return 'refused'; } }"
    assert page.evaluate(asked) == "refused"
    page.close()


def test_runs_side_by_side_share_their_charts(tmp_path, visit):
    first = full_run(tmp_path / "one/run")
    second = tmp_path / "two/run"
    write_metrics(second, 300, lr=3e-3)
    write_monitor(second, monitor_rows(300, status=None))
    write_hparams(second, lr=0.003, width=24)
    page = visit(fp.report(first, second, output=tmp_path / "both.html"))
    look_at_all(page)
    assert page.evaluate(UNDRAWN) == []
    assert page.evaluate(PATHS) == 4
    names = page.evaluate("document.querySelector('.canvas').data.map((trace) => trace.name)")
    assert names == ["one/run train_loss", "one/run val_loss", "two/run train_loss", "two/run val_loss"]
    differences = page.locator("#differences table")
    expect(differences).to_contain_text("lr0.0010.003")
    expect(differences).not_to_contain_text("width")
    expect(page.locator("#head")).to_contain_text("killed")
    expect(page.locator("#final")).to_contain_text("val_acc0.94323")
    expect(page.locator("#goodput thead")).to_contain_text("causeone/runtwo/run")
    expect(page.locator("#goodput")).to_contain_text("lost, trained again")
    keys = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(keys) == len(set(keys))
    page.locator("summary", has_text="one/run").first.click()
    expect(page.get_by_text("48 of 60 predictions are right (80.00%).")).to_be_visible()


def test_a_long_run_is_thinned_and_says_so(tmp_path, visit):
    values = np.sin(np.arange(200_000) / 3000)
    values[123_457] = 50.0
    lines = "\n".join(f"{step},0,{value!r}" for step, value in enumerate(values.tolist(), 1))
    (tmp_path / "metrics.csv").write_text(f"step,epoch,train_loss\n{lines}\n")
    path = fp.report(tmp_path)
    page = visit(path)
    page.wait_for_selector(".canvas .scatterlayer")
    drawn = page.evaluate("document.querySelector('.canvas').data[0].y")
    assert len(drawn) < 2100
    assert max(drawn) == 50.0
    expect(page.get_by_text(re.compile(r"train_loss: [\d,]+ of 200,000 points are drawn"))).to_be_visible()


def test_extreme_values_are_drawn(tmp_path, visit):
    metrics = ([1e308], [1e308, 1.0], [-1.7e308, 1.7e308], [5e-324], [1e-320, 5e-324], [0.5], [0, 0])
    names = ",".join(f"metric_{number}" for number in range(len(metrics)))
    lines = "\n".join(
        f"{step},0," + ",".join(repr(values[step]) if step < len(values) else "" for values in metrics)
        for step in (0, 1)
    )
    (tmp_path / "metrics.csv").write_text(f"step,epoch,{names}\n{lines}\n")
    page = visit(fp.report(tmp_path))
    look_at_all(page)
    charts = page.locator(".canvas .scatterlayer")
    expect(charts).to_have_count(len(metrics))
    for number, values in enumerate(metrics):
        expect(charts.nth(number).locator(".point").first).to_be_attached()
        assert "NaN" not in charts.nth(number).inner_html(), values


def test_values_that_are_not_finite_are_gaps_with_a_note(tmp_path, visit):
    cells = ["0.5", "0.4", "nan", "inf", "0.3", "0.2"]
    lines = "\n".join(f"{step},0,{cell},nan" for step, cell in enumerate(cells, 1))
    (tmp_path / "metrics.csv").write_text(f"step,epoch,train_loss,broken\n{lines}\n7,0\n")
    page = visit(fp.report(tmp_path))
    look_at_all(page)
    assert page.evaluate(UNDRAWN) == []
    expect(page.get_by_text("train_loss is NaN or infinite in 2 rows of 6, first at step 3.")).to_be_visible()
    expect(page.get_by_text("1 line of metrics.csv could not be read and is left out.")).to_be_visible()
    assert page.evaluate("document.querySelector('.canvas').data[0].y") == [0.5, 0.4, None, None, 0.3, 0.2]


def test_a_run_with_nothing_but_its_hyper_parameters_says_what_is_missing(tmp_path, visit):
    write_hparams(tmp_path, lr=0.1)
    page = visit(fp.report(tmp_path))
    for text in ("No metric is recorded", "The learning rate isn't recorded", "there is no monitor.jsonl",
                 "No plan is saved", "has saved no predictions", "The tables of this run aren't known",
                 "The environment isn't recorded", "No alert was sent", "its command isn't recorded"):  # fmt: skip
        expect(page.locator("main")).to_contain_text(text)
