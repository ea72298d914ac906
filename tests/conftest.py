"""Settings and fixtures of all tests: one thread, fixed seeds, the schedule of xdist, and quiet trainers.

A failed test's report ends with the command that repeats it. Each test starts with the same seeds (`--seed`), so that its
random numbers don't depend on the tests before it.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import durations
import models  # noqa: F401  declares the operators that torchvision misses on CPU torch
import numpy as np
import passed
import pytest
import scheduling
import slurm_cluster
import spark_home
import template
import torch
from hypothesis import settings

import footplate as fp

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]  # see tests/gpu/test_cuda.py

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process that compiles starts others
# Else hundreds of processes would compile Footplate again: programs, and forks of this process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first `python3` of PATH
os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark"))
if (home := spark_home.spark_home()) is not None:
    os.environ.setdefault("SPARK_HOME", str(home))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that run for milliseconds aren't worth LLVM's optimizations, which take a third of the time of XLA's tests. The
# processes of tests/step/xla/test_trainer_processes.py optimize as usual.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # else Ray kills its own when others here use the memory
torch.set_num_threads(1)
template.install()
template.install_for_uploaders()

# The same examples each time, so that the suite fails because of a change, not by chance. `make fuzz` draws others.
settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fuzz", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("suite")


MANY_MODULES = 200
_frozen_modules = 0


class Loggers(dict[str, Any]):
    """All loggers. Pytest iterates over them at each test, while threads of another test may add loggers."""

    def values(self) -> Any:
        return list(super().values())


logging.Logger.manager.loggerDict = Loggers(logging.Logger.manager.loggerDict)
logging.getLogger("torch.__trace").addFilter(lambda record: False)  # thousands of lines in the report of a failed test
signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit it ignored from a suite in the background


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that take at most a second and start no server")
    parser.addoption("--seed", type=int, default=1, help="seed of the random numbers of each test")
    parser.addoption("--accelerator", default="cpu", help="accelerator of the trainers that tests ask for")
    parser.addoption("--record-durations", action="store_true", help="record which tests take more than a second")
    parser.addoption("--record-passed", action="store_true", help="record how many tests of a file pass, and on what")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--record-durations"):
        config.pluginmanager.register(durations.Recorder())
    if config.getoption("--record-passed"):
        if (reason := passed.why_not(config)) is not None:
            raise pytest.UsageError(reason)
        config.pluginmanager.register(passed.Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        durations.only_fast(config, items)
    if hasattr(config, "workerinput"):
        scheduling.longest_first(items)


def pytest_collection_finish() -> None:
    freeze_imports()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Do so again after a test that has imported a large library, such as JAX or MLflow."""
    if len(sys.modules) - _frozen_modules > MANY_MODULES:
        freeze_imports()


def freeze_imports() -> None:
    """Leave all that imports have made out of later garbage collections, which take up to a second each with it."""
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    if not torch.cuda.is_available():  # a fork can't use CUDA once a library has begun to
        template.install_for_xdist()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.GroupScheduling:
    return scheduling.GroupScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the command that repeats a failed test to its report."""
    report: Any = yield
    if report.failed:
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        command = f"python -m pytest {shlex.quote(item.nodeid)} --seed {item.config.getoption('--seed')}"
        report.sections.append(("to repeat it", f"PYTHONHASHSEED={hash_seed} OMP_NUM_THREADS=1 {command}"))
    return report


@pytest.fixture(autouse=True)
def _seeds(request: pytest.FixtureRequest) -> None:
    """Give each test the same random numbers, regardless of the tests that ran before it."""
    seed = request.config.getoption("--seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """Restore the variables that imports read after each test: some libraries set them."""
    yield
    template.restore_variables()


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Restore the level of Footplate's logger, which the command line and worker processes set, after each test."""
    logger = logging.getLogger("footplate")
    level = logger.level
    yield
    if logger.level != level:  # setting it empties a cache in each of a thousand loggers
        logger.setLevel(level)


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_cluster.SlurmCluster]:
    """The daemons of Slurm, for all tests."""
    with slurm_cluster.slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def make_trainer(tmp_path: Path, request: pytest.FixtureRequest):
    """A function that makes quiet trainers, all in one run directory."""

    def make(**kwargs: Any) -> fp.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": request.config.getoption("--accelerator"),
            "default_root_dir": tmp_path / "run",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "seed": 1,
            "max_epochs": 2,
        }
        return fp.Trainer(**{**defaults, **kwargs})

    return make
