"""Each benchmark runs (`--quick`) and writes the JSON that all benchmarks share."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import template

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402
import data_common  # noqa: E402
import foreign_tests  # noqa: E402
import tune_records  # noqa: E402
from tune_records import Record  # noqa: E402

RATIOS = {
    "augmentation": {"decoded_row_by_row_vs_left", "cached_row_by_row_vs_left"},
    "ddp_overhead": {
        "footplate_vs_raw_ddp",
        "footplate_full_vs_raw_ddp",
        "lightning_vs_raw_ddp",
        "lightning_full_vs_raw_ddp",
        "lightning_vs_footplate",
        "wall_footplate_vs_raw_ddp",
        "wall_lightning_vs_raw_ddp",
    },
    "compile_step": {"vs_raw_compiled", "mlp_vs_raw_compiled"},
    "group_by_length": {"grouped_vs_shuffled_training", "grouped_vs_shuffled_loading"},
    "logical_ranks": {"step", "wall_step", "step_mlp", "wall_step_mlp"},
    "checkpoint_stall": {"stall_vs_memcpy", "stall_vs_lightning", "step_while_writing"},
    "fsdp_memory": {"peak_vs_plain_fsdp2", "construction_peak_vs_shard", "step_vs_plain_fsdp2"},
    "horovod_overhead": {
        "wall_tiny_mlp",
        "cpu_tiny_mlp",
        "wall_wide_mlp",
        "cpu_wide_mlp",
        "wall_small_cnn",
        "cpu_small_cnn",
    },
    "startup": {
        "first_step_vs_raw",
        "import_vs_torch",
        "import_alone_vs_torch",
        "lightning_first_step_vs_raw",
        "lightning_import_vs_torch",
    },
    "profiler_overhead": {"after_vs_before", "control_vs_before", "recorded_vs_before"},
    "plan_accuracy": {"memory_measured_vs_predicted_MLP", "least_vs_fastest_step_MLP"},
    "replicas": {
        f"{model}_{pair}"
        for model in ("tiny", "wide", "convolutional")
        for pair in ("replicas_vs_ddp", "replicas_vs_one", "ddp_vs_one")
    },
    "xla_exchange": {"exchange_vs_limit"},
    "monitor_overhead": {
        "noise",
        "monitor",
        "monitor_and_file",
        "dead_tracker",
        "wall_dead_tracker",
        "trackers",
        "lightning_observed",
        "cnn_noise",
        "cnn_monitor",
        "cnn_monitor_and_file",
    },
    "step_overhead": {
        "footplate_vs_raw",
        "footplate_bare_vs_raw",
        "lightning_vs_footplate",
        "lightning_vs_raw",
        "lightning_bare_vs_raw",
        "fabric_vs_raw",
        "accelerate_vs_raw",
    },
}


def unnamed_ratios(result: dict[str, Any]) -> list[str]:
    """Ratios that don't name two different entrants and what is measured."""
    names = ("of", "against", "measure")
    figures = {ratio: result["figures"].get(ratio, {}) for ratio in result.get("ratios", {})}
    return [
        ratio
        for ratio, figure in figures.items()
        if not all(figure.get(name) for name in names) or figure["of"] == figure["against"]
    ]


def quick_run(benchmark: str, file: Path, *more: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark quickly. Return the JSON that it wrote and the text that it printed."""
    ended = template.run(BENCHMARKS / f"{benchmark}.py", "--quick", "--json", file, *more)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(file.read_text())
    assert unnamed_ratios(result) == []
    return result, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RATIOS))
def test_quick_run_prints_a_table_and_writes_json_in_the_common_form(name: str, tmp_path: Path):
    file = tmp_path / "deep" / f"{name}.json"
    found, printed = quick_run(name, file)

    assert list(found) == ["benchmark", "ratios", "figures", "rows", "machine", "versions"]
    assert found["benchmark"] == name
    assert set(found["ratios"]) == RATIOS[name]
    for ratio, value in found["ratios"].items():
        spread = found["figures"][ratio]
        assert spread["rounds"] == common.QUICK_ROUNDS
        assert 0 < spread["q1"] <= value == spread["median"] <= spread["q3"]
        assert f"{ratio} " in printed
        assert spread["of"] != spread["against"]
        assert " is " in spread["measure"]
    for row in found["rows"]:
        assert row["name"] in printed
        assert len(row["rounds"]) == common.QUICK_ROUNDS
    assert {"cpu", "cores", "memory_gb", "load_before", "load_after"} <= set(found["machine"])
    assert {"torch", "footplate"} <= set(found["versions"])
    text = file.read_text()
    assert not any(private in text for private in (platform.node(), str(Path.home()), str(BENCHMARKS.parent)))


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda file: file.stem)
def test_every_ratio_that_was_measured_names_its_peer_and_its_measure(file: Path):
    assert unnamed_ratios(json.loads(file.read_text())) == []


@pytest.mark.slow
def test_the_benchmark_of_launches_may_be_run_in_parts(tmp_path: Path):
    quick_run("launch", tmp_path / "launch.json", "--only", "payload")
    found, _ = quick_run("launch", tmp_path / "launch.json", "--only", "local")
    assert set(found["ratios"]) == {
        "local_cold_vs_torchrun_2", "local_warm_vs_torchrun_2", "local_run_vs_torchrun_2",
        "local_warm_vs_elastic_launch_2",
    }  # fmt: skip
    assert found["ratios"]["local_warm_vs_torchrun_2"] < 1
    assert found["rows"][0]["name"] == "0.1 GiB there and back"
    assert all(len(row["rounds"]) == common.QUICK_ROUNDS for row in found["rows"])


@pytest.mark.slow
def test_the_benchmark_of_replays_finds_no_difference(tmp_path: Path):
    found, printed = quick_run("replay", tmp_path / "replay.json")
    figures = found["figures"]
    assert (figures["replays"], figures["replay_differs"], figures["rows_wrong"]) == (4, 0, 0)
    assert (figures["flips"], figures["flips_located"]) == (2, 2)
    assert figures["rows_named"] > 100
    assert "run 1" in printed


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_can_be_rehearsed_on_the_cpu(tmp_path: Path):
    compiled = [f"{who} {how}" for how in ("compiled", "cudagraphs") for who in ("raw", "footplate", "lightning")]
    more = ("mlp", "--accelerator", "cpu", "--without", *compiled[:5], "raw step", "footplate step", "footplate xla")
    found, printed = quick_run("gpu_train", tmp_path / "gpu_train.json", *more)
    peers = ("raw_eager", "lightning", "accelerate")
    assert {name for name in found["ratios"] if ":" not in name} == {f"footplate_vs_{peer}" for peer in peers}
    assert "failed" not in printed


@pytest.mark.slow
def test_the_benchmark_of_jobs_loses_none(tmp_path: Path):
    found, _ = quick_run("jobs", tmp_path / "jobs.json")
    assert set(found["ratios"]) == {"submit_over_bare"}
    assert [row["name"] for row in found["rows"]] == ["bare", "command", "from Python"]
    figures = found["figures"]
    assert (figures["jobs"], figures["lost"], figures["duplicated"]) == (10, 0, 0)
    assert figures["list_ms_at_500"] > 0


@pytest.mark.slow
@pytest.mark.engine
def test_the_benchmark_of_slurm_has_parts(tmp_path: Path):
    found, _ = quick_run("slurm", tmp_path / "slurm.json", "--only", "start")
    assert set(found["ratios"]) == {"submit_over_sbatch"}
    assert [row["name"] for row in found["rows"]] == ["sbatch, until the first line", "footplate, until the first line"]
    assert all(0 < row["seconds"] < 60 for row in found["rows"])


@pytest.mark.slow
def test_the_benchmark_of_goodput_compares_a_killed_job_with_its_ledger(tmp_path: Path):
    found, printed = quick_run("goodput", tmp_path / "goodput.json")
    (row,) = found["rows"]
    assert row["name"] in printed
    assert (row["events"], row["steps_again"] > 0) == (1, True)
    assert 0 <= found["figures"]["ledger_error"] < 0.1
    assert 0 <= found["figures"]["lost_error"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrants", "ratios"),
    [
        pytest.param(
            ["footplate", "optuna"],
            {"device_seconds_vs_best_peer", "device_seconds_vs_optuna", "wall_vs_optuna"},
            id="optuna",
        ),
        pytest.param(["ray tune"], set(), id="ray-tune", marks=pytest.mark.engine),
    ],
)
def test_the_benchmark_of_tunings_trains_the_same_trials_with_each(entrants, ratios, tmp_path: Path):
    found, _ = quick_run("tune", tmp_path / "tune.json", "--only", *entrants)
    assert set(found["ratios"]) == ratios
    assert [row["name"] for row in found["rows"]] == entrants
    for row in found["rows"]:
        assert (row["trials"], row["epochs"], row["reached"]) == (3, 3, 0)
        assert 0 < row["trial_start_s"] <= row["trial_start_p90_s"] < row["device_s"] <= row["wall_s"]
    # An epoch of the same hyperparameters and rows leads to the same score, bit for bit.
    assert len({row["best"] for row in found["rows"]}) == 1


def test_a_tuning_counts_the_devices_that_its_trials_held_until_the_score():
    records = [
        Record(1, "given", 0.0), Record(2, "given", 1.0), Record(1, "score", 3.0, 0.2), Record(1, "released", 4.0),
        Record(3, "given", 5.0), Record(1, "given", 6.0), Record(1, "score", 8.0, 0.9), Record(3, "released", 9.0),
    ]  # fmt: skip
    found = tune_records.figures(records, started=-2.0, target=0.9)
    # Trial 1 held a device for 4 and 2 seconds, trial 2 never gave it back, and trial 3 held it until the score.
    assert found == {"device_s": 4 + 2 + 7 + 3, "wall_s": 10, "trials": 3, "epochs": 2, "best": 0.9, "reached": 1}
    missed = tune_records.figures(records, started=-2.0, target=1.0)
    assert (missed["device_s"], missed["wall_s"], missed["reached"]) == (4 + 3 + 8 + 4, 11, 0)


def test_the_start_of_a_trial_is_from_the_decision_to_its_first_line():
    records = [
        Record(1, "chosen", 0.0), Record(1, "began", 4.0), Record(2, "chosen", 5.0), Record(2, "began", 5.25),
        Record(3, "chosen", 6.0), Record(2, "began", 9.0),
    ]  # fmt: skip
    assert tune_records.starts(records, after=1) == [0.25]


@pytest.mark.slow
def test_the_benchmark_of_xlas_models_compares_one_with_eager_torch(tmp_path: Path):
    found, _ = quick_run("xla_parity", tmp_path / "xla_parity.json")
    assert found["figures"]["models"] == len(found["rows"]) == 1
    assert found["figures"]["failed"] == 0
    assert 0 < found["figures"]["max_rel_err"] <= 1e-6


@pytest.mark.slow
def test_the_benchmark_of_what_xla_can_train_captures_a_model(tmp_path: Path):
    found, _ = quick_run("xla_coverage", tmp_path / "xla_coverage.json")
    assert found["figures"]["torchvision"] == {"tried": 1, "captured": 1}


@pytest.mark.slow
def test_the_benchmark_of_xlas_speed_measures_a_tiny_network(tmp_path: Path):
    found, _ = quick_run("xla_speed", tmp_path / "xla_speed.json")
    kinds = ("step_vs_eager", "at_once_vs_one", "two_devices_vs_one", "two_devices_vs_eager")
    assert set(found["ratios"]) == {name for kind in kinds for name in (f"tiny MLP: {kind}", f"{kind}_median")}
    assert all(value > 0 for value in found["ratios"].values())
    assert 0 < found["figures"]["host_us_per_step_k50"] <= found["figures"]["device_us_per_step_k50"]
    assert found["figures"]["trainer_us_per_step_k50"] > 0
    for kind in kinds:
        assert found["ratios"][f"{kind}_median"] == found["ratios"][f"tiny MLP: {kind}"]
        assert found["figures"][f"{kind}_median"]["models"] == ["tiny MLP"]


def test_broken_cases_of_foreign_tests_count_as_behavioural_and_wording_does_not():
    row = {"name": "made", **foreign_tests.count(Counter({"passes": 6, "differs": 1, "broken": 1, "wording": 9}))}
    assert (row["passed"], row["behavioural"], row["wording"], row["on_purpose"]) == (6, 8, 9, 0)
    share = foreign_tests.share(row)
    assert share["median"] == 0.75
    assert {"of", "against", "measure"} <= set(share)


@pytest.mark.slow
def test_a_step_is_dearer_in_lightning_than_in_footplate(tmp_path: Path):
    script = tmp_path / "measure.py"
    script.write_text(
        f"import json, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import step_overhead\n"
        "loops = {name: step_overhead.VARIANTS[name] for name in ('raw loop', 'footplate bare', 'lightning bare')}\n"
        "print(json.dumps(step_overhead.measure(loops, 3, 500, 0.0, quick=True)))"
    )
    ended = template.run(script)
    assert ended.returncode == 0, ended.stderr
    rounds = json.loads(ended.stdout)
    raw, ours, theirs = (common.median(rounds[name], "cpu_us") for name in rounds)
    assert 10 < raw < 100_000  # microseconds
    assert raw * 0.5 < ours < theirs


def test_rounds_turn_the_order_of_the_entrants_round():
    order: list[str] = []

    def measure(name: str) -> common.Figures:
        order.append(name)
        return {"figure": float(len(order))}

    found = common.interleave(["a", "b"], measure, 3)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [run["figure"] for run in found["a"]] == [1.0, 4.0, 5.0]


def test_a_ratio_is_the_median_of_the_rounds_own_quotients():
    # In the third round the machine was ten times slower for both.
    found = {"ours": [{"s": 2.0}, {"s": 3.0}, {"s": 40.0}], "raw": [{"s": 1.0}, {"s": 2.0}, {"s": 10.0}]}

    assert common.ratio(found, "ours", "raw", "s", "seconds, less is better") == {
        "median": 2.0, "q1": 1.75, "q3": 3.0, "rounds": 3,
        "of": "ours", "against": "raw", "measure": "seconds, less is better",
    }  # fmt: skip


def test_ratios_of_pieces_are_over_the_rounds_that_both_had():
    def rounds(**speeds: dict[int, float]) -> common.Rounds:
        return {name: [{"round": n, "steady": v} for n, v in one.items()] for name, one in speeds.items()}

    first = rounds(ours={0: 2.0, 1: 4.0}, theirs={0: 1.0, 1: 1.0})
    assert data_common.next_round(first) == 2
    both = data_common.merged(first, rounds(ours={2: 3.0}, others={2: 9.0}))
    ratio = data_common.paired(both, "ours", "theirs", "steady")
    assert ratio is not None
    assert (ratio["median"], ratio["q1"], ratio["q3"], ratio["rounds"]) == (3.0, 2.5, 3.5, 2)
    assert data_common.paired(both, "ours", "others", "steady") is None  # one round is no spread
    assert data_common.paired(both, "ours", "nobody", "steady") is None


@pytest.mark.slow
def test_the_benchmark_of_packing_counts_tokens_and_padding(tmp_path: Path):
    found, printed = quick_run("packing", tmp_path / "packing.json", "--rows", "4000", "--only", "footplate", "limit")
    assert set(found["ratios"]) == {"vs_limit"}
    rows = {row["name"]: row for row in found["rows"]}
    passes = [row["rows"] / row["rounds"][0]["passes"] for row in rows.values()]
    assert list(rows) == ["packed: limit: read only", "packed: footplate", "streamed: footplate"]
    # Tokens without padding: the same for all.
    assert len(set(passes)) == 1
    assert 0 < rows["packed: footplate"]["padding"] < 0.02
    assert "padding share" in printed


@pytest.mark.slow
def test_a_data_benchmark_is_taken_in_pieces_that_add_up(tmp_path: Path):
    file = tmp_path / "tabular.json"
    kept = ["--data", str(tmp_path), "--rows", "100000"]
    quick_run("data_tabular", file, *kept, "--kind", "plain", "--only", "footplate", "limit")
    found, _ = quick_run("data_tabular", file, *kept, "--add", "--only", "footplate", "floor")
    rounds = {row["name"]: [run["round"] for run in row["rounds"]] for row in found["rows"]}
    assert rounds == {
        "plain: limit: read only": [0, 1],
        "plain: footplate": [0, 1, 2, 3],
        "plain: floor: read and permute": [2, 3],
        "snappy: floor: read and permute": [0, 1],
        "snappy: footplate": [0, 1],
    }
    assert set(found["ratios"]) == {"footplate_vs_limit", "footplate_vs_floor", "snappy_footplate_vs_floor"}
    assert all(found["figures"][name]["rounds"] == 2 for name in found["ratios"])
    assert platform.node() not in file.read_text()
