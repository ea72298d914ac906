"""Compiled programs from the compiler's process: one compilation at a time, and each result cached.

A step's program depends on its graph, the target, the versions of JAX and libtpu, and our lowering. A hash of all that is
the name of a small JSON file in the cache (`~/.cache/footplate/plan`, or under `$XDG_CACHE_HOME`). The file has the facts
that the compiler reported. It is written atomically.

Only one process of a machine can use libtpu at a time. Plans wait for each other at a lock file, which the system releases
when its process dies. If a process that isn't a plan has libtpu, the compiler's process fails with a certain message, and
is started again two seconds later. The log shows that a plan is waiting.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.core.errors import FootplateError, MissingExtra
from footplate.core.optional import require
from footplate.hardware.packages import installed_version
from footplate.planning.compiler import Request
from footplate.planning.hlo import Collective
from footplate.planning.serialized_step import SerializedStep, fingerprint
from footplate.planning.targets import Target

logger = logging.getLogger(__name__)

# A part of libtpu's message when another process has it.
BUSY = "libtpu multi-process lockfile"

# A plan waits this long for a process that isn't a plan.
PATIENCE_S = 1800.0

# The version of the cache files' format.
_FORMAT = 3


class PlanError(FootplateError):
    """A plan that can't be made."""


@dataclass(frozen=True)
class Program:
    """The facts that the compiler reports of a step, for one device.

    Attributes:
        arguments_bytes: state and batch; the new state overwrites the old one.
        temporaries_bytes: values that exist only within a step; on a CPU, with an estimate of what its libraries take.
        outputs_bytes: results beside the state.
        code_bytes: the program itself.
        peak_bytes: the most that is alive at once.
        flops: floating-point operations of a step.
        accessed_bytes: the bytes that all operations together read and write.
        collectives: the data that devices exchange.
        devices: the number of devices.
        compile_s: the duration of the compilation.
        too_large: the compiler's message if the step doesn't fit into memory; all other facts are 0 then.
        measured: the times and the memory of some steps, if the program was run.
    """

    arguments_bytes: int = 0
    temporaries_bytes: int = 0
    outputs_bytes: int = 0
    code_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    accessed_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    devices: int = 1
    device_kind: str = ""
    compile_s: float = 0.0
    too_large: str | None = None
    measured: dict[str, Any] | None = None


def compiled_program(step: SerializedStep, target: Target, steps: int = 0) -> Program:
    """Compile a step for a slice or for this machine's CPU, or take the result from the cache.

    Args:
        step: the step, captured with the batch of one device.
        target: the hardware; not a GPU.
        steps: the number of steps to run and time on this machine; such results aren't cached.

    Raises:
        MissingExtra: JAX or libtpu isn't installed.
        PlanError: the compiler failed, or another process has had it for too long.
    """
    require("jax", "plan", "A plan for TPUs and XLA")
    if target.kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingExtra(
            f"A plan for {target.name} needs the TPU's compiler, libtpu, which isn't installed. "
            'Install it with: pip install "footplate[plan]"'
        )

    request = Request(step, target.kind, target.topology, target.options, steps)
    cache_file = cache_directory() / f"{_key(request)}.json"
    if not steps and cache_file.exists():
        return _read(json.loads(cache_file.read_text()))
    if target.kind != "tpu":
        return _read(_compile(request, cache_file))
    with _lock():
        # Another plan may have compiled the same step while this one waited for the lock.
        if cache_file.exists():
            return _read(json.loads(cache_file.read_text()))
        logger.info("Compiling for %s (%s). This may take minutes; the result is cached.", target.name, target.topology)
        return _read(_compile(request, cache_file))


def cache_directory() -> Path:
    """The directory of the cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "footplate" / "plan"


def _key(request: Request) -> str:
    digest = hashlib.sha256(fingerprint(request.step).encode())
    digest.update(f"{_FORMAT} {request.platform} {request.topology} {sorted(request.options.items())}".encode())
    packages = [installed_version(package) for package in ("jax", "jaxlib", "libtpu")]
    settings = [os.environ.get(name) for name in ("JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    digest.update(f"{packages} {settings}".encode())

    # The program also depends on the code of the lowering.
    lowering = Path(__file__).parents[1] / "step" / "xla" / "lowering"
    for file in sorted(lowering.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _read(reply: dict[str, Any]) -> Program:
    collectives = tuple(Collective(**fields) for fields in reply.get("collectives", ()))
    return Program(**{**reply, "collectives": collectives})


def _compile(request: Request, cache_file: Path) -> dict[str, Any]:
    reply = _run(request)
    if not request.steps:
        _write_atomically(cache_file, reply)
    return reply


def _write_atomically(path: Path, reply: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as unfinished:
        json.dump(reply, unfinished)
    Path(unfinished.name).replace(path)


@contextmanager
def _lock() -> Iterator[None]:
    """Let one process of this user at a time run the block."""
    path = Path(tempfile.gettempdir()) / f"footplate-libtpu-{os.getuid()}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another plan uses the TPU's compiler, which serves one process at a time: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(request: Request) -> dict[str, Any]:
    """Run the compiler's process, with retries while another process has libtpu."""
    deadline, logged = time.monotonic() + PATIENCE_S, False
    while True:
        reply, errors = _run_once(request)
        if reply is not None:
            return reply
        if BUSY not in errors:
            raise PlanError(f"the compiler for {request.topology or request.platform} failed:\n{_end(errors)}")
        if time.monotonic() > deadline:
            raise PlanError(
                f"another process has used the TPU's compiler for {PATIENCE_S / 60:.0f} minutes. If there is no such "
                f"process, remove the lock that one has left: {Path(tempfile.gettempdir()) / 'libtpu_lockfile'}."
            )
        if not logged:
            logger.info("A process that isn't a plan uses the TPU's compiler: waiting for it.")
            logged = True
        time.sleep(2)


def _run_once(request: Request) -> tuple[dict[str, Any] | None, str]:
    """Run the compiler's process once; returns its reply, or None and its output."""
    # TPU_SKIP_MDS_QUERY: libtpu must not look for a TPU by asking the metadata server of a cloud.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    library = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="footplate-plan-") as directory:
        request_path, reply_path = Path(directory, "request.pickle"), Path(directory, "reply.json")
        request_path.write_bytes(pickle.dumps(request))
        paths = [str(request_path), str(reply_path)]
        command = [sys.executable, "-m", "footplate.planning.compiler", *paths, str(os.getpid())]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode or not reply_path.exists():
            return None, process.stdout + process.stderr or f"exit code {process.returncode}, without any output."
        return json.loads(reply_path.read_text()), ""


def _end(text: str, lines: int = 15) -> str:
    return "\n".join(f"    {line[:300]}" for line in text.strip().splitlines()[-lines:])
