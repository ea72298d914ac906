"""`footplate run`: scripts written for torchrun, unchanged."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import template
import torch
from ports import free_port

from footplate.cli.run import split
from footplate.launch.rendezvous import task_environment

DDP = """
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save", default="model.pt")
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    print(f"rank {rank} of {dist.get_world_size()} on device {os.environ['LOCAL_RANK']} has trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

SNAPSHOTS = """
import os
import signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, first = dist.get_rank(), 0
total = torch.zeros(1)
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    first, total = snapshot["epoch"], snapshot["total"]
    print(f"continues at {first}")
for epoch in range(first, 6):
    share = torch.tensor([float(epoch * (rank + 1))])
    dist.all_reduce(share)
    total += share
    if rank == 0:
        torch.save({"epoch": epoch + 1, "total": total}, "snapshot.tmp")
        os.replace("snapshot.tmp", "snapshot.pt")
    dist.barrier()
    if epoch == 3 and first == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print("total", total.item())
"""

LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class LitNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(0)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(LitNet(), data)
    print("RESULT", trainer.global_rank, trainer.world_size, trainer.global_step)
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print("RESULT", accelerator.process_index, accelerator.num_processes, len(loader), seen)
accelerator.end_training()
"""


@pytest.fixture(autouse=True)
def temporary_logs(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def whole_torchvision(tmp_path, monkeypatch):
    """Declare torchvision's missing operators in new interpreters on CPU torch (see tests/models)."""
    (tmp_path / "site").mkdir()
    tests = str(Path(__file__).parent.parent)
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nsys.path.append({tests!r})\nimport models\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def results(out: str) -> list[str]:
    return sorted(line.partition("RESULT ")[2] for line in out.splitlines() if "RESULT" in line)


@pytest.mark.slow
def test_a_plain_ddp_script_does_what_it_does_under_torchrun(footplate, script, tmp_path):
    path = script(DDP)
    result = footplate("run", "--np", "2", path, "--", "--epochs", "2", "--save", tmp_path / "ours.pt")
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == [
        "[rank 0] rank 0 of 2 on device 0 has trained",
        "[rank 1] rank 1 of 2 on device 1 has trained",
    ]
    command = ["torch.distributed.run", "--nproc-per-node=2", path, "--epochs=2", f"--save={tmp_path / 'its.pt'}"]
    torchrun = template.Popen([sys.executable, "-m", *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert torchrun.wait(timeout=120) == 0
    ours, its = (torch.load(tmp_path / name) for name in ("ours.pt", "its.pt"))
    assert all(torch.equal(ours[name], its[name]) for name in its)


@pytest.mark.slow
def test_a_lightning_script_nobody_adapted(footplate, script, whole_torchvision):
    result = footplate("run", "--np", "2", script(LIGHTNING))
    assert result.code == 0, result.err
    assert results(result.out) == ["0 2 8", "1 2 8"]


@pytest.mark.slow
def test_an_accelerate_script_nobody_adapted(footplate, script):
    result = footplate("run", "--np", "2", script(ACCELERATE))
    assert result.code == 0, result.err
    assert results(result.out) == ["0 2 4 [0, 1]", "1 2 4 [0, 1]"]


def test_a_script_whose_process_is_killed_continues_from_its_snapshot(footplate, script, tmp_path, monkeypatch):
    path = script(SNAPSHOTS)
    monkeypatch.chdir(tmp_path)
    result = footplate("run", "--np", "2", "--log-dir", "logs", path)
    assert result.code == 0, result.err
    assert "[rank 0] continues at 4" in result.out
    assert "[rank 0] total 45.0" in result.out
    logs = tmp_path / "logs" / "train-1"
    assert {path.relative_to(logs).as_posix() for path in logs.glob("*/*")} == {
        f"attempt-{attempt}/rank-{rank}.log" for attempt in (0, 1) for rank in (0, 1)
    }


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('of rank 1')", 1, "ValueError: of rank 1"),
        ("sys.exit(5)", 5, "rank 1 ended with exit code 5"),
        ("sys.exit('a message')", 1, "a message"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(footplate, script, end, code, said):
    path = script(f"import os, sys\nif os.environ['RANK'] == '1':\n    {end}\n")
    result = footplate("run", "--np", "2", "--max-restarts", "0", path)
    assert result.code == code
    assert said in result.err
    assert ("Whole logs of all attempts: " in result.err) == (code != 0)
    assert any(Path(tempfile.gettempdir()).glob("footplate-train-*")) == (code != 0)


def test_a_traceback_is_that_of_the_script_alone(footplate, script):
    path = script("def inner():\n    raise KeyError('lost')\ninner()\n")
    result = footplate("run", "--max-restarts=0", path)
    frames = [line for line in result.err.splitlines() if line.startswith("  File ")]
    assert frames == [f'  File "{path}", line 3, in <module>', f'  File "{path}", line 2, in inner']


def test_a_mistake_of_the_script_is_tried_again_once(footplate, script, tmp_path):
    attempts = tmp_path / "attempts"
    result = footplate("run", script(f"print(1, file=open({str(attempts)!r}, 'a'))\nprint(len(3))\n"))
    assert result.code == 1
    assert "TypeError: object of type 'int' has no len()" in result.err
    assert "in attempt 1 (as in the attempt before it, with no progress in between" in result.err
    assert attempts.read_text() == "1\n1\n"


def test_a_mistake_that_footplate_finds_in_a_script_is_not_tried_again(footplate, script):
    result = footplate("run", script("import footplate as fp\nfp.Runner(np='four')\n"))
    assert result.code == 1
    assert "np='four': expected a whole number" in result.err
    assert "attempt 1 starts" not in result.err


def test_a_script_has_the_place_and_the_arguments_of_a_program(footplate, script, tmp_path):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    path = script("import beside, json, sys\nprint(json.dumps([__name__, __file__, sys.argv, beside.answer]))\n")
    result = footplate("run", "--show", "rank_0", path, "--", "--lr", "1", "-m", "x")
    assert json.loads(result.out) == ["__main__", path, [path, "--lr", "1", "-m", "x"], 42]


def test_a_module_is_run_as_with_python_m(footplate, tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    (tmp_path / "trainer" / "other.py").write_text("answer = 42\n")
    (tmp_path / "trainer" / "task.py").write_text(
        "import sys\nfrom .other import answer\nprint(__name__, answer, sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    result = footplate("run", "--show", "rank_0", "-m", "trainer.task", "--lr", "1")
    assert result.out == "__main__ 42 ['--lr', '1']\n"


def test_each_task_finds_the_cluster_and_its_role(footplate, script):
    path = script("""
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR TF_CONFIG CLUSTER_SPEC".split()
print("\\n".join(os.environ[name] for name in names))
assert int(os.environ["MASTER_PORT"])
""")
    result = footplate("run", "--np", "3", path)
    assert result.code == 0, result.err
    addresses = None
    for rank in range(3):
        before = f"[rank {rank}] "
        lines = [line.removeprefix(before) for line in result.out.splitlines() if line.startswith(before)]
        assert lines[:7] == [str(rank), str(rank), "3", "3", "0", "0", "127.0.0.1"]
        config, spec = map(json.loads, lines[7:])
        (chief,), workers = config["cluster"]["chief"], config["cluster"]["worker"]
        addresses = addresses or [chief, *workers]
        assert [chief, *workers] == addresses  # the same for all
        assert len({*addresses}) == 3
        assert spec["cluster"] == {"workerpool0": [chief], "workerpool1": workers}
        place = ("chief", 0) if rank == 0 else ("worker", rank - 1)
        assert tuple(config["task"].values()) == place
        assert spec["task"]["index"] == place[1]


def test_a_single_task_is_the_chief_and_unknown_addresses_are_left_out():
    alone = task_environment(["a:1"], 0)
    assert json.loads(alone["TF_CONFIG"]) == {"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}
    assert task_environment([], 0) == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_passed_to_the_script(forked, script, number, code):
    path = script("""
import os, signal, sys, time
def save(number, frame):
    os.write(1, f"saved by {os.environ['RANK']}\\n".encode())
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
print("there", flush=True)
time.sleep(60)
""")
    running = forked("run", "--np", "2", path)
    assert {running.stdout.readline(), running.stdout.readline()} == {"[rank 0] there\n", "[rank 1] there\n"}
    running.send_signal(number)
    out, err = running.communicate(timeout=120)
    assert sorted(out.splitlines()) == ["[rank 0] saved by 0", "[rank 1] saved by 1"]
    assert running.returncode == code
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected a script, or -m and the name of a module"),
        (["nowhere.py"], "nowhere.py: there is no such script in"),
        (["-m", "no_such_module.task"], "-m no_such_module.task: there is no module of this name"),
        (["--np", "two", "flowers.py"], 'np="two": expected an integer'),
        (["--max-restart", "2", "flowers.py"], "--max-restart"),
        (["--np", "-2", "--backend", "ray", "flowers.py"], "negative means processes of this machine"),
        (["--max-restarts", "-1", "flowers.py"], "max_restarts=-1"),
        (["--tls", "--np", "-2", "flowers.py"], "np=-2 with tls=True: TLS is for connections to other machines"),
        (["--min-np", "1", "--np", "2", "flowers.py"], "min_np=1: only the machines of ray and spark come and go"),
        (["--min-np", "1", "--nnodes", "2", "--np", "2", "flowers.py"], "write --nnodes MIN:2 instead"),
        (["--tls", "--np", "2", "flowers.py"], "TLS is for connections to other machines, and there are none"),
        (["--nnodes", "3:2", "--np", "3", "flowers.py"], "--nnodes: '3:2': expected a number of machines"),
        (["--nnodes", "0", "--np", "3", "flowers.py"], "--nnodes: '0': expected a number of machines"),
        (["--nnodes", "1:", "--np", "3", "flowers.py"], "--nnodes: '1:': expected a number of machines"),
        (["--nnodes", "2", "--np", "3", "flowers.py"], "expected the same number of processes on each machine"),
        (["--nnodes", "2", "--np", "4", "--node-rank", "2", "flowers.py"], "expected ranks from 0 to nnodes - 1"),
        (["--nnodes", "2", "--np", "4", "flowers.py"], "needs --master-addr"),
        (["--nnodes", "2", "--np", "4", "--backend", "ray", "flowers.py"], "Leave one of them out."),
    ],
)
def test_a_mistake_is_one_message(footplate, argv, message):
    result = footplate("run", *argv)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_the_scripts_arguments_are_never_taken_for_ours():
    assert split(["--np=2", "train.py", "--np", "9"]) == (["--np=2", "train.py"], ["--np", "9"])
    assert split(["--help"]) == (["--help"], [])
    assert split(["train.py", "--", "--", "a"]) == (["train.py"], ["--", "a"])
    assert split(["--module=pkg.task", "a"]) == (["--module=pkg.task"], ["a"])


MACHINES = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "FOOTPLATE_ATTEMPT")]
print("there", *place, int(total), flush=True)
if "wait" in sys.argv and os.environ["FOOTPLATE_ATTEMPT"] == "0":
    time.sleep(60)
"""


@pytest.fixture
def machine(forked):
    """A function that returns the command for one of several machines; this machine plays them all."""
    port = str(free_port())
    started = []

    def start(node, *argv, token="secret-of-these-machines", nnodes="2", np=4):
        common = ("run", "--nnodes", nnodes, "--np", np, "--master-addr", "127.0.0.1", "--master-port", port)
        started.append(forked(*common, "--node-rank", node, *argv, FOOTPLATE_TOKEN=token))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_two_machines_meet_without_a_clusters_engine(machine, script):
    path = script(MACHINES)
    other, first = machine(1, "--tls", path), machine(0, "--tls", path)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert sorted(line.partition("there ")[2] for line in out.splitlines()) == [
        "0 0 2 0 0 4", "1 1 2 0 0 4", "2 0 2 1 0 4", "3 1 2 1 0 4",
    ]  # fmt: skip
    assert other.wait(60) == 0


@pytest.mark.slow
def test_a_machine_that_is_lost_is_replaced_by_another_that_gives_the_command(machine, script):
    path = script(MACHINES)
    first, other = machine(0, path, "wait"), machine(1, path, "wait")
    assert {first.stdout.readline().split()[3] for _ in range(4)} == {"0", "1", "2", "3"}
    other.kill()
    again = machine(1, path, "wait")
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert "(restart 1 of 10)" in err
    assert sorted(line.partition("there ")[2] for line in out.splitlines()) == [
        "0 0 2 0 1 4", "1 1 2 0 1 4", "2 0 2 1 1 4", "3 1 2 1 1 4",
    ]  # fmt: skip
    assert again.wait(60) == 0


@pytest.mark.slow
def test_sigterm_on_any_machine_reaches_all_ranks_and_ends_all_machines_with_143(machine, script):
    path = script(
        MACHINES.replace(
            "import os, sys, time",
            """
import os, signal, sys, time
def save(number, frame):
    os.write(1, f"saved by {os.environ['RANK']}\\n".encode())
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
""",
        )
    )
    first, other = machine(0, path, "wait"), machine(1, path, "wait")
    assert {first.stdout.readline().split()[3] for _ in range(4)} == {"0", "1", "2", "3"}
    other.terminate()
    out, err = first.communicate(timeout=120)
    assert (first.returncode, other.wait(60)) == (143, 143), err
    assert {line.partition("saved by ")[2] for line in out.splitlines()} == {"0", "1", "2", "3"}


ELASTIC = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from footplate.launch import worker
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
dist.init_process_group("gloo")
if os.environ["RANK"] == "0":
    print("ranks:", dist.get_world_size(), "attempt:", os.environ["FOOTPLATE_ATTEMPT"], flush=True)
done = torch.zeros(1)
while not done:
    time.sleep(0.05)
    worker.progressed()
    worker.saved()
    done[0] = os.path.exists(sys.argv[1])
    dist.all_reduce(done)
"""


@pytest.mark.slow
def test_machines_leave_and_join_a_run_that_needs_fewer(machine, script, tmp_path):
    path, end = script(ELASTIC), tmp_path / "end"
    several = {"nnodes": "2:3", "np": 3}
    first, second, third = (machine(node, path, end, **several) for node in range(3))

    def said() -> list[str]:
        return first.stdout.readline().partition("ranks: ")[2].split()

    assert said() == ["3", "attempt:", "0"]
    third.kill()
    assert said() == ["2", "attempt:", "1"]
    third = machine(2, path, end, **several)
    assert said() == ["3", "attempt:", "2"]
    third.terminate()
    assert said() == ["2", "attempt:", "3"]
    assert third.wait(60) == 143
    end.touch()
    _, err = first.communicate(timeout=120)
    assert (first.returncode, second.wait(60)) == (0, 0), err
    # Only the machine that was lost without a word costs a restart.
    assert re.findall(r"restart \d of \d+", err) == ["restart 1 of 10"]
    assert "machine 2 has joined: it takes part from the next checkpoint on" in err


HOROVOD = """
import os, sys, time
import torch
import footplate.compat.horovod as hvd
hvd.init()
state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, counts=[])

@hvd.elastic.run
def train(state):
    # How many ranks took part in each step.
    while not hvd.allreduce(torch.tensor(float(os.path.exists(sys.argv[1]))), name="end", op=hvd.Sum):
        time.sleep(0.05)
        state.counts = [*state.counts, int(hvd.allreduce(torch.ones(1), name="count", op=hvd.Sum))]
        if hvd.rank() == 0 and state.counts[-2:-1] != state.counts[-1:]:
            print("ranks:", state.counts[-1], flush=True)
        state.commit()
    return state.counts

counts = train(state)
if hvd.rank() == 0:
    print("steps:", [counts[i] for i in range(len(counts)) if i == 0 or counts[i - 1] != counts[i]], flush=True)
"""


@pytest.mark.slow
def test_a_script_of_horovods_goes_on_from_the_last_commit_when_machines_leave_and_join(machine, script, tmp_path):
    path, end = script(HOROVOD), tmp_path / "end"
    first, second = (machine(node, path, end, nnodes="1:2", np=2) for node in range(2))

    def said(word: str) -> str:
        line = first.stdout.readline()
        while line and word not in line:
            line = first.stdout.readline()
        return line.partition(word)[2].strip()

    assert said("ranks: ") == "2"
    second.kill()
    assert said("ranks: ") == "1"
    second = machine(1, path, end, nnodes="1:2", np=2)
    assert said("ranks: ") == "2"
    end.touch()
    # No step was lost, or done twice.
    assert said("steps: ") == "[2, 1, 2]"
    _, err = first.communicate(timeout=120)
    assert (first.returncode, second.wait(60)) == (0, 0), err


@pytest.mark.slow
def test_a_script_that_fails_ends_all_machines_with_its_exit_code(machine, script):
    path = script("import os, sys\nsys.exit(5 if os.environ['RANK'] == '3' else 0)\n")
    first, other = machine(0, "--max-restarts=0", path), machine(1, "--max-restarts=0", path)
    _, err = first.communicate(timeout=120)
    assert (first.returncode, other.wait(60)) == (5, 5), err


def test_a_machine_that_does_not_know_the_token_is_refused(machine, script):
    path = script(MACHINES)
    first, other = machine(0, path), machine(1, path, token="another-secret-than-theirs")
    _, err = other.communicate(timeout=120)
    assert other.returncode == 2
    assert "refused this machine" in err
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 130
    assert "it doesn't know FOOTPLATE_TOKEN" in err


def test_a_port_that_is_taken_is_said_so(forked, script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("--master-addr", "127.0.0.1", "--master-port", taken.getsockname()[1])
        process = forked(
            "run", "--nnodes", "2", "--np", "2", *address, script(MACHINES), FOOTPLATE_TOKEN="secret-of-these-machines"
        )
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "this process can't listen there" in err
    assert "a port that is free" in err
