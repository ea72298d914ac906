"""The site: `mkdocs build --strict` succeeds, all pages are in the navigation, and search works without a network."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import public_names
import pytest
from browsing import browser as browser
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import Browser, expect

import footplate as fp
from footplate.cli.commands import COMMANDS
from footplate.core import errors as errors_module

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
from reference import API, HELP  # noqa: E402  a build hook, which is no package

PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


class Links(html.parser.HTMLParser):
    """What a page links to or loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(values[name] or "" for name in ("id", "name") if name in values)
        if tag == "a" and values.get("href"):
            self.targets.append(values["href"] or "")
        if tag in ("img", "script") and values.get("src"):
            self.loaded.append(values["src"] or "")
        if tag == "link" and values.get("href"):
            self.loaded.append(values["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    directory = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True)
    build(config)
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    # 404.html is shown at any address, so its links are absolute.
    return {path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_in_the_navigation(site):
    linked = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if not re.search(rf"^ +- (.+: )?{re.escape(page)}$", linked, re.MULTILINE)] == []
    assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []


def test_every_notebook_is_a_page_with_its_outputs(site):
    notebooks = sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
    assert sorted(path.stem for path in (site / "tutorials").glob("*.html")) == notebooks
    text = (site / "tutorials" / "1_first_training.html").read_text()
    assert '<th style="text-align: left">rows</th><td style="text-align: left">12,000</td>' in text
    assert "torch.Size([64, 1, 28, 28]) torch.uint8" in text
    assert '../guide/data.html"' in text


def test_a_benchmark_has_a_chart_of_its_results(site):
    text = (site / "benchmarks" / "training.html").read_text()
    rows = json.loads((ROOT / "benchmarks/results/step_overhead.json").read_text())["rows"]
    charts = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
    (chart,) = [each for each in charts if "µs of processor time for a step;" in each]
    assert re.findall(r'text-anchor="end">(.*?)<', chart) == [row["name"] for row in rows]
    widths = {name: float(width) for name, width in re.findall(r'end">(.*?)<.*?width="([\d.]+)"', chart, re.DOTALL)}
    expected = rows[0]["cpu_us"] / rows[-1]["cpu_us"]
    assert widths[rows[0]["name"]] / widths[rows[-1]["name"]] == pytest.approx(expected, abs=0.01)


def test_every_notebook_is_a_japanese_page_with_the_same_outputs(site):
    notebooks = sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
    assert sorted(path.stem for path in (site / "ja" / "tutorials").glob("*.html")) == notebooks
    text = (site / "ja" / "tutorials" / "1_first_training.html").read_text()
    assert "テーブルからの最初の学習" in text
    assert "torch.Size([64, 1, 28, 28]) torch.uint8" in text
    assert 'href="6_jobs.html"' in text
    assert '../../guide/data.html"' in text


def test_a_japanese_page_says_so_and_has_no_spaces_between_its_lines(site):
    japanese = (site / "ja" / "start" / "install.html").read_text()
    assert '<html lang="ja"' in japanese
    assert "リポジトリをクローンして、クローンから" in japanese
    assert '<html lang="en"' in (site / "start" / "install.html").read_text()


def test_a_page_of_two_languages_links_to_the_other(site, pages):
    japanese = [path.relative_to(site / "ja") for path in (site / "ja").rglob("*.html")]
    assert Path("tutorials/1_first_training.html") in japanese
    for path in japanese:
        for source, target in [(site / path, site / "ja" / path), (site / "ja" / path, site / path)]:
            assert target in [(source.parent / link).resolve() for link in pages[source].targets], source
            line = re.search(r"</h1>\s*<p>(.*?)</p>", source.read_text(), re.DOTALL)
            assert line
            assert re.sub("<.*?>", "", line[1]) == "English · 日本語"
    assert "日本語</a></p>" not in (site / "guide" / "data.html").read_text()


def test_links_within_the_site_lead_to_a_file_and_an_anchor(pages):
    dead = []
    for path, page in pages.items():
        for target in [*page.targets, *page.loaded]:
            if re.match(r"\w+:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = (path.parent / unquote(file)).resolve() if file else path
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.is_file() or (anchor and linked in pages and unquote(anchor) not in pages[linked].anchors):
                dead.append(f"{path.name}: {target}")
    assert dead == []


def test_links_to_the_repository_name_files_that_it_has(pages):
    blob = "https://github.com/footplate/footplate/blob/main/"
    named = {target.removeprefix(blob) for page in pages.values() for target in page.targets if target.startswith(blob)}
    assert named
    assert [path for path in named if not (ROOT / path.partition("#")[0]).exists()] == []


def test_a_page_loads_nothing_from_elsewhere(pages):
    assert {target for page in pages.values() for target in page.loaded if re.match(r"\w+:|//", target)} == set()


def test_the_search_index_has_every_page(site):
    script = (site / "search" / "search_index.js").read_text()
    index = json.loads(script.removeprefix("var __index = "))
    indexed = {document["location"].partition("#")[0] for document in index["docs"]}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= indexed


@pytest.mark.engine
def test_search_finds_a_page_that_is_opened_from_the_file_system(site, browser: Browser):
    page = browser.new_page()
    page.goto((site / "guide" / "data.html").as_uri())
    page.get_by_placeholder("Search").click()
    page.keyboard.type("gradient_clip_val")
    expect(page.locator(".md-search-result__link", has_text="arguments and hooks").first).to_be_visible(timeout=60_000)
    page.close()


@pytest.mark.engine
@pytest.mark.parametrize("query", ["乱数", "生成器", "続きから再開する"], ids=["word", "end of a word", "phrase"])
def test_search_finds_japanese(site, browser: Browser, query):
    page = browser.new_page()
    page.goto((site / "ja" / "start" / "install.html").as_uri())
    page.get_by_placeholder("Search").click()
    page.keyboard.type(query)
    page.keyboard.press("End")  # the search waits for a key, and Japanese is typed without one here
    expect(page.locator(".md-search-result__link", has_text="最初の実行").first).to_be_visible(timeout=60_000)
    page.close()


def test_search_shows_an_english_page_before_its_translation(site):
    script = (site / "search" / "search_index.js").read_text()
    documents = json.loads(script.removeprefix("var __index = "))["docs"]
    assert {each.get("boost", 1) for each in documents if each["location"].startswith("ja/")} == {0.5}


def test_headings_have_the_anchors_that_they_have_on_github(pages, site):
    assert "what-was-tried-in-it" in pages[site / "guide" / "lab.html"].anchors
    assert "other-projects-tests" in pages[site / "contributing.html"].anchors


def test_no_list_or_table_is_left_as_text(site):
    """GitHub accepts a list or a table without a blank line before it. The site's Markdown doesn't."""
    left = [
        f"{path.name}: {line}"
        for path in site.rglob("*.html")
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(), re.DOTALL)
        for line in paragraph.splitlines()
        if re.match(r"(-|\d+\.|\|) ", line)
    ]
    assert left == []


def test_every_public_name_is_on_one_page_of_the_reference():
    listed = [name for page in API.values() for name in page.names]
    assert len(listed) == len(set(listed))
    assert [name for name in public_names.public_names() if name not in listed] == []


def test_every_name_on_a_page_of_the_reference_has_a_heading_and_a_text(site):
    """A name without a docstring is a heading with nothing below it."""
    empty = []
    for page, about in API.items():
        text = (site / "reference" / "api" / f"{page}.html").read_text()
        for name in about.names:
            below = text.partition(f'id="{name}"')[2].partition("</h2>")[2].partition("<h2 ")[0]
            if "<p>" not in below:
                empty.append(name)
    assert empty == []


def test_every_error_that_a_user_can_fix_is_on_the_page_of_errors():
    """Each class of the package that inherits from a FootplateError, found by its name in the code."""
    bases = {"FootplateError"}
    classes: dict[str, str] = {}
    while True:
        pattern = re.compile(rf"^class ([A-Za-z]\w*)\((?:\w+, )*(?:{'|'.join(bases)})\b", re.MULTILINE)
        derived = {
            name: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            for path in (ROOT / "footplate").rglob("*.py")
            for name in pattern.findall(path.read_text())
        }
        if derived == classes:
            break
        classes = derived
        bases |= set(derived)
    shown = {name.rpartition(".")[2] for name in API["errors"].names}
    assert "MismatchError" in classes
    assert shown == {"FootplateError", *classes}


def test_footplate_exports_its_errors():
    errors = {
        name for name, value in vars(errors_module).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors <= set(fp.__all__)


def test_the_reference_shows_docstrings(site):
    text = (site / "reference" / "api" / "data.html").read_text()
    assert 'id="footplate.Table"' in text
    assert "there is no table, or the version" in text


def test_every_command_and_its_options_are_on_one_page(site):
    assert sorted(command for _, commands in HELP.values() for command in commands) == sorted(COMMANDS)
    jobs = (site / "reference" / "help" / "jobs.html").read_text()
    assert "usage: footplate jobs submit training" in jobs
    assert "--stream-logs" in jobs


def test_the_page_of_environment_variables_lists_what_the_code_names():
    # The pieces of names, such as FOOTPLATE_JOB_, are no names.
    code = "\n".join(path.read_text() for path in (ROOT / "footplate").rglob("*.py"))
    listed = re.findall(r"^\| `(FOOTPLATE_\w+)` \|", (ROOT / "docs/reference/environment.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"\bFOOTPLATE_[A-Z_]*[A-Z]\b", code))
    assert sorted(listed) == sorted(named)
