"""Programs from the compiler's process, one at a time, each made once.

A step's program depends on its graph, on what it is compiled for, on the versions of JAX and libtpu and on our table of
operations. A hash of all that is its name in the cache (`~/.cache/footplate/plan`, or under `$XDG_CACHE_HOME`), where what
the compiler said of it stays as a small JSON file, written whole or not at all.

libtpu lets one process of a machine in. Ours wait for each other at a lock file of our own, which the system lets go when a
process dies, in whatever way; when somebody else has libtpu, the compiler's process says so and is started again a little
later. Whoever waits is told.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from footplate.core.errors import FootplateError, MissingExtra
from footplate.core.optional import require
from footplate.planning.compiler import Request
from footplate.planning.hlo import Collective
from footplate.planning.serialized_step import PlainStep, fingerprint
from footplate.planning.targets import Target

logger = logging.getLogger(__name__)

BUSY = "libtpu multi-process lockfile"
PATIENCE_S = 1800.0
_FORM = 3


class PlanError(FootplateError):
    """A plan that can't be made."""


@dataclass(frozen=True)
class Program:
    """What the compiler says of a step, on one device; all sizes in bytes.

    Attributes:
        arguments_bytes: state and batch; the new state takes the old one's place.
        temporaries_bytes: what lives within a step; on a CPU with what its libraries are reckoned to set aside.
        outputs_bytes: what is new beside the state.
        code_bytes: the program itself.
        peak_bytes: the most that is alive at once.
        flops: floating-point operations of a step.
        accessed_bytes: what all operations together read and write.
        collectives: what devices exchange.
        devices: how many there are.
        compile_s: how long compiling took, when it was done.
        too_large: what the compiler said when it found no way to fit it into memory; all else is 0 then.
        measured: what running it gave, if it was run.
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


def program(step: PlainStep, target: Target, steps: int = 0) -> Program:
    """Compile a step for a slice or for this machine's CPU, unless it has been before.

    Args:
        step: captured with the batch of one device.
        target: what for; not a GPU.
        steps: how many steps to run and time here; such programs aren't kept.

    Raises:
        MissingExtra: JAX or libtpu isn't installed.
        PlanError: the compiler failed, or somebody else has it for too long.
    """
    require("jax", "plan", "A plan for TPUs and XLA")
    if target.kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingExtra(
            f"A plan for {target.name} needs the TPU's compiler, libtpu, which isn't installed. "
            'Install it with: pip install "footplate[plan]"'
        )
    request = Request(step, target.kind, target.topology, target.options, steps)
    kept = cache_directory() / f"{_key(request)}.json"
    if not steps and kept.exists():
        return _read(json.loads(kept.read_text()))
    if target.kind != "tpu":
        return _read(_compiled(request, kept))
    with _alone():
        if kept.exists():  # whoever was waited for has compiled the same
            return _read(json.loads(kept.read_text()))
        logger.info("Compiling for %s (%s), which may take minutes; the result is kept.", target.name, target.topology)
        return _read(_compiled(request, kept))


def cache_directory() -> Path:
    """Where plans' programs are described."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "footplate" / "plan"


def _key(request: Request) -> str:
    made = hashlib.sha256(fingerprint(request.step).encode())
    made.update(f"{_FORM} {request.platform} {request.topology} {sorted(request.options.items())}".encode())
    packages = [_version(package) for package in ("jax", "jaxlib", "libtpu")]
    settings = [os.environ.get(name) for name in ("JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    made.update(f"{packages} {settings}".encode())
    lowering = Path(__file__).parents[1] / "step" / "xla" / "lowering"
    for file in sorted(lowering.glob("*.py")):
        made.update(file.read_bytes())
    return made.hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(reply: dict[str, Any]) -> Program:
    found = tuple(Collective(**one) for one in reply.get("collectives", ()))
    return Program(**{**reply, "collectives": found})


def _compiled(request: Request, kept: Path) -> dict[str, Any]:
    reply = _run(request)
    if not request.steps:
        _keep(kept, reply)
    return reply


def _keep(path: Path, reply: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as unfinished:
        json.dump(reply, unfinished)
    Path(unfinished.name).replace(path)


@contextmanager
def _alone() -> Iterator[None]:
    """One process of this user at a time, from here to the end of the block."""
    path = Path(tempfile.gettempdir()) / f"footplate-libtpu-{os.getuid()}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another plan has the TPU's compiler, which serves one at a time: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(request: Request) -> dict[str, Any]:
    """Start the compiler's process, again and again while somebody else has libtpu."""
    until, told = time.monotonic() + PATIENCE_S, False
    while True:
        reply, errors = _run_once(request)
        if reply is not None:
            return reply
        if BUSY not in errors:
            raise PlanError(f"the compiler for {request.topology or request.platform} failed:\n{_end(errors)}")
        if time.monotonic() > until:
            raise PlanError(
                f"another process has had the TPU's compiler for {PATIENCE_S / 60:.0f} minutes. If there is none, another "
                f"user's has left its lock behind: remove {Path(tempfile.gettempdir()) / 'libtpu_lockfile'}."
            )
        if not told:
            logger.info("A process that isn't a plan has the TPU's compiler: waiting for it.")
            told = True
        time.sleep(2)


def _run_once(request: Request) -> tuple[dict[str, Any] | None, str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    ours = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="footplate-plan-") as directory:
        asked, replied = Path(directory, "request.pickle"), Path(directory, "reply.json")
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "footplate.planning.compiler", str(asked), str(replied), str(os.getpid())]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not replied.exists():
            return None, done.stdout + done.stderr or f"it ended with code {done.returncode} and no word."
        return json.loads(replied.read_text()), ""


def _end(text: str, lines: int = 15) -> str:
    return "\n".join(f"    {line[:300]}" for line in text.strip().splitlines()[-lines:])
