"""Profiles of trainings on XLA, which JAX's profiler records."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from torch.utils.data import DataLoader

import footplate as fp
from training.profiled_nets import FILE, Remember, Wide, events, line_of, ms, tables


@pytest.fixture(autouse=True)
def _no_program_is_loaded(tmp_path: Path) -> Iterator[None]:
    config: Any = jax.config
    directory = config.jax_compilation_cache_dir
    config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    reset_cache()
    yield
    config.update("jax_compilation_cache_dir", directory)
    reset_cache()


@pytest.mark.slow
def test_a_run_on_xla_is_recorded_by_jax(make_trainer, tmp_path: Path):
    losses = []
    for profiler in (fp.Profiler("2:6"), None):
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
    assert programs[0]["region"].startswith("jit_training_step_")
    assert programs[0]["calls"] == "4"
    assert "Times of all 4 steps together" in (folder / "operators-rank0.md").read_text()
    lines, outside = tables(folder / "lines-rank0.md")
    name = FILE.name
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
    assert any(FILE.name in row["line"] for row in rows)


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
def test_a_program_from_the_cache_has_its_lines_and_says_why_it_has_no_memory(tmp_path: Path):
    """Programs have other numbers in the second process, which has made more of them before."""

    def profile(attempt: str, *arguments: str, **environment: str) -> tuple[Path, list[dict[str, str]]]:
        run = [
            sys.executable,
            "-m",
            "training.xla_profile",
            str(tmp_path / attempt),
            str(tmp_path / "cache"),
            *arguments,
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        subprocess.run(run, check=True, cwd=Path(__file__).parents[1], env=environment)
        folder = tmp_path / attempt / "profile-2"
        return folder, tables(folder / "lines-rank0.md")[0]

    compiled, lines = profile("compiled")
    assert (compiled / "memory-rank0.csv").exists()
    places = {row["line"] for row in lines}
    assert {place.rpartition("/")[2] for place in places} == {
        f"{FILE.name}:{line_of(marker)}" for marker in ("layers", "square")
    }
    assert all("MiB" in row for row in lines)

    loaded, lines = profile("loaded", "2", "3", "4")
    assert len(list((tmp_path / "cache").glob("jit_training_step_*-cache"))) == 1
    assert {row["line"] for row in lines} == places
    assert not (loaded / "memory-rank0.csv").exists()
    assert not any("MiB" in row for row in lines)
    said = (loaded / "lines-rank0.md").read_text()
    assert "the cache of compiled programs doesn't keep XLA's plan" in said
    mend = "JAX_ENABLE_COMPILATION_CACHE=false"
    assert mend in said

    again, lines = profile("again", **dict([mend.split("=")]))
    assert (again / "memory-rank0.csv").read_text().count("\n") == (compiled / "memory-rank0.csv").read_text().count(
        "\n"
    )
    assert {row["line"] for row in lines} == places


@pytest.mark.slow
def test_a_small_program_on_xla_has_operators_or_says_why_it_has_none(make_trainer, tmp_path: Path):
    make_trainer(accelerator="xla", max_steps=8, profiler=fp.Profiler("2:6")).fit(
        Wide(2), DataLoader(torch.randn(20, 2), 2)
    )
    text = (tmp_path / "run/profile-2/operators-rank0.md").read_text()
    assert ("| operator " in text) != ("XLA runs a small program in one piece" in text)
