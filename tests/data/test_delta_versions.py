"""A time opens exactly the version that was current then, or raises an error."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from footplate.core.errors import DataError
from footplate.data import Table

START = datetime(2024, 5, 1, 12, tzinfo=UTC)


def log_file(path: str, version: int) -> Path:
    return Path(path) / "_delta_log" / f"{version:020}.json"


@pytest.fixture
def hourly(tmp_path: Path) -> str:
    """Versions 0 to 2, of one to three rows, an hour apart."""
    path = str(tmp_path / "t")
    for version in range(3):
        write_deltalake(path, pa.table({"id": [version]}), mode="append")
    for version in range(3):
        when = (START + timedelta(hours=version)).timestamp()
        os.utime(log_file(path, version), (when, when))
    return path


@pytest.mark.parametrize(
    ("minutes", "version"), [(0, 0), (59, 0), (60, 1), (119, 1), (120, 2), (100_000, 2)], ids=lambda value: str(value)
)
def test_a_moment_means_the_newest_version_that_was_there(hourly: str, minutes: int, version: int) -> None:
    moment = START + timedelta(minutes=minutes)
    assert Table(hourly, version=moment).version == version
    elsewhere = moment.astimezone(timezone(timedelta(hours=-7)))
    assert Table(hourly, version=elsewhere).version == version
    assert Table(hourly, version=elsewhere.isoformat()).version == version


def test_a_moment_before_the_first_version_is_refused_with_the_time_of_the_first(hourly: str) -> None:
    for version in (START - timedelta(seconds=1), "2001-01-01", date(2024, 5, 1)):
        with pytest.raises(DataError, match=r"version 0, was written at 2024-05-01T12:00:00\+00:00"):
            Table(hourly, version=version)


def test_a_moment_to_come_is_refused(hourly: str) -> None:
    with pytest.raises(DataError, match="is in the future"):
        Table(hourly, version=datetime.now(UTC) + timedelta(minutes=1))


def test_without_a_zone_a_moment_is_local(hourly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert Table(hourly, version="2024-05-01T22:00:00").version == 1
        assert Table(hourly, version=datetime(2024, 5, 1, 21, 59)).version == 0
        assert Table(hourly, version=date(2024, 5, 2)).version == 2
    finally:
        monkeypatch.undo()
        time.tzset()


def test_versions_whose_log_was_cleaned_up_are_not_opened_by_time(hourly: str) -> None:
    DeltaTable(hourly).create_checkpoint()
    for version in (0, 1):
        log_file(hourly, version).unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"version 2, was written at 2024-05-01T14:00:00"):
        Table(hourly, version=START + timedelta(minutes=90))
    with pytest.raises(DataError, match="version 1 can't be opened"):
        Table(hourly, version=1)
    assert Table(hourly, version="2024-05-02").num_rows == 3


def test_commits_copied_out_of_order_still_follow_one_another(hourly: str) -> None:
    early = (START - timedelta(hours=1)).timestamp()
    os.utime(log_file(hourly, 1), (early, early))
    assert Table(hourly, version=START + timedelta(minutes=1)).version == 1
    with pytest.raises(DataError, match="no version yet"):
        Table(hourly, version=START - timedelta(minutes=30))


def test_the_time_within_a_commit_counts_where_the_table_keeps_it(hourly: str) -> None:
    for version in range(3):
        actions = [json.loads(line) for line in log_file(hourly, version).read_text().splitlines()]
        info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
        info["inCommitTimestamp"] = int((START - timedelta(days=30 - version)).timestamp() * 1000)
        for action in actions:
            if "metaData" in action:
                action["metaData"]["configuration"]["delta.enableInCommitTimestamps"] = "true"
        actions.sort(key=lambda action: "commitInfo" not in action)
        log_file(hourly, version).write_text("\n".join(json.dumps(action) for action in actions))
    assert Table(hourly, version="2024-04-02T13:00:00Z").version == 1
    with pytest.raises(DataError, match="no version yet"):
        Table(hourly, version="2024-04-01T11:00:00Z")


@pytest.mark.parametrize("version", [-1, "-1", 3, "3", 10**30, "2024", np.int64(3)])
def test_a_number_that_is_no_version_says_which_there_are(hourly: str, version: Any) -> None:
    with pytest.raises(DataError, match="there are 0 to 2"):
        Table(hourly, version=version)


@pytest.mark.parametrize("version", [True, 1.0, "1.0", " 1 ", "²", "latest", "", "2024-13-01", b"1", [1]])
def test_what_is_neither_a_number_nor_a_moment_says_what_is(hourly: str, version: Any) -> None:
    with pytest.raises(DataError, match="neither a number from 0 to 2 nor a time"):
        Table(hourly, version=version)


def test_numbers_of_any_kind_mean_themselves(hourly: str) -> None:
    numbers: list[Any] = [1, "1", np.int64(1)]
    assert [Table(hourly, version=version).version for version in numbers] == [1, 1, 1]
