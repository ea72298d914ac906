"""A pytest plugin for the inner run: `horovod.torch` is `footplate.compat.horovod`."""

from __future__ import annotations

import importlib
import sys
import types
import unittest.mock

import footplate.compat.horovod as ours


def _module(name: str, **names: object) -> types.ModuleType:
    module = types.ModuleType(name)
    # With a path, the module is a package, whose parts can be imported.
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _in_thread(target, args=(), name=None, daemon=True, silent=False):
    """Horovod's helper, which its tests import."""
    import threading

    thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


sys.modules.setdefault("mock", unittest.mock)
sys.modules["mock.mock"] = unittest.mock
_module("horovod")
_module("horovod.runner")
_module("horovod.runner.util")
_module("horovod.runner.util.threads", in_thread=_in_thread)
_module("horovod.common")
_module(
    "horovod.common.exceptions",
    **{name: getattr(ours, name) for name in ("HorovodInternalError", "HostsUpdatedInterrupt")},
)
sys.modules["horovod.torch"] = ours
sys.modules["horovod"].torch = ours
for _part in ("elastic", "compression", "sampler"):
    sys.modules[f"horovod.torch.{_part}"] = importlib.import_module(f"footplate.compat.horovod.{_part}")
_module("horovod.torch.mpi_ops", synchronize=ours.synchronize)
