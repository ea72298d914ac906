"""Imports for the fork server of a quick run: the packages of the compared training loops.

Lightning takes seconds to import. A benchmark that measures starts fresh interpreters instead. MLflow is left out: it
starts threads, and a process with threads can't be forked safely.
"""

from common import let_torchvision_be_imported

let_torchvision_be_imported()

import accelerate  # noqa: E402, F401
import lightning.pytorch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

import footplate.training.trainer  # noqa: E402, F401
