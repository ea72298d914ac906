"""Profiles of real trainings: their files, their numbers, and their steps."""

from __future__ import annotations

import csv
import gc
import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from torch.utils.data import DataLoader

import footplate as fp
from footplate.core.profile_requests import VARIABLE
from training.profiled_nets import (
    FILE,
    Net,
    Remember,
    Rows,
    assert_nothing_is_left,
    batches,
    events,
    line_of,
    ms,
    steps_in,
    tables,
)

pytestmark = pytest.mark.usefixtures("_warnings_are_seen")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the profile of a training with `profiler="torch"`."""
    run_dir = tmp_path_factory.mktemp("profiled")
    fp.Trainer(
        accelerator="cpu", default_root_dir=run_dir, enable_progress_bar=False, enable_model_summary=False, logger=False,
        seed=1, max_steps=25, profiler="torch", enable_checkpointing=False,
    ).fit(Net(), batches())  # fmt: skip
    return run_dir / "profile-10"


def test_a_profile_has_a_trace_tables_a_timeline_and_a_summary(profiled: Path):
    assert {path.name for path in profiled.iterdir()} == {
        "trace-rank0.json.gz", "operators-rank0.md", "lines-rank0.md", "memory-rank0.csv", "summary-rank0.txt",
    }  # fmt: skip
    summary = (profiled / "summary-rank0.txt").read_text().splitlines()
    assert summary[0].startswith("Profile of steps 10 to 19, rank 0 of 1, cpu: ")
    assert len(summary) <= 10
    sleeping = f"{FILE.name}:{line_of('sleep')}"
    assert sleeping in summary[3]
    assert "time.sleep(0.002)" in summary[3]


def test_the_trace_has_the_steps_by_number_and_their_phases(profiled: Path):
    assert steps_in(profiled / "trace-rank0.json.gz") == list(range(10, 20))
    names = [event["name"] for event in events(profiled / "trace-rank0.json.gz") if event.get("ph") == "X"]
    for name in ("next batch", "training step", "forward", "backward", "optimizer step", "after the step", "the loss"):
        assert names.count(name) == 10, name


def test_each_operator_is_counted(profiled: Path):
    operators, regions = tables(profiled / "operators-rank0.md")
    calls = {row["operator"]: int(row["calls"]) for row in operators}
    assert calls["aten::addmm"] == 10
    # `h @ weight`, its two gradients, and the gradient of the linear layer's weight.
    assert calls["aten::mm"] == 40
    assert {row["region"]: row["calls"] for row in regions}["the loss"] == "10"


def test_times_are_charged_to_lines_and_add_up(profiled: Path):
    # A third table has the threads that other tests of this process have left.
    lines, elsewhere = tables(profiled / "lines-rank0.md")[:2]
    file = FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE
    by_line = {row["line"]: row for row in lines}

    def row(marker: str) -> dict[str, str]:
        return by_line[f"{file}:{line_of(marker)}"]

    assert ms(row("sleep")["self ms"]) > 20
    assert row("sleep")["code"] == "`time.sleep(0.002)  # sleep`"
    for marker, operator in {
        "call": "addmm",
        "matmul": "mm",
        "product": "mul",
        "loss": "pow",
        "memory": "zeros",
    }.items():
        assert operator in row(marker)["operators"], marker
    for marker in ("call", "matmul", "product", "loss"):
        assert ms(row(marker)["backward ms"]) > 0, marker
    for marker in ("memory", "sleep", "row"):
        assert ms(row(marker)["backward ms"]) == 0, marker
    assert ms(row("memory")["MiB"]) >= 10

    text = (profiled / "lines-rank0.md").read_text()
    total = ms(re.search(r"share of their ([\d,.]+) ms", text)[1])  # pyright: ignore[reportOptionalSubscript]
    charged = sum(ms(row["self ms"]) + ms(row["backward ms"]) for row in lines) + sum(
        ms(row["ms"]) for row in elsewhere
    )
    assert charged == pytest.approx(total, rel=0.01)
    # The script that called `fit`, the trainer and torch are no lines of the user's that took time.
    assert {row["line"].rpartition(":")[0] for row in lines} == {str(file)}


def test_the_timeline_of_memory_adds_up_and_names_lines(profiled: Path):
    with (profiled / "memory-rank0.csv").open() as file:
        rows = list(csv.DictReader(file))
    for before, row in itertools.pairwise(rows):
        assert int(row["allocated_bytes"]) == int(before["allocated_bytes"]) + int(row["bytes"])
        assert float(row["time_ms"]) >= float(before["time_ms"])
    assert {int(row["step"]) for row in rows} == set(range(10, 20))
    big = [row for row in rows if int(row["bytes"]) == 2**20]
    assert len(big) == 10
    assert all(row["line"].endswith(f"{FILE.name}:{line_of('memory')}") for row in big)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}])
def test_the_numbers_are_those_without_a_profiler_bit_for_bit(make_trainer, tmp_path: Path, settings: dict[str, Any]):
    losses, weights = [], []
    for profiler in (None, fp.Profiler("3:9")):
        remember = Remember()
        model = Classifier()
        torch.manual_seed(7)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        make_trainer(callbacks=remember, profiler=profiler, default_root_dir=tmp_path / str(profiler), **settings).fit(
            model, loader()
        )
        losses.append(remember.losses)
        weights.append([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert len(losses[0]) == 24
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]
    assert (tmp_path / str(fp.Profiler("3:9")) / "profile-3").is_dir()


def test_after_a_profile_nothing_of_it_is_left(make_trainer):
    looked = []

    def look(trainer: Any) -> None:
        assert_nothing_is_left(trainer)
        looked.append(trainer.global_step)

    def look_inside(trainer: Any) -> None:
        assert _profiler_enabled()
        assert "forward" in vars(trainer.run.step)
        looked.append(trainer.global_step)

    callbacks = [Remember(3, look_inside), Remember(8, look)]
    training = make_trainer(max_steps=10, profiler=fp.Profiler((2, 6)), callbacks=callbacks)
    training.fit(Net(), batches())
    assert looked == [3, 8]
    assert_nothing_is_left(training)


def test_a_profile_from_the_first_step_has_all_of_its_steps(make_trainer, tmp_path: Path):
    make_trainer(max_steps=4, profiler=fp.Profiler("0:2")).fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-0/trace-rank0.json.gz") == [0, 1]


def test_windows_of_several_batches_are_recorded_whole(make_trainer, tmp_path: Path):
    make_trainer(max_steps=5, profiler=fp.Profiler("2:4"), accumulate_grad_batches=3).fit(Net(), batches())
    # A region for each batch, with the number of the optimizer step that it is for.
    assert steps_in(tmp_path / "run/profile-2/trace-rank0.json.gz") == [2, 2, 2, 3, 3, 3]


def test_a_validation_between_two_steps_is_a_phase(make_trainer, tmp_path: Path):
    make_trainer(max_steps=8, profiler=fp.Profiler("2:6"), val_check_interval=4, num_sanity_val_steps=0).fit(
        Classifier(), loader(), loader()
    )
    _, regions = tables(tmp_path / "run/profile-2/operators-rank0.md")
    assert {row["region"]: row["calls"] for row in regions}["validation"] == "12"


def test_without_stacks_there_are_no_lines_and_the_table_says_so(make_trainer, tmp_path: Path):
    profiler = fp.Profiler("2:4", with_stack=False, profile_memory=False)
    make_trainer(max_steps=5, profiler=profiler).fit(Net(), batches())
    folder = tmp_path / "run/profile-2"
    assert "`with_stack=False`: Python's calls were not recorded." in (folder / "lines-rank0.md").read_text()
    assert not (folder / "memory-rank0.csv").exists()
    assert "self MiB" not in (folder / "operators-rank0.md").read_text()


def test_the_work_between_two_epochs_is_no_part_of_a_step(make_trainer, tmp_path: Path):
    make_trainer(max_epochs=3, profiler=fp.Profiler("2:6")).fit(Net(), DataLoader(Rows(), batch_size=100))
    folder = tmp_path / "run/profile-2"
    assert steps_in(folder / "trace-rank0.json.gz") == [2, 3, 4, 5]
    _, regions = tables(folder / "operators-rank0.md")
    assert {row["region"]: row["calls"] for row in regions}["end of the epoch"] == "1"


def test_a_loader_without_a_length_ends_the_profile_where_it_ends(make_trainer, tmp_path: Path, caplog):
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.zeros(4, 64))

    make_trainer(max_epochs=1, profiler=fp.Profiler("2:9")).fit(Net(), DataLoader(Stream(), batch_size=1))
    assert "Profiler: the training ended before step 9, so the profile has 2 steps." in caplog.text
    assert "Times of all 2 steps together" in (tmp_path / "run/profile-2/operators-rank0.md").read_text()


class Watched(Rows):
    """Rows whose first number is 1 where Python's calls are recorded."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(sys.getprofile() is not None))


class Sums(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sums.append(float(batch.sum()))
        assert sys.getprofile() is not None or not _profiler_enabled()
        return super().training_step(batch, batch_idx)


def test_a_worker_that_is_forked_while_steps_are_recorded_records_nothing(make_trainer, tmp_path: Path):
    model = Sums()
    make_trainer(max_epochs=3, profiler=fp.Profiler("2:8")).fit(
        model, DataLoader(Watched(), batch_size=100, num_workers=1)
    )
    # The second epoch's worker is forked between steps 4 and 5.
    assert model.sums == [0.0] * 12
    assert steps_in(tmp_path / "run/profile-2/trace-rank0.json.gz") == [2, 3, 4, 5, 6, 7]


def test_modules_that_a_step_imports_are_no_trouble(make_trainer, tmp_path: Path, monkeypatch):
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for number in range(200):
        (tmp_path / "modules" / f"lazy_{number}_module.py").write_text(f"import math\nvalue = math.sqrt({number})\n")

    class Imports(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for number in range(20 * batch_idx, 20 * batch_idx + 20):
                importlib.import_module(f"lazy_{number}_module")
            gc.collect()
            [str(number) * 20 for number in range(2000)]
            return super().training_step(batch, batch_idx)

    make_trainer(max_steps=8, profiler=fp.Profiler("1:7")).fit(Imports(), batches())
    assert steps_in(tmp_path / "run/profile-1/trace-rank0.json.gz") == [1, 2, 3, 4, 5, 6]
    lines = tables(tmp_path / "run/profile-1/lines-rank0.md")[0]
    assert any(row["code"].startswith("`importlib.import_module(") for row in lines)


# The environment, and trainings inside trainings


def test_the_environment_profiles_each_training_and_no_search(make_trainer, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "1:3")
    training = make_trainer(max_steps=5, profiler=fp.Profiler("3:4"))
    model = Classifier()
    fp.Tuner(training).lr_find(model, loader(), num_training=5)
    assert "Profile of" not in capsys.readouterr().out
    training.fit(model, loader())
    for first, steps in {1: [1, 2], 3: [3]}.items():
        assert steps_in(tmp_path / f"run/profile-{first}/trace-rank0.json.gz") == steps
    assert "Profile of steps 1 to 2, rank 0 of 1, cpu" in capsys.readouterr().out


def test_a_resumed_training_does_not_record_what_is_over(make_trainer, tmp_path: Path, caplog):
    make_trainer(max_steps=8).fit(Classifier(), loader())
    training = make_trainer(max_steps=10, profiler=fp.Profiler("2:4"))
    training.fit(Classifier(), loader(), ckpt_path="last")
    assert training.global_step == 10
    assert "Profiler: the steps 2:4 were over when it could begin, at step 8." in caplog.text
    assert not list((tmp_path / "run").glob("profile-*"))


def test_all_ranks_record_the_same_steps(make_trainer, tmp_path: Path):
    make_trainer(max_steps=6, devices=2, profiler=fp.Profiler("2:4")).fit(Net(), batches())
    folder = tmp_path / "run/profile-2"
    for rank in (0, 1):
        assert steps_in(folder / f"trace-rank{rank}.json.gz") == [2, 3]
        assert f"rank {rank} of 2" in (folder / f"summary-rank{rank}.txt").read_text()
        operators, _ = tables(folder / f"operators-rank{rank}.md")
        assert any("allreduce" in row["operator"] for row in operators)
