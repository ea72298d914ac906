"""What goes into an Estimator and what comes out of it: the batches of an `input_fn`, predictions row by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from footplate.core.errors import ConfigError

InputFn = Callable[..., Any]


def takes_params(input_fn: InputFn) -> bool:
    """Whether an `input_fn` wants `params`."""
    return "params" in inspect.signature(input_fn).parameters


def batches_of(input_fn: InputFn, params: Mapping[str, Any]) -> Any:
    """What an `input_fn` returns.

    Raises:
        ConfigError: it can't be iterated over again and again.
    """
    found = input_fn(params=params) if takes_params(input_fn) else input_fn()
    if isinstance(found, Iterator) or not hasattr(found, "__iter__") or isinstance(found, (tuple, Tensor)):
        raise ConfigError(
            f"input_fn returned {type(found).__name__}: expected something that can be iterated over again and again, "
            "such as a footplate.Loader or a torch DataLoader, whose batches are (features, labels)."
        )
    return found


def features_and_labels(batch: Any) -> tuple[Any, Any]:
    """A batch that is a pair, as it is; anything else is features without labels."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Those predictions of a batch that were asked for.

    Raises:
        ConfigError: there are no such.
    """
    if keys is None:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ConfigError("predict_keys chooses among predictions that are a dict; these are a tensor.")
    absent = [key for key in keys if key not in predictions]
    if absent:
        raise ConfigError(f'predict_keys: there is no "{absent[0]}"; there are {", ".join(map(str, predictions))}.')
    return {key: predictions[key] for key in keys}


def rows_of(predictions: Any) -> Iterator[Any]:
    """The predictions of a batch, one row at a time."""
    if not isinstance(predictions, Mapping):
        yield from predictions
        return
    for row in zip(*predictions.values(), strict=True):
        yield dict(zip(predictions, row, strict=True))
