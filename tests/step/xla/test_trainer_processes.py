"""Two processes with two devices each train one model, like one process with four devices, and like the CPU.

Most processes are forks of a process that has imported torch and JAX (`template.py`), and find each other's compiled
programs.
The first test begins with fresh interpreters, which compile all programs. The last one starts launchers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import template
import torch
from ports import free_port as port_of_ours

import footplate as fp
from footplate import checkpoint
from footplate.hardware.xla_processes import coordinator, free_port

TESTS = Path(__file__).parents[2]


def ports():
    """Two free ports in sequence."""
    while True:
        port = port_of_ours()
        with contextlib.suppress(OSError):
            port_of_ours(port + 1)
            return port


def environment(cache):
    """Environment of this process with the tests' modules on the path, without the settings for its own devices."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "WORLD_SIZE", "RANK")}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    clean |= {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    return clean | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The directory of compiled programs that the tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(cache):
    """A function that runs forked processes. It returns (output, exit code) of each."""

    def run(root, accelerator, processes, **given):
        command = [sys.executable, "-m", "step.xla.process", asked(root, accelerator, processes, **given)]
        fork = functools.partial(template.Popen, packages=template.WITH_JAX)
        return ended([piped(command, environ, fork) for environ in environments(cache, processes)])

    return run


def run_fresh(cache, root, accelerator, processes, **given):
    """Run fresh interpreters. Return (output, exit code) of each."""
    command = [sys.executable, "-m", "step.xla.process", asked(root, accelerator, processes, **given)]
    return ended([piped(command, environ) for environ in environments(cache, processes)])


def environments(cache, processes):
    """Environment of each process, as torchrun sets it for several."""
    if processes == 1:
        return [environment(cache)]
    told = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports())}
    return [{**environment(cache), **told, "RANK": str(rank)} for rank in range(processes)]


def piped(command, environ, start=subprocess.Popen):
    return start(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def asked(root, accelerator, processes, *, model="steady", train=("shared", 40), val=("shared", 18), **given):
    """The request to `process.py`. The global batch has 8 rows, of 4 devices."""
    callbacks = {name: given.pop(name, False) for name in ("looks", "stops", "dies", "raises")}
    devices = 1 if accelerator == "cpu" else 4 // processes
    trainer = {"accelerator": accelerator, "devices": devices, "default_root_dir": str(root), "max_epochs": 2} | given
    return json.dumps(
        {"model": model, "train": train, "val": val, "size": 8 // processes, "trainer": trainer, **callbacks}
    )


def ended(children):
    """Output and exit code of each process at its end."""
    try:
        return [(child.communicate(timeout=400)[0], child.returncode) for child in children]
    finally:
        for child in children:
            child.kill()


def metrics(results):
    """Metrics that each process has printed at its end."""
    assert [code for _, code in results] == [0] * len(results), "\n".join(output for output, _ in results)
    return [json.loads(output.splitlines()[-1]) for output, _ in results]


def state(root):
    return checkpoint.load(checkpoint.newest([root / "checkpoints"]))


def compare(root, results, other, wanted):
    """Compare weights, optimizer states and metrics."""
    mine, theirs = state(root), state(other)
    assert mine["global_step"] == theirs["global_step"]
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(mine["state_dict"][name], value, rtol=0, atol=1e-6)
    (metric,) = metrics(wanted)
    for values in metrics(results):
        assert values == pytest.approx(metric, rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def on_cpu(run, tmp_path_factory):
    """The directory and the result of the plain training on the CPU."""
    root = tmp_path_factory.mktemp("cpu")
    return root, run(root, "cpu", 1)


@pytest.mark.slow
def test_two_processes_train_like_one_and_go_on_where_they_were_cut_off(cache, run, on_cpu, tmp_path):
    run_fresh(cache, tmp_path / "xla", "xla", 2, max_epochs=1)
    assert list((cache / "footplate/xla").iterdir())  # the second run finds its programs there
    results = run(tmp_path / "xla", "xla", 2)
    compare(tmp_path / "xla", results, *on_cpu)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"strategy": "fsdp", "sync_batchnorm": True, "iterations_per_loop": 2}], ids=str)
def test_rows_that_the_processes_do_not_divide_count_as_in_one_process(given, run, tmp_path):
    """The last batch has 3 of 8 rows, so one process has 1 and the other 2. Dropout and BatchNorm act as in one process."""
    given = {"model": "drawing", "train": ("shared", 43), "limit_val_batches": 0, **given}
    wanted, results = (run(tmp_path / str(processes), "xla", processes, **given) for processes in (1, 2))
    compare(tmp_path / "2", results, tmp_path / "1", wanted)
    assert metrics(results)[0]["rows"] == 43


@pytest.mark.slow
def test_a_window_of_two_processes_is_ended_by_the_cpu_and_followed_by_them_again(run, tmp_path):
    """Sharded weights. The last batch of an epoch has one row, so one process has none."""
    given = {"model": "wide", "train": ("shared", 41), "val": ("shared", 9), "accumulate_grad_batches": 3}
    wanted = run(tmp_path / "cpu", "cpu", 1, **given)
    root = tmp_path / "carried"
    cut_off = run(root, "xla", 2, strategy="fsdp", stops=True, **given)
    assert [code for _, code in cut_off] == [143, 143], cut_off
    assert state(root)["step"]["accumulated"] == 1
    metrics(run(root, "cpu", 1, max_epochs=1, **given))
    results = run(root, "xla", 2, strategy="fsdp", **given)
    compare(root, results, tmp_path / "cpu", wanted)


@pytest.mark.slow
def test_processes_with_loaders_of_their_own_end_an_epoch_together_and_evaluate_what_they_have(run, tmp_path):
    """The first process has five batches each way, the other one. A callback reads the weights each time."""
    own = {"train": ("own", 20), "val": ("own", 20)}
    one, other = metrics(run(tmp_path, "xla", 2, model="wide", strategy="fsdp", looks=True, **own))
    assert one["val_loss"] == other["val_loss"]
    assert one["rows"] == other["rows"] == 8
    assert state(tmp_path)["global_step"] == 2


@pytest.mark.slow
def test_batches_that_differ_in_more_than_their_rows_are_refused_by_both(run, tmp_path):
    for output, code in run(tmp_path, "xla", 2, train=("wider", 20)):
        assert code == 3, output
        assert "process 0 has float64[4, 16], int64[4]; process 1 has float64[4, 8], int64[4]" in output


@pytest.mark.slow
def test_when_one_process_raises_the_other_does_not_wait_for_it_for_ever(run, tmp_path):
    """It doesn't end as if it had succeeded either. There is no launcher here, which would end it sooner."""
    (output, code), (raised, other) = run(tmp_path, "xla", 2, raises=True)
    assert other == 1, raised
    assert "RuntimeError: no such thing here" in raised
    assert code not in (0, 3), output


@pytest.mark.slow
def test_when_the_first_process_is_killed_all_are_started_again_and_go_on(cache, on_cpu, tmp_path):
    """JAX aborts the other process. The launcher reports the first failure. One machine runs two machines' commands."""
    root, port = tmp_path / "xla", str(ports())
    common = [
        "--nnodes",
        "2",
        "--np",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "-m",
        "step.xla.process",
    ]
    footplate = [sys.executable, "-m", "footplate", "run"]
    environ = {**environment(cache), "FOOTPLATE_TOKEN": "secret-of-these-machines"}
    words = asked(root, "xla", 2, val=("shared", 8), dies=True)
    children = [
        piped([*footplate, "--node-rank", str(node), *common, words], environ, template.Popen) for node in range(2)
    ]
    (output, code), (_, other) = ended(children)
    assert [code, other] == [0, 0], output
    assert "rank 0 was killed by SIGKILL in attempt 0; attempt 1 starts now" in output
    assert "begins at step 5" in output, output
    compare(root, [], *on_cpu)


def test_the_first_process_is_found_beside_torchs_port():
    torchrun = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert coordinator(torchrun, lambda port: port) == "10.0.0.1:29501"
    assert coordinator({**torchrun, "MASTER_ADDR": "fe80::1"}, lambda port: 7) == "[fe80::1]:7"
    assert coordinator({**torchrun, "JAX_COORDINATOR_ADDRESS": "10.0.0.9:99"}, lambda port: port) == "10.0.0.9:99"
    with pytest.raises(fp.ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        coordinator({}, lambda port: port)


def test_a_port_that_is_taken_is_not_the_first_process_s():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert free_port(taken) not in (0, taken)
    assert free_port(taken) == taken
    assert 0 < free_port(65536) < 65536
