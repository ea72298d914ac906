"""Processes that train in turns on one GPU, for `gpu_train.py`.

    parent                        process of a loop
    ------                        -----------------
    Child(…)                      make the model, then wait in the batch iterator
    send(Turn(lead, steps))  →    `lead` steps, synchronise, read the clocks, `steps` steps, synchronise, read the clocks
    receive()                ←    Figures; it frees the memory that torch keeps, and waits for the next turn
    kill()

A process that fails sends its error, or closes its pipe. Both become `error` of the `Child`, and nobody else is affected.

The processes are forks of one that has imported all packages and never used the GPU. So they start at once. If such a fork
can't use the GPU, they are fresh interpreters.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
from common import Figures

BATCHES = 3
PRELOAD = (
    "preloaded", "torchvision.models", "transformers.models.gpt2.modeling_gpt2", "footplate.planning", "gpu_variants"
)  # fmt: skip
ENDLESS = 10**9
KEPT = 1500  # characters of a failed process's output


@dataclass(frozen=True)
class Turn:
    """What a loop has to do: steps that are not timed, and then steps that are.

    The first turn warms up. The monitor's first looks at a step, which examine its operations, happen in it.
    """

    lead: int
    steps: int
    first: bool = False


@dataclass(frozen=True)
class Failure:
    """The error that ended a process: its type and its first line."""

    error: str


def first_line(error: BaseException) -> str:
    """Describe an error in one line of limited length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def settings_of_children(directory: str, compile_threads: int) -> dict[str, str]:
    """Return the environment of the loops' processes: where they import from, and where compilers keep their results."""
    here = Path(__file__).parent
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")])),
        "TMPDIR": directory,
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


# In the process of a loop


class Turns:
    """Prepared batches, yielded turn by turn.

    Args:
        messages: receives turns, and sends figures.
        accelerator: "cuda" or "cpu".
        in_jax: JAX computes, and takes the batches from the CPU.
        make: makes the batches on a device.
        table: the directory of the table.

    Attributes:
        device: where torch's tensors are.
        trainer: Footplate's trainer, whose monitor leaves the pauses out.
        facts: further figures at the end of a turn.
    """

    def __init__(
        self, messages: Any, accelerator: str, in_jax: bool, make: Callable[[str], list[Any]], table: Path
    ) -> None:
        self.accelerator = accelerator
        self.device = "cpu" if in_jax else accelerator
        self.table = table
        self.trainer: Any = None
        self.facts: Callable[[], Figures] = dict
        self._in_jax = in_jax
        self._messages = messages
        self._begun = time.perf_counter()
        self._make = make
        self._ready_bytes = 0
        self._waited_s = 0.0
        self._steps = self._take_turns()

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        ready = self._make(self.device)
        # A training without prefetching has one batch on the GPU.
        self._ready_bytes = sum(tensor.nbytes for batch in ready[1:] for tensor in batch)
        for batch in itertools.cycle(ready):
            next(self._steps)
            yield batch

    def step(self) -> None:
        """Begin a step: wait for a turn if none is under way."""
        next(self._steps)

    def _take_turns(self) -> Iterator[None]:
        while True:
            turn = self._wait()
            for _ in range(turn.lead):
                if turn.first and self.trainer is not None:
                    self.trainer.monitor.look_at = 0.0
                yield
            before = self._clocks()
            for _ in range(turn.steps):
                yield
            after = self._clocks()
            figures = {name: after[name] - before[name] for name in after}
            self._messages.send({**figures, **self._memory(), **self.facts(), "ready_s": self._ready_s()})
            self._free()

    def _wait(self) -> Turn:
        paused = time.perf_counter()
        turn = self._messages.recv()
        paused_s = time.perf_counter() - paused
        self._waited_s += paused_s
        if self.trainer is not None:
            # The monitor looks at a step every second of training. A pause is not training.
            self.trainer.monitor.look_at += paused_s
        return turn

    def _clocks(self) -> Figures:
        self._synchronize()
        clocks = {"wall_s": time.perf_counter(), "cpu_s": time.process_time()}
        if self.trainer is not None:
            clocks["input_s"] = self.trainer.monitor.times.total().get("input", 0.0)
        return clocks

    def _ready_s(self) -> float:
        return time.perf_counter() - self._begun - self._waited_s

    def _synchronize(self) -> None:
        if self._in_jax:
            import jax

            jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
        elif self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _memory(self) -> Figures:
        if self._in_jax:
            import jax

            stats = jax.local_devices()[0].memory_stats() or {}
            return {"peak_bytes": float(stats["peak_bytes_in_use"])} if "peak_bytes_in_use" in stats else {}
        if self.device != "cuda":
            return {}
        import torch

        peak = float(torch.cuda.max_memory_allocated())
        return {"peak_bytes": peak, "step_bytes": peak - self._ready_bytes}

    def _free(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()


def train(loop: Any, model: Any, accelerator: str, table: Path, messages: Any) -> None:
    """Run a loop in this process until it is killed."""
    from gpu_variants import footplate_xla

    in_jax = loop is footplate_xla
    if in_jax:
        # XLA chooses the memory format itself.
        model = replace(model, channels_last=False)
    turns = Turns(messages, accelerator, in_jax, lambda device: model.batches(device, BATCHES), table)
    directory = Path(tempfile.mkdtemp(prefix="footplate-bench-"))
    try:
        loop(model, turns, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    raise RuntimeError("the loop ended")


def calculate(function: Callable[..., Any], arguments: tuple[Any, ...], messages: Any) -> None:
    """Send what a function returns."""
    messages.send(function(*arguments))


def _run(target: Any, arguments: tuple[Any, ...], environment: dict[str, str], log: str, messages: Any) -> None:
    screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.environ.update(environment)
    gc.freeze()  # else each collection would visit the objects of all imported packages
    try:
        import torch

        torch.set_num_threads(1)
        target(*arguments, messages)
    except BaseException as error:
        traceback.print_exc()
        messages.send(Failure(first_line(error)))


# In the parent


def forks() -> Any:
    """Return the start method of forks of a process that has imported all packages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


class Child:
    """Handle of one process.

    Args:
        name: its name.
        context: its start method.
        target: `train` or `calculate`.
        arguments: its arguments, except the pipe.
        logs: the directory of its output.
        environment: variables that are set first.

    Attributes:
        error: why it can't go on; empty if it can.
        asked: True after the first `send`.
        figures: what it has sent, in order.
    """

    def __init__(
        self,
        name: str,
        context: Any,
        target: Any,
        arguments: tuple[Any, ...],
        logs: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.error = ""
        self.asked = False
        self.figures: list[Any] = []
        self._log = logs / f"{name.replace('/', ' ')}.txt"
        self.messages, other = multiprocessing.Pipe()
        self._process = context.Process(
            target=_run, args=(target, arguments, environment or {}, str(self._log), other), daemon=True
        )
        try:
            self._process.start()
        except Exception as error:  # the fork server has died, or there is no memory
            self.error = first_line(error)
        other.close()

    def send(self, turn: Turn) -> None:
        self.asked = True
        try:
            self.messages.send(turn)
        except OSError as error:
            self._fail(first_line(error))

    def receive(self, timeout_s: float) -> Any:
        """Return the next figures. None after an error, which is also that there are none in time."""
        if self.error:
            return None
        try:
            if not self.messages.poll(max(0.0, timeout_s)):
                return self._fail(f"no answer in {timeout_s:.0f} s")
            answer = self.messages.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return self._fail(f"ended with exit code {self._process.exitcode}: {self._last_line()}")
        if isinstance(answer, Failure):
            return self._fail(answer.error)
        self.figures.append(answer)
        return answer

    def kill(self) -> None:
        """Kill the process and its children, such as the compiler's workers."""
        pid = self._process.pid
        if pid is None or self._process.exitcode is not None:
            return
        try:
            family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        except psutil.Error:
            return
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                continue
        self._process.join(5)

    def _fail(self, error: str) -> None:
        self.error = error
        self.kill()
        print(f"{self.name}: {error}\n{self._tail()}", file=sys.stderr, flush=True)

    def _tail(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-KEPT:]
        except OSError:
            return ""

    def _last_line(self) -> str:
        lines = self._tail().strip().splitlines()
        return lines[-1][:200] if lines else ""


def warm_up(children: dict[str, Child], after: dict[str, str], turn: Turn, until: float, kill: set[str]) -> None:
    """Let each process make its first steps, some of them after others. Late ones fail.

    Args:
        children: by name.
        after: the name of the process that must be ready or have failed before.
        turn: the first turn.
        until: the limit, on the clock `time.perf_counter`.
        kill: those that are killed as soon as they are ready.
    """
    limit_s = until - time.perf_counter()

    def is_done(name: str) -> bool:
        return name not in children or bool(children[name].error or children[name].figures)

    while waiting := [name for name in children if not is_done(name)]:
        for name in waiting:
            if not children[name].asked and is_done(after.get(name, "")):
                children[name].send(turn)
        asked = {children[name].messages: name for name in waiting if children[name].asked and not children[name].error}
        if not asked:
            continue
        answered = connection.wait(list(asked), max(0.0, until - time.perf_counter()))
        if not answered:
            for name in waiting:
                children[name].error = f"not ready in {limit_s:.0f} s"
                children[name].kill()
            return
        for messages in answered:
            name = asked[messages]  # type: ignore[index]
            children[name].receive(0.0)
            if name in kill:
                children[name].kill()
