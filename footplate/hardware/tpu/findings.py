"""All that can be said of this machine's TPU before any work: for `footplate doctor`, and for a trainer that begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from footplate.hardware.tpu import older
from footplate.hardware.tpu.metadata import no_server, server
from footplate.hardware.tpu.surroundings import Surroundings, contradictions, look
from footplate.hardware.tpu.versions import installed, mismatches, wrong_software


@dataclass(frozen=True)
class Findings:
    """What is known, and what is wrong with it.

    Attributes:
        surroundings: the slice, and this machine's place in it.
        facts: the same in words, for a page.
        advice: what doesn't fit, each with what to do.
    """

    surroundings: Surroundings
    facts: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]


def examine(environ: Mapping[str, str], chips: int) -> Findings:
    """Look at the environment, at the versions of packages, and, where a TPU is attached, ask the metadata server.

    Args:
        environ: the environment.
        chips: how many TPU chips are attached to this machine.
    """
    found = look(environ, server(environ) if chips else no_server)
    packages = installed()
    generation = found.slice.generation if found.slice is not None else None
    software = wrong_software(found.software, generation, packages.get("torch"))
    config = environ.get(older.VARIABLE)
    advice = [
        *contradictions(found),
        *([older.what_it_means_today(config)] if config else []),
        *mismatches(packages),
        *([software] if software else []),
    ]
    return Findings(found, _facts(found), tuple(advice))


def _facts(found: Surroundings) -> tuple[tuple[str, str], ...]:
    facts = {
        "slice": str(found.slice) if found.slice is not None else found.accelerator_type,
        "this host": found.worker_id,
        "hosts": ", ".join(found.hostnames) or None,
        "software": found.software,
        "kept to some chips by": found.narrowed,
    }
    return tuple((name, value) for name, value in facts.items() if value is not None)
