"""The TPU slice of this machine and this host's position in it, from environment variables and the metadata server.

    TPU_ACCELERATOR_TYPE=v5litepod-16      the slice                attribute accelerator-type
    TPU_WORKER_ID=2                        this host's number       attribute agent-worker-number
    TPU_WORKER_HOSTNAMES=h0,h1,h2,h3       all of its hosts         attribute worker-network-endpoints
                                           its software             attribute tpu-env, RUNTIME_VERSION

GKE and Ray set the variables. A TPU VM has the metadata server (`metadata.py`). If both have a value, the variable wins,
because someone set it on purpose. Reading accepts every value; `contradictions` lists the impossible ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from footplate.core.errors import ConfigError
from footplate.hardware.tpu.metadata import Attribute, no_server, tpu_env
from footplate.hardware.tpu.names import Slice, slice_of

NARROWING = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")


@dataclass(frozen=True)
class TPUEnvironment:
    """The TPU that this process runs on. Unknown values are None or empty.

    Attributes:
        accelerator_type: the slice's name, as given.
        worker_id: this host's number in the slice, as given.
        hostnames: names or addresses of all hosts of the slice.
        software: the software version of the machine.
        narrowed: the variable that limits this process to some of the host's chips.
    """

    accelerator_type: str | None = None
    worker_id: str | None = None
    hostnames: tuple[str, ...] = ()
    software: str | None = None
    narrowed: str | None = None

    @property
    def slice(self) -> Slice | None:
        """The slice, if its name is known."""
        if self.accelerator_type is None:
            return None
        try:
            return slice_of(self.accelerator_type)
        except ConfigError:
            return None

    @property
    def known(self) -> bool:
        """True if any value is known."""
        return self != TPUEnvironment()


def read_environment(environ: Mapping[str, str], attribute: Attribute = no_server) -> TPUEnvironment:
    """Read the TPU's environment variables, and missing values from the metadata server.

    Args:
        environ: the environment variables.
        attribute: a function from an attribute's name to its value; by default, no server is asked.
    """
    tpu_env_values = tpu_env(attribute("tpu-env") or "")
    endpoints = attribute("worker-network-endpoints") if not environ.get("TPU_WORKER_HOSTNAMES") else None
    listed = environ.get("TPU_WORKER_HOSTNAMES") or ",".join(map(_address, (endpoints or "").split(",")))
    return TPUEnvironment(
        accelerator_type=environ.get("TPU_ACCELERATOR_TYPE")
        or attribute("accelerator-type")
        or tpu_env_values.get("ACCELERATOR_TYPE")
        or None,
        worker_id=environ.get("TPU_WORKER_ID")
        or attribute("agent-worker-number")
        or tpu_env_values.get("WORKER_ID")
        or None,
        hostnames=tuple(name.strip() for name in listed.split(",") if name.strip()),
        software=tpu_env_values.get("RUNTIME_VERSION") or None,
        narrowed=next((name for name in NARROWING if environ.get(name)), None),
    )


def contradictions(environment: TPUEnvironment) -> list[str]:
    """List the impossible values of an environment, each with its solution."""
    problems = []
    if environment.accelerator_type is not None and environment.slice is None:
        problems.append(f"The accelerator type is unknown: {_why_unknown(environment.accelerator_type)}")

    hosts, slice_ = len(environment.hostnames), environment.slice
    if slice_ is not None and hosts and hosts != slice_.hosts:
        problems.append(
            f"TPU_WORKER_HOSTNAMES names {hosts} host(s), but a {slice_.name} has {slice_.hosts}: list all hosts of the "
            "slice, in the order of their numbers, or correct TPU_ACCELERATOR_TYPE."
        )

    most = slice_.hosts if slice_ is not None else hosts
    worker = environment.worker_id
    if worker is not None and (not worker.isdecimal() or (most and int(worker) >= most)):
        expected = "0" if most == 1 else f"a number from 0 to {most - 1}" if most else "a number, 0 for the first host"
        problems.append(f'TPU_WORKER_ID="{worker}": expected {expected}.')
    return problems


def wrong_count(environment: TPUEnvironment, devices: int) -> str | None:
    """Return a warning if JAX finds another number of devices on this host than the slice has.

    Args:
        environment: the environment. If a variable limits the process to some chips, there is no warning.
        devices: number of devices that JAX finds on this host.
    """
    slice_ = environment.slice
    if slice_ is None or environment.narrowed is not None or devices == slice_.devices_per_host:
        return None
    return (
        f"A {slice_.name} has {slice_.devices_per_host} device(s) on each of its hosts, but JAX finds {devices} here. "
        "Check if another process uses some of them, or if TPU_ACCELERATOR_TYPE is that of another machine."
    )


def _why_unknown(name: str) -> str:
    try:
        return str(slice_of(name))
    except ConfigError as error:
        return str(error)


def _address(endpoint: str) -> str:
    """Return the address in `id:port:10.0.0.2`; return any other form unchanged."""
    parts = endpoint.split(":")
    return parts[2] if len(parts) >= 3 else endpoint
