"""Optional dependencies: imported when they are used, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from footplate.core.errors import MissingExtra


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`, which the extra `footplate[extra]` installs.

    Args:
        module: the dotted name to import, such as `"mlflow"`.
        extra: the extra that installs it.
        purpose: the feature that needs it, as the beginning of a sentence: `"Logging to MLflow"`.

    Raises:
        MissingExtra: the module, or a module that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {module}, which can't be imported here ({error}). "
            f'Install it with: pip install "footplate[{extra}]"'
        ) from error
