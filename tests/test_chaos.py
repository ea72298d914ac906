"""A training that is killed ten times, and what the chaos benchmarks do and conclude."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import lab_chaos  # noqa: E402
from chaos_plan import KINDS, Blow, Fall, Line, aftermath, judge, overlaps, plan  # noqa: E402
from lab_chaos_faults import Training  # noqa: E402
from lab_chaos_launchers import LAUNCHERS, Launcher, Ray, Spark  # noqa: E402


def measured(name: str, file: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark. Return the JSON that it writes."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--json", str(file), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert file.exists(), ended.stderr
    document = json.loads(file.read_text())
    assert list(document) == ["benchmark", "ratios", "figures", "rows", "machine", "versions"]
    assert document["benchmark"] == name
    return document


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_training_killed_in_ten_ways_is_bit_for_bit_the_one_that_was_left_alone(tmp_path):
    document = measured("chaos", tmp_path / "chaos.json", "--quick", "--seed", "4")
    figures = document["figures"]
    assert figures["findings"] == []
    wrong = ("diverged", "corrupt", "orphans", "stuck", "unexpected", "overlapping", "litter")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert figures["kills"] == 10
    assert {row["name"]: row["kills"] for row in document["rows"]} == dict.fromkeys(KINDS, 1)


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_rank_is_back_with_and_without_the_process_that_forks_it(tmp_path):
    figures = measured("recovery", tmp_path / "recovery.json", "--quick")
    assert figures["figures"]["recovered"] == figures["figures"]["kills"] == 2
    seconds = {row["name"]: row["seconds"] for row in figures["rows"]}
    assert 0 < seconds["footplate warm, 2 ranks"] < seconds["footplate cold, 2 ranks"]


@given(kills=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_a_plan_is_a_function_of_its_seed_and_has_every_kind_as_often(kills, seed):
    blows = plan(kills, seed)
    assert blows == plan(kills, seed)
    assert len(blows) == kills
    counts = Counter(blow.kind for blow in blows)
    assert set(counts) <= set(KINDS)
    assert all(kills // len(KINDS) <= counts[kind] <= kills // len(KINDS) + 1 for kind in KINDS)


def batches(pid: int, at: float, *numbers: int, rank: int = 0) -> list[Line]:
    """A process's start, and a batch each second. The value is the number."""
    start = Line(pid, at, rank, "start", 0, "")
    return [start, *(Line(pid, at + 1 + i, rank, "batch", n, f"{n}") for i, n in enumerate(numbers))]


UNTOUCHED = batches(1, 0.0, 1, 2, 3, 4)


def test_a_struck_run_that_repeats_batches_with_the_same_values_is_the_same():
    assert judge(batches(7, 0.0, 1, 2, 3) + batches(8, 10.0, 2, 3, 4), UNTOUCHED) == []


def test_a_value_that_differs_and_one_that_is_missing_are_told():
    struck = batches(7, 0.0, 1, 2)
    struck[-1] = Line(7, 2.0, 0, "batch", 2, "other")
    assert judge(struck, UNTOUCHED) == [
        "at 2.000 rank 0, batch 2: other, not 2",
        "rank 0, batch 3 is missing",
        "rank 0, batch 4 is missing",
    ]


def test_a_batch_that_the_untouched_run_did_not_have_is_told():
    assert judge(batches(7, 0.0, 1, 2, 3, 4, 5), UNTOUCHED) == ["at 5.000 rank 0, batch 5: 5, not None"]


def test_lost_batches_and_seconds_count_from_the_last_blow_before_the_run_went_on():
    blow = Blow("kill rank", hasty=False, pause_s=0.0, rank=0, where=0.0, jump_s=0.0)
    lines = batches(7, 0.0, 1, 2, 3) + batches(8, 10.0, 2, 3)
    assert aftermath(lines, [Fall(blow, 3.5)]) == [{"kind": "kill rank", "lost_batches": 2, "seconds": 7.5}]
    assert aftermath(UNTOUCHED, [Fall(blow, 0.5)]) == []


def test_a_process_that_trains_after_its_successor_has_begun_overlaps():
    one, two = batches(7, 0.0, 1, 2, 3), batches(8, 10.0, 2, 3)
    assert overlaps(one + two) == 0
    assert overlaps([*one, two[0], Line(7, 10.5, 0, "batch", 4, ""), *two[1:]]) == 1
    assert overlaps([*one, *batches(8, 0.0, 1, rank=1)]) == 0  # another rank is no successor


def test_faults_are_added_to_those_of_runs_before():
    rows = [
        {"name": "kill rank", "faults": 2, "recovery_s": 1.5, "recovery_s_each": [1.0, 2.0]},
        {"name": "cut off", "faults": 0},
    ]
    figures = {"diverged": 0, "corrupt": 1, "hung": 0, "orphans": 0, "findings": [{"what": "corrupt"}]}
    findings = lab_chaos.earlier({"figures": figures, "rows": rows})
    findings.note("hung", fault="cut off")
    assert (findings.struck["kill rank"], findings.recovery_s) == (2, {"kill rank": [1.0, 2.0]})
    assert {name: findings.counts[name] for name in lab_chaos.COUNTED} == {
        "diverged": 0, "corrupt": 1, "hung": 1, "orphans": 0,
    }  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_each_kind_of_fault_in_the_lab_can_strike(launcher: type[Launcher]):
    kinds = lab_chaos.kinds_of(launcher)
    assert len(kinds) == len(set(kinds.values())) >= 10
    strikes = {kind: hasattr(Training, f"_{kind.replace(' ', '_')}") for kind in kinds if kind not in launcher.kills}
    assert strikes == dict.fromkeys(strikes, True)


def test_what_an_engine_keeps_running_is_no_orphan_and_a_rank_is():
    fork_server = "/venv/bin/python -c from footplate.launch.fork_server import main; main(**config)"
    java = "/usr/bin/java -cp /spark org.apache.spark"
    raylet, serving, idle = "/ray/core/src/ray/raylet/raylet", "ray::FootplateAgent.run", "ray::FootplateAgent"
    worker, executor = f"{java}.deploy.worker.Worker", f"{java}.executor.CoarseGrainedExecutorBackend"
    kept = [
        (line, [bool(pattern.search(line)) for pattern in (launcher.services, launcher.idle_hosts)])
        for launcher, lines in ((Ray, (raylet, serving, idle, fork_server)), (Spark, (worker, executor, fork_server)))
        for line in lines
    ]
    assert kept == [
        (raylet, [True, False]), (serving, [False, False]), (idle, [False, True]), (fork_server, [False, False]),
        (worker, [True, False]), (executor, [False, True]), (fork_server, [False, False]),
    ]  # fmt: skip
