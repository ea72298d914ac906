"""LightningModules for the tests, and recorders that watch them while they train.

Lightning and timm import torchvision wherever it is installed. Beside a torch for the CPU, torchvision's compiled part
can't be loaded, and its import then fails at undeclared operators. Declaring them is enough.
"""

import importlib.util
from pathlib import Path

import torch


def _torchvision_is_whole() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for file in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return True


if not _torchvision_is_whole() and not hasattr(torch.ops.torchvision, "nms"):
    _torchvision = torch.library.Library("torchvision", "DEF")  # kept: the declaration ends with the object
    for _name in ("nms", "qnms"):
        _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
