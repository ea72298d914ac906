"""A trial: training with a trainer's settings that leaves everything as it was.

A trial has a copy of the model, a trainer and a run directory of its own, and loaders with positions of their own. At its
end, the random generators, the data module and the samplers get their former states.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks.base import Callback
from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.data.adapters.combined import CombinedLoader, flatten, holds_loaders, is_combined, leaves_of, mode_of
from footplate.training.profiling import NoProfiler

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer


@contextlib.contextmanager
def trial(
    trainer: Trainer, model: Any, datamodule: Any, loaders: Any, limits: dict[str, Any], *callbacks: Callback
) -> Iterator[tuple[Trainer, Any, Any]]:
    """Make a trainer with the same settings, a copy of the model, and loaders with positions of their own.

    At the end of the `with` block, everything has its former state.
    """
    from footplate.training.trainer import Trainer

    directory = tempfile.mkdtemp(prefix="footplate-search-")
    config = replace(
        trainer.config, callbacks=list(callbacks), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, enable_monitor=False, max_epochs=-1, min_epochs=None, min_steps=None, max_time=None,
        val_check_interval=None, check_val_every_n_epoch=1, num_sanity_val_steps=0, profiler=NoProfiler(final=True),
        seed=trainer.seed, default_root_dir=directory, **limits,
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        held.enter_context(_as_before(model, datamodule, loaders))
        with warnings.catch_warnings():
            # The user's trainer has given these warnings already.
            warnings.simplefilter("ignore")
            trainer_copy = Trainer(**vars(config))
        # A launch id of its own keeps a job from counting this fit.
        trainer_copy.run.launch_id = "search"
        yield trainer_copy, _copied(model), _apart(loaders)


@contextlib.contextmanager
def _as_before(model: Any, datamodule: Any, loaders: Any) -> Iterator[None]:
    """Restore what training changes besides the model's copy: random generators, the data module, samplers.

    Inside the block, the model is on the CPU, so that its copy has the device's memory.
    """
    generators = rng.capture()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    fields = None if datamodule is None else dict(vars(datamodule))
    hparams = copy.copy(getattr(datamodule, "hparams", None))
    samplers = [_state_of(sampler) for sampler in _samplers(loaders)]

    devices = [
        (tensor, tensor.device) for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cpu"
    ]
    for tensor, _ in devices:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)
        for put_back in samplers:
            put_back()
        if fields is not None:
            vars(datamodule).clear()
            vars(datamodule).update(fields)
        if isinstance(hparams, dict) and datamodule is not None:
            datamodule.hparams.clear()
            datamodule.hparams.update(hparams)
        rng.restore(generators)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)


def _copied(model: Any) -> Any:
    """Return a copy of the model, without the callbacks that it configures.

    Raises:
        ConfigError: it can't be copied.
    """
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        # The user's code may raise any exception.
        raise ConfigError(
            f"{type(model).__name__} can't be copied ({error}), so that a search can't leave it as it is. A tensor that "
            "depends on others, a lock or an open file as an attribute can't be."
        ) from error
    if overrides(copied, "configure_callbacks"):
        copied.configure_callbacks = list
    return copied


def _apart(loaders: Any) -> Any:
    """Return loaders with positions of their own, in the same collection.

    Raises:
        ConfigError: an iterator, which a search would use up.
    """
    if loaders is None:
        return None
    leaves, build = flatten(loaders) if holds_loaders(loaders) else ([loaders], next)
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise ConfigError(f"A search would use up the {type(leaf).__name__} that was given: give what makes it.")
    built = build(iter([leaf.beside() if hasattr(leaf, "beside") else leaf for leaf in leaves]))
    return CombinedLoader(built, mode_of(loaders, "max_size_cycle")) if is_combined(loaders) else built


def _samplers(loaders: Any) -> list[Any]:
    """Return the samplers and generators of torch DataLoaders, which an epoch changes."""
    samplers: list[Any] = []
    for loader in leaves_of(loaders) if holds_loaders(loaders) else [loaders]:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            samplers += [] if owner is None or owner is loader else [owner]
            samplers += [generator] if isinstance(generator, torch.Generator) else []
    return samplers


def _state_of(sampler: Any) -> Callable[[], Any]:
    """Return a function that gives a sampler or generator its present state back."""
    if isinstance(sampler, torch.Generator):
        state = sampler.get_state()
        return lambda: sampler.set_state(state)
    fields = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        plain = isinstance(value, (int, float, str, list, dict, set, tuple)) or hasattr(value, "getstate")
        fields[name] = copy.deepcopy(value) if plain else value
    return lambda: getattr(sampler, "__dict__", {}).update(fields)
