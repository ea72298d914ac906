"""A pytest plugin for the inner run: Footplate's Trainer wherever Lightning's is.

With FOREIGN_CONTROL in the environment, Lightning's Trainer stays, which shows what a case does at home.
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

import footplate

_theirs = lightning.pytorch.trainer.trainer.Trainer
_ours = _theirs if os.environ.get("FOREIGN_CONTROL") else footplate.Trainer
counts_use_of(_ours)

for _name, _module in list(sys.modules.items()):
    if _module is not None and _name.split(".")[0] in ("lightning", "pytorch_lightning"):
        for _key, _value in list(vars(_module).items()):
            if _value is _theirs:
                setattr(_module, _key, _ours)

# LightningCLI's default was bound when its module was imported; its decorators keep the function in __wrapped__.
_init = lightning.pytorch.cli.LightningCLI.__init__
while hasattr(_init, "__wrapped__"):
    _init = _init.__wrapped__
_init.__defaults__ = tuple(_ours if value is _theirs else value for value in _init.__defaults__ or ())
