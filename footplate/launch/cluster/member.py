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

from footplate.core.errors import LaunchError
from footplate.core.signals import heard
from footplate.launch.cluster import greeting
from footplate.launch.cluster.machines import GREET_S, JOIN_S, Line

RETRY_S = 0.2
LONGEST_WHY = 1000  # characters

_AGENT = """
import os, pickle, sys
from footplate.core.errors import FootplateError
from footplate.launch.family import die_with

die_with(int(sys.argv.pop()))
why = int(sys.argv.pop())
os.set_inheritable(why, False)
call, index, node = pickle.load(sys.stdin.buffer)
try:
    call(index, node)
except FootplateError as error:
    os.write(why, str(error).encode())
    sys.exit(f"footplate run: {error}")
"""


class LostError(LaunchError):
    """Machine 0 has gone, or can't be reached any more: no mistake of the user's, so the command may be given again."""


def join(host: str, port: int, token: str, node: int) -> int:
    """Be the member of machine `node` until it is told to end; the exit code that it is told.

    Raises:
        LaunchError: there is no lobby, or it is another one, or it has refused this machine.
        LostError: the lobby has gone.
    """
    line = _enter(host, port, token, node)
    agents: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with heard(lambda signum, _: line.send(told=signum)):
            return _serve(line, node, agents)
    finally:
        _kill(agents)
        line.close()


def _enter(host: str, port: int, token: str, node: int) -> Line:
    """A connection to the lobby, which has proved to be ours; another one if the lobby closes it without a word."""
    until = time.monotonic() + JOIN_S
    while True:
        connection = _connect(host, port, until)
        connection.settimeout(GREET_S)
        line, nonce = Line(connection), greeting.nonce()
        challenge = line.receive() or {}
        line.send(proof=greeting.proof(token.encode(), "member", str(challenge.get("nonce"))), nonce=nonce, node=node)
        answer = line.receive()
        if answer is not None and greeting.proves(token.encode(), "lobby", nonce, str(answer.get("proof"))):
            connection.settimeout(None)
            return line
        line.close()
        if answer is not None or time.monotonic() > until:
            why = str((answer or {}).get("why") or "it is no lobby of Footplate's")[:200]
            raise LaunchError(
                f"{host}:{port} refused this machine: {why}. Give the same FOOTPLATE_TOKEN and --nnodes everywhere."
            )
        time.sleep(RETRY_S)


def _serve(line: Line, node: int, agents: dict[int, subprocess.Popen[bytes]]) -> int:
    while (message := line.receive()) is not None:
        if message["do"] == "start":
            index = message["index"]
            agents[index], why = _start(b64decode(message["call"]), index, node)
            threading.Thread(target=_await, args=(line, index, agents[index], why), daemon=True).start()
        elif message["do"] == "still there?":
            line.send(here=True)
        elif message["do"] == "stop":
            _kill(agents)
        elif message["do"] == "bye":
            return message["code"]
        else:
            raise LaunchError(f"Machine {node} was refused: {message['why']}.")
    raise LostError(
        f"Machine {node} has lost the connection to machine 0, which looks after the launch. If machine 0 still runs, give "
        "this command again: the next attempt begins when this machine is back."
    )


def _connect(host: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"--master-addr {host} --master-port {port}: nobody is there after {JOIN_S:.0f} s: {error}. Is the "
                    "command given on machine 0, is that its address, and may this machine connect to it?"
                ) from error
            time.sleep(RETRY_S)
        else:
            return connection


def _start(call: bytes, index: int, node: int) -> tuple[subprocess.Popen[bytes], int]:
    """An agent, and a descriptor from which can be read why it has ended, if it says so."""
    why, written = os.pipe()
    os.set_blocking(why, False)
    command = [sys.executable, "-c", _AGENT, str(written), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[written])
    os.close(written)
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(pickle.dumps((pickle.loads(call), index, f"machine {node}")))
    return process, why


def _await(line: Line, index: int, process: subprocess.Popen[bytes], why: int) -> None:
    code, text = process.wait(), b""
    with contextlib.suppress(BlockingIOError):  # a process of the agent's has the other end, too
        text = os.read(why, LONGEST_WHY)
    os.close(why)
    line.send(ended=index, code=code, why=text.decode(errors="replace"))


def _kill(agents: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in agents.values():
        process.kill()
    agents.clear()
