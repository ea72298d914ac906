"""What the fork server of a quick run imports: every package that the compared training loops import.

Lightning takes seconds to import, and MLflow takes as long. A benchmark that measures starts fresh interpreters instead.
"""

from common import let_torchvision_be_imported

let_torchvision_be_imported()

import accelerate  # noqa: E402, F401
import lightning.pytorch  # noqa: E402, F401
import mlflow  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

import footplate.training.trainer  # noqa: E402, F401
