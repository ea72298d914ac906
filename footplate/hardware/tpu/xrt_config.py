"""`XRT_TPU_CONFIG`: the variable that gave programs the address of their TPU when there were TPU *nodes*.

    tpu_worker;0;10.0.0.2:8470                                    a node, reached over the network
    tpu_worker;0;10.0.0.2:8470|tpu_worker;1;10.0.0.3:8470         the hosts of a slice of several
    localservice;0;localhost:51011                                the TPU of this machine, through a server on it

Today a program runs on the machine that the TPU is attached to, and needs no address. The variables of today are
`TPU_ACCELERATOR_TYPE` and others (`environment.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

VARIABLE = "XRT_TPU_CONFIG"


@dataclass(frozen=True)
class Endpoint:
    """One host of a TPU node: `kind;index;host:port`."""

    kind: str
    index: int
    host: str
    port: int

    @property
    def local(self) -> bool:
        """True if it is this machine."""
        return self.kind == "localservice" or self.host in ("localhost", "127.0.0.1", "::1")


def read_config(text: str) -> list[Endpoint] | None:
    """Parse a value of `XRT_TPU_CONFIG` into endpoints; None if it has no known form."""
    endpoints = []
    for part in text.strip().split("|"):
        fields = part.split(";")
        if len(fields) != 3 or not fields[1].strip().isdecimal():
            return None
        host, _, port = fields[2].strip().rpartition(":")
        if not host or not port.isdecimal():
            return None
        endpoints.append(Endpoint(fields[0].strip(), int(fields[1]), host, int(port)))
    return endpoints


def explain(text: str) -> str:
    """Explain a value of `XRT_TPU_CONFIG`: its meaning, and what to do instead."""
    endpoints = read_config(text)
    if endpoints is None:
        return (
            f"{VARIABLE}={text[:80]!r} has no known form (such as tpu_worker;0;10.0.0.2:8470), and nothing reads it "
            "today: unset it."
        )
    if all(endpoint.local for endpoint in endpoints):
        return f"{VARIABLE} names the TPU of this machine, which is found without it: unset it."
    where = ", ".join(f"{endpoint.host}:{endpoint.port}" for endpoint in endpoints)
    return (
        f"{VARIABLE} names a TPU node at {where}, reached over the network. TPU nodes no longer exist: start the "
        "program on the machine that the TPU is attached to (a TPU VM"
        f"{'; on each of them, if a slice has several' if len(endpoints) > 1 else ''}), and unset {VARIABLE}."
    )
