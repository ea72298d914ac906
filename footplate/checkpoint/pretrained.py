"""`load_pretrained`: start from weights in safetensors files, of which each rank reads its part.

    def configure_model(self):
        with torch.device("meta"):
            self.net = LlamaForCausalLM(config)
        fp.load_pretrained(self.net, "models/llama")

Names, shapes and types are compared at once, from the headers of the files. A tensor that has memory gets its numbers at
once, too. A tensor on the meta device gets them when the trainer makes it: each rank then reads the elements that it keeps
(`distributed/stored_weights.py`). Tensors that no file has, such as the frequencies of rotary embeddings, get theirs from
the layers themselves (`distributed/meta_device.py`).

The files are those of Hugging Face (one file, or several with an index), one safetensors file, or a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from footplate.checkpoint import loading
from footplate.checkpoint.format import statefile
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.checkpoint.storage.base import META, STATE
from footplate.checkpoint.stored_tensor import StoredTensor, check_complete, tensors_of, tensors_of_shards
from footplate.core.errors import CheckpointError
from footplate.distributed.stored_weights import local_box, remember

# Hugging Face's names, in the order in which it looks for them.
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3
# Old files of Llama and others hold these frequencies, which models compute.
_COMPUTED = "rotary_emb.inv_freq"


def load_pretrained(module: nn.Module, path: str | Path, prefix: str = "") -> None:
    """Give a module the weights in safetensors files. Each rank of a sharded module reads only its part.

    Call it in `configure_model`, where the module may be on the meta device. Its numbers are read when the trainer makes
    it. The files must be there until then, on every machine. Numbers are converted between floating-point types: float32
    weights can be read from bfloat16 files.

    Args:
        module: the layer that the files belong to, such as `self.net`.
        path: a directory of Hugging Face, a safetensors file, or a checkpoint (`run.ckpt`).
        prefix: the beginning of the names in the files that the module's own names lack, such as "model.". Tensors with
            other names are left out.

    Raises:
        CheckpointError: a tensor is missing or unknown, or has another shape or kind of type; or the files can't be read.
            The error names it. Nothing was loaded.

    Examples:
        >>> from safetensors.torch import save_file
        >>> save_file({"model.weight": torch.ones(1, 4), "model.bias": torch.zeros(1)}, "pretrained.safetensors")
        >>> layer = torch.nn.Linear(4, 1)
        >>> fp.load_pretrained(layer, "pretrained.safetensors", prefix="model.")
        >>> layer.weight.tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    place = to_place(path)
    stored = {name[len(prefix) :]: tensor for name, tensor in _open(place).items() if name.startswith(prefix)}
    weights = list(_weights_of(module))
    faults = _faults(module, weights, stored, prefix)
    if faults:
        raise CheckpointError(
            f"{place} doesn't hold the weights of this {type(module).__name__}: {'; '.join(faults)}. Nothing was loaded."
        )
    for shared in _by_tensor(weights):
        sources = [(weight.name, stored[weight.name]) for weight in shared if weight.name in stored]
        _check_alike(sources, str(place))
        for weight in shared:
            if weight.tensor.is_meta:
                remember(weight.layer, weight.key, sources[0][1])
        if not shared[0].tensor.is_meta:
            sources[0][1].read_into(*local_box(shared[0].tensor))


# Files


def _open(place: Place) -> dict[str, StoredTensor]:
    """The tensors at a place, by their names in the files."""
    store = store_of(place)
    kind = store.kind(place)
    if kind is None:
        raise CheckpointError(
            f"There is nothing at {place}. Expected a directory with safetensors files, or such a file."
        )
    place = store.resolve(place)
    if kind == "file":
        return tensors_of(place.parent, place.name)
    if store.size(place, META) is not None:
        return _of_checkpoint(place)
    if store.size(place, _INDEX) is not None:
        return _of_index(place, _INDEX)
    if store.size(place, _SINGLE) is not None:
        return tensors_of(place, _SINGLE)
    raise CheckpointError(
        f"{place} holds neither {_SINGLE} nor {_INDEX}, nor is it a checkpoint. Give the path of a safetensors file, or "
        "write such files first, by save_pretrained() of transformers or `footplate checkpoint convert`."
    )


def _of_index(place: Place, index: str) -> dict[str, StoredTensor]:
    """The tensors that an index of Hugging Face lists."""
    try:
        with store_of(place).open(place, index) as file:
            names: dict[str, str] = json.loads(file.read())["weight_map"]
        files = {file: tensors_of(place, file) for file in dict.fromkeys(names.values())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place / index} can't be read: it has no weight_map of names and files.") from error
    lost = [name for name, file in names.items() if name not in files[file]]
    if lost:
        raise CheckpointError(f"{place / index} lists {lost[0]} in {names[lost[0]]}, which doesn't hold it.")
    return {name: files[file][name] for name, file in names.items()}


def _of_checkpoint(place: Place) -> dict[str, StoredTensor]:
    """The weights of a checkpoint of Footplate, which may be in shards."""
    meta = loading.read_meta(place)
    with store_of(place).open(place, STATE) as file:
        tree = statefile.outline(file, meta["files"][STATE]["bytes"], str(place)).tree["state_dict"]
    whole = tensors_of(place, STATE)
    sharded = tensors_of_shards(place, (name for name in meta["files"] if name != STATE))
    return {
        name: whole[reference]
        if isinstance(reference, str)
        else check_complete(sharded.get(reference.name), reference, str(place))
        for name, reference in statefile.tensor_references(tree)
    }


# Weights of a module


@dataclass(frozen=True)
class _Weight:
    """A parameter or persistent buffer under one of its names."""

    name: str
    layer: nn.Module
    key: str
    tensor: Tensor


def _weights_of(module: nn.Module) -> Iterator[_Weight]:
    """The weights of a module, under all their names: those of its `state_dict`."""
    for path, layer in module.named_modules(remove_duplicate=False):
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                if tensor is not None and key not in layer._non_persistent_buffers_set:
                    yield _Weight(f"{path}.{key}" if path else key, layer, key, tensor)


def _by_tensor(weights: list[_Weight]) -> list[list[_Weight]]:
    """Group the names of each tensor."""
    groups: dict[int, list[_Weight]] = {}
    for weight in weights:
        groups.setdefault(id(weight.tensor), []).append(weight)
    return list(groups.values())


# Checks


def _faults(module: nn.Module, weights: list[_Weight], stored: Mapping[str, StoredTensor], prefix: str) -> list[str]:
    """What is wrong with the files for a module, in a few words each."""
    # One name of a shared tensor is enough.
    missing = [group[0].name for group in _by_tensor(weights) if not any(weight.name in stored for weight in group)]
    names = {weight.name for weight in weights}
    unknown = [name for name in stored if name not in names and not _is_computed(module, name)]
    there = [(weight, stored[weight.name]) for weight in weights if weight.name in stored]
    shapes = [
        f"{weight.name} {source.shape}, and {tuple(weight.tensor.shape)} in the module"
        for weight, source in there
        if source.shape != tuple(weight.tensor.shape)
    ]
    types = [
        f"{weight.name} {source.dtype}, and {weight.tensor.dtype} in the module"
        for weight, source in there
        if not _converts(source.dtype, weight.tensor.dtype)
    ]
    labels = (("it lacks", missing), ("it has unknown", unknown), ("shapes differ:", shapes), ("types differ:", types))
    faults = [f"{label} {_few(faulty)}" for label, faulty in labels if faulty]
    hint = _hint(names, stored, prefix) if missing else ""
    return [*faults, hint] if hint else faults


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if numbers keep their meaning. Those of 8-bit types need scales, which are other tensors."""
    plain = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return source == target or (source in plain and target in plain)


def _is_computed(module: nn.Module, name: str) -> bool:
    """Return True for a tensor that files may have although the module computes it."""
    own = [own for own, _ in module.named_buffers(remove_duplicate=False)]
    if name in own or (name.endswith(_COMPUTED) and any(buffer.endswith(_COMPUTED) for buffer in own)):
        return True
    # Models of transformers list such names as regular expressions.
    patterns: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _hint(names: set[str], stored: Mapping[str, StoredTensor], prefix: str) -> str:
    """How the names would fit, if they differ by their beginning only."""
    some = max(names, key=len)
    for name in stored:
        longer = name.removesuffix(some)
        if name.endswith(f".{some}") and sum(longer + own in stored for own in names) * 2 > len(names):
            return f'with prefix="{prefix}{longer}" the names fit'
    whole = max(stored, key=len, default="")
    for name in names:
        longer = name.removesuffix(whole)
        if whole and name.endswith(f".{whole}") and sum(longer + other in names for other in stored) * 2 > len(stored):
            return f"the names fit its layer {longer.rstrip('.')}: pass that"
    return ""


def _check_alike(sources: list[tuple[str, StoredTensor]], place: str) -> None:
    """Check that files hold the same numbers under all names of a tensor.

    Raises:
        CheckpointError: they don't.
    """
    (first, tensor), *others = sources
    for name, other in others:
        if other.parts != tensor.parts and not tensor.equals(other):
            raise CheckpointError(
                f"{place}: {first} and {name} hold different numbers, and are one tensor in this module. Build the module "
                "without sharing it (tie_word_embeddings=False in transformers). Nothing was loaded."
            )
