"""`Runner`: the number of processes, output, logs and results."""

from __future__ import annotations

import os
import signal
import tempfile
import textwrap
import threading
import time

import nbformat
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, loader
from nbclient import NotebookClient
from process_placement import ProcessPlacement
from torch import distributed as dist

import footplate as fp
from footplate.core.errors import ConfigError, LaunchError
from footplate.launch import backends, worker
from footplate.launch.backends import Cluster, Local, connected_cluster
from footplate.launch.local import LocalWorkerGroup
from footplate.launch.runner import choose, new_log_dir

NO_CLUSTER: dict[str, str] = {}


@pytest.fixture(autouse=True)
def temporary_logs(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))


class Six:
    """A cluster with six slots, whose workers run here."""

    name = "six"

    def slots(self):
        return 6

    def worker_group(self, payload_fd, environment, preload, world_size):
        return LocalWorkerGroup(payload_fd, environment, preload, keep=True)


def place(scale=1):
    return int(os.environ["RANK"]) * scale, int(os.environ["WORLD_SIZE"]) * scale


def speak():
    print("from", os.environ["RANK"])
    worker.log_to_driver(f"told by {os.environ['RANK']}")


@given(st.integers(-64, -1))
def test_a_negative_number_is_so_many_processes_here(np):
    assert choose(np, environ=NO_CLUSTER) == (Local(), -np)


@given(st.integers(1, 64))
def test_a_positive_number_is_so_many_workers_of_the_backend(np):
    six = Six()
    assert choose(np, six, environ=NO_CLUSTER) == (six, np)
    assert choose(np, "local", environ=NO_CLUSTER) == (Local(), np)


def test_zero_is_all_the_slots_there_are():
    six = Six()
    assert choose(0, six, environ=NO_CLUSTER) == (six, 6)
    assert choose(0, environ=NO_CLUSTER) == (Local(), Local().slots())
    assert Local().slots() >= 1


def test_one_process_needs_no_cluster():
    assert choose(1, environ=NO_CLUSTER) == (Local(), 1)


def test_several_workers_of_no_cluster_are_refused_with_both_ways_out():
    with pytest.raises(ConfigError, match=r'np=8: .*no active Spark session.*np=-8 or backend="local"; for a cluster'):
        choose(8, environ=NO_CLUSTER)


def test_a_ray_that_the_environment_names_is_found():
    assert connected_cluster({"RAY_ADDRESS": "10.0.0.1:6379"}) == "ray"
    assert connected_cluster({"RAY_ADDRESS": ""}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"np": 2.0}, r"np=2\.0: expected a whole number: -4 for four"),
        ({"np": True}, "np=True: expected a whole number"),
        ({"np": 2, "backend": "rai"}, r'backend="rai": .*Did you mean "ray"'),
        ({"np": 2, "backend": 3}, "backend=3: expected a name or a Backend"),
        ({"np": -2, "backend": "ray"}, "np=-2 with backend='ray': negative means processes of this machine. Use np=2"),
        ({"np": -2, "resources": {"num_gpus": 1}}, "local processes share the machine. Leave resources out"),
        ({"np": -2, "max_restarts": -1}, "max_restarts=-1"),
        ({"np": -2, "max_host_restarts": 1.5}, "max_host_restarts=1.5"),
        ({"np": -2, "heartbeat_timeout": 0}, "heartbeat_timeout=0"),
        ({"np": 2, "min_np": 3}, "min_np=3 with np=2: expected a number from 1 to np, on a cluster"),
        ({"np": 2, "min_np": 0}, "min_np=0 with np=2"),
        ({"np": -2, "min_np": 1}, "min_np=1 with np=-2"),
        ({"np": -2, "tls": True}, "np=-2 with tls=True: TLS is for connections to other machines"),
        ({"np": -2, "driver_log_verbosity": "al"}, r'driver_log_verbosity=\'al\': Did you mean "all"'),
    ],
)
def test_what_cannot_be_is_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        fp.Runner(**arguments)


def test_resources_of_local_processes_are_refused():
    with pytest.raises(ConfigError, match=r'resources=.*with backend="local"'):
        fp.Runner(2, backend="local", resources={"num_gpus": 1}).run(place)


def test_processes_of_this_machine_do_not_come_and_go():
    with pytest.raises(ConfigError, match="min_np=1: only the machines of ray and spark come and go"):
        fp.Runner(2, backend="local", min_np=1).run(place)


def test_tls_of_local_processes_and_of_a_backend_of_ones_own_is_refused():
    with pytest.raises(ConfigError, match="TLS is for connections to other machines"):
        fp.Runner(2, backend="local", tls=True).run(place)
    with pytest.raises(ConfigError, match="give tls to that backend"):
        fp.Runner(2, backend=Local(), tls=True).run(place)


def test_it_returns_what_rank_0_returned():
    assert fp.Runner(np=-2).run(place) == (0, 2)
    assert fp.Runner(np=2, backend="local").run(place, scale=10) == (0, 20)
    assert fp.Runner(np=1).run(place, 3) == (0, 3)


def test_an_argument_may_have_the_name_of_one_of_the_launchs():
    def train(world_size, name):
        return world_size, name

    assert fp.Runner(np=-1).run(train, world_size=7, name="mine") == (7, "mine")


def test_the_workers_get_the_variables_of_the_run():
    assert fp.Runner(np=-1, env={"GREETING": 1}).run(lambda: os.environ["GREETING"]) == "1"


def test_an_exception_comes_home_with_its_traceback_and_the_place_of_the_logs(tmp_path):
    def inner():
        raise KeyError("lost")

    def train():
        print("before it")
        inner()

    runner = fp.Runner(np=-2, max_restarts=0, log_dir=tmp_path)
    with pytest.raises(KeyError, match="lost") as raised:
        runner.run(train)
    traceback, logs = raised.value.__notes__
    assert "in inner" in traceback
    assert logs == f"Whole logs of all attempts: {runner.log_dir}"
    assert runner.log_dir == tmp_path / "train-1"
    assert (runner.log_dir / "attempt-0/rank-0.log").read_text().startswith("before it\n")


def test_each_run_has_logs_of_its_own(tmp_path):
    runner = fp.Runner(np=-1, log_dir=tmp_path)
    for number in (1, 2):
        runner.run(speak)
        assert (tmp_path / f"speak-{number}/attempt-0/rank-0.log").read_text() == "from 0\ntold by 0\n"


def test_temporary_logs_outlast_a_failure_but_not_the_next_run_or_the_runner_after_a_success():
    runner = fp.Runner(np=-1)
    runner.run(speak)
    first = runner.log_dir
    assert (first / "attempt-0/rank-0.log").read_text() == "from 0\ntold by 0\n"
    with pytest.raises(ZeroDivisionError):
        runner.run(lambda: print("wrong") or 1 / 0)
    failed = runner.log_dir
    assert not first.exists()
    runner.run(speak)
    last = runner.log_dir
    assert last.exists()
    del runner
    assert not last.exists()
    assert (failed / "attempt-0/rank-0.log").read_text().startswith("wrong\n")


def test_temporary_logs_of_a_success_end_with_the_process_but_not_with_one_forked_from_it(program):
    code, said = program("""
import footplate as fp, os
runner = fp.Runner(np=-1)
runner.run(print)
if os.fork() == 0:
    raise SystemExit
os.wait()
print(runner.log_dir.is_dir(), runner.log_dir)
""").end()
    assert code == 0, said
    there, place = said.split()[-2:]
    assert there == "True"
    assert not os.path.exists(place)  # noqa: PTH110


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", "/proc/logs"):
        with pytest.raises(ConfigError, match="can't make a directory there"):
            new_log_dir(place, "train")


def test_names_that_are_no_file_names_are_made_ones(tmp_path):
    assert new_log_dir(tmp_path, "<lambda>").name == "_lambda_-1"


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        ("all", ["[rank 0] from 0", "[rank 0] told by 0", "[rank 1] from 1", "[rank 1] told by 1"]),
        ("rank_0", ["[rank 1] told by 1", "from 0", "told by 0"]),
        ("log_callback_only", ["[rank 0] told by 0", "[rank 1] told by 1"]),
    ],
)
def test_what_is_shown_is_chosen(verbosity, shown, capsys):
    fp.Runner(np=-2, driver_log_verbosity=verbosity).run(speak)
    assert sorted(capsys.readouterr().out.splitlines()) == shown


def test_outside_a_run_a_message_to_the_driver_is_printed(capsys):
    worker.log_to_driver("one\ntwo")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_losses_of_a_machine_have_a_budget_of_their_own(tmp_path):
    def work():
        (tmp_path / str(worker.attempt())).touch()
        os.kill(os.getppid(), signal.SIGKILL)  # what starts processes here
        time.sleep(60)

    with pytest.raises(LaunchError, match=r"all ranks were lost.*\(max_host_restarts=1 is used up\)"):
        fp.Runner(np=-1, max_restarts=0, max_host_restarts=1).run(work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_run_inside_a_run_is_refused():
    with pytest.raises(
        LaunchError, match=r"Runner\(np=-2\) in rank \d of 2: each rank would start processes of its own"
    ):
        fp.Runner(np=-2).run(lambda: fp.Runner(np=-2).run(place))


def test_a_run_in_one_of_torchruns_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LaunchError, match="in rank 1 of 2"):
        fp.Runner(np=-2).run(place)


def test_a_trainer_in_a_worker_finds_its_world_and_trains(tmp_path):
    def train(lr):
        class Line(fp.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch, batch_idx):
                loss = (self.layer(batch[0]) - batch[0]).square().mean()
                self.log("loss", loss, on_step=False, on_epoch=True)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=lr)

        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2)
        trainer = fp.Trainer(
            accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Line(), data)
        seen = [None] * 2
        dist.all_gather_object(seen, (trainer.global_rank, trainer.world_size, trainer.global_step))
        return seen, float(trainer.callback_metrics["loss"])

    seen, loss = fp.Runner(np=-2).run(train, lr=0.1)
    assert seen == [(0, 2, 4), (1, 2, 4)]
    assert 0 <= loss < 10


def test_a_trainer_of_several_nodes_trains_on_the_cluster_that_is_found(tmp_path, monkeypatch):
    placement = ProcessPlacement(["a", "b"])
    monkeypatch.setattr(backends, "connected_cluster", lambda: "processes")
    monkeypatch.setattr(backends, "named", lambda name, resources: Cluster(placement))
    model = Classifier()
    before = model.net[0].weight.clone()
    trainer = fp.Trainer(
        accelerator="cpu", num_nodes=2, devices=1, max_epochs=1, default_root_dir=tmp_path, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader(batch_size=5))
    assert len(placement.started) == 1
    assert trainer.global_step > 0
    assert not torch.equal(model.net[0].weight, before)


def test_it_runs_from_a_script_without_a_guard(program):
    script = program("""
import footplate as fp, os
def train(scale):
    return scale * int(os.environ["WORLD_SIZE"])
print(fp.Runner(np=-2).run(train, scale=21))
""")
    assert script.end() == (0, "42\n")


def test_ctrl_c_ends_all_workers(program):
    script = program("""
import footplate as fp, time
def train():
    print("there", flush=True)
    time.sleep(60)
try:
    fp.Runner(np=-2).run(train)
except KeyboardInterrupt:
    print("interrupted")
""")
    script.read_until("[rank 0] there", "[rank 1] there")
    script.process.send_signal(signal.SIGINT)
    code, rest = script.end()
    assert code == 0
    assert rest.endswith("interrupted\n")


@pytest.mark.slow
def test_it_runs_in_a_notebook_with_functions_and_classes_of_its_cells(tmp_path):
    cells = [
        "import os\nimport footplate as fp",
        """
        class Answer:
            def __init__(self, value):
                self.value = value

        def train(factor):
            print("trains")
            return Answer(factor * int(os.environ["WORLD_SIZE"]))
        """,
        """
        answer = fp.Runner(np=-2).run(train, factor=21)
        print(type(answer) is Answer, answer.value)
        """,
        "print(fp.Runner(np=-2, driver_log_verbosity='rank_0').run(lambda: os.getppid()) > 0)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = ["".join(out.get("text", "") for out in cell.outputs) for cell in book.cells]
    assert sorted(texts[2].splitlines()) == ["True 42", "[rank 0] trains", "[rank 1] trains"]
    assert texts[3] == "True\n"


def test_launching_from_a_thread_works_too():
    results = []
    thread = threading.Thread(target=lambda: results.append(fp.Runner(np=-1).run(place)))
    thread.start()
    thread.join(60)
    assert results == [(0, 1)]
