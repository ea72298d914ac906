"""The process that joins the lab's machines: it carries their frames, as `network.py` says.

It is the first process of a PID namespace in which all machines are. So when it ends, in whichever way, the kernel kills
everything in the lab. It ends when its standard input ends, unless it was started with `--keep`.

Each machine has one end of a veth pair, and the switch has the other end, with a packet socket on it. A kernel needs no
bridge, no netem and no firewall for that. Frames are as long as a kernel allows (64 KiB), so that Python carries enough.

Requests come over a Unix socket, `switch` in the lab's directory. Each is one line of JSON, and so is the answer:

    {"do": "plug", "machine": "m0", "network": 0, "mac": "02…"}    its interface to this network is there
    {"do": "unplug", "machine": "m0"}                              its interfaces will be deleted
    {"do": "link", "from": "m0", "to": "m1", "link": {…}}          fields of a `Link`, in all networks
    {"do": "firewall", "machine": "m0", "open": [29500]}           null opens all ports
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from typing import Any

from footplate.lab.network import NETWORKS, SOCKET, Network, interface_of

Port = tuple[str, int]

MAX_FRAME_BYTES = 1 << 17
RECEIVE_BUFFER_BYTES = 64 << 20
# Frames to carry from one machine before the others have their turn.
TURN = 64
ALL_PROTOCOLS = 3
RCVBUFFORCE = 33


class Switch:
    """Carries frames, and serves requests."""

    def __init__(self, server: socket.socket) -> None:
        self._networks = [Network(random.Random()) for _ in range(NETWORKS)]
        # By machine and network.
        self._ports: dict[Port, socket.socket] = {}
        # Frames by the time at which they are due. The number keeps the order of frames that are due together.
        self._queue: list[tuple[float, int, Port, bytes]] = []
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._server = server
        self._selector.register(server, selectors.EVENT_READ, self._answer)

    def watch(self, stdin: int) -> None:
        """End with this stream."""
        self._selector.register(stdin, selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        """Serve until the process ends."""
        while True:
            wait = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            for key, _ in self._selector.select(wait):
                key.data()
            now = time.monotonic()
            while self._queue and self._queue[0][0] <= now:
                _, _, to, frame = heapq.heappop(self._queue)
                self._deliver(to, frame)

    def _carry(self, machine: str, network: int, port: socket.socket) -> bool:
        """Carry a machine's frames for a turn. Returns True if it may have more."""
        for _ in range(TURN):
            try:
                frame, address = port.recvfrom(MAX_FRAME_BYTES)
            except OSError:
                # There are no more frames; or the interface is gone.
                return False
            # Frames that we have sent ourselves come back.
            if address[2] == socket.PACKET_OUTGOING:
                continue
            now = time.monotonic()
            for due, destination in self._networks[network].deliveries(frame, machine, now):
                to = (destination, network)
                if due <= now:
                    self._deliver(to, frame)
                else:
                    self._count += 1
                    heapq.heappush(self._queue, (due, self._count, to, frame))
        return True

    def _deliver(self, to: Port, frame: bytes) -> None:
        # A machine that is down loses what is sent to it.
        with contextlib.suppress(OSError, KeyError):
            self._ports[to].send(frame)

    def _answer(self) -> None:
        connection, _ = self._server.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            try:
                self._carry_out(json.loads(connection.makefile("rb").readline()))
                answer = {}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _carry_out(self, request: dict[str, Any]) -> None:
        do = request["do"]
        if do == "plug":
            self._plug(request["machine"], request["network"], bytes.fromhex(request["mac"]))
        elif do == "unplug":
            self._unplug(request["machine"])
        elif do == "link":
            for network in self._networks:
                network.change_link(request["from"], request["to"], **request["link"])
        elif do == "firewall":
            for network in self._networks:
                network.set_firewall(request["machine"], request["open"])
        else:
            raise ValueError(f"unknown request {do!r}")

    def _plug(self, machine: str, network: int, mac: bytes) -> None:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        with contextlib.suppress(PermissionError):
            port.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        port.bind((interface_of(machine, network), 0))
        port.setblocking(False)
        self._networks[network].add(machine, mac)
        self._ports[machine, network] = port
        self._selector.register(port, selectors.EVENT_READ, lambda: self._carry(machine, network, port))

    def _unplug(self, machine: str) -> None:
        for network in range(NETWORKS):
            if port := self._ports.pop((machine, network), None):
                # Its last frames, such as those that end its connections.
                while self._carry(machine, network, port):
                    pass
                self._selector.unregister(port)
                port.close()

    def _end(self) -> None:
        if not os.read(0, 1):
            sys.exit(0)


def main() -> None:
    """Run the switch in the current directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true")
    keep = parser.parse_args().keep
    # As the first process of its namespace, it gets orphans.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(SOCKET)
    server.listen()
    switch = Switch(server)
    if not keep:
        switch.watch(0)
    switch.serve()


if __name__ == "__main__":
    main()
