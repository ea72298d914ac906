import json
import time
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from footplate.hardware import cpu_rates
from footplate.hardware.base import Device
from footplate.hardware.cpu import CPU
from footplate.hardware.doctor import AcceleratorReport, advise, examine, examine_accelerator, faster_types, to_dict
from footplate.hardware.doctor_page import page
from footplate.hardware.packages import Package


@pytest.fixture(scope="module")
def report():
    return examine()


def _printed(report, width=200) -> str:
    paper = StringIO()
    Console(width=width, file=paper).print(page(report))
    return paper.getvalue()


def test_training_can_work_on_this_machine(report):
    assert report.ok
    assert "cpu" in [accelerator.name for accelerator in report.accelerators if accelerator.usable]


def test_it_is_quick():
    def takes_s() -> float:
        begin = time.perf_counter()
        examine()
        return time.perf_counter() - begin

    assert any(takes_s() < 2 for _ in range(10))  # on a machine that may be busy


def test_each_accelerator_is_usable_or_has_a_reason(report):
    for accelerator in report.accelerators:
        assert accelerator.usable == (accelerator.reason is None)
        assert accelerator.usable == bool(accelerator.devices)


def test_the_page_shows_devices_reasons_versions_and_the_verdict(report):
    text = _printed(report)

    for accelerator in report.accelerators:
        assert (accelerator.reason or f"{accelerator.name}:0") in text
    for package in report.packages:
        assert package.version in text
    assert report.machine.cpu in text
    assert 'Training can work here; accelerator="auto" is' in text


def test_the_page_fits_a_narrow_terminal(report):
    assert max(map(len, _printed(report, width=60).splitlines())) <= 60


def test_markup_like_text_is_shown_as_it_is(report):
    missing = Package("mlflow", None, "tracking", 'pip install "footplate[mlflow]"')

    assert 'not installed, for tracking: pip install "footplate[mlflow]"' in _printed(
        replace(report, extras=(missing,))
    )


def test_as_plain_data_it_survives_json(report):
    plain = json.loads(json.dumps(to_dict(report)))

    assert plain["ok"] is True
    assert plain["machine"]["usable_cores"] == report.machine.usable_cores
    cpu = next(accelerator for accelerator in plain["accelerators"] if accelerator["name"] == "cpu")
    assert cpu["usable"] is True
    assert cpu["precisions"] == ["32-true", "64-true", "bf16-mixed", "bf16-true"]
    assert cpu["devices"][0]["memory_bytes"] > 0


def test_a_problem_of_a_required_package_means_no_training(report):
    sick = replace(report, problems=("torch 2.9.1 is older than 2.11",))

    assert not sick.ok
    assert to_dict(sick)["ok"] is False
    assert "problem: torch 2.9.1 is older than 2.11" in _printed(sick)
    assert "Training can't work here" in _printed(sick)


def test_an_accelerator_that_cannot_describe_itself_is_reported_and_stops_nothing():
    class Garbled(CPU):
        name = "garbled"

        def devices(self) -> list[Device]:
            raise RuntimeError("bus error")

    examined = examine_accelerator(Garbled())

    assert not examined.usable
    assert "RuntimeError: bus error" in examined.reason


@pytest.mark.parametrize(
    ("change", "threads", "words"),
    [
        ({"usable_cores": 2.0}, 64, "set OMP_NUM_THREADS=2"),
        ({"usable_cores": 0.5}, 2, "set OMP_NUM_THREADS=1"),
        ({"usable_cores": 32.0}, 1, "unset OMP_NUM_THREADS"),
        ({"usable_cores": 4.0, "shm_bytes": 64 * 2**20}, 4, "/dev/shm has 64 MiB"),
        ({"usable_cores": 4.0, "disk_free_bytes": 100 * 2**20}, 4, "100 MiB left"),
    ],
)
def test_what_makes_training_slow_is_advised_on(report, change, threads, words):
    well = replace(report.machine, shm_bytes=2**34, disk_free_bytes=2**40)

    (advice,) = advise(replace(well, **change), threads, report.extras)

    assert words in advice


@pytest.mark.parametrize(("gain", "words"), [(2.9, "2.9 times as fast as in float32"), (1.2, None)])
def test_bfloat16_is_advised_on_a_cpu_that_multiplies_it_faster(gain, words, monkeypatch):
    rates = {torch.float32: 1e11, torch.bfloat16: gain * 1e11}
    monkeypatch.setattr(cpu_rates, "flops_per_s", rates.get)

    advice = faster_types([])

    assert [words in text for text in advice] == ([True] if words else [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 multiplies matrices in bfloat16 14.8 times as fast"),
        ("TPU v5 lite", "TPU v5 lite multiplies matrices in bfloat16 6.0 times as fast"),
        # It has no bfloat16.
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_bfloat16_is_advised_on_devices_of_the_catalog(name, words, monkeypatch):
    monkeypatch.setattr(cpu_rates, "flops_per_s", lambda dtype: 1e11)
    devices = tuple(Device(index, name) for index in range(2))

    advice = faster_types([AcceleratorReport("cuda", None, devices)])

    assert [words in text for text in advice] == ([True] if words else [])


def test_a_missing_image_decoder_is_advised_on(report):
    well = replace(report.machine, usable_cores=4.0, shm_bytes=2**34, disk_free_bytes=2**40)
    extras = tuple(replace(extra, version=None) for extra in report.extras)

    assert [advice for advice in advise(well, 4, extras) if "footplate[images]" in advice]


@pytest.mark.parametrize(("cores", "threads"), [(1.0, 1), (0.5, 1), (2.0, 2), (8.0, 4), (64.0, 32)])
def test_a_well_set_up_machine_needs_no_advice(report, cores, threads):
    well = replace(report.machine, usable_cores=cores, shm_bytes=None, disk_free_bytes=2**40)

    assert advise(well, threads, report.extras) == []
