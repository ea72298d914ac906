"""Profiles of real trainings: their files, their numbers, and that nothing is left of the profiler afterwards."""

from __future__ import annotations

import csv
import gc
import gzip
import importlib
import itertools
import json
import logging
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from torch.utils.data import DataLoader, Dataset

import footplate as fp
from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import VARIABLE, request_profile, status_of, wait_for_profile
from footplate.training.profiler.recording import Recording, Written
from footplate.training.profiler.regions import named_region
from footplate.training.profiler.source_operators import operator_line

SOURCE = Path(__file__).read_text().splitlines()


def line_of(marker: str) -> int:
    """The number of the line of this file that ends with a comment."""
    (number,) = (number for number, text in enumerate(SOURCE, 1) if text.endswith(f"  # {marker}"))
    return number


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / 400)  # row


class Net(fp.Module):
    """A network whose lines have known costs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.weight = torch.nn.Parameter(torch.eye(64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self.first(batch)  # call
        h = h @ self.weight  # matmul
        for _ in range(2):
            h = h * 1.5  # product
        with torch.no_grad():
            noise = torch.zeros(256, 1024)  # memory
        time.sleep(0.002)  # sleep
        with self.trainer.profiler.profile("the loss"):
            loss = (h**2).mean() + noise.sum()  # loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Remember(fp.Callback):
    """Remembers the losses as hexadecimal floats, and calls a function after a step."""

    def __init__(self, step: int = -1, call: Any = None) -> None:
        self.losses: list[str] = []
        self._step, self._call = step, call

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss).hex())
        if trainer.global_step == self._step:
            self._call(trainer)


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=8)


def tables(path: Path) -> list[list[dict[str, str]]]:
    """The tables of a Markdown file, row by row, by the head of the column."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line[2:-2].split(" | ")] for line in block.splitlines())
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def ms(text: str) -> float:
    return float(text.replace(",", ""))


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def steps_in(path: Path) -> list[int]:
    """The numbers of the recorded steps of a trace."""
    names = (event["name"] for event in events(path) if event.get("ph") == "X")
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


def assert_nothing_is_left(trainer: Any, bare: bool = True) -> None:
    """Neither torch nor the trainer has anything of a profiler."""
    assert not _profiler_enabled()
    assert sys.getprofile() is None
    assert sys.gettrace() is None
    step = trainer.run.step
    assert not {"train", "evaluate", "forward", "backpropagate", "end_window"} & set(vars(step))
    assert step.bare is bare
    assert trainer.run.profiles.due == math.inf
    assert type(named_region("nothing")).__name__ == "nullcontext"


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
    sleeping = f"test_profiler.py:{line_of('sleep')}"
    assert sleeping in summary[3]
    assert "time.sleep(0.002)" in summary[3]


def test_the_trace_has_the_steps_by_number_and_their_phases(profiled: Path):
    assert steps_in(profiled / "trace-rank0.json.gz") == list(range(10, 20))
    found = [event["name"] for event in events(profiled / "trace-rank0.json.gz") if event.get("ph") == "X"]
    for name in ("next batch", "training step", "forward", "backward", "optimizer step", "after the step", "the loss"):
        assert found.count(name) == 10, name


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
    file = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)
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
    assert all(row["line"].endswith(f"test_profiler.py:{line_of('memory')}") for row in big)


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


# Failures


def test_a_profile_that_cannot_be_written_is_given_up_with_a_warning(make_trainer, tmp_path: Path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile-2").write_text("a file, where the directory would be")
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    training.fit(Net(), batches())
    assert training.global_step == 8
    (warning,) = (record.message for record in caplog.records if "profile" in record.message.lower())
    assert warning.startswith("The profile was given up: FileExistsError")
    assert warning.endswith("The training goes on.")
    assert_nothing_is_left(training)


def test_a_disk_that_is_full_ends_the_profile_and_not_the_training(make_trainer, tmp_path: Path, caplog):
    # /dev/full takes no byte.
    folder = tmp_path / "run/profile-2"
    folder.mkdir(parents=True)
    (folder / f".trace-rank0.json.{os.getpid()}.gz").symlink_to("/dev/full")
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    training.fit(Net(), batches())
    assert training.global_step == 8
    assert "The profile was given up: OSError: [Errno 28] No space left on device" in caplog.text
    assert_nothing_is_left(training)
    assert not (folder / "trace-rank0.json.gz").exists()


class SlowWrites:
    """Files are written when the training allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_write = threading.Event(), threading.Event()
        write = Recording.write

        def slow(recording: Recording) -> Written:
            self.begun.set()
            assert self.may_write.wait(60), "the training waited for the files"
            return write(recording)

        monkeypatch.setattr(Recording, "write", slow)


def test_the_training_goes_on_while_the_files_are_written(make_trainer, tmp_path: Path, monkeypatch, capsys):
    writes = SlowWrites(monkeypatch)
    dues = []
    at_12 = Remember(12, lambda trainer: dues.append(trainer.run.profiles.due))
    at_20 = Remember(20, lambda trainer: writes.may_write.set())
    make_trainer(profiler=fp.Profiler("4:6"), max_steps=22, callbacks=[at_12, at_20]).fit(Net(), batches())
    assert writes.begun.is_set()
    # No step asks while the files are written.
    assert dues == [math.inf]
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert capsys.readouterr().out.count("Profile of steps 4 to 5, ") == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "footplate-profile"]


def test_fit_returns_when_the_files_are_written_also_after_an_error(make_trainer, tmp_path: Path, monkeypatch):
    writes = SlowWrites(monkeypatch)

    def fail(trainer: Any) -> None:
        threading.Timer(0.5, writes.may_write.set).start()
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        make_trainer(profiler=fp.Profiler("4:6"), max_steps=22, callbacks=Remember(9, fail)).fit(Net(), batches())
    assert writes.may_write.is_set()
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]


def test_a_second_range_begins_when_the_first_is_written(make_trainer, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "7:9")
    trainer = make_trainer(profiler=fp.Profiler("4:6"), max_steps=12)
    trainer.fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert steps_in(tmp_path / "run/profile-7/trace-rank0.json.gz") == [7, 8]
    threads = {
        event["tid"]
        for event in events(tmp_path / "run/profile-7/trace-rank0.json.gz")
        if "event_tree.py" in event["name"]
    }
    assert threads == set()
    assert_nothing_is_left(trainer)


def test_a_request_while_the_last_files_are_written_finds_no_training(make_trainer, monkeypatch):
    writes = SlowWrites(monkeypatch)
    failures = []

    class AtEnd(fp.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert writes.begun.wait(60)
            with pytest.raises(ConfigError, match=r"no Trainer\.fit runs in these processes now") as error:
                request_profile([os.getpid()], 2)
            failures.append(error)
            writes.may_write.set()

    make_trainer(profiler=fp.Profiler("4:6"), max_steps=6, callbacks=AtEnd()).fit(Net(), batches())
    assert len(failures) == 1


def test_another_profiler_that_records_keeps_recording(make_trainer, caplog):
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    with torch.profiler.profile() as own:
        training.fit(Net(), batches())
    assert "The profile was given up: RuntimeError: another torch.profiler records in this process" in caplog.text
    assert training.global_step == 8
    assert {event.key: event.count for event in own.key_averages()}["aten::addmm"] == 8


def test_steps_that_the_training_does_not_reach_are_warned_of(make_trainer, tmp_path: Path, caplog):
    make_trainer(max_steps=5, profiler="torch").fit(Net(), batches())
    assert "Profiler: the training ended after 5 steps, so the steps 10:20 were not recorded." in caplog.text
    assert not list((tmp_path / "run").glob("profile-*"))


def test_a_profile_that_the_training_ends_has_the_steps_so_far(make_trainer, tmp_path: Path, caplog):
    training = make_trainer(max_steps=5, profiler=fp.Profiler("3:100"))
    training.fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-3/trace-rank0.json.gz") == [3, 4]
    assert "Profiler: the training ended before step 100, so the profile has 2 steps." in caplog.text
    assert_nothing_is_left(training)


class Mistake(Exception):
    pass


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 4:
            raise Mistake("the user's own mistake")
        return super().training_step(batch, batch_idx)


def test_an_exception_in_a_recorded_step_comes_through_and_ends_the_profile(make_trainer, tmp_path: Path, caplog):
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:6"), enable_checkpointing=False)
    with pytest.raises(Mistake, match="the user's own mistake"):
        training.fit(Breaks(), batches())
    assert "The profile was given up: the training was interrupted." in caplog.text
    assert not list((tmp_path / "run").glob("profile-*"))
    assert not _profiler_enabled()
    assert sys.getprofile() is None

    # The next training in this process is profiled as usual.
    make_trainer(max_steps=4, profiler=fp.Profiler("1:3")).fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-1/trace-rank0.json.gz") == [1, 2]


@pytest.mark.parametrize(
    "steps",
    ["20:10", "10:10", "10", "10:20:30", "x:y", ":20", "-1:4", (10,), (3, 2), (1.5, 3), None, 10, True, ("a", "b")],
)
def test_a_bad_range_is_one_clear_error(steps: Any):
    with pytest.raises(ConfigError, match="expected the first step and the step after the last, such as"):
        fp.Profiler(steps)


def test_other_mistakes(make_trainer, monkeypatch):
    with pytest.raises(ConfigError, match='profiler="kineto": expected one of torch, simple, '):
        make_trainer(profiler="kineto")
    with pytest.raises(ConfigError, match=r"Profiler\(with_stack=1\): expected True or False"):
        fp.Profiler(with_stack=1)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "20:10")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='20:10': expected the first step"):
        make_trainer(max_steps=2).fit(Net(), batches())


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


# On demand


def test_a_training_is_profiled_on_demand(make_trainer, tmp_path: Path):
    requests = []
    ask = Remember(3, lambda trainer: requests.append(request_profile([os.getpid()], 2)))
    again = []

    def ask_again(trainer: Any) -> None:
        with pytest.raises(Unavailable, match="a profile is being made already"):
            request_profile([os.getpid()], 2)
        again.append(status_of(requests[0]).state)

    done = []
    look = Remember(8, lambda trainer: done.append(wait_for_profile(requests[0], lambda status: None)))
    make_trainer(max_steps=9, callbacks=[ask, Remember(5, ask_again), look]).fit(Net(), batches())
    # Step 3 is the warm-up.
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert again == ["recording"]
    assert done[0].state == "done"
    assert done[0].directory == str(tmp_path / "run/profile-4")
    assert done[0].summary.startswith("Profile of steps 4 to 5")
    # The training is over, and the files tell.
    assert status_of(requests[0]).state == "done"


def test_a_request_just_before_the_end_fails_with_the_reason(make_trainer):
    requests = []
    ask = Remember(5, lambda trainer: requests.append(request_profile([os.getpid()], 2)))
    make_trainer(max_steps=5, callbacks=ask).fit(Net(), batches())
    status = status_of(requests[0])
    assert (status.state, status.error) == ("failed", f"process {os.getpid()} has ended")


def test_a_process_that_does_not_train_cannot_be_profiled():
    with pytest.raises(ConfigError, match=r"no Trainer\.fit runs in these processes now"):
        request_profile([os.getpid()], 2)


@pytest.mark.slow
def test_twenty_requests_from_another_thread_each_get_their_steps(make_trainer, tmp_path: Path):
    class Endless(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.first(batch).mean()

    training = make_trainer(max_steps=-1, max_epochs=-1, enable_checkpointing=False)
    states, failures = [], []

    def ask() -> None:
        try:
            for _ in range(20):
                request = None
                while request is None:
                    try:
                        request = request_profile([os.getpid()], 2)
                    except ConfigError:  # it hasn't begun
                        time.sleep(0.01)
                states.append(wait_for_profile(request, lambda state: None))
        except BaseException as failure:
            failures.append(failure)
        training.should_stop = True

    asking = threading.Thread(target=ask)
    asking.start()
    training.fit(Endless(), batches())
    asking.join()
    assert not failures
    assert [status.state for status in states] == ["done"] * 20
    for status in states:
        first = int(status.directory.rpartition("-")[2])
        assert steps_in(Path(status.directory) / "trace-rank0.json.gz") == [first, first + 1]
    assert_nothing_is_left(training)


# XLA


class Wide(fp.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self.layers(batch)  # layers
        return (h**2).mean()  # square

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
def test_a_run_on_xla_is_recorded_by_jax(make_trainer, tmp_path: Path):
    losses = []
    for profiler in (None, fp.Profiler("2:6")):
        remember = Remember()
        torch.manual_seed(3)
        data = DataLoader(torch.randn(2560, 512), batch_size=256)
        make_trainer(accelerator="xla", max_steps=8, profiler=profiler, callbacks=remember).fit(Wide(512), data)
        losses.append(remember.losses)
    assert losses[0] == losses[1]

    folder = tmp_path / "run/profile-2"
    assert {path.name for path in folder.iterdir()} == {
        "trace-rank0.json.gz", "xplane-rank0.pb", "operators-rank0.md", "lines-rank0.md", "memory-rank0.csv",
        "summary-rank0.txt",
    }  # fmt: skip
    operators, programs = tables(folder / "operators-rank0.md")
    assert any("dot" in row["operator"] or "fusion" in row["operator"] for row in operators)
    assert (programs[0]["region"], programs[0]["calls"]) == ("jit_step", "4")
    assert "Times of all 4 steps together" in (folder / "operators-rank0.md").read_text()
    lines, outside = tables(folder / "lines-rank0.md")
    name = Path(__file__).name
    by_line = {row["line"].rpartition("/")[2]: row for row in lines}
    layers = by_line[f"{name}:{line_of('layers')}"]
    assert layers["code"] == "`h = self.layers(batch)  # layers`"
    assert ms(layers["self ms"]) > 0
    assert ms(layers["backward ms"]) > 0
    assert by_line.keys() == {f"{name}:{line_of(marker)}" for marker in ("layers", "square")}
    assert {row["phase"] for row in outside} <= {
        "optimizer step",
        "operations of XLA's own",
        "no operation runs",
        "backward",
    }
    # Each operation is charged to lines, or counts outside of them.
    charged = sum(ms(row["self ms"]) + ms(row["backward ms"]) for row in lines)
    charged += sum(ms(row["ms"]) for row in outside if row["phase"] != "no operation runs")
    assert charged == pytest.approx(sum(ms(row["self ms"]) for row in operators), abs=0.05)
    assert_memory_adds_up(folder / "memory-rank0.csv", 4, [4 * 512 * 256])
    assert any(event.get("name") == "ProfilerStep" for event in events(folder / "trace-rank0.json.gz"))


def assert_memory_adds_up(path: Path, steps: int, sizes: list[int]) -> None:
    """Each change leads to the total beside it, each run gives its memory back, and the plan of XLA is never exceeded."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    total, ends = 0, {}
    for row in rows:
        total += int(row["bytes"])
        assert int(row["allocated_bytes"]) == total
        ends[row["step"]] = total
        assert 0 <= total <= int(row["reserved_bytes"])
    assert list(ends) == [str(2 + step) for step in range(steps)]
    assert set(ends.values()) == {int(rows[0]["bytes"])}
    assert rows[0]["operator"] == "inputs and outputs"
    assert set(sizes) <= {int(row["bytes"]) for row in rows}
    peak = max(rows, key=lambda row: int(row["allocated_bytes"]))
    # XLA packs values with other lives into the same memory, and loses little between them.
    assert int(peak["allocated_bytes"]) > 0.8 * int(peak["reserved_bytes"])
    assert any(Path(__file__).name in row["line"] for row in rows)


@pytest.mark.slow
def test_several_steps_in_one_call_on_two_devices_have_lines_and_no_time_twice(make_trainer, tmp_path: Path):
    data = DataLoader(torch.randn(2560, 512), batch_size=256)
    make_trainer(accelerator="xla", devices=2, iterations_per_loop=2, max_steps=8, profiler=fp.Profiler("2:6")).fit(
        Wide(512), data
    )
    folder = tmp_path / "run/profile-2"
    operators, programs = tables(folder / "operators-rank0.md")
    # A loop contains the operations of its body.
    assert not any(row["operator"].startswith("while") for row in operators)
    assert "Times of all 4 steps together" in (folder / "operators-rank0.md").read_text()
    # Two calls on each device.
    assert programs[0]["calls"] == "4"
    lines, _ = tables(folder / "lines-rank0.md")
    assert any(row["line"].endswith(f":{line_of('layers')}") for row in lines)
    rows = list(csv.DictReader((folder / "memory-rank0.csv").read_text().splitlines()))
    assert {row["device"] for row in rows} == {"cpu:0"}
    assert {row["step"] for row in rows} == {"2", "4"}


def test_without_stacks_and_memory_a_run_on_xla_has_its_lines(make_trainer, tmp_path: Path):
    settings = fp.Profiler("2:4", with_stack=False, profile_memory=False)
    data = DataLoader(torch.randn(2560, 512), batch_size=256)
    make_trainer(accelerator="xla", max_steps=6, profiler=settings).fit(Wide(512), data)
    folder = tmp_path / "run/profile-2"
    assert not (folder / "memory-rank0.csv").exists()
    assert f":{line_of('layers')} " in (folder / "lines-rank0.md").read_text()


@pytest.mark.slow
def test_a_small_program_on_xla_has_operators_or_says_why_it_has_none(make_trainer, tmp_path: Path):
    make_trainer(accelerator="xla", max_steps=8, profiler=fp.Profiler("2:6")).fit(
        Wide(2), DataLoader(torch.randn(20, 2), 2)
    )
    text = (tmp_path / "run/profile-2/operators-rank0.md").read_text()
    assert ("| operator " in text) != ("XLA runs a small program in one piece" in text)


# Lines of symbols

FUNCTIONS = """
def plain(x, w):
    y = x * 2
    z = y + 1
    z += y
    return -z

class Net:
    @decorated
    def forward(self, x):
        for _ in range(3):
            x = x @ self.w
            x = x / 2
        if x > 1:
            x = x[0]
        return (x
                - 1)
"""


@pytest.mark.parametrize(
    ("first", "after", "operator", "line"),
    [
        (2, 2, "aten::mul", 3), (2, 3, "aten::add", 4), (2, 5, "aten::add_", 5), (2, 5, "aten::neg", 6),
        (2, 2, "aten::matmul", None), (9, 10, "aten::matmul", 12), (10, 12, "aten::div", 13),
        # In a loop, the operator is above the last line that ran.
        (9, 13, "aten::matmul", 12), (9, 14, "aten::gt", 14), (9, 14, "aten::is_nonzero", 14), (9, 14, "aten::select", 15),
        (9, 15, "aten::sub", 16), (99, 99, "aten::add", None),
    ],
)  # fmt: skip
def test_an_operator_without_a_call_finds_its_line(
    tmp_path: Path, first: int, after: int, operator: str, line: int | None
):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    assert operator_line(str(file), first, after, operator) == line
    assert operator_line(str(tmp_path / "is-not-there.py"), first, after, operator) is None


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="footplate")
