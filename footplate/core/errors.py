"""The errors that a user's mistake raises.

The text of a `FootplateError` tells what was given, what was expected, and what to do. The command line prints that text
without a traceback. Any other exception is a defect in Footplate or in the user's code, and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


class FootplateError(Exception):
    """Base class of every error that a user can fix. Its text is written for the user.

    Examples:
        >>> try:
        ...     fp.Trainer(max_epochs=-5)
        ... except fp.FootplateError as error:
        ...     print(error)
        max_epochs=-5: expected an integer of at least -1 or None.
    """


class ConfigError(FootplateError, ValueError):
    """An argument, a flag or a configuration value that can't be used.

    Examples:
        >>> fp.EarlyStopping("val_loss", mode="lowest")
        Traceback (most recent call last):
        footplate.core.errors.ConfigError: ...
    """


class Unavailable(ConfigError):
    """Something that can't be reached now: a store, a log on another machine, a lock that another process holds.

    Examples:
        >>> from footplate.jobs.operations import Jobs
        >>> try:
        ...     Jobs.from_env().cancel("flowers")
        ... except fp.Unavailable as error:
        ...     print(error)  # such as: Slurm's controller does not answer
        ... except fp.ConfigError as error:
        ...     print(error)  # such as: there is no such job
    """


class DataError(FootplateError):
    """A table, a column or a row that can't be read as asked.

    Examples:
        >>> fp.Table("flowers.parquet", columns=["lable"])
        Traceback (most recent call last):
        footplate.core.errors.DataError: ...
    """


class CheckpointError(FootplateError):
    """A checkpoint that is missing, incomplete, unsafe or of another model.

    Examples:
        >>> fp.Trainer().validate(model, val, ckpt_path="runs/missing.ckpt")
        Traceback (most recent call last):
        footplate.core.errors.CheckpointError: ...
    """


class LaunchError(FootplateError):
    """An object that can't be sent to or from worker processes, or a worker that is lost for good.

    Examples:
        >>> import threading
        >>> fp.Runner(np=-1).run(threading.Lock().acquire)  # a lock can't be sent to another process
        Traceback (most recent call last):
        footplate.core.errors.LaunchError: ...
    """


class PeerLostError(ConnectionError):
    """A rank has lost its connections to other ranks while they met: one of them has ended, or the network failed.

    A call in several processes then begins another attempt. You see this error if none is left.

    Examples:
        >>> issubclass(fp.PeerLostError, ConnectionError)
        True
    """


class PackageError(FootplateError):
    """A job's package that can't be packed or installed.

    Examples:
        >>> issubclass(fp.PackageError, fp.FootplateError)
        True
    """


class MissingExtra(FootplateError, ImportError):
    """An optional dependency that a feature needs and that is not installed.

    Examples:
        >>> try:
        ...     trainer = fp.Trainer(logger=fp.MLflow("flowers"))
        ... except fp.MissingExtra as error:
        ...     print(error)  # with the command that installs MLflow
    """


def did_you_mean(name: str, options: Iterable[object]) -> str:
    """Return a sentence that names the option nearest to `name`, and all options.

    >>> did_you_mean("val_lss", ["val_loss", "train_loss"])
    'Did you mean "val_loss"? There are: train_loss, val_loss.'
    """
    # Import it here: only an error needs it.
    import difflib

    known = sorted(str(option) for option in options)
    if not known:
        return "There are none."
    listed = f"There are: {', '.join(known)}."
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f'Did you mean "{near[0]}"? {listed}' if near else listed
