"""Checkpoints that leave out frozen weights: of a fine-tuned model, only what has been trained is saved.

Fine-tuning with adapters, such as LoRA, begins from pretrained weights. The module's constructor loads them, and no step
changes them, so each checkpoint would hold the same copy. With `Trainer(save_frozen_weights=False)` it holds instead

    state["state_dict"]         the weights that were trained, and the buffers
    state["frozen_weights"]     of each weight that was left out: its checksum and its type

Such a checkpoint is loaded into a module that has its pretrained weights already. `fill_in` compares their checksums with
those of the checkpoint, so training never continues on another base.

A weight is left out if it is frozen and still has the numbers that it had before training. So a weight that was trained and
then frozen stays in the checkpoint, and so does a frozen weight that a hook has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from footplate.checkpoint.format.statefile import bytes_of
from footplate.core.errors import CheckpointError

FROZEN_WEIGHTS = "frozen_weights"
# A callback that averages weights keeps the trained ones under this key, as Lightning's does.
TRAINED = "current_model_state"
_STATES = ("state_dict", TRAINED)

Checksums = dict[str, dict[str, Any]]
Whole = Callable[[Any], Any]


class FrozenWeights:
    """The frozen weights of a module, as they are before training. All ranks make it together.

    Args:
        module: the module, with its pretrained weights.
        whole: gathers a sharded tensor (`Strategy.whole`).
    """

    def __init__(self, module: nn.Module, whole: Whole) -> None:
        self._module, self._whole = module, whole
        tensors = _frozen(module)
        self._checksums: Checksums = {name: _checksum(tensor, whole) for name, tensor in tensors.items()}
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}

    def loaded(self, state: dict[str, Any]) -> None:
        """A checkpoint's state has been loaded into the module. From now on, weights that it has changed are saved, too."""
        tensors, compared = _frozen(self._module), state.get(FROZEN_WEIGHTS, {})
        for name, expected in list(self._checksums.items()):
            # `fill_in` has compared the weights that the checkpoint was saved without.
            is_same = compared.get(name) == expected
            if name in tensors and (is_same or _checksum(tensors[name], self._whole) == expected):
                self._versions[name] = _version(tensors[name])
            else:
                del self._checksums[name]

    def leave_out(self, state: dict[str, Any]) -> None:
        """Replace frozen weights in a run's state by their checksums."""
        names = [name for name, tensor in _frozen(self._module).items() if self._has(name, tensor)]
        unchanged = {name: self._checksums[name] for name in names}
        state[FROZEN_WEIGHTS] = unchanged
        for key in _STATES:
            if key in state:
                state[key] = {name: value for name, value in state[key].items() if name not in unchanged}

    def _has(self, name: str, tensor: Tensor) -> bool:
        """Return True if a frozen weight has the numbers that it had before training."""
        if name not in self._checksums:
            return False
        version = _version(tensor)
        if version == self._versions[name]:
            return True
        # Something was written to it, perhaps the same numbers: a step on XLA fetches all weights from the devices.
        # Ranks don't gather a sharded tensor here, since another rank may not see it as written.
        if hasattr(tensor, "to_local") or _checksum(tensor, self._whole) != self._checksums[name]:
            return False
        self._versions[name] = version
        return True


def fill_in(
    state: dict[str, Any], module: nn.Module, source: str, whole: Whole = lambda tensor: tensor
) -> dict[str, Any]:
    """Return a checkpoint's state with the frozen weights that it was saved without: those of the module.

    A checkpoint in a lower precision has checksums of rounded weights. Then the weights are rounded, and filled in.

    Args:
        state: the state. With sharded weights, all ranks call this together.
        module: the module, with its pretrained weights.
        source: the name of the checkpoint, for messages.
        whole: gathers a sharded tensor (`Strategy.whole`).

    Raises:
        CheckpointError: the module lacks such a weight, or has other numbers in it.
    """
    left_out: Checksums = state.get(FROZEN_WEIGHTS, {})
    if not left_out:
        return state
    own = module.state_dict()
    lacking = [name for name in left_out if name not in own]
    filled = {
        name: own[name].detach().to(getattr(torch, expected["dtype"]))
        for name, expected in left_out.items()
        if name in own
    }
    others = [name for name, tensor in filled.items() if _checksum(tensor, whole) != left_out[name]]
    for names, what in ((lacking, "lacks"), (others, "has other numbers in")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{source} was saved without its {len(left_out)} frozen weights (save_frozen_weights=False), and this "
                f"{type(module).__name__} {what} {', '.join(names[:3])}{more}. Build the model with the pretrained weights "
                "that it was trained with."
            )
    # The parts of a quantized weight can't be loaded. The module has them already.
    parameters = {name: filled[name] for name, _ in module.named_parameters(remove_duplicate=False) if name in filled}
    return {**state, **{key: {**state[key], **parameters} for key in _STATES if key in state}}


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters of a module, and what belongs to them, such as the scales of a quantized weight."""
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and any(path in frozen for path in _paths(name))
    }


def _paths(name: str) -> Iterator[str]:
    """A name, and the names of all that it may be a part of."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _checksum(tensor: Tensor, whole: Whole) -> dict[str, Any]:
    with torch.no_grad():
        content = bytes_of(whole(tensor.detach()).cpu().contiguous())
    return {"crc32": zlib.crc32(content), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _version(tensor: Any) -> tuple[int, int]:
    """The memory of a tensor, or of this rank's shard, and how often it was written to."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data_ptr(), 0 if local.is_inference() else local._version
