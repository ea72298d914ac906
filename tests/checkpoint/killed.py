"""A program that writes checkpoints until it is killed, again and again. It is a fork with torch, and so is each start."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import template

PROGRAM = """
import os, sys, torch
from footplate import checkpoint
from footplate.checkpoint.writer import CheckpointWriter

directory, same = sys.argv[1], sys.argv[2] == "same"

def write():
    writer = CheckpointWriter()
    weights = torch.zeros(1 << 18)
    checkpoint.clean_up(directory)
    older = checkpoint.newest([directory])
    number = 0 if older is None else checkpoint.read_meta(older)["number"]
    for number in range(number + 1, 10_000):
        weights.fill_(number)
        path = f"{directory}/a.ckpt" if same else f"{directory}/{number}.ckpt"
        previous = f"{directory}/{number - 1}.ckpt"
        writer.save({"state_dict": {"w": weights}, "number": number}, path, {"number": number},
                    lambda: None if same else checkpoint.delete(previous))
        writer.wait()
        print(number, flush=True)

for _ in sys.stdin:
    if not os.fork():
        print(os.getpid(), flush=True)
        write()
        os._exit(1)
    os.wait()
    print("ended", flush=True)
"""


def reports_of_killed(directory: str, mode: str, kills: int, within_s: float) -> Iterator[list[int]]:
    """Start the program and kill it, again and again.

    Args:
        directory: where it writes.
        mode: "same" for one name, which each checkpoint replaces; or "new names".
        kills: how often.
        within_s: the longest time from its first checkpoint to the kill.

    Yields:
        The numbers of the checkpoints that a killed program had reported as complete.
    """
    command = [sys.executable, "-c", PROGRAM, directory, mode]
    with template.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for attempt in range(kills):
            process.stdin.write("start\n")
            process.stdin.flush()
            pid = int(process.stdout.readline())
            reports = [int(process.stdout.readline())]
            time.sleep(random.Random(attempt).uniform(0.0, within_s))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "ended\n":
                reports.append(int(line))
            yield reports
        process.stdin.close()
