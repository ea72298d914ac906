"""Searches before training: a learning rate, and the largest batch that fits into memory.

    tuner = fp.Tuner(trainer)
    tuner.scale_batch_size(model, datamodule=data)      # sets data.batch_size (or model.batch_size)
    tuner.lr_find(model, datamodule=data)               # sets model.lr (or model.learning_rate)
    trainer.fit(model, datamodule=data)

A search trains a copy of the model, with a trainer and a run directory of its own (`trial.py`). So the model, your trainer,
the loaders and the global random generators are afterwards as they were. `fit` after a search gives the same bits as `fit`
without one, if learning rate and batch size are the same. Only the attribute that the search sets differs.

A search can't restore what your data set's code keeps in memory, or what hooks write outside the model.
"""

from footplate.training.tuner.batch_size import largest as largest
from footplate.training.tuner.lr_finder import LRFinder as LRFinder
from footplate.training.tuner.tuner import Tuner as Tuner
