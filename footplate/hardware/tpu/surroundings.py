"""Which TPU this machine has a part of, and which part: from the environment, and what is lacking there from the server.

    TPU_ACCELERATOR_TYPE=v5litepod-16      the slice                attribute accelerator-type
    TPU_WORKER_ID=2                        which of its hosts       attribute agent-worker-number
    TPU_WORKER_HOSTNAMES=h0,h1,h2,h3       all of its hosts         attribute worker-network-endpoints
                                           its software             attribute tpu-env, RUNTIME_VERSION

GKE and Ray set the variables; a TPU VM has the metadata server (`metadata.py`). The two agree or the environment is right:
whoever set a variable meant it. Reading changes nothing and refuses nothing; `contradictions` says what can't be so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from footplate.core.errors import ConfigError
from footplate.hardware.tpu.metadata import Attribute, no_server, tpu_env
from footplate.hardware.tpu.names import Slice, slice_of

NARROWING = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")


@dataclass(frozen=True)
class Surroundings:
    """What is known of the TPU around this process; None and empty where nothing says it.

    Attributes:
        accelerator_type: the slice's name, as it was said.
        worker_id: which of the slice's hosts this is, as it was said.
        hostnames: names or addresses of all of its hosts.
        software: the software version that the machine was made with.
        narrowed: the variable by which this process is kept to a part of its host's chips.
    """

    accelerator_type: str | None = None
    worker_id: str | None = None
    hostnames: tuple[str, ...] = ()
    software: str | None = None
    narrowed: str | None = None

    @property
    def slice(self) -> Slice | None:
        """The slice, if its name stands for one that is known."""
        if self.accelerator_type is None:
            return None
        try:
            return slice_of(self.accelerator_type)
        except ConfigError:
            return None

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return self != Surroundings()


def look(environ: Mapping[str, str], attribute: Attribute = no_server) -> Surroundings:
    """What the environment says of the TPU, and the metadata server of what the environment doesn't.

    Args:
        environ: the environment.
        attribute: a function from an attribute's name to its value; nobody is asked by default.
    """
    said = tpu_env(attribute("tpu-env") or "")
    endpoints = attribute("worker-network-endpoints") if not environ.get("TPU_WORKER_HOSTNAMES") else None
    listed = environ.get("TPU_WORKER_HOSTNAMES") or ",".join(_address(one) for one in (endpoints or "").split(","))
    return Surroundings(
        accelerator_type=environ.get("TPU_ACCELERATOR_TYPE")
        or attribute("accelerator-type")
        or said.get("ACCELERATOR_TYPE")
        or None,
        worker_id=environ.get("TPU_WORKER_ID") or attribute("agent-worker-number") or said.get("WORKER_ID") or None,
        hostnames=tuple(name.strip() for name in listed.split(",") if name.strip()),
        software=said.get("RUNTIME_VERSION") or None,
        narrowed=next((name for name in NARROWING if environ.get(name)), None),
    )


def contradictions(found: Surroundings) -> list[str]:
    """What can't be so in what was said, each with what to do."""
    problems = []
    if found.accelerator_type is not None and found.slice is None:
        problems.append(f"The accelerator type is unknown here: {_why_unknown(found.accelerator_type)}")
    hosts, slice_ = len(found.hostnames), found.slice
    if slice_ is not None and hosts and hosts != slice_.hosts:
        problems.append(
            f"TPU_WORKER_HOSTNAMES names {hosts} host(s), and a {slice_.name} has {slice_.hosts}: give all hosts of the "
            "slice, in the order of their numbers, or correct TPU_ACCELERATOR_TYPE."
        )
    most = slice_.hosts if slice_ is not None else hosts
    worker = found.worker_id
    if worker is not None and (not worker.isdecimal() or (most and int(worker) >= most)):
        fitting = "0" if most == 1 else f"a number from 0 to {most - 1}" if most else "a number, 0 for the first host"
        problems.append(f'TPU_WORKER_ID="{worker}": expected {fitting}.')
    return problems


def wrong_count(found: Surroundings, devices: int) -> str | None:
    """What to say when JAX has found another number of devices on this host than the slice's name promises.

    Args:
        found: the surroundings; where a variable keeps the process to some chips, nothing is said.
        devices: how many devices JAX has found here.
    """
    slice_ = found.slice
    if slice_ is None or found.narrowed is not None or devices == slice_.devices_per_host:
        return None
    return (
        f"A {slice_.name} has {slice_.devices_per_host} device(s) on each of its hosts, and JAX has found {devices} here: "
        "is another process using some of them, or TPU_ACCELERATOR_TYPE that of another machine?"
    )


def _why_unknown(name: str) -> str:
    try:
        return str(slice_of(name))
    except ConfigError as error:
        return str(error)


def _address(endpoint: str) -> str:
    """The address in `id:port:10.0.0.2`; what isn't in that form, as it is."""
    parts = endpoint.split(":")
    return parts[2] if len(parts) >= 3 else endpoint
