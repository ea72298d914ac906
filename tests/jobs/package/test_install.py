"""Packages that run after their installation: real interpreters, a real pip, wheels made here, no network."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from footplate.core.errors import PackageError
from footplate.jobs.package import install
from footplate.jobs.package.requirements import needed
from footplate.jobs.package.virtualenv import READY


def make_wheel(directory: Path, name: str = "helpers", version: str = "1.0", requires: str = "") -> Path:
    """A wheel of one module that has a `version`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        for path, text in files.items()
    }
    record = "".join(f"{path},sha256={digests[path].decode()},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in files.items():
            wheel.writestr(inside, text)
    return path


def run(ready, *arguments: str) -> str:
    environ = {"PATH": os.environ["PATH"], **ready.env}
    done = subprocess.run([ready.python, *arguments], env=environ, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The only directory in which pip looks for wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def test_without_requirements_the_running_interpreter_runs_it(project):
    log = io.StringIO()
    ready = install(project.take(), project.home, log)
    assert ready.python == Path(sys.executable)
    assert log.getvalue() == ""
    assert run(ready, "-m", "trainer.task") == "one"


def test_what_runs_is_what_was_taken_though_the_source_is_edited_or_gone(project):
    taken = project.take()
    project.write("trainer/task.py", "print('two')\n")
    assert run(install(taken, project.home, io.StringIO()), "-m", "trainer.task") == "one"
    (project.package / "task.py").unlink()
    assert run(install(taken, project.home, io.StringIO()), "-m", "trainer.task") == "one"


def test_the_footplate_that_installs_is_the_one_that_a_job_imports(project):
    import footplate

    ready = install(project.take(), project.home, io.StringIO())
    assert run(ready, "-c", "import footplate; print(footplate.__file__)") == footplate.__file__


WHAT_IT_HAS = """
import cloudpickle, helpers, importlib.util
print(helpers.version, cloudpickle.version, importlib.util.find_spec("torch").origin)
"""


@pytest.mark.slow
def test_requirements_go_into_an_environment_made_once_over_what_is_installed_here(project, wheels):
    import cloudpickle

    make_wheel(wheels)
    make_wheel(wheels, "cloudpickle", "0.0.1")
    project.write("requirements.txt", "helpers==1.0\ncloudpickle==0.0.1\n")
    log = io.StringIO()
    first = install(project.take(), project.home, log)
    assert (
        "creating an environment with requirements.txt: helpers==1.0, requirements.txt: cloudpickle==0.0.1"
        in log.getvalue()
    )
    assert "Successfully installed" in log.getvalue()
    project.write("trainer/task.py", WHAT_IT_HAS)
    log = io.StringIO()
    second = install(project.take(), project.home, log)  # the code is another, the requirements are the same
    assert second.python == first.python != Path(sys.executable)
    assert log.getvalue() == ""
    helpers, pickler, torch_at = run(second, "-m", "trainer.task").split()
    assert (helpers, pickler) == ("1.0", "0.0.1")
    assert not Path(torch_at).is_relative_to(project.home)  # it is there already, and wasn't installed again
    (project.root / "requirements.txt").unlink()
    without = install(project.take(), project.home, log)
    assert run(without, "-c", "import cloudpickle; print(cloudpickle.__version__)") == cloudpickle.__version__


@pytest.mark.slow
def test_a_failing_pip_says_why_and_which_requirement_and_a_later_one_installs_everything(project, wheels):
    """A list of requirements, what setup.py needs, and a wheel."""
    make_wheel(wheels, "grains", "2.0")
    wheel = make_wheel(project.root / "dist", "helpers", "1.5")
    project.write(
        "setup.py", "from setuptools import setup\nsetup(name='trainer', version='1', install_requires=['grains>=2'])\n"
    )
    project.write("requirements.txt", "helpers\nno-such_thing>=3\n")
    taken, log = project.take(str(wheel)), io.StringIO()
    with pytest.raises(PackageError) as raised:
        install(taken, project.home, log)
    assert str(raised.value).startswith("requirements.txt: no-such_thing>=3 can't be installed. pip said:\n")
    assert "No matching distribution found for no-such_thing" in str(raised.value)
    assert "No matching distribution found for no-such_thing" in log.getvalue()

    make_wheel(wheels, "no_such_thing", "3.1")  # it exists now: the next attempt starts from the beginning
    ready = install(taken, project.home, log)
    program = "import helpers, grains, no_such_thing; print(helpers.version, grains.version, no_such_thing.version)"
    assert run(ready, "-c", program) == "1.5 2.0 3.1"


INSTALL = """
import sys, pathlib
from footplate.jobs.package import install, stored
home = pathlib.Path(sys.argv[1])
print("go", flush=True)
sys.stdin.readline()
print(install(stored(sys.argv[2], home), home, sys.stderr).python, flush=True)
import setuptools  # which is possible after an installation, too
"""


def start_install(project, digest: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INSTALL, str(project.home), digest]
    return subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
def test_an_install_that_was_killed_is_made_anew_and_two_at_once_make_one_environment(project, wheels):
    make_wheel(wheels)
    project.write("requirements.txt", "helpers\n")
    taken = project.take()
    process = start_install(project, taken.digest)
    process.stdin.write("\n")
    process.stdin.flush()
    limit = time.monotonic() + 100
    while not list(project.home.glob("environments/*/pyvenv.cfg")):
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not list(project.home.glob(f"environments/*/{READY}"))

    both = [start_install(project, taken.digest) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "go\n"
    ends = [process.communicate("\n", timeout=200) for process in both]
    assert {process.returncode for process in both} == {0}, ends
    assert len({out for out, _ in ends}) == 1
    assert sum("creating an environment" in err for _, err in ends) == 1
    ready = install(taken, project.home, io.StringIO())
    assert run(ready, "-c", "import helpers; print(helpers.version)") == "1.0"


def test_a_setup_py_that_fails_says_its_last_words(project):
    project.write("setup.py", "raise SystemExit('needs a licence')\n")
    with pytest.raises(PackageError, match=r"setup\.py can't list its requirements: needs a licence"):
        install(project.take(), project.home, io.StringIO())


def test_a_setup_py_is_not_shown_footplates_own_variables(project, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_TOKEN", "secret")
    project.write("setup.py", "import os\nraise SystemExit(f'token {os.environ.get(\"FOOTPLATE_TOKEN\")}')\n")
    with pytest.raises(PackageError, match="token None"):
        install(project.take(), project.home, io.StringIO())


def test_the_dependencies_of_a_pyproject_are_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "trainer"\nversion = "1"\ndependencies = ["numpy>=1", "helpers"]\n'
    )
    assert needed(tmp_path, Path(sys.executable)) == ["numpy>=1", "helpers"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "trainer"\ndynamic = ["dependencies"]\n')
    with pytest.raises(PackageError, match="its dependencies are dynamic"):
        needed(tmp_path, Path(sys.executable))
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(PackageError, match=r"pyproject\.toml can't be read"):
        needed(tmp_path, Path(sys.executable))


def test_a_pyproject_that_only_sets_up_tools_needs_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert needed(tmp_path, Path(sys.executable)) == []
