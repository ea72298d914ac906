"""A function in several processes: its arguments, its environment, and its result."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch
from torch import distributed as dist

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch import launch, worker


def test_rank_0s_result_comes_home():
    assert launch(lambda a, b: (int(os.environ["RANK"]), a + b), 3, 4, world_size=2) == (0, 7)


def test_the_ranks_meet_through_plain_init_process_group():
    def work():
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        return total.item(), dist.get_world_size()

    assert launch(work, world_size=3) == (6, 3)


def test_a_function_without_torch_runs_without_it_in_all_attempts(quick):
    def work():
        assert "torch" not in sys.modules
        if worker.attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return worker.attempt()

    assert launch(work, world_size=2, restarts=quick, preload=()) == 1


def test_the_ranks_meet_although_none_has_preloaded_torch_and_one_is_early(tmp_path):
    """Rank 0 imports torch in one thread only. Two that import it at once wait for each other, and one import fails."""

    def work():
        if os.environ["RANK"] == "0":
            (tmp_path / "imports").touch()
        else:
            while not (tmp_path / "imports").exists():
                time.sleep(0.01)
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        from torch import distributed

        distributed.init_process_group("gloo")
        distributed.barrier()
        if distributed.get_rank() == 1:
            # Rank 0 has the store, and may have returned.
            distributed.distributed_c10d._get_default_store().set("late", "still there")
        return distributed.get_world_size()

    assert launch(work, world_size=2, preload=()) == 2


def test_a_worker_finds_its_place_in_the_environment():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FOOTPLATE_ATTEMPT", "GREETING")

    def work():
        dist.init_process_group("gloo")
        seen = [None] * 2
        dist.all_gather_object(seen, [os.environ[name] for name in names])
        return seen, int(os.environ["MASTER_PORT"]) > 0

    seen, has_port = launch(work, world_size=2, env={"GREETING": "hello"})
    assert seen == [["0", "2", "0", "2", "127.0.0.1", "0", "hello"], ["1", "2", "1", "2", "127.0.0.1", "0", "hello"]]
    assert has_port
    assert "GREETING" not in os.environ


def test_a_worker_finds_modules_by_the_callers_names_of_folders(tmp_path, monkeypatch):
    """A folder of packages may be behind a symbolic link. Its modules aren't the user's own ones then."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "linked_module.py").touch()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.syspath_prepend(tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def work():
        import linked_module

        return linked_module.__file__, sys.path[0]

    assert launch(work, world_size=1, preload=()) == (str(tmp_path / "link" / "linked_module.py"), str(tmp_path))


def test_a_large_result_and_much_output_come_home(capsys):
    def work():
        for number in range(20_000):
            print("a line of some length", number)
        return torch.arange(25_000_000)

    assert torch.equal(launch(work, world_size=1), torch.arange(25_000_000))
    assert capsys.readouterr().out.count("\n") == 20_000


def test_an_instance_of_the_callers_class_comes_home_as_one():
    class Answer:
        def __init__(self, value):
            self.value = value

    answer = launch(lambda given: Answer(given.value + 1), Answer(1), world_size=1)
    assert isinstance(answer, Answer)
    assert answer.value == 2


def test_only_rank_0s_result_needs_to_be_picklable():
    assert launch(lambda: threading.Lock() if os.environ["RANK"] == "1" else "fine", world_size=2) == "fine"


def test_a_result_that_cannot_be_pickled_is_said_so_and_not_tried_again():
    with pytest.raises(LaunchError, match=r"result of the function, a generator, can't be sent back.*numbers, tensors"):
        launch(lambda: (value for value in ()), world_size=1)


def test_an_argument_that_cannot_be_pickled_is_said_so():
    with pytest.raises(LaunchError, match=r"can't be sent to worker processes.*make them where they are used"):
        launch(print, threading.Lock(), world_size=1)


def test_an_argument_that_cannot_be_loaded_is_said_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fleeting.py").write_text("def work(): pass\n")
    import fleeting

    (tmp_path / "fleeting.py").unlink()
    with pytest.raises(LaunchError, match="No module named 'fleeting'"):
        launch(fleeting.work, world_size=1)


def test_a_module_that_cannot_be_preloaded_is_said_so():
    with pytest.raises(LaunchError, match=r"can't import what it needs \(no_such_module\)"):
        launch(print, world_size=1, preload=["no_such_module"])


def test_a_function_that_leaves_without_a_result_is_said_so(said):
    assert launch(sys.exit, world_size=1) is None
    assert "rank 0 ended with SystemExit(0) before its function returned" in said.text


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_of_none_is_refused(size):
    with pytest.raises(ConfigError, match=f"world_size={size}"):
        launch(print, world_size=size)


def test_it_runs_in_another_thread_and_sets_no_handlers_there():
    results = []
    thread = threading.Thread(target=lambda: results.append(launch(lambda: "done", world_size=2)))
    thread.start()
    thread.join(120)
    assert results == ["done"]


def test_rank_0_holds_the_store_until_all_have_reported():
    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(0.5)
            store = dist.distributed_c10d._get_default_store()
            store.set("late", "still there")
        return "done"

    assert launch(work, world_size=2) == "done"


def test_exit_handlers_run_and_threads_are_joined(tmp_path):
    def work():
        import atexit

        atexit.register((tmp_path / "handler").touch)
        threading.Thread(target=lambda: (time.sleep(0.2), (tmp_path / "thread").touch())).start()

    launch(work, world_size=1)
    assert {path.name for path in tmp_path.iterdir()} == {"handler", "thread"}


def test_ranks_do_not_draw_the_same_random_numbers():
    def work():
        import random

        import numpy as np

        dist.init_process_group("gloo")
        seen = [None] * 2
        dist.all_gather_object(seen, (random.random(), np.random.rand()))
        return seen

    (a, b), (c, d) = launch(work, world_size=2)
    assert a != c
    assert b != d


def test_loader_processes_work_in_a_worker():
    def work():
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        return sum(batch[0].sum().item() for batch in torch.utils.data.DataLoader(data, num_workers=2))

    assert launch(work, world_size=2) == 28.0


def test_outside_a_launch_the_worker_functions_are_harmless(monkeypatch):
    for name in ("FOOTPLATE_ATTEMPT", "FOOTPLATE_SLOT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    worker.progressed()
    assert (worker.attempt(), worker.slot()) == (0, 0)
    monkeypatch.setenv("LOCAL_RANK", "3")  # torchrun's
    assert worker.slot() == 3


def test_a_script_needs_no_guard_and_is_not_run_again(program):
    script = program("""
import os, sys
print("the script runs")
from footplate.launch import launch
class Box:
    pass
def work(box):
    return type(box) is Box, os.environ["WORLD_SIZE"]
result = launch(work, Box(), world_size=2, preload=())
assert result == (True, "2"), result
""")
    assert script.end() == (0, "the script runs\n")
