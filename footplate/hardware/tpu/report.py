"""Report on this machine's TPU: for `footplate doctor`, and for the beginning of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from footplate.hardware.tpu import xrt_config
from footplate.hardware.tpu.environment import TPUEnvironment, contradictions, read_environment
from footplate.hardware.tpu.metadata import no_server, server
from footplate.hardware.tpu.versions import installed, mismatches, wrong_software


@dataclass(frozen=True)
class TPUReport:
    """The TPU of this machine, and problems with it.

    Attributes:
        environment: the slice, and this host's position in it.
        facts: the same as pairs of name and value, for display.
        advice: each problem, with its solution.
    """

    environment: TPUEnvironment
    facts: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]


def examine_tpu(environ: Mapping[str, str], chips: int) -> TPUReport:
    """Read the environment and the versions of packages. If a TPU is attached, ask the metadata server, too.

    Args:
        environ: the environment variables.
        chips: number of TPU chips attached to this machine.
    """
    environment = read_environment(environ, server(environ) if chips else no_server)
    generation = environment.slice.generation if environment.slice is not None else None

    packages = installed()
    software = wrong_software(environment.software, generation, packages.get("torch"))
    config = environ.get(xrt_config.VARIABLE)
    advice = [
        *contradictions(environment),
        *([xrt_config.explain(config)] if config else []),
        *mismatches(packages),
        *([software] if software else []),
    ]
    return TPUReport(environment, _facts(environment), tuple(advice))


def _facts(environment: TPUEnvironment) -> tuple[tuple[str, str], ...]:
    facts = {
        "slice": str(environment.slice) if environment.slice is not None else environment.accelerator_type,
        "this host": environment.worker_id,
        "hosts": ", ".join(environment.hostnames) or None,
        "software": environment.software,
        "limited to some chips by": environment.narrowed,
    }
    return tuple((name, value) for name, value in facts.items() if value is not None)
