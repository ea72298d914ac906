"""Ctrl-C and SIGTERM: the run is saved, the exit code has the reason, and the output names the command to continue."""

from __future__ import annotations

import signal
import subprocess

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_it_is_continued_and_the_command_works(
    process, forked, net, tmp_path, number, code
):
    start = process if number == signal.SIGINT else forked
    running = start("fit", *net, "--model=flowers.Slow", "--trainer.max_epochs=100")
    for _ in range(3):
        assert running.stdout.readline() == "training\n"
    running.send_signal(number)
    _, err = running.communicate(timeout=120)
    assert running.returncode == code
    assert "Traceback" not in err
    command = f"footplate fit --config {tmp_path / 'run' / 'config.yaml'} --ckpt_path last"
    assert f"Continue with: {command}\n" in err

    continued = forked(*command.split()[1:], "--trainer.max_epochs=2")
    _, err = continued.communicate(timeout=120)
    assert continued.returncode == 0, err
    assert f"Continuing from {tmp_path / 'run'}" in err


def test_an_interrupt_before_the_run_began_shows_no_traceback(process, project):
    (project / "waiting.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(60)\n")
    running: subprocess.Popen[str] = process("fit", "--model=waiting.Net")
    assert running.stdout.readline() == "imported\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err == "footplate fit: interrupted.\n"
