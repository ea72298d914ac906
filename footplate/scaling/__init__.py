"""The scaling study: run the same training at several sizes, and compare time, throughput, efficiency and loss.

    results.py          the measurements and the summary of each size: frozen data, and pure functions over it
    learning_rates.py   the learning rate at each size
    study_callbacks.py  in a worker: callbacks that set the learning rate and measure time, in an unchanged trainer
    training_task.py    in a worker: one training, and its results
    study.py            `scale`: run all trainings, with interleaved repeats
    findings.py         the findings, as sentences
    report.py           the table and the JSON;  chart.py: the chart;  record.py: MLflow

Importing this package imports none of these files. A name is loaded when it is first used.
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
