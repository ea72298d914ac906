"""The data module: where batches come from.

    class Flowers(fp.DataModule):
        def train_dataloader(self):
            return fp.Loader(fp.Table("lake/flowers"), batch_size=64, shuffle=True)

The shape is that of `lightning.pytorch.LightningDataModule`, name for name. `TableDataModule` is one over tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from footplate.core.hooks import empty_hooks
from footplate.core.hparams import HyperParameters
from footplate.training.module_hooks import ModuleHooks

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer


@empty_hooks
class DataModule(HyperParameters):
    """Loaders of batches for training and evaluation. Override the methods of the loaders that you need.

    A loader may be a `footplate.data.Loader`, a `torch.utils.data.DataLoader`, or any iterable of batches. Evaluation may
    have a list of them. `prepare_data` runs once per machine, `setup(stage)` in every process.

    Examples:
        >>> class Squares(fp.DataModule):
        ...     def setup(self, stage):
        ...         self.rows = torch.arange(8.0)
        ...
        ...     def train_dataloader(self):
        ...         return torch.utils.data.DataLoader(self.rows, batch_size=4)
    """

    trainer: Trainer | None = None

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **kwargs: Any) -> Self:
        """Build this data module from a checkpoint's hyper-parameters, and load its state. No code of the file is run.

        Args:
            checkpoint_path: a Footplate checkpoint, or a Lightning `.ckpt` file.
            **kwargs: arguments of `__init__`. They override the checkpoint's, and replace those that it could not keep.

        Raises:
            CheckpointError: missing, incomplete, or an argument is missing.
        """
        from footplate.checkpoint import load_datamodule

        return load_datamodule(cls, checkpoint_path, kwargs)

    prepare_data = ModuleHooks.prepare_data
    setup = ModuleHooks.setup
    teardown = ModuleHooks.teardown
    on_before_batch_transfer = ModuleHooks.on_before_batch_transfer
    transfer_batch_to_device = ModuleHooks.transfer_batch_to_device
    on_after_batch_transfer = ModuleHooks.on_after_batch_transfer

    def train_dataloader(self) -> Any:
        """Batches to train on."""
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader")

    def val_dataloader(self) -> Any:
        """Batches to validate on, or a list of loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no val_dataloader")

    def test_dataloader(self) -> Any:
        """Batches to test on, or a list of loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no test_dataloader")

    def predict_dataloader(self) -> Any:
        """Batches to predict, or a list of loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no predict_dataloader")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this data module. The loader's position is kept anyway."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **loader_kwargs: Any,
    ) -> DataModule:
        """Make a data module of `torch.utils.data` sets. Training is shuffled unless the set is iterable."""
        from torch.utils.data import DataLoader, IterableDataset

        def loaders(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, (list, tuple)):
                return [loaders(item, shuffle) for item in dataset]
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size, shuffle, num_workers=num_workers, **loader_kwargs)

        module = cls()
        sets: Sequence[tuple[str, Any, bool]] = (
            ("train_dataloader", train_dataset, True),
            ("val_dataloader", val_dataset, False),
            ("test_dataloader", test_dataset, False),
            ("predict_dataloader", predict_dataset, False),
        )
        for name, dataset, shuffle in sets:
            if dataset is not None:
                setattr(module, name, lambda dataset=dataset, shuffle=shuffle: loaders(dataset, shuffle))
        return module
