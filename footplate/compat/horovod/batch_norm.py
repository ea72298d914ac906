"""SyncBatchNorm: batch norm over the rows of all ranks, on the CPU too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from footplate.compat.horovod.submit import Sum
from footplate.compat.horovod.verbs import allreduce
from footplate.compat.horovod.world import size
from footplate.core.errors import DataError


class SyncBatchNorm(_BatchNorm):
    """Batch norm of 1, 2 or 3 dimensions whose mean and variance in training are those of all ranks' rows.

    It has the arguments of `BatchNorm1d`. Each forward pass needs two small sums over the ranks, and so does each backward
    pass.

    Examples:
        >>> hvd.SyncBatchNorm(3)(torch.ones(4, 3)).shape
        torch.Size([4, 3])
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise DataError(f"SyncBatchNorm: expected (rows, channels, …), got the shape {tuple(input.shape)}.")

    def forward(self, input: Tensor) -> Tensor:
        if size() == 1 or not (self.training or not self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)

        # One sum over the ranks gives both the sums of the channels and the number of rows.
        over = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        rows = wide.new_tensor([input.numel() // input.shape[1]])
        total = allreduce(torch.cat([wide.sum(over), rows]), op=Sum)  # total: (channels + 1,)
        count = total[-1].detach()
        mean = total[:-1] / count

        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = allreduce(centred.square().sum(over), op=Sum) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
