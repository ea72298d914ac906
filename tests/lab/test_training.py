"""`footplate run` on several machines whose network breaks: the training goes on, and its numbers are the same.

The proof is exact: each loss of each rank, of all attempts, equals the one of a training on one machine that nothing
disturbed. `benchmarks/lab_chaos.py` draws more kinds of faults, on up to four machines.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import warm_commands
from lab_losses import SCRIPT, Losses, losses

from footplate.lab import Command, Lab, Machine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

END_S = 240
PORT = 29500


@dataclass
class Training:
    """A training with a rank on each of two machines, or of another number."""

    lab: Lab
    options: tuple[object, ...] = ()
    script: str = SCRIPT.name
    world: int = 2
    nnodes: str = ""
    arguments: tuple[object, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False  # a fresh interpreter, not a fork

    def start(self, node_rank: int, machine: Machine | None = None, pause_s: float = 0.2) -> Command:
        """Give the command on a machine, by default on the one with the same number."""
        shutil.copy(SCRIPT, self.lab.shared)
        host = machine or self.lab.machines[node_rank]
        with (self.lab.shared / f"{host.name}.log").open("ab") as log:
            words = [
                "run", "--nnodes", self.nnodes or self.world, "--node-rank", node_rank, "--np", self.world, *self.options,
                "--master-addr", "10.77.0.10", "--master-port", PORT, f"/mnt/{self.script}", "/mnt/out", pause_s,
                *self.arguments,
            ]  # fmt: skip
            env = {"FOOTPLATE_TOKEN": "a-token-for-the-lab", "OMP_NUM_THREADS": "1", **self.env}
            if self.fresh:
                return host.start(["footplate", *words], env=env, output=log)
            return warm_commands.start(host, words, env, log)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + END_S
        while not any(key[1] >= step for key in losses(self.lab.shared / "out")):
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "".join(f"{log.name}:\n{log.read_text()}" for log in sorted(self.lab.shared.glob("*.log")))

    def ends_like(self, expected: Losses, *commands: Command) -> None:
        """Wait for the commands, which must succeed, and compare all losses."""
        codes = [command.wait(END_S) for command in commands]
        assert codes == [0] * len(commands), self.said()
        assert losses(self.lab.shared / "out") == expected


@pytest.fixture
def training(lab) -> Callable[..., Training]:
    return lambda count=2, *options: Training(lab(count), options)


def test_a_machine_that_lost_its_power_comes_back_with_another_address(training, undisturbed):
    run = training()
    first, lost = run.start(0), run.lab.machines[1]
    run.start(1)
    run.wait_for_step(8)
    lost.crash()
    lost.boot("10.77.0.99")
    run.ends_like(undisturbed, first, run.start(1))


def test_a_machine_that_was_cut_off_is_replaced_within_the_heartbeats_timeout(training, undisturbed):
    run = training(3, "--heartbeat-timeout", 5)
    first, cut = run.start(0), run.start(1)
    run.wait_for_step(8)
    run.lab.cut(run.lab.machines[1])
    run.ends_like(undisturbed, first, run.start(1, run.lab.machines[2]))
    # It notices by itself that nobody is there.
    assert cut.wait(END_S) == 1


def test_a_partition_one_way_is_as_good_as_two(training, undisturbed):
    run = training(3, "--heartbeat-timeout", 5)
    first, lost = run.start(0), run.start(1)
    run.wait_for_step(8)
    run.lab.partition([run.lab.machines[0]], [run.lab.machines[1]])
    run.ends_like(undisturbed, first, run.start(1, run.lab.machines[2]))
    assert lost.wait(END_S) == 1


@pytest.mark.parametrize("fault", ["its power", "its connection"])
def test_a_machine_that_has_lost_something_is_done_without_and_takes_part_again_when_it_is_back(lab, fault):
    # One of them also with TLS.
    options = ("--heartbeat-timeout", 5, *(["--tls"] if fault == "its power" else []))
    run = Training(lab(3), options, world=3, nnodes="2:3", arguments=(1000,))
    lost, out = run.lab.machines[2], run.lab.shared / "out"

    def last_step(rank: int) -> int:
        return max(step for name, step in losses(out) if name == f"rank-{rank}")

    commands = [run.start(node) for node in range(3)]
    run.wait_for_step(6)
    if fault == "its power":
        lost.crash()
    else:
        run.lab.cut(lost)
        # A step whose gradients were exchanged before the cut still ends.
        time.sleep(1)
    lost_at = last_step(2)
    run.wait_for_step(lost_at + 6)
    assert last_step(2) == lost_at
    if fault == "its power":
        lost.boot("10.77.0.99")
        commands[2] = run.start(2)
    else:
        # Its command joins again by itself.
        run.lab.heal()
    until = time.monotonic() + END_S
    while last_step(2) == lost_at:
        assert time.monotonic() < until, run.said()
        time.sleep(0.05)
    (out / "enough").touch()
    assert [command.wait(END_S) for command in commands] == [0, 0, 0], run.said()
    assert last_step(2) == last_step(0) > lost_at + 6, run.said()


def test_host_names_of_debian_and_an_interface_that_leads_nowhere(training, undisturbed):
    """Debian gives a host's own name the address 127.0.1.1. Here nobody knows the name of another machine, either."""
    run = training()
    run.fresh = True
    for index, machine in enumerate(run.lab.machines):
        machine.kill()
        machine.boot(hosts=f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n", stranger=f"10.99.0.{index + 1}/24")
    run.ends_like(undisturbed, run.start(0, pause_s=0.0), run.start(1, pause_s=0.0))


def test_the_ranks_meet_on_the_interface_that_was_asked_for(training, undisturbed):
    run = training(2, "--interface", "eth1")
    for index, machine in enumerate(run.lab.machines):
        machine.kill()
        machine.boot(second=f"10.78.0.{index + 1}/24")
    commands = [run.start(0), run.start(1)]
    run.wait_for_step(2)
    talks = [machine.run(["cat", "/proc/net/tcp"])[1].lower() for machine in run.lab.machines]
    run.ends_like(undisturbed, *commands)
    # Addresses are in the order of this machine's bytes: 10.78.0.1 is 01004e0a.
    assert all("01004e0a:" in talk and "02004e0a:" in talk for talk in talks)


def test_an_interface_that_is_not_there_is_named_before_any_work(training):
    run = training(2, "--interface", "eth7")
    assert run.start(1).wait(END_S) == 2
    assert "FOOTPLATE_INTERFACE=eth7: m1 has no interface of this name with an address. It has eth0." in run.said()


def test_a_slow_link_that_loses_frames_and_a_firewall_with_holes_for_the_master_port_and_free_ports(
    training, undisturbed
):
    run = training()
    run.lab.shape(run.lab.machines[1], delay_s=0.02, jitter_s=0.005, loss=0.01)
    for machine in run.lab.machines:
        machine.run(["sh", "-c", "echo 45000 45063 > /proc/sys/net/ipv4/ip_local_port_range"])
        run.lab.firewall(machine, [PORT, *range(45000, 45064)])
    run.ends_like(undisturbed, run.start(0, pause_s=0.0), run.start(1, pause_s=0.0))


def test_a_closed_port_is_named_with_both_machines(training):
    run = training(2, "--max-host-restarts", 0)
    run.lab.firewall(run.lab.machines[0], [PORT])
    commands = [run.start(0, pause_s=0.0), run.start(1, pause_s=0.0)]
    assert [command.wait(END_S) for command in commands] == [1, 1], run.said()
    assert "The agent on m1 can't reach the driver at 10.77.0.10:" in run.said()


LOSE_EACH_OTHER_SOON = """
import sys
from pathlib import Path

from footplate.core.net import silence

silence.RANKS_SILENCE_S = 6
sys.path.insert(0, "/mnt")
import lab_train

lab_train.train(Path(sys.argv[1]), float(sys.argv[2]), 3)
"""


def test_ranks_that_lose_each_other_begin_again_though_the_driver_hears_both(lab):
    """Neither gloo nor torch's store notices it for a quarter of an hour."""
    run = Training(lab(3), script="soon.py", world=3)
    (run.lab.shared / "soon.py").write_text(LOSE_EACH_OTHER_SOON)
    commands = [run.start(node_rank) for node_rank in range(3)]
    run.wait_for_step(6)
    _, first, second = run.lab.machines
    run.lab.partition([first], [second])
    until = time.monotonic() + END_S
    while "; attempt 1 starts now" not in run.said():
        assert time.monotonic() < until, run.said()
        time.sleep(0.05)
    run.lab.heal()
    assert [command.wait(END_S) for command in commands] == [0, 0, 0], run.said()
    assert "Connection timed out" in run.said()
    found = losses(run.lab.shared / "out")
    assert {step for _, step in found} == set(range(1, 19))
    assert len(found) == 3 * 18
    assert all(len(values) == 1 for values in found.values())


OWN_DISK = """
import sys
from pathlib import Path

import footplate as fp

sys.path.insert(0, "/mnt")
import lab_train

lab_train.train(
    Path(sys.argv[1]), float(sys.argv[2]), 3, root="/home/lab/run", num_nodes=2,
    dirpath=sys.argv[3] if len(sys.argv) > 3 else None,
)
"""
BUCKET = """
import os, threading, urllib.request
from moto.server import ThreadedMotoServer

# It writes a line for each request, which nobody reads.
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
ThreadedMotoServer("0.0.0.0", 5555).start()
urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:5555/lake", method="PUT"))
print("ready", flush=True)
# At the end of the main thread, no thread may start for a request.
threading.Event().wait()
"""


def test_checkpoints_in_a_bucket_reach_a_machine_without_the_disk_of_the_lost_one(lab, undisturbed):
    settings = {
        "AWS_ENDPOINT_URL": "http://10.77.0.10:5555", "AWS_ACCESS_KEY_ID": "someone", "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
    run = Training(lab(3), ("--heartbeat-timeout", 5), script="own_disk.py", arguments=("s3://lake/run",), env=settings)
    (run.lab.shared / "own_disk.py").write_text(OWN_DISK)
    server = run.lab.machines[0].start(["python", "-c", BUCKET], output=subprocess.PIPE)
    assert server.stdout is not None
    while server.stdout.readline() != b"ready\n":
        assert server.returncode is None
    first = run.start(0)
    run.start(1)
    run.wait_for_step(8)
    run.lab.machines[1].crash()
    run.ends_like(undisturbed, first, run.start(1, run.lab.machines[2]))


def test_checkpoints_on_a_disk_of_one_machine_are_named_with_the_machine_that_lacks_them(lab):
    run = Training(lab(2), script="own_disk.py")
    (run.lab.shared / "own_disk.py").write_text(OWN_DISK)
    commands = [run.start(0), run.start(1)]
    run.wait_for_step(8)
    commands[1].send_signal(signal.SIGKILL)
    commands[1].wait(END_S)
    commands[1] = run.start(1)
    assert [command.wait(END_S) for command in commands] == [1, 1], run.said()
    assert "rank 1 (m1) can't see this directory of rank 0, and can't load its checkpoints" in run.said()
    # The error of rank 1 itself, or what rank 0 heard of it: whichever came first.
    assert re.search(
        r"There is no checkpoint at /home/lab/run/checkpoints/epoch=\d-step=\d+\.ckpt\. This is so on m1\. Each "
        r"rank reads it\. Keep it on a disk that all machines share",
        run.said(),
    )


HOROVOD = """
import json, sys, time
from pathlib import Path

import torch
import footplate.compat.horovod as hvd

hvd.init()
directory, pause_s = Path(sys.argv[1]), float(sys.argv[2])
directory.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def train(state):
    print(f"begins at step {state.step}", flush=True)
    while state.step < 24:
        generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        inputs = torch.randn(6, 8, generator=generator)
        targets = torch.randint(0, 3, (6,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        state.step += 1
        with (directory / f"rank-{hvd.rank()}.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.step, "loss": float(loss.detach()).hex()}) + "\\n")
        if state.step % 5 == 0:
            state.commit()
        time.sleep(pause_s)


train(state)
"""


def test_a_horovod_program_goes_on_after_a_machine_has_lost_its_power(lab):
    run = Training(lab(2), ("--heartbeat-timeout", 5), script="horovod_train.py")
    (run.lab.shared / "horovod_train.py").write_text(HOROVOD)
    first, lost = run.start(0), run.lab.machines[1]
    run.start(1)
    run.wait_for_step(8)
    lost.crash()
    lost.boot("10.77.0.99")
    commands = [first, run.start(1)]
    assert [command.wait(END_S) for command in commands] == [0, 0], run.said()
    assert re.search(r"begins at step (5|10|15|20)\n", run.said())
    found = losses(run.lab.shared / "out")
    assert len(found) == 2 * 24
    assert all(len(values) == 1 for values in found.values())
