"""A machine of a launch without a cluster's engine: comes into the lobby (`machines.py`), starts agents as it is told."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode

from footplate.errors import LaunchError
from footplate.launch.cluster import greeting
from footplate.launch.cluster.machines import JOIN_S, Line
from footplate.signals import heard

RETRY_S = 0.2

_AGENT = (
    "import pickle, sys; from footplate.launch.family import die_with; die_with(int(sys.argv.pop())); "
    "call, index, node = pickle.load(sys.stdin.buffer); call(index, node)"
)


def join(host: str, port: int, token: str, node: int) -> int:
    """Be the member of machine `node` until it is told to end; the exit code that it is told.

    Raises:
        LaunchError: there is no lobby, it is another one, or it has gone.
    """
    line = Line(_connect(host, port))
    challenge = line.receive() or {}
    nonce = greeting.nonce()
    line.send(proof=greeting.proof(token.encode(), "member", str(challenge.get("nonce"))), nonce=nonce, node=node)
    answer = line.receive() or {}
    if not greeting.proves(token.encode(), "lobby", nonce, str(answer.get("proof"))):
        line.close()
        raise LaunchError(
            f"{host}:{port} refused this machine, or is no lobby of Footplate's. Give the same FOOTPLATE_TOKEN and "
            "--nnodes everywhere."
        )
    agents: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with heard(lambda signum, _: line.send(told=signum)):
            return _serve(line, node, agents)
    finally:
        _kill(agents)
        line.close()


def _serve(line: Line, node: int, agents: dict[int, subprocess.Popen[bytes]]) -> int:
    while (message := line.receive()) is not None:
        if message["do"] == "start":
            index = message["index"]
            agents[index] = _start(b64decode(message["call"]), index, node)
            threading.Thread(target=_await, args=(line, index, agents[index]), daemon=True).start()
        elif message["do"] == "stop":
            _kill(agents)
        elif message["do"] == "bye":
            return message["code"]
        else:
            raise LaunchError(f"Machine {node} was refused: {message['why']}.")
    raise LaunchError(f"Machine {node} has lost the connection to machine 0, which looks after the launch.")


def _connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + JOIN_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(f"--master-addr {host} --master-port {port}: nobody is there: {error}.") from error
            time.sleep(RETRY_S)
        else:
            connection.settimeout(None)
            return connection


def _start(call: bytes, index: int, node: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(pickle.dumps((pickle.loads(call), index, f"machine {node}")))
    return process


def _await(line: Line, index: int, process: subprocess.Popen[bytes]) -> None:
    line.send(ended=index, code=process.wait())


def _kill(agents: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in agents.values():
        process.kill()
    agents.clear()
