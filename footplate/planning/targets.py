"""The hardware that a plan knows, by name, with its facts from the catalog.

    v5e-8, v6e-8        eight chips: the names of these generations count chips
    v4-8, v5p-8         eight cores of four chips: the two cores of a chip work as one device
    v2-8, v3-8          eight cores of four chips: each core is a device
    H100, A100x8        GPUs of one machine, by the names of the catalog
    cpu                 this machine, with measured rates (`hardware/cpu_rates.py`)

A device holds a copy of the model and computes a part of the batch. For slices these are JAX's devices. Rates are peak
rates. A value that the catalog doesn't have is None; it isn't estimated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from footplate.catalog.peak_rates import products_per_s
from footplate.catalog.rows import Accelerator, catalog
from footplate.core.errors import ConfigError, did_you_mean
from footplate.hardware.tpu.names import Slice, generation_of, generations, sizes, slice_of

# The most chips of a planned slice, by the number of its dimensions.
MOST_CHIPS = {2: 256, 3: 512}


@dataclass(frozen=True)
class Target:
    """A slice, some GPUs of one machine or of several equal ones, or this machine's processor.

    Attributes:
        name: the name that the user gave.
        kind: "tpu", "gpu" or "cpu".
        accelerator: the row of the catalog; None for a CPU.
        devices: the number of devices that share the batch.
        chips: the number of accelerators that the price includes.
        topology: the topology of a slice, such as `v5e:2x4`; None for other hardware.
        memory_bytes: the memory of one device.
        bytes_per_s: the rate of that memory.
        wire_bytes_per_s: the rate at which a device sends to other devices of its slice or machine, in one direction.
        usd_per_hour: the price of all of it together.
        machine: the machine or chips that the price is for. None for a part of the GPUs of the smallest machine.
        machine_devices: the devices that `wire_bytes_per_s` connects: those of one machine, or of the slice.
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
    machine: str | None
    machine_devices: int = 1

    @property
    def options(self) -> dict[str, object]:
        """Further arguments of JAX's `get_topology_desc` for this slice."""
        if self.topology is None:
            return {}
        generation = self.topology.partition(":")[0]
        if generation == "v4":
            return {"chip_config_name": "megacore"}
        return {"chips_per_host_bounds": (1, 1, 1)} if self.chips == 1 else {}

    def flops_per_s(self, precision: str, convolutions: float = 0.0) -> float | None:
        """The peak rate of one device for products; None for a CPU, and if the catalog has no rate.

        Args:
            precision: the precision of the training.
            convolutions: the part of convolutions in the arithmetic, from 0 to 1.
        """
        rate = None if self.accelerator is None else products_per_s(self.accelerator, precision, convolutions)
        return rate and rate * self.chips / self.devices


def target_of(name: str) -> Target:
    """Look up a target by its name.

    Raises:
        ConfigError: the name is unknown; the text suggests the nearest one.
    """
    text = name.strip()
    if text.lower() == "cpu":
        return _cpu()
    if generation_of(text) is not None:
        return _slice(text, slice_of(text))
    gpus = {row.short.lower(): row for row in catalog().accelerators.values() if row.kind == "gpu"}
    if text.lower() in gpus:
        return _gpus(text, gpus[text.lower()], 1)
    several = re.fullmatch(r"(.+)[x:]([1-9][0-9]{0,5})", text.lower())
    if several and several[1] in gpus:
        return _gpus(text, gpus[several[1]], int(several[2]))
    options = ["cpu", *(f"{generation}-8" for generation in generations()), *(row.short for row in gpus.values())]
    raise ConfigError(
        f'"{name[:60]}" is no hardware that a plan knows. {did_you_mean(text, options)} For several GPUs: H100x8.'
    )


def _slice(name: str, tpu_slice: Slice) -> Target:
    generation, chips, devices = tpu_slice.generation, tpu_slice.chips, tpu_slice.devices
    most = MOST_CHIPS[tpu_slice.topology.count("x") + 1]
    if chips > most:
        raise ConfigError(f'"{name}": a plan for {chips} chips is too large. Choose {sizes(generation, most)}.')
    row = catalog().accelerators[generation.catalog]
    wire = row.interconnect_gb_per_s
    return Target(
        name=name,
        kind="tpu",
        accelerator=row,
        devices=devices,
        chips=chips,
        topology=f"{generation.name}:{tpu_slice.topology}",
        memory_bytes=int(row.memory_gb * 2**30) // generation.devices_per_chip,
        bytes_per_s=row.memory_gb_per_s * 1e9 / generation.devices_per_chip,
        wire_bytes_per_s=wire * 1e9 / 2 / generation.devices_per_chip if wire else None,
        usd_per_hour=row.usd_per_hour * chips if row.usd_per_hour else None,
        machine=f"{chips} {row.short} chip{'s' * (chips > 1)}, with the machines",
        machine_devices=devices,
    )


def _gpus(name: str, row: Accelerator, count: int) -> Target:
    most = max(_counts_of(row), default=count)
    machines, rest = divmod(count, most)
    if machines > 1 and not rest:
        machine, price = _machine_of(row, most)
        machine, price = f"{machines} × {machine}", price and price * machines
    else:
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
        machine_devices=min(count, most),
    )


def _counts_of(row: Accelerator) -> set[int]:
    """Return the numbers of a GPU that a machine can have."""
    data = catalog()
    counts = {each.accelerator_count for each in data.machines.values() if each.accelerator == row.name}
    for (_, accelerator), valid in data.counts.items():
        if accelerator == row.name:
            counts.update(valid)
    return counts


def _machine_of(row: Accelerator, count: int) -> tuple[str | None, float | None]:
    """Find the smallest machine with this number of a GPU, and its price; the price is None if a part of it is unknown.

    Fewer than the smallest machine has are a part of one, without a price of its own.

    Raises:
        ConfigError: no machine has this number.
    """
    data = catalog()
    machines = data.machines.values()
    built_in = [each for each in machines if (each.accelerator, each.accelerator_count) == (row.name, count)]
    attached = [
        data.machines[name]
        for (name, accelerator), counts in data.counts.items()
        if accelerator == row.name and count in counts and not data.machines[name].legacy
    ]
    candidates = sorted([*built_in, *attached], key=lambda each: (each.vcpus or 0, each.memory_gb or 0))
    if not candidates:
        valid = _counts_of(row)
        if count < min(valid, default=0):
            return None, None
        raise ConfigError(
            f"no machine of the catalog has {count} {row.short}. Choose {', '.join(map(str, sorted(valid)))} of them, or a "
            f"multiple of {max(valid)} for several machines."
        )

    machine = candidates[0]
    if machine.accelerator:
        return machine.name, machine.usd_per_hour
    if machine.usd_per_hour is None or row.usd_per_hour is None:
        return f"{machine.name} with {count} {row.short}", None
    return f"{machine.name} with {count} {row.short}", machine.usd_per_hour + count * row.usd_per_hour


def _cpu() -> Target:
    from footplate.hardware.machine import examine_machine

    machine = examine_machine()
    memory = machine.memory_limit_bytes or machine.memory_bytes
    return Target("cpu", "cpu", None, 1, 0, None, memory, None, None, None, f"this machine: {machine.cpu}")
