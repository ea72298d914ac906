"""The scaling study: the same training at several sizes, and what adding devices brings.

    figures.py    what was measured, and what follows from it: pure functions over frozen data
    rates.py      the learning rate at each size
    probe.py      in a worker: the callbacks that set the rate and take the time, in trainers that know nothing of it
    measured.py   in a worker: one training, and what of it goes home
    study.py      `scale`: training after training, repeats interleaved
    reading.py    what the figures say, in sentences
    report.py     the table and the JSON;  chart.py: the picture;  record.py: MLflow

Importing this package imports none of them; a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.scaling.learning_rates import learning_rate as learning_rate
    from footplate.scaling.study import scale as scale

_HOMES = {
    "learning_rate": "footplate.scaling.learning_rates",
    "scale": "footplate.scaling.study",
}

__all__ = ["learning_rate", "scale"]

__getattr__ = lazy(__name__, _HOMES)
