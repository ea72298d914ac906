"""The errors that a user's mistake raises.

A `FootplateError` says what was given, what was expected and what to do. The command line prints its text alone,
without a traceback; anything else that escapes is a defect of ours or of the user's code, and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


class FootplateError(Exception):
    """Base of every error that a user can mend; its text is written for them."""


class ConfigError(FootplateError, ValueError):
    """An argument, a flag or a configuration value that can't be used."""


class Unavailable(ConfigError):
    """What is asked for can't be had now: a store that is away, a log of another machine, a lock that others hold."""


class DataError(FootplateError):
    """A table, a column or a row that can't be read as asked."""


class CheckpointError(FootplateError):
    """A checkpoint that is missing, incomplete, unsafe or of another model."""


class LaunchError(FootplateError):
    """Something that can't travel to or from worker processes, or a worker lost for good."""


class PackageError(FootplateError):
    """A job's package that can't be packed, or can't be installed."""


class MissingExtra(FootplateError, ImportError):
    """An optional dependency that the asked-for feature needs is not installed."""


def did_you_mean(name: str, options: Iterable[object]) -> str:
    """A sentence that names the options nearest to `name`, or all of them when none is near.

    >>> did_you_mean("val_lss", ["val_loss", "train_loss"])
    'Did you mean "val_loss"? There are: train_loss, val_loss.'
    """
    import difflib  # only who has made a mistake waits for it

    known = sorted(str(option) for option in options)
    if not known:
        return "There are none."
    listed = f"There are: {', '.join(known)}."
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f'Did you mean "{near[0]}"? {listed}' if near else listed
