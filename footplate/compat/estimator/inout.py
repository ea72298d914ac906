"""Input and output of an Estimator: the batches of an `input_fn`, and predictions row by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from footplate.core.errors import ConfigError

InputFn = Callable[..., Any]


def takes_params(input_fn: InputFn) -> bool:
    """Return True if an `input_fn` has an argument `params`."""
    return "params" in inspect.signature(input_fn).parameters


def batches_of(input_fn: InputFn, params: Mapping[str, Any]) -> Any:
    """Call an `input_fn`, and check its result.

    Raises:
        ConfigError: the result can't be iterated several times.
    """
    batches = input_fn(params=params) if takes_params(input_fn) else input_fn()
    if isinstance(batches, Iterator) or not hasattr(batches, "__iter__") or isinstance(batches, (tuple, Tensor)):
        raise ConfigError(
            f"input_fn returned {type(batches).__name__}: expected an object that can be iterated several times, such as a "
            "footplate.Loader or a torch DataLoader, whose batches are (features, labels)."
        )
    return batches


def features_and_labels(batch: Any) -> tuple[Any, Any]:
    """Split a batch: a pair is features and labels, anything else is features without labels."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Select predictions of a batch by key; None selects all.

    Raises:
        ConfigError: a key that isn't among the predictions, or predictions that aren't a dict.
    """
    if keys is None:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ConfigError(
            "predict_keys selects from a dict of predictions, and model_fn returned a tensor. Leave it out."
        )
    absent = [key for key in keys if key not in predictions]
    if absent:
        raise ConfigError(f'predict_keys: there is no "{absent[0]}". There are: {", ".join(map(str, predictions))}.')
    return {key: predictions[key] for key in keys}


def rows_of(predictions: Any) -> Iterator[Any]:
    """The predictions of a batch, one row at a time."""
    if not isinstance(predictions, Mapping):
        yield from predictions
        return
    for row in zip(*predictions.values(), strict=True):
        yield dict(zip(predictions, row, strict=True))
