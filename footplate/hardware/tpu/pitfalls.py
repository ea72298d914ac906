"""What makes training slow on a TPU without a word: each as a pure function to a sentence with a hint, or to None.

A TPU gives no error when it is used badly. A program is compiled again for each form of batch; products in full single
precision are made of six in bfloat16; a matrix unit of 128 × 128 multiplies zeros where a matrix is smaller; rows are
computed eight at a time; and whoever reads or writes the weights between two steps waits for a copy of all of them.
Who calls these, and when: `footplate/callbacks/pitfalls.py`.
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
MANY_FORMS = 3  # one form of batch, and another for the last batch of an epoch, are as usual


class Compiled(Protocol):
    """A program that was compiled."""

    @property
    def name(self) -> str:
        """The step's name."""
        ...

    @property
    def form(self) -> str:
        """The form of batch that it holds for."""
        ...

    @property
    def steps(self) -> int:
        """How many steps a call of it makes."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took to make."""
        ...


@dataclass(frozen=True)
class Product:
    """A product of matrices, (rows × inner) · (inner × columns), `times` over."""

    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def multiplications(self) -> int:
        """How many multiplications it needs."""
        return self.times * self.rows * self.inner * self.columns

    def done(self, unit: int) -> int:
        """How many a matrix unit of `unit` × `unit` does for it: inner and columns are filled up to it, rows to a tile."""
        rows = _up_to(self.rows, ROWS_OF_A_TILE)
        return self.times * rows * _up_to(self.inner, unit) * _up_to(self.columns, unit)

    def __str__(self) -> str:
        return f"{self.rows}×{self.inner} · {self.inner}×{self.columns}"


def recompilations(programs: Iterable[Compiled]) -> list[str]:
    """For each step that was compiled for many forms of batch: how often, for which forms, and how long it took."""
    by_step: dict[tuple[str, int], list[Compiled]] = defaultdict(list)
    for one in programs:
        by_step[one.name, one.steps].append(one)
    return [
        f"{name} was compiled {len(made)} times, {sum(one.seconds for one in made):.1f} s in all: for "
        f"{'; '.join(f'{one.form} ({one.seconds:.1f} s)' for one in made)}. Each form of batch costs a program: "
        "keep to one (drop_last=True, images of one size), or pad sequences to a few lengths."
        for (name, _), made in by_step.items()
        if len({one.form for one in made}) >= MANY_FORMS
    ]


def full_precision(precision: str) -> str | None:
    """What to say of training in single or double precision, where the hardware multiplies bfloat16."""
    if precision not in ("32-true", "64-true"):
        return None
    return (
        f'precision="{precision}": a TPU multiplies bfloat16, and makes each product in single precision of six of those. '
        'Use precision="bf16-mixed", or "bf16-true" for weights in bfloat16, too.'
    )


def waiting(waited_s: float, elapsed_s: float) -> str | None:
    """What to say of the time in which the devices had nothing to do, since the next batch was not there."""
    if elapsed_s <= 0 or waited_s / elapsed_s < MUCH_WAITING:
        return None
    return (
        f"The devices have waited for input for {100 * waited_s / elapsed_s:.0f}% of {elapsed_s:.0f} s. Give the loader "
        "more workers or threads, keep decoded images, or store them smaller; DataWaitMonitor logs the share."
    )


def tiny_batches(rows: int, devices: int) -> str | None:
    """What to say of batches that leave each device too few rows."""
    each = rows / devices
    if each >= ROWS_OF_A_TILE:
        return None
    return (
        f"Batches of {rows} rows give each of {devices} device(s) {each:g}, and a TPU computes {ROWS_OF_A_TILE} rows at a "
        f"time: batch_size={ROWS_OF_A_TILE * devices} takes no longer, and larger ones use it better."
    )


def transfers(weight_readers: Sequence[str], state_bytes: int, log_every_n_steps: int) -> str | None:
    """What to say of what is carried between host and devices at every step.

    Args:
        weight_readers: who has hooks between two steps and may look at the weights.
        state_bytes: parameters and buffers; what the optimizer remembers comes on top.
        log_every_n_steps: how often metrics are read.
    """
    if weight_readers:
        return (
            f"{' and '.join(dict.fromkeys(weight_readers))} may look at the weights at every batch, so they go to the host "
            f"and back each time: 2 × {state_bytes / 1e6:,.1f} MB, and the optimizer's. Do it at the end of epochs, or in "
            "training_step."
        )
    if log_every_n_steps == 1:
        return (
            "log_every_n_steps=1 waits for the devices after every step, to read its metrics: take 50 or so, and they are "
            "read together."
        )
    return None


def small_products(products: Sequence[Product], unit: int) -> str | None:
    """What to say of products whose sizes leave most of a matrix unit idle.

    Args:
        products: those of one step.
        unit: the matrix unit's rows and columns.
    """
    done = sum(one.done(unit) for one in products)
    if not done:
        return None
    use = sum(one.multiplications for one in products) / done
    if use >= POOR_USE:
        return None
    worst = max(products, key=lambda one: one.done(unit) - one.multiplications)
    share = 100 * (worst.done(unit) - worst.multiplications) / done
    return (
        f"At most {100 * use:.0f}% of the matrix units' work is the model's: they multiply {unit} × {unit} at once, and "
        f"its matrices are smaller. The worst is {worst}, {share:.0f}% of all work for nothing. Multiples of {unit} "
        "(features, channels, classes, vocabulary) cost no more."
    )


def _up_to(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit
