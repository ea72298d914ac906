"""`footplate goodput`, and the same part of `footplate jobs describe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs.conftest import bench  # noqa: F401  a fixture

from cli.test_jobs_watch import submit  # noqa: F401  a fixture

SECONDS = {"input": 0.25, "step": 0.75}


def windows(first: int, *steps: int, time: float) -> list[dict[str, Any]]:
    rows = [{"kind": "start", "time": time, "step": first, "world_size": 1, "setup_s": 1.0}]
    for number, step in enumerate(steps, start=1):
        rows.append(
            {"kind": "window", "time": time + number, "step": step, "batches": 10, "wall_s": 1.0, "seconds": SECONDS}
        )
    return rows


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was killed after step 30 or so, and continued from step 10."""
    rows = [*windows(0, 10, 20, 30, time=100.0), *windows(10, 20, 30, 40, time=110.0)]
    rows.append({"kind": "end", "time": 113.0, "step": 40, "status": "finished"})
    (tmp_path / "monitor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_time_of_a_run_is_shown_by_cause(footplate, run_dir: Path):
    shown = footplate("goodput", str(run_dir), "--machine", "n1-standard-8").out
    lines = [line.split() for line in shown.splitlines()]
    assert shown.startswith("goodput: 21.4% of 14.0 s trained steps that count\n")
    assert lines[4][:7] == ["lost,", "trained", "again", "2.5", "s", "17.9%", "$0.00026"]
    assert "25 steps were lost with an attempt, and are trained again, for $0.00026." in shown
    assert "Price: $0.38 an hour (1 n1-standard-8, by the list price in us-central1)." in shown
    assert "  1              4.5 s    16.7%  0 to 35, 25 lost\n" in shown

    document = json.loads(footplate("goodput", str(run_dir), "--json", "--usd-per-hour", "36").out)
    assert {cause["cause"]: cause["seconds"] for cause in document["causes"]} == {
        "training": 3.0, "input": 1.0, "lost": 2.5, "startup": 2.0, "down": 5.5
    }  # fmt: skip
    assert (document["wallSeconds"], document["usd"], document["usdLost"], document["lostSteps"]) == (
        14.0,
        0.14,
        0.025,
        25,
    )
    assert footplate("goodput", str(run_dir), "--last", "2s").out == "goodput of the last 2s: 75.0%\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-run"], "monitor.jsonl doesn't exist. A Trainer writes it into its default_root_dir"),
        (["RUN", "--machine", "n1-standrd-8"], 'Did you mean "n1-standard-8"'),
        (["RUN", "--machine", "n1-standard-8", "--usd-per-hour", "1"], "give one of them"),
        (["RUN", "--usd-per-hour", "nan"], "--usd-per-hour nan: expected a price, 0 or more."),
        (["RUN", "--machine", "a3-highgpu-8g"], "the catalog has no price for it. Use --usd-per-hour."),
        (["RUN", "--last", "long"], "--last long: expected a time such as"),
    ],
)
def test_mistakes(footplate, run_dir: Path, argv: list[str], message: str):
    result = footplate("goodput", *(str(run_dir) if word == "RUN" else word for word in argv))
    assert result.code == 2
    assert message in result.err


def test_a_job_is_described_with_its_time_by_cause(submit, footplate, bench):  # noqa: F811
    bench.program("print('done')")
    submit("my_job")
    assert footplate("jobs", "wait", "my_job").code == 0
    goodput = yaml.safe_load(footplate("jobs", "describe", "my_job").out)["goodput"]
    causes = {cause["cause"]: cause["seconds"] for cause in goodput["causes"]}
    assert sum(causes.values()) == pytest.approx(goodput["wallSeconds"], abs=1e-4)
    assert (goodput["split"], goodput["runs"]) == (False, False)
    shown = footplate("jobs", "describe", "my_job", "--format", "table").out
    assert "\n\ngoodput: unknown, since the time of the processes isn't split (" in shown
    assert "There is no monitor.jsonl of this job in " in shown
