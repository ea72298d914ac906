"""Agents and the driver, without an engine: agents are processes of this machine."""

from __future__ import annotations

import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import template
import torch
from launched import gone
from process_placement import ProcessPlacement, agent, rank
from torch import distributed as dist
from wiretap import Wiretap

from footplate.core.errors import LaunchError
from footplate.core.net.handshake import ServerHandshake
from footplate.launch import Restarts, launch, worker
from footplate.launch.backends import Cluster
from footplate.launch.cluster import agent_group, channel, listener
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.agent_info import AgentInfo
from footplate.launch.cluster.channel import Channel, ChannelClosedError
from footplate.launch.dispatch import dispatch_ready
from footplate.launch.worker import attempt

MB = 1 << 20


def run(placement: ProcessPlacement, work: Callable, *args, tls: bool = False, **given):
    backend = Cluster(placement, tls)
    return launch(work, *args, world_size=len(placement.nodes), backend=backend, **{"preload": (), **given})


def test_ranks_meet_and_are_numbered_machine_by_machine():
    names = (
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "FOOTPLATE_SLOT",
        "CUDA_VISIBLE_DEVICES",
        "GREETING",
    )

    def work():
        dist.init_process_group("gloo")
        total = torch.tensor([rank() + 1])
        dist.all_reduce(total)
        seen = [None] * 3
        dist.all_gather_object(seen, [os.environ[name] for name in names])
        return total.item(), seen

    placement = ProcessPlacement(["a", "b", "a"], [{"CUDA_VISIBLE_DEVICES": number} for number in "456"])
    total, seen = run(placement, work, preload=("torch",), env={"GREETING": "hello"})
    assert total == 6
    assert seen == [
        ["0", "0", "2", "0", "0", "4,6", "hello"],
        ["1", "1", "2", "0", "1", "4,6", "hello"],
        ["2", "0", "1", "1", "0", "5", "hello"],
    ]


def test_output_and_logs_come_home(tmp_path, capsys):
    def work():
        print("out of", rank())
        print("err of", rank(), file=sys.stderr)

    run(ProcessPlacement(["a", "b"]), work, log_dir=tmp_path)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[rank 0] out of 0", "[rank 1] out of 1"]
    assert sorted(shown.err.splitlines()) == ["[rank 0] err of 0", "[rank 1] err of 1"]
    assert sorted((tmp_path / "attempt-0" / "rank-1.log").read_text().splitlines()) == ["err of 1", "out of 1"]


def test_an_exception_comes_home_with_its_traceback():
    def innermost():
        raise ZeroDivisionError("over there")

    def work():
        if rank() == 1:
            innermost()
        time.sleep(30)

    with pytest.raises(ZeroDivisionError, match="over there") as raised:
        run(ProcessPlacement(["a", "b"]), work, restarts=Restarts(max_restarts=0, peers_grace_s=0.1))
    assert "in innermost" in raised.value.__notes__[0]


SLOW_TO_CONNECT = """
import pickle, sys, time
from footplate.launch.cluster.agent_info import AgentInfo
call, index, node = pickle.load(sys.stdin.buffer)
as_details = AgentInfo.as_details
AgentInfo.as_details = lambda self: time.sleep(3 * (index == 1)) or as_details(self)
call(index, node)
"""


def test_the_first_of_two_failures_is_the_cause_also_if_its_machine_was_slow_to_connect():
    def work():
        dist.init_process_group("gloo")
        if rank() == 1:
            raise ZeroDivisionError("the cause")
        time.sleep(0.4)
        raise KeyError("the consequence")

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run(
            ProcessPlacement(["a", "b"], program=SLOW_TO_CONNECT),
            work,
            preload=("torch",),
            restarts=Restarts(max_restarts=0),
        )


def test_an_agents_times_are_converted_by_the_message_that_was_least_delayed():
    clock = agent_group.AgentClock()
    for sent_at, delay_s in ((100.0, 0.7), (101.0, 0.01), (102.0, 0.3)):
        clock.read(sent_at, sent_at + delay_s - 90.0)
    assert clock.ours(105.0) == pytest.approx(15.01)


def test_an_agents_clock_may_drift():
    clock = agent_group.AgentClock()
    for second in range(100_000):
        clock.read(second, second * 1.0001)
    assert clock.ours(100_000) == pytest.approx(100_010, abs=0.01)


def test_a_killed_worker_is_started_again_by_the_agents_that_are_there(quick, said):
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt()

    placement = ProcessPlacement(["a", "b"])
    assert run(placement, work, restarts=quick) == 1
    assert len(placement.started) == 1
    # A listener may warn of a stranger: another test's agent, whose driver had the same port.
    (line,) = [record.message for record in said.records if record.name == "footplate.launch.supervisor"]
    assert line.startswith("launch: rank 1 was killed by SIGKILL in attempt 0; attempt 1 starts now (restart 1 of 3)")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_agent_is_a_lost_node_and_a_new_group_is_placed(victim, quick, said, tmp_path):
    """Agents 0 and 2 are one host group, which 0 leads. Agent 1 is alone."""

    def work():
        if attempt() == 0:
            (tmp_path / str(rank())).touch()
            time.sleep(30)
        return attempt()

    placement = ProcessPlacement(["a", "b", "a"])

    def kill() -> None:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        os.kill(placement.processes[victim].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert run(placement, work, restarts=quick) == 1
    killer.join()
    tokens = {call.token for call in placement.started}
    assert len(tokens) == 2
    (line,) = [record.message for record in said.records if record.name == "footplate.launch.supervisor"]
    assert f"was lost with its node {socket.gethostname()}" in line
    assert line.endswith("in attempt 0; attempt 1 starts now (restart 1 of 10)")


def test_with_fewer_ranks_allowed_a_lost_places_slot_is_given_up():
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(agent(), signal.SIGKILL)
            time.sleep(30)
        return attempt(), os.environ["WORLD_SIZE"]

    placement = ProcessPlacement(["a", "b", "c"])
    assert run(placement, work, restarts=Restarts(min_world_size=2, peers_grace_s=0.1)) == (1, "2")
    assert len(placement.started) == 2


def test_a_machine_that_says_nothing_is_lost_and_no_frozen_worker(monkeypatch, said):
    monkeypatch.setattr(agent_group, "KILL_S", 0.3)

    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(agent(), signal.SIGSTOP)
            time.sleep(30)
        return attempt()

    hosts_alone = Restarts(max_restarts=0, max_host_restarts=1, peers_grace_s=0.3, max_delay_s=0.1)
    assert run(ProcessPlacement(["a", "b"]), work, restarts=hosts_alone, heartbeat_timeout_s=4.0) == 1
    assert "gave no sign of life for 4 s, and nothing has come from its machine for" in said.text


def test_a_frozen_worker_on_a_machine_that_answers_is_no_lost_machine():
    def work():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)

    no_restarts = Restarts(max_restarts=0, peers_grace_s=0.3)
    with pytest.raises(LaunchError, match=r"gave no sign of life for 4 s in attempt 0 \(max_restarts=0\)"):
        run(ProcessPlacement(["a", "b"]), work, restarts=no_restarts, heartbeat_timeout_s=4.0)


def test_a_killed_fork_server_is_replaced_by_its_agent(quick, said):
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(30)
        return attempt()

    placement = ProcessPlacement(["a", "b"])
    assert run(placement, work, restarts=quick) == 1
    assert len(placement.started) == 1
    assert "rank 1 was lost on" in said.text
    assert "which was killed by SIGKILL" in said.text


def test_a_machine_keeps_what_it_was_given_until_the_launch_is_over(tmp_path, quick):
    for node in "ab":
        (tmp_path / node).mkdir()
    placement = ProcessPlacement(["a", "b"], [{"TMPDIR": str(tmp_path / node)} for node in "ab"])

    def work():
        mark = worker.kept() / "mark"
        content = mark.read_text() if mark.exists() else "nothing"
        mark.write_text(f"of attempt {attempt()}")
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt() == 1:
            dist.init_process_group("gloo")
            dist.barrier()
            if rank() == 1:
                os.kill(agent(), signal.SIGKILL)
            time.sleep(30)
        return content, mark.parts[: len(tmp_path.parts) + 1] == (*tmp_path.parts, "a")

    assert run(placement, work, restarts=quick, preload=("torch",)) == ("of attempt 1", True)
    assert len(placement.started) == 2
    assert [path for node in "ab" for path in (tmp_path / node).glob("footplate-*")] == []


def test_a_place_that_cannot_be_started_is_said_so():
    with pytest.raises(LaunchError, match=r"rank [01] could not be started: its process ended with 3 in attempt 0"):
        run(
            ProcessPlacement(["a", "b"], program="raise SystemExit(3)"),
            print,
            restarts=Restarts(max_host_restarts=0, peers_grace_s=0),
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("import footplate.core.version; footplate.core.version.__version__ = '9.9'", "footplate 9.9, here footplate"),
        ("import platform; platform.python_version_tuple = lambda: ('3', '99', '0')", "Python 3.99, here Python 3"),
    ],
)
def test_other_versions_on_a_node_are_refused_at_once(change, words):
    placement = ProcessPlacement(["a"], program=f"{change}\n{ProcessPlacement(['']).program}", fresh=True)
    with pytest.raises(LaunchError, match=words):
        run(placement, print)
    assert len(placement.started) == 1


def test_what_cannot_be_imported_there_is_said_with_the_machines_name():
    with pytest.raises(
        LaunchError, match=rf"On {socket.gethostname()}: .*can't import what it needs \(no_such_module\)"
    ):
        run(ProcessPlacement(["a"]), print, preload=["no_such_module"])


def test_300_mb_go_there_and_back_and_agents_hold_none_of_it():
    def work(data):
        return bytearray(data)

    placement, peaks = ProcessPlacement(["a", "b"], fresh=True), {}

    def watch() -> None:
        while not ended.wait(0.02):
            for process in list(placement.processes.values()):
                for line in _status(process.pid):
                    if line.startswith("VmHWM"):
                        peaks[process.pid] = int(line.split()[1]) >> 10  # MB

    data = bytes(300 * MB)
    ended = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123  the peak is now
        file.write("5")
    before = psutil.Process().memory_info().rss // MB
    result = run(placement, work, data)
    ended.set()
    watcher.join()
    peak = next(int(line.split()[1]) >> 10 for line in _status(os.getpid()) if line.startswith("VmHWM"))
    assert result == data
    assert len(peaks) == 2
    assert max(peaks.values()) < 150
    assert peak - before < 450  # the result, and no second copy of it


def _status(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
            return file.read().splitlines()
    except OSError:
        return []


def test_signs_of_life_are_not_held_up_by_a_large_result(monkeypatch):
    take = channel._write_all

    def take_slowly(fd: int, data: bytes) -> None:
        time.sleep(0.025)
        take(fd, data)

    monkeypatch.setattr(channel, "_write_all", take_slowly)
    began = time.monotonic()
    result = run(
        ProcessPlacement(["a", "a"]), lambda: bytes(100 * MB), heartbeat_timeout_s=5, restarts=Restarts(max_restarts=0)
    )
    assert len(result) == 100 * MB
    assert time.monotonic() - began > 2 * 5


def while_running(
    tmp_path: Path, placement: ProcessPlacement, act: Callable[[AgentCall], None], once_it_works: bool = False
) -> None:
    """Run a function while a launch with one worker runs, from its beginning or the worker's. The launch must succeed."""
    began, done = tmp_path / "began", tmp_path / "done"

    def acting() -> None:
        try:
            while not (began.exists() if once_it_works else placement.started):
                time.sleep(0.01)
            act(placement.started[0])
        finally:
            done.touch()

    def work() -> str:
        began.touch()
        while not done.exists():
            time.sleep(0.01)
        return "undisturbed"

    actor = threading.Thread(target=acting)
    actor.start()
    assert run(placement, work) == "undisturbed"
    actor.join()


@dataclass
class TappedPlacement(ProcessPlacement):
    """Agents whose connections a stranger listens to."""

    taps: list[Wiretap] = field(default_factory=list)

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        self.taps.append(Wiretap(call.port))
        super().start(slots, replace(call, port=self.taps[-1].port))

    @property
    def heard(self) -> bytes:
        for tap in self.taps:
            tap.close()
        return b"".join(bytes(tap.heard) for tap in self.taps)


@pytest.mark.parametrize("tls", [False, True])
def test_with_tls_nobody_can_read_the_code_the_output_and_the_result(tls):
    def work(secret: str):
        print("output with", secret)
        if attempt() == 0 and rank() == 1:
            raise ValueError("again")
        return secret * 100_000

    placement = TappedPlacement(["a", "b"])
    assert run(placement, work, "open sesame", tls=tls) == "open sesame" * 100_000
    assert (b"sesame" in placement.heard) is not tls
    assert len(placement.heard) > MB


def test_an_agent_and_a_driver_of_which_only_one_uses_tls_say_so(tmp_path):
    def act(call: AgentCall) -> None:
        with pytest.raises(LaunchError, match="it doesn't use TLS"):
            replace(call, tls=True)(0)

    while_running(tmp_path, ProcessPlacement(["a"]), act)


def test_an_agent_without_the_token_is_refused(tmp_path, said):
    sent_away = []

    def act(call: AgentCall) -> None:
        AgentCall(call.host, call.port, b"another")(0)  # returns: it isn't wanted
        sent_away.append(True)

    while_running(tmp_path, ProcessPlacement(["a"]), act)
    assert sent_away
    assert "from 127.0.0.1 was refused: it doesn't know the token" in said.text


def test_a_second_agent_for_an_allocation_is_refused(tmp_path, said):
    sent_away = []

    def act(call: AgentCall) -> None:
        for index in (0, 7):
            call(index)  # returns while the launch runs: it isn't wanted
            sent_away.append(index)

    while_running(tmp_path, ProcessPlacement(["a"]), act, once_it_works=True)
    assert sent_away == [0, 7]
    assert "was refused: allocation 0 has an agent already" in said.text
    assert "was refused: there is no allocation 7, only 1" in said.text


def test_nonsense_and_silence_disturb_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.5)
    closed: list[bool] = []

    def act(call: AgentCall) -> None:
        with (
            socket.create_connection((call.host, call.port)) as one,
            socket.create_connection((call.host, call.port)) as two,
        ):
            one.sendall(os.urandom(5000))
            closed.extend((until_closed(one), until_closed(two)))

    while_running(tmp_path, ProcessPlacement(["a"]), act)
    assert closed == [True, True]


def until_closed(connection: socket.socket) -> bool:
    """Return True if the other end closes the connection within a minute."""
    connection.settimeout(60)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_more_strangers_than_can_be_listened_to_do_not_keep_agents_out(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "MAX_STRANGERS", 4)
    strangers = []

    def act(call: AgentCall) -> None:
        strangers.extend(socket.create_connection((call.host, call.port)) for _ in range(20))

    while_running(tmp_path, ProcessPlacement(["a"]), act)
    assert len(strangers) == 20
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_is_closed_while_it_sends_disturbs_nobody(monkeypatch):
    monkeypatch.setattr(listener, "MAX_STRANGERS", 1)
    with selectors.DefaultSelector() as selector:
        opened = listener.Listener("127.0.0.1", selector, lambda *_: None)
        with socket.create_connection(opened.address) as stranger:
            dispatch_ready(selector, 5)
            with socket.create_connection(opened.address) as two:  # for whom the first must go
                stranger.sendall(b"something")
                time.sleep(0.1)  # both have come
                dispatch_ready(selector, 5)
                assert until_closed(stranger)
                assert two.recv(1)
                opened.close()


def test_a_listener_without_a_free_file_descriptor_pauses_and_accepts_again(caplog):
    with selectors.DefaultSelector() as selector:
        opened = listener.Listener("127.0.0.1", selector, lambda *_: None)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket()
        with Path("/dev/null").open() as file:
            resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
            try:
                waiting.connect(opened.address)
                dispatch_ready(selector, 60)
                assert not selector.select(0)  # a connection that can't be accepted doesn't keep the selector awake
                until = time.monotonic() + 60
                while not selector.select(0.1) and time.monotonic() < until:
                    opened.check_deadlines()
                dispatch_ready(selector, 0)  # a second failure
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until = time.monotonic() + 60
        while not selector.select(0.1) and time.monotonic() < until:
            opened.check_deadlines()
        dispatch_ready(selector, 0)
        waiting.settimeout(60)
        assert waiting.recv(1)
        assert caplog.text.count("can't take connections") == 1
        waiting.close()
        opened.close()


def test_a_listener_closes_while_it_pauses():
    with selectors.DefaultSelector() as selector:
        opened = listener.Listener("127.0.0.1", selector, lambda *_: None)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as waiting, Path("/dev/null").open() as file:
            resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
            try:
                waiting.connect(opened.address)
                dispatch_ready(selector, 60)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            opened.close()
        assert not selector.get_map()


def test_an_agent_does_not_obey_one_who_does_not_know_the_token():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def pretend() -> None:
            channel = Channel(server.accept()[0], trusted=True)
            channel.send(ServerHandshake("agent").challenge)
            channel.flush()
            select.select([channel], [], [], 60)
            list(channel.receive())
            channel.send({"proof": "0" * 64})
            channel.send({"do": "prepare"})
            channel.flush()
            select.select([channel], [], [], 60)
            with pytest.raises(ChannelClosedError):
                list(channel.receive())
            channel.close()

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(LaunchError, match="is not the driver of this launch"):
            AgentCall(host, port, b"token")(0)
        pretender.join()


def test_a_driver_that_cannot_be_reached_is_said_so():
    with socket.socket() as silent:  # its port is nobody else's, and it doesn't listen there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"can't reach the driver at 127\.0\.0\.1:{port}: .*refused"):
            AgentCall("127.0.0.1", port, b"token")(0)


DRIVER = f"""
import sys, time
sys.path[:0] = [{os.path.dirname(__file__)!r}, {os.path.dirname(template.__file__)!r}]
from process_placement import ProcessPlacement
from footplate.launch import launch
from footplate.launch.backends import Cluster
from footplate.launch import worker
def work():
    print("works", "and keeps", worker.kept(), flush=True)
    time.sleep(60)
launch(work, world_size=2, backend=Cluster(ProcessPlacement(["a", "b"], fresh=True)), preload=())
"""  # noqa: PTH120


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_driver_that_is_told_to_end_ends_the_workers(signum, code, program):
    driver = program(DRIVER)
    driver.read_until("[rank 0] works", "[rank 1] works")
    family = driver.family()
    driver.process.send_signal(signum)
    ended, _ = driver.end()
    assert ended in (code, -signum)
    assert gone(family)


def test_a_driver_that_is_killed_takes_workers_and_agents_with_it(program):
    driver = program(DRIVER)
    said = driver.read_until("[rank 0] works", "[rank 1] works")
    kept = Path(said.split()[-1])
    assert kept.is_dir()
    family = driver.family()
    assert len(family) == 6
    driver.process.kill()
    assert gone(family)
    assert not kept.exists()


def test_an_agents_description_survives_json():
    info = AgentInfo.of_this_process(3, "node", "127.0.0.1")
    assert AgentInfo.from_details(json.loads(json.dumps(info.as_details()))) == info
    assert AgentInfo.from_details({**info.as_details(), "index": "3"}) is None
    assert AgentInfo.from_details({}) is None


def test_a_machine_that_cannot_reach_rank_0s_store_is_named_with_the_address():
    """The situation behind a firewall that is only open for the driver."""
    placement = ProcessPlacement(["a", "b"], program=CLOSED + ProcessPlacement.program)
    no_restarts = Restarts(max_restarts=0, max_host_restarts=0, peers_grace_s=0.3)
    said = (
        rf"rank 1 can't meet rank 0: {socket.gethostname()} can't connect to 127\.0\.0\.1:\d+, .*no firewall may close"
    )
    with pytest.raises(LaunchError, match=said):
        run(placement, rank, restarts=no_restarts)


CLOSED = """
import socket
from footplate.launch.cluster import agent
class Closed:
    gethostname = staticmethod(socket.gethostname)
    first = True
    def create_connection(self, address, timeout):
        first, self.first = self.first, False
        if first:
            return socket.create_connection(address, timeout)
        raise TimeoutError("timed out")
agent.socket = Closed()
"""
