"""Answers of a driver, from an NVML library that is compiled for the test and replaces the driver's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPUS = [["NVIDIA A10", "GPU-0", 24 * 2**30, [8, 6]], ["NVIDIA H100 80GB HBM3", "GPU-1", 80 * 2**30, [9, 0]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def ask(folder, expression, **environ):
    """Evaluate an expression over `nvml` in a process whose NVML is in `folder`; an NvmlError is returned as its text."""
    script = f"""
import dataclasses, json
from footplate.hardware import nvml
try:
    value = {expression}
    print(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value))
except nvml.NvmlError as error:
    print(json.dumps(str(error)))
"""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder), **environ}
    run = subprocess.run([sys.executable, "-c", script], check=True, env=environ, capture_output=True, text=True)
    return json.loads(run.stdout)


def test_the_driver_and_its_gpus(library):
    driver = ask(library, "nvml.find_driver()")

    assert (driver["version"], driver["cuda"]) == ("550.54.15", [12, 4])
    assert [list(gpu.values()) for gpu in driver["gpus"]] == GPUS


def test_the_use_of_a_gpu_by_its_number_and_by_its_uuid(library):
    assert ask(library, "nvml.use(1)") == [0.87, 2**30]
    assert ask(library, "nvml.busy('GPU-1')") == 0.87


@pytest.mark.parametrize("expression", ["nvml.use(0)", "nvml.busy('GPU-0')", "nvml.busy('MIG-1')", "nvml.use(2)"])
def test_a_gpu_that_does_not_report_its_use_is_an_error(library, expression):
    assert "the NVIDIA driver does not answer nvmlDevice" in ask(library, expression)


def test_a_driver_that_fails_is_named_with_what_to_do(library):
    text = ask(library, "nvml.find_driver()", FAKE_NVML_INIT="18")

    assert "nvmlInit (RM has detected an NVML/RM version mismatch)" in text
    assert "nvidia-smi" in text
    assert "restart the machine" in text


def test_a_machine_without_a_driver_is_named_with_what_to_do(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")

    assert "no NVIDIA driver is installed" in ask(tmp_path, "nvml.find_driver()")
