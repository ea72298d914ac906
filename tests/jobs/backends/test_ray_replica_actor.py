"""The actor of a replica, without Ray: its output arrives exactly once."""

from __future__ import annotations

import threading

from footplate.jobs.backends.ray.replica_actor import Message, ReplicaActor


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
