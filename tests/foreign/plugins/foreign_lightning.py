"""A pytest plugin for the inner run: replaces Lightning's Trainer and LightningCLI by Footplate's.

With FOREIGN_CONTROL in the environment, Lightning's Trainer stays, which shows what a case does with Lightning.
"""

from __future__ import annotations

import os
import sys

import torch

# The CPU build of torch lacks torchvision's operators, which torchvision expects to be declared when it is imported.
if not hasattr(torch.ops.torchvision, "nms"):
    _declared = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _declared.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import lightning.pytorch.cli
import lightning.pytorch.trainer.trainer
import lightning.pytorch.tuner
from foreign_recorder import counts_use_of

import footplate.compat.lightning.cli

if not os.environ.get("FOREIGN_CONTROL"):
    _ours = {
        lightning.pytorch.trainer.trainer.Trainer: footplate.Trainer,
        lightning.pytorch.cli.LightningCLI: footplate.compat.lightning.cli.LightningCLI,
    }
    for _name, _module in list(sys.modules.items()):
        if _module is not None and _name.split(".")[0] in ("lightning", "pytorch_lightning"):
            for _key, _value in list(vars(_module).items()):
                if isinstance(_value, type) and _value in _ours:
                    setattr(_module, _key, _ours[_value])
counts_use_of(lightning.pytorch.Trainer)
