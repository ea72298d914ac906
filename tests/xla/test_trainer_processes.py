"""Two processes with two devices each train one model, as one process on the CPU does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import footplate as fp
from footplate import checkpoint
from footplate.step.xla.processes import coordinator, free_port
from xla.trained import equal

TESTS = Path(__file__).parents[1]

PROGRAM = """
import sys, torch
from models.small import loader
from xla.trained import Steady
import footplate as fp

root, accelerator, epochs, size, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
torch.manual_seed(fp.Trainer(accelerator="cpu", max_epochs=1).world.rank)  # each begins with other weights
model = Steady()
made = fp.Trainer(
    accelerator=accelerator, devices=2 if accelerator == "xla" else 1, precision="64-true", max_epochs=epochs, seed=1,
    default_root_dir=root, logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
)
try:
    made.fit(model, loader(rows, size), loader(18, 6, shuffle=False), ckpt_path="last")
except fp.FootplateError as error:
    print(error)
    raise SystemExit(3)
print(made.world.rank, {name: float(value) for name, value in sorted(made.callback_metrics.items())})
"""


def ports():
    """Two free ports, one after the other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def run(root, accelerator, processes, epochs=2, rows=40):
    """Start them, wait for all, and return (exit code, output) of each. The global batch has 8 rows."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "WORLD_SIZE", "RANK")}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    clean |= {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(root / "cache")}
    clean["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    port, children = ports(), []
    for rank in range(processes):
        told = {"WORLD_SIZE": str(processes), "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = [str(root), accelerator, str(epochs), str(8 // processes), str(rows)]
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments], env={**clean, **(told if processes > 1 else {})},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        return [(child.communicate(timeout=400)[0], child.returncode) for child in children]
    finally:
        for child in children:
            child.kill()


def state(root):
    return checkpoint.load(checkpoint.newest([root / "checkpoints"]))


@pytest.mark.slow
def test_two_processes_train_like_one_and_go_on_where_they_were_cut_off(tmp_path):
    wanted = run(tmp_path / "cpu", "cpu", 1)
    run(tmp_path / "xla", "xla", 2, epochs=1)
    found = run(tmp_path / "xla", "xla", 2)
    assert [code for _, code in (*wanted, *found)] == [0, 0, 0], found
    assert list((tmp_path / "xla" / "cache/footplate/xla").iterdir())  # the second run has found its programs there
    mine, theirs = state(tmp_path / "xla"), state(tmp_path / "cpu")
    assert mine["global_step"] == theirs["global_step"] == 10
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(mine["state_dict"][name], value, rtol=0, atol=1e-6)
    lines = [output.splitlines()[-1].partition(" ") for output, _ in found]
    assert [rank for rank, _, _ in lines] == ["0", "1"]
    metrics = [eval(text) for _, _, text in lines]
    assert metrics[0] == metrics[1]
    assert equal(metrics[0].keys(), eval(wanted[0][0].splitlines()[-1].partition(" ")[2]).keys())
    for name, value in eval(wanted[0][0].splitlines()[-1].partition(" ")[2]).items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_rows_that_the_processes_do_not_divide_are_refused_by_both(tmp_path):
    for output, code in run(tmp_path, "xla", 2, rows=11):
        assert code == 3, output
        assert "use drop_last=True" in output


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
