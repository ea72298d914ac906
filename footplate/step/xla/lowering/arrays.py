"""Conversion of tensors to arrays and back.

JAX has 64-bit types only with `jax_enable_x64`. Otherwise int64 and float64 become int32 and float32 on the device, and
come back in their own type. An integer that doesn't fit into 32 bits is refused, since it would be another number on
the device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from footplate.core.errors import FootplateError

_TYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


_COMPLEX_TYPES = {torch.complex64: "complex64", torch.complex128: "complex128"}


class NotRepresentable(FootplateError, ValueError):
    """The devices can't represent the type or the values of a tensor."""


def array_type(dtype: torch.dtype) -> Any:
    """JAX's type for a type of torch.

    Raises:
        NotRepresentable: JAX has no such type.
    """
    if dtype not in _TYPES:
        raise NotRepresentable(
            f"{str(dtype).removeprefix('torch.')} has no counterpart in a step that XLA runs: it takes bool, integers and "
            "real floating-point numbers. Convert it in the loader (torch.view_as_real for complex numbers), or train with "
            'accelerator="cpu" or "cuda".'
        )
    return jax.dtypes.canonicalize_dtype(_TYPES[dtype])


def value_type(dtype: torch.dtype) -> Any:
    """JAX's type for a value inside a step, which may be complex, unlike batches and states.

    Raises:
        NotRepresentable: JAX has no such type.
    """
    return jax.dtypes.canonicalize_dtype(_COMPLEX_TYPES[dtype]) if dtype in _COMPLEX_TYPES else array_type(dtype)


def host_array(tensor: Tensor) -> np.ndarray:
    """A tensor's values as NumPy's, in the type that JAX has for them; shares the tensor's memory where it can.

    Raises:
        NotRepresentable: JAX has no such type, or an integer needs more than 32 bits where JAX has no more.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    # NumPy has no bfloat16 of its own.
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    kind = array_type(tensor.dtype)
    if tensor.dtype == torch.int64 and kind != np.int64:
        _check_range(tensor)
    return np.asarray(tensor.numpy(), dtype=kind)


def _check_range(tensor: Tensor) -> None:
    if not tensor.numel():
        return
    least, most = (int(bound) for bound in torch.aminmax(tensor))
    if least < _INT32.min or most > _INT32.max:
        raise NotRepresentable(
            f"int64 values go from {least} to {most}, and integers on the device have 32 bits ({_INT32.min} to "
            f"{_INT32.max}): they would wrap round to other numbers. Reduce them in the loader (ids % size, seconds since "
            'the first row), or use precision="64-true".'
        )


def to_array(tensor: Tensor) -> jax.Array:
    """A copy of a tensor as an array on JAX's default device. It may be complex, as a constant of a step."""
    if tensor.is_complex():
        pairs = to_array(torch.view_as_real(tensor.detach().resolve_conj()))
        return jax.lax.complex(pairs[..., 0], pairs[..., 1])
    return jax.device_put(np.array(host_array(tensor), copy=True))


_INT32 = np.iinfo(np.int32)


def to_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """A copy of an array as a tensor on the CPU."""
    values = np.asarray(array)
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(np.array(values, copy=True)).to(dtype)
