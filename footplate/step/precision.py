"""Precisions: the types of parameters and of the computation.

32-true      everything in float32
bf16-mixed   parameters in float32, computation in bfloat16 where torch.autocast considers it safe
16-mixed     the same with float16; the loss is scaled so that small gradients survive (GradScaler)
bf16-true    everything in bfloat16: half the memory
16-true      everything in float16
64-true      everything in float64
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from footplate.core.errors import ConfigError, did_you_mean
from footplate.hardware.transfer import map_tensors
from footplate.step.torch_internals import convert_floating

ALIASES = {
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "64": "64-true",
}
_TYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}
NAMES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@dataclass(frozen=True)
class Precision:
    """A precision by name.

    Attributes:
        name: one of `NAMES`.
        autocast: the type of the computation in a mixed precision, else None.
        parameters: the type of the parameters.
    """

    name: str
    autocast: torch.dtype | None
    parameters: torch.dtype

    @classmethod
    def parse(cls, precision: str | int) -> Precision:
        """Parse a spelling of a precision: `"bf16-mixed"`, `32`, `"16"`, …

        Raises:
            ConfigError: unknown precision.
        """
        name = ALIASES.get(str(precision), str(precision))
        if name not in NAMES:
            raise ConfigError(f'precision="{precision}" is unknown. {did_you_mean(name, NAMES)}')
        bits, kind = name.split("-")
        mixed = kind == "mixed"
        return cls(name, _TYPES[bits] if mixed else None, torch.float32 if mixed else _TYPES[bits])

    @property
    def plain(self) -> bool:
        """Return True if this precision changes nothing."""
        return self.name == "32-true"

    def convert_module(self, module: torch.nn.Module) -> None:
        """Convert the floating-point parameters and buffers to the type of the parameters."""
        if self.parameters is not torch.float32:
            convert_floating(module, self.parameters)

    def convert_batch(self, batch: Any) -> Any:
        """Convert the floating-point tensors of a batch to the type of the parameters, for the `-true` precisions."""
        if self.parameters is torch.float32:
            return batch
        return map_tensors(
            batch,
            lambda item: (
                item.to(self.parameters) if isinstance(item, torch.Tensor) and item.is_floating_point() else item
            ),
        )

    @contextlib.contextmanager
    def default_type(self) -> Iterator[None]:
        """Make the type of the parameters torch's default type inside the `with` block."""
        if self.parameters is torch.float32:
            yield
            return
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.parameters)
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def forward_context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass: autocast, or the default type for tensors that the step creates."""
        if self.autocast is not None:
            return torch.autocast(device.type, dtype=self.autocast)
        return self.default_type()
