"""Checks of single arguments of `Trainer`, and what they mean for a loader of a known length. Pure functions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch

from footplate.callbacks.timer import Duration, parse_duration
from footplate.checkpoint.storage import is_remote
from footplate.core.errors import ConfigError

Limit = int | float | None


def check_limit(name: str, value: Limit) -> Limit:
    """Check a number of batches (int), a share of them (float, 0.0 … 1.0), or None for all.

    Raises:
        ConfigError: any other value.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f"{name}={value!r}: expected a number of batches (10) or a part of them (0.1).")
    if isinstance(value, float) and value > 1.0:
        raise ConfigError(f"{name}={value!r}: a float is a part, 0.0 to 1.0; for batches use {name}={int(value)}.")
    return value


def check_local_directory(name: str, path: Any) -> None:
    """Check a directory on this machine, or None.

    Raises:
        ConfigError: it is a URI.
    """
    if path is not None and is_remote(path):
        raise ConfigError(
            f"{name}=\"{path}\": the run's directory holds logs that grow line by line, and objects can't grow. "
            f'Use a directory on this machine, and for checkpoints ModelCheckpoint(dirpath="{path}/checkpoints").'
        )


def limit_batches(name: str, limit: Limit, total: float) -> float:
    """Return the number of batches that a limit leaves of `total`, which is infinite if it is unknown.

    Raises:
        ConfigError: a share of an unknown number, or a share so small that no batch is left.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return total
    if isinstance(limit, int):
        return min(limit, total)
    if limit == 0.0:
        return 0
    if math.isinf(total):
        raise ConfigError(f"{name}={limit}: a part of a loader whose length is unknown; give a number of batches.")
    batches = int(total * limit)
    if batches == 0 and total > 0:
        raise ConfigError(
            f"{name}={limit}: less than one of {int(total)} batches; use {name}=1, or at least {1 / total:.2g}."
        )
    return batches


def validation_seconds(val_check_interval: Any) -> float | None:
    """Return the seconds between two validations, for a duration. None for batches or a share of an epoch.

    Raises:
        ConfigError: text, a dict or a timedelta that is no duration.
    """
    if not isinstance(val_check_interval, (str, timedelta, dict)):
        return None
    if isinstance(val_check_interval, str) and val_check_interval.count(":") == 2:
        val_check_interval = f"00:{val_check_interval}"
    return parse_duration(val_check_interval, "val_check_interval").total_seconds()


def validation_interval(
    val_check_interval: int | float | Duration | None, check_val_every_n_epoch: int | None, batches: float
) -> float:
    """Return the number of training batches between two validations.

    Infinite for the end of an epoch of unknown length, and for an interval by the clock.

    Raises:
        ConfigError: more batches than an epoch has, or a share of an unknown number.
    """
    if validation_seconds(val_check_interval) is not None:
        return math.inf
    if val_check_interval is None or (isinstance(val_check_interval, float) and val_check_interval == 1.0):
        return batches

    if (
        isinstance(val_check_interval, bool)
        or not isinstance(val_check_interval, (int, float))
        or val_check_interval <= 0
    ):
        raise ConfigError(
            f"val_check_interval={val_check_interval!r}: expected batches (100), a part of an epoch (0.25) or a duration "
            '("00:15:00", timedelta(minutes=15), {"minutes": 15}).'
        )

    # A number of batches.
    if isinstance(val_check_interval, int):
        if check_val_every_n_epoch is not None and val_check_interval > batches:
            raise ConfigError(
                f"val_check_interval={val_check_interval}: an epoch has {int(batches)} batches. "
                "Use at most that, or check_val_every_n_epoch=None to count over epochs."
            )
        return val_check_interval

    # A part of an epoch, whose length must be known.
    if val_check_interval > 1.0:
        raise ConfigError(
            f"val_check_interval={val_check_interval}: a float is a part of an epoch, up to 1.0; "
            f"for batches use val_check_interval={int(val_check_interval)}."
        )
    if math.isinf(batches):
        raise ConfigError(
            f"val_check_interval={val_check_interval}: a part of an epoch of unknown length; give a number of batches."
        )
    return max(1, int(batches * val_check_interval))


def check_validation_interval(name: str, value: Any) -> None:
    """Check a `val_check_interval` that some epoch could have.

    Raises:
        ConfigError: any other value.
    """
    validation_interval(value, None, 1 << 62)


def check_dry_run(name: str, value: Any) -> None:
    """Check True, False or a number of batches.

    Raises:
        ConfigError: any other value.
    """
    check_count(name, int(value) if isinstance(value, bool) else value, 0)


def check_count(name: str, value: Any, least: int, none: bool = False) -> Any:
    """Check an integer of at least `least`, or None if `none` is set.

    Raises:
        ConfigError: any other value.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: expected an integer of at least {least}{' or None' if none else ''}.")
    return value


def check_fewest(fewest: int | None, devices: int) -> None:
    """Check that a run has at least `min_devices` devices.

    Raises:
        ConfigError: it has fewer.
    """
    if fewest is not None and fewest > devices:
        raise ConfigError(
            f"min_devices={fewest}: the run has {devices} device(s). Use at most that, or None to keep all."
        )


def check_flag(name: str, value: Any) -> bool:
    """Check True or False.

    Raises:
        ConfigError: any other value.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False.")
    return value


def check_seconds(name: str, value: Any) -> float:
    """Check a time in seconds, above 0.

    Raises:
        ConfigError: any other value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name}={value!r}: expected seconds, more than 0.")
    return float(value)


def check_clip_val(name: str, value: Any) -> None:
    """Check a number of at least 0, or None.

    Raises:
        ConfigError: any other value.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise ConfigError(f"{name}={value!r}: expected a number of at least 0.")


def check_clip_algorithm(name: str, value: Any) -> None:
    """Check "norm", "value" or None.

    Raises:
        ConfigError: any other value.
    """
    if value not in (None, "norm", "value"):
        raise ConfigError(f'{name}="{value}": expected "norm" or "value".')


def check_sync_batchnorm(value: bool, device: torch.device, ranks: int) -> bool:
    """Return True if batch norm uses the batches of all ranks.

    Raises:
        ConfigError: this device can't.
    """
    if value and ranks > 1 and device.type == "cpu":
        raise ConfigError("sync_batchnorm=True: torch's SyncBatchNorm only runs on GPUs. Leave it out on the CPU.")
    return value and ranks > 1


def check_replicas(name: str, ranks: int, nodes: int, refused: Mapping[str, Any]) -> None:
    """Check that `strategy="replicas"` goes with the other arguments.

    Args:
        name: the name of the strategy.
        ranks: how many processes train together.
        nodes: `num_nodes`.
        refused: arguments that don't go with it, by name. A false value was not given.

    Raises:
        ConfigError: it doesn't.
    """
    if name != "replicas":
        return
    if ranks > 1:
        raise ConfigError(
            f'strategy="replicas" trains on several devices in one process, and this is one of {ranks}: use strategy="ddp".'
        )
    for argument, value in {"num_nodes": nodes > 1 and nodes, **refused}.items():
        if value:
            raise ConfigError(
                f'{argument}={value!r} doesn\'t go with strategy="replicas": leave it out, or use strategy="ddp".'
            )


def check_compile(name: str, value: Any) -> None:
    """Check True, False, a dict, or one of the names.

    Raises:
        ConfigError: any other value.
    """
    if not isinstance(value, (bool, dict)) and value not in ("step", "cudagraphs"):
        raise ConfigError(
            f'{name}={value!r}: expected True, False, a dict of torch.compile\'s options, "step" or "cudagraphs".'
        )


def check_deterministic(name: str, value: Any) -> None:
    """Check True, False, "warn" or None.

    Raises:
        ConfigError: any other value.
    """
    if value not in (None, True, False, "warn"):
        raise ConfigError(f'{name}={value!r}: expected True, False or "warn".')


def set_deterministic(value: bool | Literal["warn"] | None) -> None:
    """Let torch run only deterministic algorithms in this process, or all. None leaves torch's setting alone."""
    if value is not None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")


def as_list(value: Any) -> list[Any]:
    """Return a list: of nothing for None, of one object, or of several."""
    if value is None:
        return []
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return [value]
