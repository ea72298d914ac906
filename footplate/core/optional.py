"""Optional dependencies: imported when used, with an error that names what to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from footplate.core.errors import MissingExtra


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`, which `pip install footplate[extra]` brings.

    Args:
        module: the dotted name to import, such as `"mlflow"`.
        extra: the name of our extra that installs it.
        purpose: what needs it, as the beginning of a sentence: `"Logging to MLflow"`.

    Raises:
        MissingExtra: the module, or one it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {module}, which can't be imported here ({error}). "
            f'Install it with: pip install "footplate[{extra}]"'
        ) from error
