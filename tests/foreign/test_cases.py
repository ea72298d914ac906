"""The lists of foreign cases: well-formed, with references that match the pages, and compared with outcomes correctly."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign import cases
from foreign.cases import Entry
from foreign.references import problem
from foreign.suites import SUITES

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("suite", SUITES)
def test_a_list_is_as_update_would_write_it(suite, tmp_path):
    path = cases.FOLDER / f"{suite}.txt"
    cases.write(tmp_path / "list", cases.read(path), cases.heading(path))
    assert (tmp_path / "list").read_text() == path.read_text()


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_that_does_not_pass_has_a_reason_that_resolves(suite):
    entries = cases.read(cases.FOLDER / f"{suite}.txt")
    assert not [case for case, entry in entries.items() if entry.kind != "passes" and not entry.reason]
    purposes = {entry.reason for entry in entries.values() if entry.kind == "on purpose"}
    assert [found for purpose in sorted(purposes) if (found := problem(purpose, REPOSITORY))] == []


def test_a_reference_to_nothing_is_noticed():
    assert "no heading" in (problem("docs/reference/lightning.md#no-such-section", REPOSITORY) or "")
    assert "these words" in (problem("docs/reference/lightning.md#callbacks: no such words", REPOSITORY) or "")
    assert "expected" in (problem("because", REPOSITORY) or "")


def test_a_listed_case_that_fails_or_is_missing_is_named():
    entries = {
        "a.py::test_x[*]": Entry("passes", count=2),
        "a.py::test_y": Entry("passes"),
        "a.py::test_z": Entry("differs", "why"),
    }
    outcomes = {"a.py::test_x[1]": "passed", "a.py::test_x[2]": "failed", "a.py::test_z": "passed"}
    compared = cases.compare(entries, outcomes)
    assert compared.broken == {"a.py::test_x[2]": "failed", "a.py::test_y": "did not run"}
    assert compared.mended == ["a.py::test_z"]
    assert compared.counts == {"passes": 2, "broken": 2}


def test_a_case_that_a_folded_entry_counts_and_that_is_missing_is_named():
    compared = cases.compare({"a.py::test_x[*]": Entry("passes", count=3)}, {"a.py::test_x[1]": "passed"})
    assert compared.broken == {"a.py::test_x[*]": "did not run"}
    assert compared.counts == {"passes": 1, "broken": 2}


def test_a_case_that_passes_without_footplate_has_not_passed():
    compared = cases.compare({"a.py::test_x": Entry("passes")}, {"a.py::test_x": "unused", "a.py::test_y": "unused"})
    assert compared.broken == {"a.py::test_x": "unused"}
    assert compared.unlisted == []


def test_an_update_changes_what_changed_and_keeps_the_rest(tmp_path):
    entries = {
        "a.py::test_x[*]": Entry("differs", "why", 3),
        "a.py::test_y": Entry("internals", "a mock"),
        "a.py::test_z": Entry("on purpose", "docs/reference/lightning.md#callbacks"),
        "a.py::test_broken": Entry("passes"),
    }
    outcomes = {
        "a.py::test_x[1]": "passed",
        "a.py::test_x[2]": "failed",
        "a.py::test_y": "failed",
        "a.py::test_z": "skipped",
        "a.py::test_broken": "failed",
        "a.py::test_new": "passed",
        "a.py::test_other": "unused",
    }
    cases.write(tmp_path / "list", cases.updated(entries, outcomes), "A list.")
    assert cases.heading(tmp_path / "list") == "A list."
    assert cases.read(tmp_path / "list") == {
        "a.py::test_x[1]": Entry("passes"),
        "a.py::test_x[2]": Entry("differs", "why"),
        "a.py::test_x[*]": Entry("differs", "why"),
        "a.py::test_y": Entry("internals", "a mock"),
        "a.py::test_z": Entry("on purpose", "docs/reference/lightning.md#callbacks"),
        "a.py::test_broken": Entry("differs", "passed before; find the cause"),
        "a.py::test_new": Entry("passes"),
    }


def test_a_line_that_can_not_be_read_is_refused(tmp_path):
    (tmp_path / "list").write_text("[a.py]\nsometimes test_x\n")
    with pytest.raises(cases.MalformedList, match="list:2"):
        cases.read(tmp_path / "list")
