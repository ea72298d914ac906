"""`footplate completion`: scripts that a shell accepts, and their completions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import template

from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store import open_store

COMPLETE = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_footplate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completion(shell: str) -> subprocess.CompletedProcess[str]:
    """Output of the command in a process of its own, because its choices are the classes that a process has loaded."""
    command = [sys.executable, "-m", "footplate", "completion", shell]
    process = template.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    candidates = completion("bash")
    assert candidates.returncode == 0, candidates.stderr
    path = tmp_path_factory.mktemp("completion") / "footplate.bash"
    path.write_text(candidates.stdout)
    return path


def complete(script: Path, words: str) -> set[str]:
    bash = COMPLETE.format(script=script, words=words)
    return set(subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True).stdout.split())


def test_bash_accepts_the_script(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_no_option_is_offered_within_itself(script):
    # The parameter of a class may be an object of the same class, and so on for ever.
    assert script.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("footplate do", {"doctor"}),
        ("footplate fit --trainer.max_e", {"--trainer.max_epochs"}),
        ("footplate predict --out", {"--output"}),
        ("footplate table --for", {"--format"}),
        ("footplate checkpoint ins", {"inspect"}),
        ("footplate checkpoint convert --fo", {"--force"}),
        ("footplate catalog reg", {"regions"}),
        ("footplate jobs submit training --master-acc", {"--master-accelerator"}),
        ("footplate completion z", {"zsh"}),
    ],
)
def test_commands_options_and_choices_are_completed(script, words, expected):
    assert complete(script, words) == expected


def test_names_of_jobs_are_completed(script, tmp_path, monkeypatch):
    store = open_store(Home(tmp_path))
    for name in ("flowers_1", "flowers_2", "trees_1"):
        store.add(Job(name, State.SUCCEEDED, 1.0, 1.0, "here"))
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert complete(script, "footplate jobs describe flow") == {"flowers_1", "flowers_2"}


def test_short_class_names_are_completed(script):
    assert "footplate.EarlyStopping" in complete(script, "footplate fit --trainer.callbacks footplate.E")


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_scripts_too(shell):
    candidates = completion(shell)
    assert candidates.returncode == 0
    assert "doctor" in candidates.stdout


def test_an_unknown_shell_is_a_mistake(footplate):
    result = footplate("completion", "ksh")
    assert result.code == 2
    assert result.err == 'footplate completion: shell="ksh": expected "bash" or "zsh" or "fish" or "tcsh".\n'
