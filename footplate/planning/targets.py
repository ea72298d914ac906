"""What can be planned for, by name, and what the catalog knows of it.

    v5e-8, v6e-8        eight chips: these generations are named by their chips
    v4-8, v5p-8         eight cores, which are four chips: two cores of a chip work as one device
    v2-8, v3-8          eight cores of four chips, each a device of its own
    H100, A100x8        GPUs of one machine, by the catalog's names
    cpu                 this machine, with the rates that it shows when it is asked (`rates.py`)

A device is what holds a copy of the model and computes a part of the batch; what JAX calls a device of a slice.
Rates are peaks; nothing reaches them. What the catalog doesn't know is None, and nothing is put in its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from footplate.core.errors import ConfigError, did_you_mean
from footplate.hardware.tpu.names import Slice, generation_of, generations, sizes, slice_of
from footplate.jobs.catalog.rows import Accelerator, catalog

MOST_CHIPS = {2: 256, 3: 512}  # of a slice that is planned for, by the number of its dimensions


@dataclass(frozen=True)
class Target:
    """A slice, some GPUs of one machine, or this machine's processor.

    Attributes:
        name: as it was asked for.
        kind: "tpu", "gpu" or "cpu".
        accelerator: the catalog's row; None for a CPU.
        devices: how many share the batch.
        chips: how many accelerators the price is for.
        topology: of a slice: `v5e:2x4`.
        memory_bytes: of one device.
        bytes_per_s: to and from that memory.
        wire_bytes_per_s: what a device can send to the others of its slice or machine, in one direction.
        usd_per_hour: for all of it.
        machine: what the price is of, or why there is none.
    """

    name: str
    kind: str
    accelerator: Accelerator | None
    devices: int
    chips: int
    topology: str | None
    memory_bytes: int
    bytes_per_s: float | None
    wire_bytes_per_s: float | None
    usd_per_hour: float | None
    machine: str

    @property
    def options(self) -> dict[str, object]:
        """What JAX must be told of a slice beside its topology."""
        if self.topology is None:
            return {}
        generation = self.topology.partition(":")[0]
        if generation == "v4":
            return {"chip_config_name": "megacore"}
        return {"chips_per_host_bounds": (1, 1, 1)} if self.chips == 1 else {}

    def flops_per_s(self, precision: str, convolutions: float = 0.0) -> float | None:
        """The peak rate of one device for products; None where the catalog has none, and for a CPU.

        A TPU multiplies bfloat16. Products in full single precision, which is what Footplate asks of it unless told
        otherwise, are made of six of those (XLA's HIGHEST). On a GPU torch takes TF32 for convolutions and single precision
        for products of matrices, unless told otherwise.

        Args:
            precision: the training's.
            convolutions: which part of the arithmetic is that of convolutions.
        """
        row = self.accelerator
        if row is None:
            return None
        per_device = self.chips / self.devices * 1e12
        if self.kind == "tpu":
            rate = row.bf16_tflops and row.bf16_tflops / (1 if precision.startswith("bf16") else 6)
        elif precision.startswith("bf16"):
            rate = row.bf16_tflops
        else:
            rate = row.fp32_tflops
            if rate and row.tf32_tflops:
                rate = 1 / ((1 - convolutions) / rate + convolutions / row.tf32_tflops)
        return rate * per_device if rate else None


def target_of(name: str) -> Target:
    """The target of a name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    text = name.strip()
    if text.lower() == "cpu":
        return _cpu()
    if generation_of(text) is not None:
        return _slice(text, slice_of(text))
    gpus = {row.short.lower(): row for row in catalog().accelerators.values() if row.kind == "gpu"}
    if text.lower() in gpus:
        return _gpus(text, gpus[text.lower()], 1)
    several = re.fullmatch(r"(.+)x([1-9][0-9]{0,5})", text.lower())
    if several and several[1] in gpus:
        return _gpus(text, gpus[several[1]], int(several[2]))
    options = ["cpu", *(f"{one}-8" for one in generations()), *(row.short for row in gpus.values())]
    raise ConfigError(f'"{name[:60]}" is nothing to plan for. {did_you_mean(text, options)} Several GPUs: H100x8.')


def _slice(name: str, found: Slice) -> Target:
    generation, chips, devices = found.generation, found.chips, found.devices
    most = MOST_CHIPS[found.topology.count("x") + 1]
    if chips > most:
        raise ConfigError(
            f'"{name}": {chips} chips are more than can be planned for; there are {sizes(generation, most)}.'
        )
    row = catalog().accelerators[generation.catalog]
    wire = row.interconnect_gb_per_s
    return Target(
        name=name,
        kind="tpu",
        accelerator=row,
        devices=devices,
        chips=chips,
        topology=f"{generation.name}:{found.topology}",
        memory_bytes=int(row.memory_gb * 2**30) // generation.devices_per_chip,
        bytes_per_s=row.memory_gb_per_s * 1e9 / generation.devices_per_chip,
        wire_bytes_per_s=wire * 1e9 / 2 / generation.devices_per_chip if wire else None,
        usd_per_hour=row.usd_per_hour * chips if row.usd_per_hour else None,
        machine=f"{chips} {row.short} chip{'s' * (chips > 1)}, with the machines",
    )


def _gpus(name: str, row: Accelerator, count: int) -> Target:
    machine, price = _machine_of(row, count)
    wire = row.interconnect_gb_per_s
    return Target(
        name=name,
        kind="gpu",
        accelerator=row,
        devices=count,
        chips=count,
        topology=None,
        memory_bytes=int(row.memory_gb * 1e9),
        bytes_per_s=row.memory_gb_per_s * 1e9,
        wire_bytes_per_s=wire * 1e9 / 2 if wire else None,
        usd_per_hour=price,
        machine=machine,
    )


def _machine_of(row: Accelerator, count: int) -> tuple[str, float | None]:
    """The smallest machine with so many of a GPU, and its price with them; the price is None where a part is unknown.

    Raises:
        ConfigError: no machine takes so many.
    """
    known = catalog()
    built_in = [one for one in known.machines.values() if (one.accelerator, one.accelerator_count) == (row.name, count)]
    attached = [
        known.machines[machine]
        for (machine, accelerator), counts in known.counts.items()
        if accelerator == row.name and count in counts and not known.machines[machine].legacy
    ]
    found = sorted([*built_in, *attached], key=lambda one: (one.vcpus or 0, one.memory_gb or 0))
    if not found:
        counts = {one.accelerator_count for one in known.machines.values() if one.accelerator == row.name}
        counts |= {each for (_, accelerator), some in known.counts.items() if accelerator == row.name for each in some}
        raise ConfigError(
            f"no machine of the catalog has {count} {row.short}; there are with {', '.join(map(str, sorted(counts)))}."
        )
    machine = found[0]
    if machine.accelerator:
        return machine.name, machine.usd_per_hour
    if machine.usd_per_hour is None or row.usd_per_hour is None:
        return f"{machine.name} with {count} {row.short}", None
    return f"{machine.name} with {count} {row.short}", machine.usd_per_hour + count * row.usd_per_hour


def _cpu() -> Target:
    from footplate.hardware.machine import examine_machine

    here = examine_machine()
    memory = here.memory_limit_bytes or here.memory_bytes
    return Target("cpu", "cpu", None, 1, 0, None, memory, None, None, None, f"this machine: {here.cpu}")
