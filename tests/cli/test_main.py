"""`footplate` itself: its commands, the ones that start quickly, and the meaning of exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import footplate as fp
from footplate.cli.commands import COMMANDS


def test_version_is_printed(footplate):
    assert footplate("--version").out == f"footplate {fp.__version__}\n"


def test_help_names_every_command(footplate):
    result = footplate("--help")
    assert result.code == 0
    assert all(f"  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(footplate, command):
    result = footplate(command, "--help")
    assert result.code == 0
    assert f"usage: footplate {command}" in result.out


def test_an_unknown_command_is_answered_with_the_nearest(footplate):
    result = footplate("fitt")
    assert result.code == 2
    assert 'Did you mean "fit"?' in result.err


def test_no_command_is_a_mistake(footplate):
    result = footplate()
    assert result.code == 2
    assert "footplate --help" in result.err


@pytest.mark.parametrize("argument", ["--help", "--version", "fitt"])
def test_it_answers_without_torch(argument):
    script = f"import sys; from footplate.cli.main import main; main([{argument!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_a_table_is_shown_without_torch(project):
    script = (
        "import sys; from footplate.cli.main import main; code = main(['table', 'rows.parquet']); "
        "sys.exit('torch' in sys.modules or code)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=project, check=False).returncode == 0


def test_a_reader_that_has_seen_enough_is_no_failure(process):
    running = process("table", "rows.parquet")
    running.stdout.close()
    assert running.wait(60) == 0
    assert running.stderr.read() == ""


def test_a_mistake_is_one_message_and_exit_code_2(forked):
    running = forked("fit", "--model=flowers.Net", "--trainer.max_epoch=3")
    _, err = running.communicate(timeout=120)
    assert running.returncode == 2
    assert err == 'footplate fit: --trainer.max_epoch: there is no such option. Did you mean "--trainer.max_epochs"?\n'


def test_a_failure_of_the_users_code_keeps_its_traceback_and_exits_with_1(forked, net):
    running = forked("fit", *net, "--model=flowers.WrongColumn")
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "Traceback" in err
    assert 'return batch["z"].sum()' in err
    assert err.rstrip().endswith("KeyError: 'z'")
