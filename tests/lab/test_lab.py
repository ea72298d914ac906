"""The lab itself: machines that are apart, a network that breaks as asked, and nothing that is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from footplate.core.errors import ConfigError, LaunchError
from footplate.lab import Lab
from footplate.lab.machine import Machine

pytestmark = pytest.mark.engine

CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print(time.monotonic() - began)
except OSError as error:
    print(error)
"""
SERVE = """
import socket, sys, time
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(600)
"""
TALK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
print("connected", flush=True)
try:
    print("told of the end" if connection.recv(1) == b"" else "told something", flush=True)
except ConnectionResetError:
    print("told of the end", flush=True)
"""


def serve(machine: Machine, *ports: int) -> None:
    """Let the machine listen at TCP ports."""
    command = machine.start(["python", "-c", SERVE, *ports], output=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stdout.readline() == b"ready\n"


def connect(machine: Machine, host: str, port: int = 5000, within_s: float = 30) -> float:
    """Connect to a port, which must succeed; return the seconds that it took."""
    return float(machine.run(["python", "-c", CONNECT, host, port, within_s])[1])


def hears_nothing(machine: Machine, host: str, port: int = 5000) -> bool:
    """Return True if neither a connection nor a refusal comes from a port within a second."""
    return machine.run(["python", "-c", CONNECT, host, port, 1])[1].strip() == "timed out"


def test_each_machine_has_its_own_name_files_processes_and_clock(lab):
    first, second = lab(2).machines
    script = (
        "import os, socket, time; open('/tmp/mine', 'x'); open('/dev/shm/mine', 'x'); open('/home/lab/mine', 'x'); "
        "boot_id = open('/proc/sys/kernel/random/boot_id').read().strip(); "
        "print(socket.gethostname(), boot_id, time.monotonic(), len(os.listdir('/tmp')))"
    )
    (code_0, seen_0), (code_1, seen_1) = (machine.run(["python", "-c", script]) for machine in (first, second))
    assert (code_0, code_1) == (0, 0)
    name_0, boot_0, clock_0, files_0 = seen_0.split()
    name_1, boot_1, clock_1, files_1 = seen_1.split()
    assert (name_0, name_1) == ("m0", "m1")
    assert boot_0 != boot_1
    assert abs(float(clock_0) - float(clock_1)) > 5000
    assert files_0 == files_1 == "1"
    first.start(["sleep", "77"])
    assert [line.split(maxsplit=1)[1] for line in first.processes()] == ["sleep 77"]
    assert second.processes() == []


def test_the_shared_disk_is_shared(lab):
    made = lab(2)
    first, second = made.machines
    first.run(["sh", "-c", "echo hello > /mnt/word"])
    assert second.run(["cat", "/mnt/word"]) == (0, "hello\n")
    assert (made.shared / "word").read_text() == "hello\n"


def test_machines_know_each_other_by_name_and_reach_nothing_else(lab):
    first, second = lab(2).machines
    serve(first, 5000)
    connect(second, "m0")
    connect(second, "10.77.0.10")
    assert "unreachable" in second.run(["python", "-c", CONNECT, "192.0.2.1", 80, 5])[1]


def test_what_is_cut_hears_nothing_until_it_is_healed(lab):
    made = lab(3)
    first, second, third = made.machines
    serve(first, 5000)
    made.cut(second)
    assert hears_nothing(second, "m0")
    connect(third, "m0")
    made.heal()
    connect(second, "m0")


def test_a_partition_is_one_way(lab):
    made = lab(2)
    first, second = made.machines
    # A datagram needs no way back. The first one waits for the address of m0, which needs both ways.
    receive = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5000)); print(s.recv(9), flush=True); "
        "s.settimeout(1); print(s.recv(9), flush=True)"
    )
    send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'word', ('m0', 5000))"
    receiver = first.start(["python", "-c", receive], output=subprocess.PIPE)
    assert receiver.stdout is not None
    until = time.monotonic() + 20
    while b":1388 " not in first.run(["cat", "/proc/net/udp"])[1].encode() and time.monotonic() < until:
        time.sleep(0.05)
    second.run(["python", "-c", send])
    assert receiver.stdout.readline() == b"b'word'\n"
    made.partition([first], [second])
    second.run(["python", "-c", send])
    assert receiver.stdout.readline() == b"b'word'\n"


def test_a_slow_link_delays_both_ways(lab):
    made = lab(2)
    first, second = made.machines
    serve(first, 5000)
    connect(second, "m0")
    made.shape(second, delay_s=0.2)
    assert connect(second, "m0") >= 0.4
    made.shape(second)
    assert min(connect(second, "m0") for _ in range(10)) < 0.4


def test_a_firewall_closes_ports(lab):
    made = lab(2)
    first, second = made.machines
    serve(first, 5000, 5001)
    made.firewall(first, [5001])
    assert hears_nothing(second, "m0", 5000)
    connect(second, "m0", 5001)
    made.firewall(first, None)
    connect(second, "m0", 5000)


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_others_hear_of_a_killed_machine_and_not_of_one_that_lost_its_power(lab, end):
    first, second = lab(2).machines
    serve(first, 5000)
    talk = second.start(["python", "-c", TALK, "m0"], output=subprocess.PIPE)
    assert talk.stdout is not None
    assert talk.stdout.readline() == b"connected\n"
    getattr(first, end)()
    if end == "kill":
        assert talk.stdout.readline() == b"told of the end\n"
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            talk.wait(1)


def test_a_machine_comes_back_with_another_address_and_its_files(lab):
    first, second = lab(2).machines
    first.run(["sh", "-c", "echo kept > /home/lab/file; echo gone > /dev/shm/file"])
    boot_id = first.run(["cat", "/proc/sys/kernel/random/boot_id"])[1]
    first.kill()
    with pytest.raises(LaunchError, match="m0 is down"):
        first.run(["true"])
    first.boot("10.77.0.99")
    assert first.run(["cat", "/home/lab/file"]) == (0, "kept\n")
    assert first.run(["cat", "/dev/shm/file"])[0] != 0
    assert first.run(["cat", "/proc/sys/kernel/random/boot_id"])[1] != boot_id
    serve(first, 5000)
    connect(second, "10.77.0.99")


@pytest.mark.parametrize("address", ["10.77.0.0", "10.77.0.255", "10.76.0.1", "::1", "m3"])
def test_an_address_outside_of_the_lab_is_refused(lab, address):
    (machine,) = lab(1).machines
    machine.kill()
    with pytest.raises(ConfigError, match=f"address={address}: expected an address from 10.77.0.1 to 10.77.0.254"):
        machine.boot(address)


def test_a_process_that_has_the_number_of_a_machine_that_is_gone_is_left_alone(lab):
    made = lab(1)
    (machine,) = made.machines
    machine.kill()
    other = subprocess.Popen(["sleep", "60"])
    (made.directory / "m0" / "pid").write_text(str(other.pid))
    assert machine.pid is None
    machine.kill()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_command_that_takes_too_long_is_killed(lab):
    (machine,) = lab(1).machines
    with pytest.raises(subprocess.TimeoutExpired):
        machine.run(["sleep", "4323"], timeout_s=0.5)
    assert no_process("4323")


def test_a_second_interface_leads_nowhere(lab):
    first, _ = lab(2).machines
    first.kill()
    first.boot(stranger="10.99.0.5/24")
    names = first.run(["python", "-c", "import socket; print([name for _, name in socket.if_nameindex()])"])[1]
    assert "ens1" in names
    assert first.run(["python", "-c", CONNECT, "10.99.0.6", 80, 1])[1].strip() in (
        "timed out",
        "[Errno 113] No route to host",
    )


def test_a_command_ends_as_it_ends_there(lab):
    (machine,) = lab(1).machines
    assert machine.run(["sh", "-c", "echo out; echo err >&2; exit 7"]) == (7, "out\nerr\n")
    command = machine.start(["sleep", "600"])
    command.send_signal(signal.SIGTERM)
    assert command.wait(10) == -signal.SIGTERM


def test_a_secret_of_the_environment_does_not_come_along(lab, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "secret")
    assert "secret" not in lab(1).machines[0].run(["env"])[1]


def test_no_process_is_left_behind(lab):
    made = lab(1)
    made.machines[0].start(["sleep", "4321"])
    made.close()
    assert no_process("4321")
    assert not made.directory.exists()


def test_no_process_is_left_behind_when_the_maker_is_killed():
    script = (
        "from footplate.lab import Lab; lab = Lab(1); lab.machines[0].start(['sleep', '4322']); "
        "print('up', flush=True); input()"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"up\n"
    maker.kill()
    maker.wait()
    assert no_process("4322")


def no_process(word: str) -> bool:
    """Wait until no process has this word in its command line."""
    until = time.monotonic() + 20
    while any(word in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_the_command_line_keeps_a_lab_until_it_is_told_to_end_it(lab, tmp_path):
    def footplate(*words: object) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "footplate", "lab", str(words[0]), "--dir", str(tmp_path / "lab"), *map(str, words[1:])],
            capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, shown = footplate("up", 2)
    try:
        assert code == 0
        assert shown.splitlines()[1].startswith("m1  10.77.0.11  ")
        assert footplate("exec", "m1", "--", "sh", "-c", "hostname; exit 5") == (5, "m1\n")
        assert footplate("up", 2)[0] == 2
        code, shown = footplate("cut", "m9")
        assert (code, "the lab has m0 to m1" in shown) == (2, True)
        for words in (
            ("cut", "m1"), ("heal",), ("partition", "m0", "m1"), ("shape", "m1", "--delay", 0.1),
            ("firewall", "m0", "--open", 22), ("firewall", "m0", "--off"), ("crash", "m1"),
            ("boot", "m1", "--address", "10.77.0.50"), ("ps", "m1"), ("kill", "m0"),
        ):  # fmt: skip
            assert footplate(*words) == (0, ""), words
        assert footplate("exec", "m0", "--", "true")[0] == 2
    finally:
        footplate("down")
    code, shown = footplate("ps", "m1")
    assert (code, "no lab runs here" in shown) == (2, True)


def test_a_number_of_machines_that_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="count=0"):
        Lab(0, tmp_path)
