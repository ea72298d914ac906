"""Tensors to arrays and back, and the types of both.

JAX has 64-bit types only where `jax_enable_x64` is on; elsewhere int64 and float64 become their 32-bit kin, and come back
as what they were.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

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


def array_type(dtype: torch.dtype) -> Any:
    """The type that JAX has for a type of torch's."""
    return jax.dtypes.canonicalize_dtype(_TYPES[dtype])


def to_array(tensor: Tensor) -> jax.Array:
    """A copy of a tensor as an array on JAX's default device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own
        values = tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    else:
        values = tensor.numpy()
    return jax.device_put(np.array(values, dtype=array_type(tensor.dtype), copy=True))


def to_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """A copy of an array as a tensor on the CPU."""
    values = np.asarray(array)
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(np.array(values, copy=True)).to(dtype)
