"""Imports of a quick run, before it forks: the packages of the compared training loops.

Lightning takes seconds to import. A full run starts fresh interpreters instead. MLflow isn't imported here, because it
starts threads, and a process with threads can't be forked safely.
"""

from common import let_torchvision_be_imported

let_torchvision_be_imported()

import accelerate  # noqa: E402, F401
import lightning.pytorch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

import footplate.training.trainer  # noqa: E402, F401
