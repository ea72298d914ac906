"""The actor of a replica, without Ray: its output arrives exactly once."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from pathlib import Path

from footplate.core.profile_requests import ProfileRequest, ProfileStatus
from footplate.core.stacks.requests import Answering
from footplate.jobs import questions
from footplate.jobs.backends.ray import replica_actor
from footplate.jobs.backends.ray.replica_actor import Answer, Message, ReplicaActor
from footplate.launch.hang_files import HANGS_DIR
from jobs.conftest import until

ROOT = Path(__file__).parent.parent.parent.parent


def test_a_call_that_is_repeated_while_the_first_is_still_at_it_gets_the_same_answer():
    replica, heard = ReplicaActor(), []
    calls = [threading.Thread(target=lambda: heard.append(replica.poll(0))) for _ in range(2)]
    for thread in calls:
        thread.start()
    for text in (b"one", b"two"):
        replica._messages.put(Message("output", text))
    for thread in calls:
        thread.join()
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


def look_after_an_empty_program(replica: ReplicaActor, directory: Path) -> tuple[threading.Thread, int]:
    """Let an actor run a program until it has ended. Return the actor's thread, and the number of its last answer."""
    variables = {**os.environ, HANGS_DIR: str(directory / "hangs")}
    thread = threading.Thread(target=replica._look_after, args=([sys.executable, "-c", ""], variables, directory))
    thread.start()
    answer, messages = replica.poll(0)
    while not messages:
        answer, messages = replica.poll(answer)
    assert [message.kind for message in messages] == ["began"]
    until(lambda: replica._process is not None and replica._process.poll() is not None)
    return thread, answer


def test_the_end_of_a_process_waits_until_the_end_of_its_profile_is_known(tmp_path: Path, monkeypatch):
    replica, directory = ReplicaActor(), tmp_path / "profile-4"
    directory.mkdir()
    (directory / "summary-rank0.txt").write_text("Profile of steps 4 to 5")
    gone = Answering(2**22 + 1, "footplate-stacks-17-4711")
    request = ProfileRequest([gone], "id", 3, str(tmp_path), 0.0)
    monkeypatch.setattr(questions, "request_profile", lambda pids, steps: request)
    monkeypatch.setattr(replica_actor, "PROFILE_S", 60.0)
    monkeypatch.setattr(replica_actor, "FOLLOWED_S", 60.0)
    assert replica.ask("request_profile", 2).value == request

    thread, answer = look_after_an_empty_program(replica, tmp_path)
    answer, heard = replica.poll(answer)
    assert heard == []
    status = replica.ask("profile_status", request).value
    assert (status.state, status.summary) == ("done", "Profile of steps 4 to 5")
    # The answer is on its way.
    answer, heard = replica.poll(answer)
    assert heard == []
    replica.end_following()
    while not heard:
        answer, heard = replica.poll(answer)
    thread.join()
    assert heard == [Message("ended")]


def test_the_end_of_a_process_waits_for_an_answer_that_takes_longer_than_followers_pause(tmp_path: Path, monkeypatch):
    replica, answers = ReplicaActor(), threading.Event()
    monkeypatch.setattr(replica_actor, "PROFILE_S", 60.0)
    monkeypatch.setattr(replica_actor, "FOLLOWED_S", 0.0)

    def status_of(request: object) -> ProfileStatus:
        answers.wait()
        return ProfileStatus("done")

    monkeypatch.setattr(questions, "status_of", status_of)
    heard: list[Answer] = []
    asking = threading.Thread(target=lambda: heard.append(replica.ask("profile_status", None)))
    asking.start()
    until(lambda: replica._questions)
    running, answer = look_after_an_empty_program(replica, tmp_path)
    answer, messages = replica.poll(answer)
    assert messages == []
    answers.set()
    asking.join()
    assert heard == [Answer(ProfileStatus("done"))]
    while not messages:
        answer, messages = replica.poll(answer)
    running.join()
    assert messages == [Message("ended")]


def test_errors_of_a_question_are_answers():
    answer = ReplicaActor().ask("request_profile", 2)
    assert (answer.value, answer.unavailable) == (None, False)
    assert answer.error.startswith("no Trainer.fit runs in these processes now.")
    assert ReplicaActor().ask("stacks", False).value == []
