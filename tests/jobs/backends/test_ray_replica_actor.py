"""The actor of a replica, without Ray: its output arrives exactly once."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from pathlib import Path

from footplate.jobs.backends.ray.replica_actor import Message, ReplicaActor
from footplate.launch.hang_files import HANGS_DIR

ROOT = Path(__file__).parent.parent.parent.parent


def test_a_call_that_is_repeated_while_the_first_is_still_at_it_gets_the_same_answer():
    replica, heard = ReplicaActor(), []
    calls = [threading.Thread(target=lambda: heard.append(replica.poll(0))) for _ in range(2)]
    for one in calls:
        one.start()
    for text in (b"one", b"two"):
        replica._messages.put(Message("output", text))
    for one in calls:
        one.join()
    while len(heard) < 4 and sum(len(said) for _, said in heard[1:]) < 2:  # what came too late for that answer
        heard.append(replica.poll(heard[-1][0]))
    assert heard[0] == heard[1]
    assert b"".join(said.data for _, answer in heard[1:] for said in answer) == b"onetwo"


def test_the_stacks_of_a_hang_are_passed_on_once(tmp_path: Path):
    program = f"""
        import os, time
        from pathlib import Path
        from footplate.launch.hang_files import HangFiles
        from footplate.launch.hang_watch import Hang
        hangs = HangFiles(os.environ["{HANGS_DIR}"])
        hangs.write(Hang("first", "first: all stacks"))
        while not Path("heard").exists():
            time.sleep(0.01)
        hangs.write(Hang("second", "second: all stacks"))
    """
    (tmp_path / "hangs").mkdir()
    variables = {**os.environ, HANGS_DIR: str(tmp_path / "hangs"), "PYTHONPATH": str(ROOT)}
    replica, heard = ReplicaActor(), []
    command = [sys.executable, "-c", textwrap.dedent(program)]
    thread = threading.Thread(target=replica._look_after, args=(command, variables, tmp_path))
    thread.start()

    answer = 0
    while not any(message.kind == "ended" for message in heard):
        answer, messages = replica.poll(answer)
        heard += messages
        if any(message.kind == "hang" for message in heard):
            (tmp_path / "heard").touch()
    thread.join()

    assert [message.text for message in heard if message.kind == "hang"] == ["first: all stacks", "second: all stacks"]
    assert heard[-1] == Message("ended")
