import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.hardware.cuda import CUDA, Facts, oldest_capability, why_not
from footplate.hardware.nvml import Driver, Gpu, NvmlError, find_driver, visible_gpus

GPUS = tuple(Gpu("NVIDIA A10", f"GPU-{start}0000-{index}", 24 * 2**30, (8, 6)) for index, start in enumerate("abc"))
DRIVER = Driver("580.65.06", (13, 0), GPUS)
WELL = Facts("2.13.0+cu130", (13, 0), driver=DRIVER, count=3, oldest_capability=(7, 5))


def test_on_this_machine_the_answer_agrees_with_torch():
    assert (CUDA().unavailable() is None) == torch.cuda.is_available()


def test_looking_does_not_initialise_cuda_so_a_fork_may_still_use_it():
    script = """
import torch
from footplate.hardware.cuda import CUDA
cuda = CUDA()
if cuda.unavailable() is None:
    assert cuda.devices()
cuda.describe()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_in_order_is_no_reason():
    assert why_not(WELL) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch_cuda": None, "torch_version": "2.13.0+cpu"}, ["cpu is built without CUDA", "3 GPU(s)", "Install"]),
        ({"driver": None, "no_driver": "no NVIDIA driver is installed.", "count": 0}, ["no NVIDIA driver"]),
        ({"driver": Driver("550.1", (12, 4), GPUS), "count": 0}, ["550.1", "12.4", "13.0", "Update the driver"]),
        ({"driver": replace(DRIVER, gpus=()), "count": 0}, ["finds no GPU", "container"]),
        ({"visible": "", "count": 0}, ['CUDA_VISIBLE_DEVICES=""', "3 GPU(s) (NVIDIA A10)", "0 … 2"]),
        ({"visible": "7", "count": 0}, ['CUDA_VISIBLE_DEVICES="7"']),
        ({"count": 0}, ["torch sees none", "nvidia-smi"]),
        ({"oldest_capability": (9, 0)}, ["8.6", "from 9.0 on", "older CUDA"]),
        ({"torch_cuda": None, "rocm": True, "count": 0}, ["ROCm", "rocm-smi"]),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_wrong_and_what_to_do(change, words):
    reason = why_not(replace(WELL, **change))

    assert reason is not None
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    "change",
    [
        {"driver": None, "no_driver": "no NVML here."},  # a Jetson: no NVML, but CUDA works
        {"driver": replace(DRIVER, cuda=(13, 4))},
        {"torch_cuda": (13, 2)},  # any driver of the same major version runs it
        {"torch_cuda": None, "rocm": True, "driver": None},
        {"visible": "2"},
    ],
)
def test_what_works_is_not_refused(change):
    assert why_not(replace(WELL, **change)) is None


def test_one_gpu_that_is_new_enough_is_enough():
    old = replace(GPUS[0], capability=(6, 1))
    facts = replace(WELL, driver=replace(DRIVER, gpus=(old, *GPUS[1:])))

    assert why_not(facts) is None
    assert "6.1" in (why_not(replace(facts, visible="0", count=1)) or "")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,9,1", [0]),
        ("1,1", []),
        ("GPU-b", [1]),
        ("GPU-c,0", [2, 0]),
        ("GPU-", []),
        ("MIG-1234", []),
    ],
)
def test_the_visible_gpus_are_read_as_cuda_reads_them(visible, indices):
    assert visible_gpus(GPUS, visible) == [GPUS[index] for index in indices]


@given(st.lists(st.integers(0, 2), unique=True, min_size=1))
def test_visible_gpus_keep_the_order_they_are_named_in(indices):
    assert visible_gpus(GPUS, ",".join(map(str, indices))) == [GPUS[index] for index in indices]


@pytest.mark.parametrize(
    ("architectures", "oldest"),
    [([], (0, 0)), (["sm_75", "sm_80", "sm_90a", "compute_120"], (7, 5)), (["sm_120", "sm_100"], (10, 0))],
)
def test_the_oldest_capability_is_that_of_the_oldest_kernels(architectures, oldest):
    assert oldest_capability(architectures) == oldest


def test_the_driver_answers_or_says_what_to_do():
    try:
        answer = find_driver().version
    except NvmlError as error:
        answer = str(error)

    assert re.match(r"\d+\.\d+|.*Install it.*|.*nvidia-smi.*", answer)
