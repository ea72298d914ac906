"""The loaders of a call: found, made resumable, shared out among the ranks, and limited to a number of batches.

    passed to the call, or by the data module's hook, or by the module's  →  adapted  →  checked by all ranks together

Loaders of a `fit` that come from a hook are made when something asks for them first. That may be a hook that needs their
length. No worker process of a loader outlives the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.combination import count_batches
from footplate.data.adapters.combined import leaves_of, loaders_of
from footplate.data.adapters.evaluation import apart_from_training, share_out
from footplate.data.adapters.logical_loader import logical_loader
from footplate.data.adapters.rank_shares import even
from footplate.data.adapters.workers import pin_for
from footplate.distributed.uneven_loaders import shortest
from footplate.training.argument_checks import limit_batches

if TYPE_CHECKING:
    from footplate.training.run import Run

LOADERS = {"validate": "val", "test": "test", "predict": "predict"}


def ask_loader(run: Run, name: str, argument: Any) -> Any:
    """Return a loader: as passed, or from the data module, or from the module. None if there is none."""
    if argument is not None:
        return argument
    owner = _owner(run, name)
    return None if owner is None else getattr(owner, name)()


def _owner(run: Run, name: str) -> Any:
    """Return the data module or module whose hook makes a loader. None if neither does."""
    owners = [run.datamodule, run.module]
    return next((owner for owner in owners if owner is not None and overrides(owner, name)), None)


def asks_hooks(run: Run, train_dataloaders: Any, val_dataloaders: Any) -> bool:
    """Return True if a hook makes one of the loaders of a `fit`.

    Raises:
        ConfigError: there is no training data.
    """
    training, validation = _owner(run, "train_dataloader"), _owner(run, "val_dataloader")
    if train_dataloaders is None and training is None:
        raise _no_training_data()
    return train_dataloaders is None or (val_dataloaders is None and validation is not None)


def _no_training_data() -> ConfigError:
    return ConfigError(
        "trainer.fit() has no training data: pass train_dataloaders=… or datamodule=… (on the command line: --data), "
        "or define train_dataloader()."
    )


def training_loader(run: Run, argument: Any, limit: Any, saved: dict[str, Any] | None) -> tuple[Any, float]:
    """Return the training loader, made resumable, and the number of its batches in an epoch, on all ranks.

    Args:
        run: the run.
        argument: as the user passed it.
        limit: `limit_train_batches`.
        saved: the loader's state in a checkpoint, if that state has the size of global batches. The size is kept.

    Raises:
        ConfigError: there is none, it is empty, or the limit leaves less than a batch.
    """
    user_loader = run.dataloaders["train"] = ask_loader(run, "train_dataloader", argument)
    if user_loader is None:
        raise _no_training_data()
    overfit = run.config.overfit_batches
    for leaf in leaves_of(user_loader):
        pin_for(leaf, run.device)
    if run.logical is not None:
        loader = logical_loader(user_loader, run.seed, run.logical.worlds, not overfit)
    else:
        loader = adapt(user_loader, run.seed, not overfit, run.data_world, run.config.use_distributed_sampler)
    run.read_from("train", [loader])
    if saved is None and run.logical is None and run.ranks_meant > run.world.size:
        saved = as_meant(loader.state_dict(), run.ranks_meant // run.ranks_of_a_share, run.data_ranks)
    if saved is not None:
        loader.load_state_dict(saved)
    total = count_batches(loader)
    if run.group.is_distributed and not even(loader):
        total = shortest(total, run.group, "training")
    if total == 0:
        raise ConfigError("The training loader has no batches: is the data empty, or drop_last with too few rows?")
    name = "overfit_batches" if overfit else "limit_train_batches"
    limit = overfit or limit
    batches = limit_batches(name, limit, total)
    return loader, batches


def as_meant(state: dict[str, Any], wanted_ranks: int, ranks: int) -> dict[str, Any] | None:
    """Return a fresh loader's state on fewer ranks than asked for, with global batches for all. None if it has none."""
    if "parts" in state:
        parts = [
            {**part, "state": as_meant(part["state"], wanted_ranks, ranks) or part["state"]} for part in state["parts"]
        ]
        return {**state, "parts": parts}
    size = state.get("global_batch_size")
    return None if size is None else {**state, "global_batch_size": size // ranks * wanted_ranks, "ranks": wanted_ranks}


def check_evaluated(run: Run, stage: str, dataloaders: Any) -> None:
    """Refuse an evaluation without data.

    Raises:
        ConfigError: no loader was passed, and no hook makes one.
    """
    if dataloaders is None and _owner(run, f"{LOADERS[stage]}_dataloader") is None:
        raise no_data(stage)


def no_data(stage: str) -> ConfigError:
    """Return the error of an evaluation without a loader."""
    return ConfigError(
        f"trainer.{stage}() has no data: pass dataloaders=… or datamodule=…, or define {LOADERS[stage]}_dataloader()."
    )


def evaluation_loaders(run: Run, stage: str, argument: Any, limit: Any) -> tuple[list[Any], list[float]]:
    """Return the loaders of a stage and the number of batches of each. Empty if there are none.

    Raises:
        ConfigError: one of them is empty, or the limit leaves less than a batch.
    """
    name = LOADERS[stage]
    user_loaders = run.dataloaders[name] = ask_loader(run, f"{name}_dataloader", argument)
    for leaf in leaves_of(user_loaders):
        pin_for(leaf, run.device)
    training, shared = run.dataloaders.get("train"), run.config.use_distributed_sampler
    separate = [apart_from_training(loader, training) for loader in loaders_of(user_loaders)]
    if run.logical is not None and stage != "predict":
        loaders = [logical_loader(loader, run.seed, run.logical.worlds) for loader in separate]
    else:
        loaders = [share_out(loader, run.seed, run.data_world, shared) for loader in separate]
    run.read_from(name, loaders)
    totals = [count_batches(loader) for loader in loaders]
    if run.parallel.lockstep and run.group.is_distributed:
        pairs = zip(loaders, totals, strict=True)
        totals = [total if even(loader) else shortest(total, run.group, stage) for loader, total in pairs]
    limits = [limit_batches(f"limit_{name}_batches", limit, total) for total in totals]
    for index, batches in enumerate(limits):
        if batches == 0 and limit != 0:
            which = f" {index}" if len(loaders) > 1 else ""
            raise ConfigError(f"The {stage} loader{which} has no batches: is the data empty?")
    return loaders, limits
