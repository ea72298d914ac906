"""A machine of a launch without a cluster's engine: it joins (`machines.py`), and starts agents on request."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

from footplate.core.errors import LaunchError
from footplate.core.net.framing import MAX_STRANGER_BYTES
from footplate.core.net.handshake import ClientHandshake, HandshakeError
from footplate.core.net.tls import client_stream, expect_announcement
from footplate.core.signals import heard
from footplate.launch.cluster.machines import HANDSHAKE_S, JOIN_S, PURPOSE, Connection

RETRY_S = 0.2
MAX_REASON_BYTES = 1000

AGENT = """
import os, pickle, sys
from footplate.core.errors import FootplateError
from footplate.launch.process_lifetime import die_with

die_with(int(sys.argv.pop()))
reason_fd = int(sys.argv.pop())
os.set_inheritable(reason_fd, False)
call, index, node = pickle.load(sys.stdin.buffer)
try:
    call(index, node)
except FootplateError as error:
    os.write(reason_fd, str(error).encode())
    sys.exit(f"footplate run: {error}")
"""


class LostError(LaunchError):
    """Machine 0 has gone, or can't be reached any more. The user made no mistake, so the command may be given again."""


def join(host: str, port: int, token: str, node: int, tls: bool = False) -> int:
    """Be the member of machine `node` until machine 0 ends the launch; return the exit code that it sends.

    Raises:
        LaunchError: machine 0 can't be reached, has another token, or has refused this machine.
        LostError: machine 0 has gone.
    """
    connection = _join(host, port, token, node, tls)
    agents: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with heard(lambda signum, _: connection.send(signal=signum)):
            return _serve(connection, node, agents)
    finally:
        _kill(agents)
        connection.close()


def _join(host: str, port: int, token: str, node: int, tls: bool) -> Connection:
    """Connect to machine 0, and prove the token. Try again if machine 0 closes the connection without an answer."""
    until = time.monotonic() + JOIN_S
    while True:
        accepted = _connect(host, port, until)
        accepted.settimeout(HANDSHAKE_S)
        connection = Connection(accepted)
        try:
            if _shake_hands(connection, token, node, tls):
                accepted.settimeout(None)
                return connection
            why = "no launch of Footplate answers there"
        except HandshakeError as error:
            # Another try would get the same answer.
            why, until = str(error), 0.0

        connection.close()
        if time.monotonic() > until:
            raise LaunchError(
                f"{host}:{port} refused this machine: {why}. Give the same FOOTPLATE_TOKEN and --nnodes everywhere."
            )
        time.sleep(RETRY_S)


def _shake_hands(connection: Connection, token: str, node: int, tls: bool) -> bool:
    """Return False if the other end closes the connection, or says nothing.

    Raises:
        HandshakeError: it has refused this machine, or has not proved the token.
    """
    challenge, binding = connection.receive(MAX_STRANGER_BYTES), ""
    if challenge is not None and tls:
        expect_announcement(challenge.message)
        stream = client_stream()
        connection.begin_tls(stream)
        challenge, binding = connection.receive(MAX_STRANGER_BYTES), stream.binding
    if challenge is None:
        return False
    handshake = ClientHandshake(token.encode(), PURPOSE, binding)
    connection.send(**handshake.answer(challenge.message, {"node": node}))
    reply = connection.receive(MAX_STRANGER_BYTES)
    if reply is None:
        return False
    handshake.verify(reply.message)
    return True


def _serve(connection: Connection, node: int, agents: dict[int, subprocess.Popen[bytes]]) -> int:
    while (frame := connection.receive()) is not None:
        message = frame.message
        if message["do"] == "start":
            index = message["index"]
            agents[index], reason_fd = _start(frame.data, index, node)
            threading.Thread(target=_await, args=(connection, index, agents[index], reason_fd), daemon=True).start()
        elif message["do"] == "ping":
            connection.send(pong=True)
        elif message["do"] == "stop":
            _kill(agents)
        elif message["do"] == "bye":
            return message["code"]
        else:
            raise LaunchError(f"Machine {node} was refused: {message['why']}.")
    raise LostError(
        f"Machine {node} has lost the connection to machine 0, which controls the launch. If machine 0 still runs, give "
        "this command again: the next attempt begins when this machine is back."
    )


def _connect(host: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"--master-addr {host} --master-port {port}: nothing answers there after {JOIN_S:.0f} s: {error}. "
                    "Give the command on machine 0, too; check that this is its address; let this machine connect to it."
                ) from error
            time.sleep(RETRY_S)
        else:
            return connection


def start_agent(reason_fd: int) -> subprocess.Popen[bytes]:
    """Start the process of an agent. It reads its call from its input, and writes the reason of its end to `reason_fd`."""
    command = [sys.executable, "-c", AGENT, str(reason_fd), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[reason_fd])


def _start(call: bytes, index: int, node: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start an agent. Returns it, and the descriptor from which its error, if it has one, can be read."""
    reason_fd, written = os.pipe()
    os.set_blocking(reason_fd, False)
    process = start_agent(written)
    os.close(written)
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(pickle.dumps((pickle.loads(call), index, f"machine {node}")))
    return process, reason_fd


def _await(connection: Connection, index: int, process: subprocess.Popen[bytes], reason_fd: int) -> None:
    code, text = process.wait(), b""
    # A process that the agent started may have the other end, too, and keep it open.
    with contextlib.suppress(BlockingIOError):
        text = os.read(reason_fd, MAX_REASON_BYTES)
    os.close(reason_fd)
    connection.send(ended=index, code=code, why=text.decode(errors="replace"))


def _kill(agents: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in agents.values():
        process.kill()
    agents.clear()
