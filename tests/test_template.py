"""Programs and fork servers in forks of the template are like those in fresh interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import template

from footplate.launch import fork_server_pool, launch

pytestmark = pytest.mark.slow
TORCH = ("torch",)


@pytest.fixture(autouse=True)
def no_fork_servers():
    """Tests of launches begin with an empty pool, and leave none of their fork servers there."""
    fork_server_pool.end_all()
    yield
    fork_server_pool.end_all()


def ended(*arguments: str, **settings: object) -> tuple[int, str, str]:
    """Run a program to its end. Return its exit status, its output and its errors."""
    process = template.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_program_has_its_own_arguments_directory_environment_and_input(tmp_path: Path):
    program = "import os, sys; print(__name__, sys.argv, os.getcwd(), dict(os.environ), sys.stdin.read(), os.getppid())"
    process = template.Popen(
        [sys.executable, "-c", program, "a", "b c"],
        cwd=tmp_path, env={"OF_THIS_TEST": "yes"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate("the input", timeout=120)
    assert out == f"__main__ ['-c', 'a', 'b c'] {tmp_path} {{'OF_THIS_TEST': 'yes'}} the input {os.getpid()}\n"


def test_a_module_and_a_script_run_as_the_main_program(tmp_path: Path):
    (tmp_path / "beside.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert ended("-m", "beside", "x", cwd=tmp_path) == (0, "__main__ ['x']\n", "")
    assert ended(str(tmp_path / "beside.py"), "x") == (0, "__main__ ['x']\n", "")


def test_exit_statuses_tracebacks_and_signals_are_those_of_the_program():
    assert ended("-c", "import atexit, sys; atexit.register(print, 'the end'); sys.exit(3)") == (3, "the end\n", "")
    code, _, errors = ended("-c", "raise ValueError('wrong')")
    assert (code, errors.splitlines()[-1]) == (1, "ValueError: wrong")
    assert ended("-c", "import os; os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
    sleeping = template.Popen(
        [sys.executable, "-c", "import time; print('there', flush=True); time.sleep(60)"], stdout=-1
    )
    assert sleeping.stdout.readline() == b"there\n"
    sleeping.send_signal(signal.SIGINT)
    assert sleeping.wait(60) == -signal.SIGINT
    sleeping.stdout.close()


def test_the_names_and_threads_of_one_program_are_not_in_the_next():
    assert ended("-c", "import torch; torch.left = 1; torch.set_num_threads(2)")[0] == 0
    program = "import threading, torch; print(hasattr(torch, 'left'), threading.active_count())"
    assert ended("-c", program) == (0, "False 1\n", "")


def test_a_script_that_is_run_has_its_packages_directory_and_arguments(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(sys.argv[1:], sys.path[0], os.getcwd(), 'lightning' in sys.modules); sys.exit(3)"
    )
    done = template.run(script, "a", 2, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"['a', '2'] {tmp_path} {tmp_path} True\n", "")


def test_a_script_that_takes_too_long_is_killed_with_its_processes(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import os, time; os.fork(); open(f'{os.getpid()}.pid', 'w').close(); time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 10"):
        template.run(script, cwd=tmp_path, packages=template.PACKAGES, timeout_s=10.0)
    processes = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(processes) == 2
    deadline = time.monotonic() + 60
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_fork_server_with_torch_is_a_fork_and_a_child_of_this_process():
    server, imported = launch(lambda: (os.getppid(), "torch" in sys.modules), world_size=1, preload=TORCH)
    assert imported
    process = psutil.Process(server)
    assert process.ppid() == os.getpid()
    assert process.cmdline() == psutil.Process(template.template().pid).cmdline()
    fork_server_pool.end_all()
    assert not psutil.pid_exists(server)


def test_a_template_that_starts_late_has_the_variables_of_the_beginning(monkeypatch):
    monkeypatch.setattr(template, "_templates", {})
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "2")
        template.template()
    server = launch(os.getppid, world_size=1, preload=TORCH)
    assert psutil.Process(server).cmdline() == psutil.Process(template.template().pid).cmdline()


def test_a_fork_server_that_preloads_nothing_or_reads_other_variables_is_a_fresh_interpreter(monkeypatch):
    def of_template(**settings) -> bool:
        server = launch(os.getppid, world_size=1, **settings)
        return psutil.Process(server).cmdline() == psutil.Process(template.template().pid).cmdline()

    assert of_template(preload=TORCH)
    assert not of_template(preload=())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not of_template(preload=TORCH)


def test_the_fork_servers_of_a_program_in_a_fork_are_forks_and_end_with_it():
    program = """
import os, time
from footplate.launch import launch
print(os.getpid(), launch(os.getppid, world_size=1, preload=("torch",)), flush=True)
time.sleep(60)
"""
    process = template.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    launcher, server = map(int, process.stdout.readline().split())
    assert process.pid == launcher
    assert psutil.Process(server).ppid() == launcher
    assert psutil.Process(server).cmdline() == psutil.Process(template.template().pid).cmdline()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(server):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    """Return True if a process runs. A zombie doesn't."""
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
