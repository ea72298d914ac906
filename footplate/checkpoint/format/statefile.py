"""A run state as one flat file: a header that locates every tensor, followed by the bytes of all tensors.

    {"state_dict": {"weight": tensor}, "progress": {"epoch": 3}}

    header    state_dict.weight: F32 (2, 3), bytes 0 … 24
              __metadata__: {"state_dict": {"weight": <tensor "state_dict.weight">}, "progress": {"epoch": 3}}, as JSON
    bytes     0 … 24

The layout is that of safetensors (https://github.com/huggingface/safetensors#format), so any reader of safetensors can
extract the weights. The tree of plain values around the tensors is JSON in the file's metadata. Nothing in the file is
code. `Snapshot` copies a live state into one block of host memory, which is reused from save to save and written without
another copy. A save costs the training loop one pass over the state's memory.
"""

from __future__ import annotations

import enum
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from footplate.checkpoint.format.state_hash import state_hash
from footplate.core.errors import CheckpointError

# Marks values that JSON has no form for: {"$": "tuple", "of": [1, 2]}
_TAG = "$"
_TREE, _CHECKSUMS = "footplate", "footplate_crc32"
_PIECE_NBYTES = 16 << 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, RecursionError)
_PLAIN = frozenset({type(None), bool, int, float, str})
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FORMATS = {"channels_last": (4, torch.channels_last), "channels_last_3d": (5, torch.channels_last_3d)}
_TORCH_TYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Written:
    """Size of a file, CRC-32 of its bytes, and the hash of the state in it (see `state_hash.py`)."""

    nbytes: int
    crc32: int
    state_hash: str = ""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its type, shape and size in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sharded:
    """A reference to a tensor whose parts are in other files; see `shards.py`.

    Attributes:
        name: the name of its parts in these files.
        dtype: its type.
        shape: the shape of the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """The content of a file's header.

    Attributes:
        tree: the state in JSON's terms, with references to its tensors.
        tensors: each tensor by its name.
        checksums: the CRC-32 of each tensor's bytes; empty in files of earlier versions.
    """

    tree: Any
    tensors: dict[str, Entry]
    checksums: dict[str, int]

    def tensors_of(self, part: str) -> dict[str, Entry]:
        """The tensors that a top-level part of the state refers to. A tensor shared by several parts counts in each."""
        references = _references(self.tree.get(part) if isinstance(self.tree, dict) else None)
        return {
            reference["of"]: self._sharded(reference) if reference[_TAG] == "sharded" else self.tensors[reference["of"]]
            for reference in references
        }

    @staticmethod
    def _sharded(reference: dict[str, Any]) -> Entry:
        dtype, shape = _DTYPES[reference["dtype"]], tuple(reference["shape"])
        return Entry(dtype, shape, math.prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class Frozen:
    """A state in host memory that shares no memory with the live one.

    Attributes:
        tree: the state in JSON's terms, with references to its tensors.
        index: the header's entries of the tensors, as JSON.
        data: uint8 (nbytes,), the tensors' bytes one after the other.
        spans: for each tensor in the order of the index: its name, and where its bytes begin and end.
        notes: additional metadata for the header, for other readers.
    """

    tree: Any
    index: str
    data: Tensor
    spans: tuple[tuple[str, int, int], ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    def checksums(self) -> dict[str, int]:
        """The CRC-32 of each tensor's bytes, by its name."""
        data = bytes_of(self.data)
        return {name: zlib.crc32(data[start:stop]) for name, start, stop in self.spans}

    def write(self, file: RawIOBase) -> Written:
        """Write the header and the tensors' bytes."""
        checksums = self.checksums()
        words = " ".join(f"{checksum:08x}" for checksum in checksums.values())
        tree = json.dumps(self.tree, separators=(",", ":"))
        metadata = json.dumps({**self.notes, _CHECKSUMS: words, _TREE: tree})
        header = _frame(f'{{"__metadata__":{metadata}{self.index}}}')
        data = bytes_of(self.data)
        starts = range(0, len(data), _PIECE_NBYTES)

        checksum = 0
        for piece in (memoryview(header), *(data[start : start + _PIECE_NBYTES] for start in starts)):
            checksum = zlib.crc32(piece, checksum)
            # One call may write only a part to an unbuffered file.
            while piece:
                piece = piece[file.write(piece) :]
        return Written(len(header) + len(data), checksum, state_hash(self.tree, checksums))


class Snapshot:
    """Copies states into host memory that is reused. The next copy overwrites the one before."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[str, torch.dtype, torch.Size, str]] = []
        self._index = ""
        self._spans: tuple[tuple[str, int, int], ...] = ()
        self._data = self._memory
        self._views: list[Tensor] = []

    def take(self, state: Any, notes: Mapping[str, str] | None = None) -> Frozen:
        """Copy a state: every tensor to the host, and every container.

        Args:
            state: the live state.
            notes: see `Frozen`.

        Raises:
            CheckpointError: a value can't be saved; the text names its path.
        """
        encoder = _Encoder()
        tree = encoder.encode(state, "")
        tensors = list(encoder.tensors.values())
        kinds = [(name, tensor.dtype, tensor.shape, tensor.device.type) for name, tensor in encoder.tensors.items()]
        if kinds != self._kinds:
            self._arrange(kinds)

        if tensors:
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._views, tensors, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
            for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
                torch.accelerator.synchronize(device)
        return Frozen(tree, self._index, self._data, self._spans, notes or {})

    def _arrange(self, kinds: list[tuple[str, torch.dtype, torch.Size, str]]) -> None:
        """Lay out the tensors in memory: wide types first, so that every tensor is aligned."""
        total = sum(shape.numel() * dtype.itemsize for _, dtype, shape, _ in kinds)
        pinned = any(device == "cuda" for *_, device in kinds)
        with torch.inference_mode(False):
            if self._memory.numel() < total or (pinned and not self._memory.is_pinned()):
                self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)

            views: dict[str, Tensor] = {}
            entries, spans, start = [], [], 0
            for name, dtype, shape, _ in sorted(kinds, key=lambda kind: -kind[1].itemsize):
                stop = start + shape.numel() * dtype.itemsize
                views[name] = self._memory[start:stop].view(dtype).view(shape)
                entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
                entries.append(f",{json.dumps(name)}:{json.dumps(entry)}")
                spans.append((name, start, stop))
                start = stop
            self._views = [views[name] for name, *_ in kinds]
            self._data = self._memory[:total]
        self._index, self._spans, self._kinds = "".join(entries), tuple(spans), kinds


def freeze(state: Any) -> Frozen:
    """Copy a state into memory of its own."""
    return Snapshot().take(state)


def write_tensors(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write a plain safetensors file. A tensor with several names is written once for each.

    Raises:
        CheckpointError: the format has no type for a tensor; the text gives its name.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name}: a {_kind_of(tensor)} can't be written to a safetensors file.")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes

    file.write(_frame(json.dumps(header)))
    for _, tensor in ordered:
        file.write(bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous()))


def _frame(header: str) -> bytes:
    """Encode a header: its length, its text, and padding that aligns the tensors after it."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(
    file: BinaryIO, nbytes: int, source: str, device: Any = "cpu", instead: Mapping[str, Any] = _NOTHING
) -> tuple[Any, Written]:
    """Read the state in a file; return it with the size and checksum of the bytes.

    Args:
        file: the file, at its beginning.
        nbytes: its size.
        source: its name, for error texts.
        device: the device for the tensors.
        instead: what stands in the state for some tensors, by their names. No memory is taken for them.

    Raises:
        CheckpointError: the file is not a state file, or is damaged.
    """
    tensors, metadata, written = read_tensors(file, nbytes, source, device, instead)
    try:
        return _decode(json.loads(metadata[_TREE]), tensors), written
    except _DAMAGED as error:
        raise _damaged(source, error) from error


def read_tensors(
    file: BinaryIO, nbytes: int, source: str, device: Any = "cpu", instead: Mapping[str, Any] = _NOTHING
) -> tuple[dict[str, Tensor], dict[str, str], Written]:
    """Read the tensors in a file by name, its header's metadata, and the size and checksum of its bytes; see `read`."""
    try:
        size, header, checksum = _read_header(file, nbytes)
        tensors: dict[str, Any] = {}
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            if name in instead:
                size, checksum = _pass_over(file, entry["data_offsets"], size, checksum)
                tensors[name] = instead[name]
                continue
            tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            raw = bytes_of(tensor)
            if file.readinto(raw) != len(raw):  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError(f"{name} is truncated")
            size, checksum = size + len(raw), zlib.crc32(raw, checksum)
            tensors[name] = tensor.to(device)
        if file.read(1):
            raise ValueError("there are bytes after its end")
        return tensors, header["__metadata__"], Written(size, checksum)
    except _DAMAGED as error:
        raise _damaged(source, error) from error


def _pass_over(file: BinaryIO, offsets: list[int], size: int, checksum: int) -> tuple[int, int]:
    """Read a tensor without keeping it; return size and checksum of the bytes up to its end."""
    left = offsets[1] - offsets[0]
    while left:
        piece = file.read(min(left, _PIECE_NBYTES))
        if not piece:
            raise ValueError("it is truncated")
        left, size, checksum = left - len(piece), size + len(piece), zlib.crc32(piece, checksum)
    return size, checksum


def _damaged(source: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{source} can't be read: it is damaged ({error}). Nothing was loaded.")


def outline(file: BinaryIO, nbytes: int, source: str) -> Outline:
    """Read a file's header, and no tensor. The arguments are those of `read`.

    Raises:
        CheckpointError: the file is not a state file, or is damaged.
    """
    try:
        _, header, _ = _read_header(file, nbytes)
        metadata = header.pop("__metadata__")
        tree = json.loads(metadata[_TREE])
        words = metadata.get(_CHECKSUMS, "").split()
        checksums = dict(zip(header, (int(word, 16) for word in words), strict=bool(words)))
        entries = {
            name: Entry(
                _DTYPES[field["dtype"]], tuple(field["shape"]), field["data_offsets"][1] - field["data_offsets"][0]
            )
            for name, field in header.items()
        }
    except _DAMAGED as error:
        raise CheckpointError(f"{source} can't be read: it is damaged ({error}).") from error
    return Outline(tree, entries, checksums)


def layout(
    file: BinaryIO, nbytes: int, source: str
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...], int]], dict[str, str]]:
    """Read the header of any safetensors file, and no tensor. The arguments are those of `read`.

    Returns:
        Type, shape and index of the first byte of each tensor by name; and the file's metadata.

    Raises:
        CheckpointError: the file is no safetensors file, is damaged, or holds a tensor of an unknown type.
    """
    try:
        first, header, _ = _read_header(file, nbytes)
        metadata = header.pop("__metadata__", {})
        ends = [first + entry["data_offsets"][1] for entry in header.values()]
        if max(ends, default=first) != nbytes:
            raise ValueError(f"it has {nbytes} bytes instead of {max(ends, default=first)}")
        unknown = {name: entry["dtype"] for name, entry in header.items() if entry["dtype"] not in _DTYPES}
        entries = {
            name: (_DTYPES[entry["dtype"]], tuple(entry["shape"]), first + entry["data_offsets"][0])
            for name, entry in header.items()
            if name not in unknown
        }
    except _DAMAGED as error:
        raise CheckpointError(
            f"{source} can't be read: it is no safetensors file, or it is damaged ({error})."
        ) from error
    for name, dtype in unknown.items():
        raise CheckpointError(f"{source}: {name} has the type {dtype}, which Footplate can't read.")
    return entries, metadata


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _read_header(file: BinaryIO, nbytes: int) -> tuple[int, dict[str, Any], int]:
    """Read the header; return its size, its content, and the checksum up to its end."""
    length = file.read(8)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > nbytes - 8:
        raise ValueError("its header is truncated")
    text = file.read(count)
    return 8 + count, json.loads(text), zlib.crc32(text, zlib.crc32(length))


class _Encoder:
    """Turns a state into JSON's terms, and collects its tensors, named by their path in the state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[Any, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return `value` in JSON's terms. `path` is its path in the state."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, Sharded):
            return self._sharded(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            if isinstance(value, torch.Size):
                return {_TAG: "size", "of": items}
            return {_TAG: "tuple", "of": items} if isinstance(value, tuple) else items
        if isinstance(value, (set, frozenset)):
            return {_TAG: "set", "of": [self.encode(item, path) for item in sorted(value, key=repr)]}
        if isinstance(value, bytes):
            return {_TAG: "bytes", "of": value.hex()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {_TAG: "numpy", "of": self._tensor(torch.from_numpy(np.array(value)), path)}
        if isinstance(value, np.generic):
            return self.encode(value.item(), path)
        if isinstance(value, enum.Enum):
            return self.encode(value.value, path)
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, (torch.dtype, torch.device)):
            return {_TAG: "dtype" if isinstance(value, torch.dtype) else "device", "of": str(value)}
        if isinstance(value, complex):
            return {_TAG: "complex", "of": [value.real, value.imag]}

        # Subclasses of plain types, such as torch's version.
        for plain in (str, int, float):
            if isinstance(value, plain):
                return plain(value)
        raise CheckpointError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} can't be saved in a checkpoint, "
            "because loading it would run code. Return plain values and tensors from state_dict()."
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        encoded: dict[Any, Any] = {}
        named = True
        for key, item in value.items():
            if type(key) is not str:
                key = self._key(key, path)
            named = named and type(key) is str and key != _TAG
            if type(item) in _PLAIN:
                encoded[key] = item
            else:
                inside = f"{path}[{key}]" if type(key) is not str else f"{path}.{key}" if path else key
                encoded[key] = self.encode(item, inside)
        return encoded if named else {_TAG: "dict", "of": [[key, item] for key, item in encoded.items()]}

    @staticmethod
    def _key(key: Any, path: str) -> Any:
        if type(key) is str or key is None:
            return key
        if isinstance(key, enum.Enum):
            key = key.value
        for plain in (bool, int, float, str):
            if isinstance(key, plain):
                return plain(key)
        raise CheckpointError(f"{path}: the key {key!r} can't be saved in a checkpoint. Use text or numbers.")

    @staticmethod
    def _sharded(value: Sharded, path: str) -> Any:
        if value.dtype not in _NAMES:
            raise CheckpointError(f"{path}: a sharded tensor of {value.dtype} can't be saved in a checkpoint.")
        return {_TAG: "sharded", "of": value.name, "dtype": _NAMES[value.dtype], "shape": list(value.shape)}

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
            if tensor.dtype is torch.complex128 and tensor.layout is torch.strided:
                return {_TAG: "complex128", "of": self._tensor(torch.view_as_real(tensor.resolve_conj()), path)}
            raise CheckpointError(
                f"{path}: a {_kind_of(tensor)} can't be saved in a checkpoint. Return a dense tensor from state_dict()."
            )
        if tensor.device.type == "meta":
            raise CheckpointError(f"{path}: the tensor is on the meta device, so it has no values to save.")

        # An address alone is ambiguous: each device has its own addresses.
        memory = (tensor.device, tensor.data_ptr())
        identity = (memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        name = self._seen.get(identity) if tensor.numel() else None
        if name is None:
            name = path
            number = 1
            while name in self.tensors or name in ("", "__metadata__"):
                number += 1
                name = f"{path}#{number}"
            self.tensors[name] = tensor
            self._seen[identity] = name

        reference = {_TAG: "tensor", "of": name}
        if not tensor.is_contiguous():
            for label, (dimensions, memory_format) in _FORMATS.items():
                if tensor.ndim == dimensions and tensor.is_contiguous(memory_format=memory_format):
                    reference["format"] = label
        return reference


def _kind_of(tensor: Tensor) -> str:
    if type(tensor) is not Tensor:
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return f"tensor of {tensor.dtype}" if tensor.layout is torch.strided else f"{tensor.layout} tensor"


def _references(value: Any) -> Iterator[dict[str, Any]]:
    """All references to tensors in a part of a tree."""
    if isinstance(value, dict):
        if value.get(_TAG) in ("tensor", "sharded"):
            yield value
        else:
            for item in value.values():
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def tensor_references(tree: Any) -> Iterator[tuple[str, str | Sharded]]:
    """Yield the names in a part of an outline's tree, and for each the tensor's name in the file, or its parts."""
    for name, value in tree.items():
        kind = value.get(_TAG) if isinstance(value, dict) else None
        if kind == "tensor":
            yield name, value["of"]
        elif kind == "sharded":
            yield name, _decode(value, {})


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}

    kind, of = value[_TAG], value["of"]
    if kind == "tensor":
        tensor = tensors[of]
        if "format" not in value or not isinstance(tensor, Tensor):
            return tensor
        return tensor.contiguous(memory_format=_FORMATS[value["format"]][1])
    if kind == "sharded":
        return Sharded(of, _DTYPES[value["dtype"]], tuple(value["shape"]))

    # Containers, and then values of single types.
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in of}
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in of)
    if kind == "set":
        return {_decode(item, tensors) for item in of}
    if kind == "numpy":
        return _decode(of, tensors).numpy()
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind == "complex":
        return complex(*of)
    if kind == "complex128":
        return torch.view_as_complex(_decode(of, tensors))
    if kind == "dtype":
        return _TORCH_TYPES[of]
    if kind == "device":
        return torch.device(of)
    if kind == "size":
        return torch.Size(of)
    raise ValueError(f"an unknown kind of value, {kind!r}")
