"""The path of a report, as `fp.report` returns it: a path for programs, and a link with figures in a notebook."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import footplate as fp
from reporting.runs import full_run, write_metrics


def rows(shown: str) -> list[list[str]]:
    """The cells of the table, row by row. The first row has the names of the runs."""
    return [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*</tr>", shown)]


def test_a_notebook_shows_a_link_the_state_and_the_last_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    full_run(tmp_path / "runs" / "flowers")
    shown = fp.report("runs/flowers")._repr_html_()
    assert '<a href="runs/flowers/report.html" target="_blank">runs/flowers/report.html</a>' in shown
    header, *cells = rows(shown)
    assert header == ["", "flowers"]
    facts = dict(cells)
    assert facts["status"] == "finished"
    assert facts["steps"]
    assert facts["val_loss"]


def test_several_runs_are_columns(tmp_path: Path):
    for name in ("first", "second"):
        write_metrics(tmp_path / name)
    header, *cells = rows(
        fp.report(tmp_path / "first", tmp_path / "second", output=tmp_path / "both.html")._repr_html_()
    )
    assert header == ["", "first", "second"]
    assert all(len(row) == 3 for row in cells)


def test_names_of_files_and_runs_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "<i>")
    shown = fp.report("<i>", output="javascript:a.html")._repr_html_()
    assert 'href="javascript%3Aa.html"' in shown
    assert "<i>" not in shown


def test_for_a_program_it_is_a_path(tmp_path: Path):
    write_metrics(tmp_path / "run")
    path = fp.report(tmp_path / "run")
    assert isinstance(path, Path)
    assert path == tmp_path / "run" / "report.html"
    assert pickle.loads(pickle.dumps(path)) == path
    assert "status" not in path.parent._repr_html_()
