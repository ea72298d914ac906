"""Causes of silent slowness on a TPU. Each is a pure function that returns a warning with a hint, or None.

A TPU raises no error when it is used badly:

- A program is compiled again for each form of batch.
- A product in single precision consists of six products in bfloat16.
- A matrix unit of 128 × 128 multiplies zeros if a matrix is smaller.
- Rows are computed eight at a time.
- Reading or writing the weights between two steps waits for a copy of all of them.

The callback `footplate/callbacks/pitfalls.py` calls these functions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

ROWS_OF_A_TILE = 8
MUCH_WAITING = 0.2
POOR_USE = 0.5
# Two forms are normal: one for most batches, and one for the last batch of an epoch.
MANY_FORMS = 3


class Compiled(Protocol):
    """A compiled program."""

    @property
    def name(self) -> str:
        """The step's name."""
        ...

    @property
    def form(self) -> str:
        """The form of batch that it was compiled for."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps in one call."""
        ...

    @property
    def seconds(self) -> float:
        """Duration of the compilation."""
        ...


@dataclass(frozen=True)
class Product:
    """A product of matrices, (rows × inner) · (inner × columns), repeated `times` times."""

    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def multiplications(self) -> int:
        """Number of multiplications that the product needs."""
        return self.times * self.rows * self.inner * self.columns

    def done(self, unit: int) -> int:
        """Number of multiplications on a matrix unit of `unit` × `unit`. It pads inner and columns, and rows to a tile."""
        rows = _up_to(self.rows, ROWS_OF_A_TILE)
        return self.times * rows * _up_to(self.inner, unit) * _up_to(self.columns, unit)

    def __str__(self) -> str:
        return f"{self.rows}×{self.inner} · {self.inner}×{self.columns}"


def recompilations(programs: Iterable[Compiled]) -> list[str]:
    """List the steps that were compiled for many forms of batch, with the forms and durations."""
    by_step: dict[tuple[str, int], list[Compiled]] = defaultdict(list)
    for program in programs:
        by_step[program.name, program.steps].append(program)
    return [
        f"{name} was compiled {len(compiled)} times, {sum(program.seconds for program in compiled):.1f} s in total: for "
        f"{'; '.join(f'{program.form} ({program.seconds:.1f} s)' for program in compiled)}. Each form of batch needs a "
        "program of its own: use one form (drop_last=True, images of one size), or pad sequences to a few lengths."
        for (name, _), compiled in by_step.items()
        if len({program.form for program in compiled}) >= MANY_FORMS
    ]


def full_precision(precision: str) -> str | None:
    """Return a warning about single or double precision, because the hardware multiplies bfloat16."""
    if precision not in ("32-true", "64-true"):
        return None
    return (
        f'precision="{precision}": a TPU multiplies bfloat16, and needs six products for one in single precision. '
        'Use precision="bf16-mixed", or "bf16-true" for weights in bfloat16, too.'
    )


def waiting(waited_s: float, elapsed_s: float) -> str | None:
    """Return a warning if the devices were idle for long because the next batch was missing."""
    if elapsed_s <= 0 or waited_s / elapsed_s < MUCH_WAITING:
        return None
    return (
        f"The devices waited for input for {100 * waited_s / elapsed_s:.0f}% of {elapsed_s:.0f} s. Give the loader "
        "more workers or threads, keep decoded images, or store them smaller; DataWaitMonitor logs the share."
    )


def tiny_batches(rows: int, devices: int) -> str | None:
    """Return a warning if batches have too few rows for each device."""
    rows_per_device = rows / devices
    if rows_per_device >= ROWS_OF_A_TILE:
        return None
    return (
        f"Batches of {rows} rows give each of {devices} device(s) {rows_per_device:g}, but a TPU computes {ROWS_OF_A_TILE} "
        f"rows at a time: batch_size={ROWS_OF_A_TILE * devices} takes no longer, and larger batches use the TPU better."
    )


def transfers(weight_readers: Sequence[str], state_bytes: int, log_every_n_steps: int) -> str | None:
    """Return a warning about copies between host and devices at every step.

    Args:
        weight_readers: names of the objects whose hooks between two steps may read the weights.
        state_bytes: size of parameters and buffers, without the optimizer's state.
        log_every_n_steps: the interval at which metrics are read.
    """
    if weight_readers:
        return (
            f"{' and '.join(dict.fromkeys(weight_readers))} may read the weights at every batch, so they are copied to the "
            f"host and back each time: 2 × {state_bytes / 1e6:,.1f} MB, and the optimizer's state. Read them at the end of "
            "epochs, or in training_step."
        )
    if log_every_n_steps == 1:
        return (
            "log_every_n_steps=1 waits for the devices after every step to read its metrics. Use a larger value, such as "
            "50, to read them together."
        )
    return None


def small_products(products: Sequence[Product], unit: int) -> str | None:
    """Return a warning if the sizes of products leave most of a matrix unit idle.

    Args:
        products: the products of one step.
        unit: rows and columns of the matrix unit.
    """
    done = sum(product.done(unit) for product in products)
    if not done:
        return None
    use = sum(product.multiplications for product in products) / done
    if use >= POOR_USE:
        return None

    worst = max(products, key=lambda product: product.done(unit) - product.multiplications)
    share = 100 * (worst.done(unit) - worst.multiplications) / done
    return (
        f"At most {100 * use:.0f}% of the matrix units' work is for the model: they multiply {unit} × {unit} at once, and "
        f"its matrices are smaller. The worst is {worst}, which wastes {share:.0f}% of all work. Multiples of {unit} "
        "(features, channels, classes, vocabulary) take no longer."
    )


def _up_to(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit
