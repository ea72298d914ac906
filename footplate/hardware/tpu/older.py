"""`XRT_TPU_CONFIG`, in which programs of the days of TPU *nodes* were told where their TPU is.

    tpu_worker;0;10.0.0.2:8470                                    a node, reached over the network
    tpu_worker;0;10.0.0.2:8470|tpu_worker;1;10.0.0.3:8470         the hosts of a slice of several
    localservice;0;localhost:51011                                the TPU of this machine, through a server on it

Today a program runs on the machine that the TPU is attached to, and is told nothing of the kind; which TPU that is it
reads from `TPU_ACCELERATOR_TYPE` and its kin (`surroundings.py`).
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
        """Whether it is this machine."""
        return self.kind == "localservice" or self.host in ("localhost", "127.0.0.1", "::1")


def read_config(text: str) -> list[Endpoint] | None:
    """The endpoints that a value of `XRT_TPU_CONFIG` names; None where it is in no form that there was."""
    found = []
    for part in text.strip().split("|"):
        fields = part.split(";")
        if len(fields) != 3 or not fields[1].strip().isdecimal():
            return None
        host, _, port = fields[2].strip().rpartition(":")
        if not host or not port.isdecimal():
            return None
        found.append(Endpoint(fields[0].strip(), int(fields[1]), host, int(port)))
    return found


def what_it_means_today(text: str) -> str:
    """One sentence or two on a value of `XRT_TPU_CONFIG`: what it says, and what to do instead."""
    endpoints = read_config(text)
    if endpoints is None:
        return (
            f"{VARIABLE}={text[:80]!r} is in no form that there was (tpu_worker;0;10.0.0.2:8470), and nothing reads it "
            "today: unset it."
        )
    if all(one.local for one in endpoints):
        return f"{VARIABLE} names the TPU of this machine, which is found without it: unset it."
    where = ", ".join(f"{one.host}:{one.port}" for one in endpoints)
    return (
        f"{VARIABLE} names a TPU node at {where}, reached over the network. There are no TPU nodes any more: start the "
        "program on the machine that the TPU is attached to (a TPU VM"
        f"{'; on each of them, for a slice of several' if len(endpoints) > 1 else ''}), and unset {VARIABLE}."
    )
