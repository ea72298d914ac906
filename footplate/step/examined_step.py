"""One step of training, examined: its operations, its FLOPs, and where the code reads values back from the device.

    with ExaminedStep() as examined:
        step.train(…)
    examined.flops, examined.operations, examined.reads, examined.by_line, examined.pauses

Torch calls the mode for every operation, below autograd, with the same kernels as without it. So the numbers of the step
are the same. It takes some 10 µs an operation, in a few steps of a run.

Between two operations, Python runs: the user's code and torch's own. If that takes long, the code does something else
there: NumPy, a loop over rows, reading a file.

The FLOPs are those of matrix products, convolutions and attention, counted by torch's formulas
(`torch.utils.flop_counter`), forward and backward. A multiplication with an addition counts as two.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
# Frames above these belong to the trainer and to the script that called it.
_STEP = re.compile(r"/footplate/(step|training|distributed)/")
_LIBRARY = re.compile(r"(/(site|dist)-packages/|/lib/python3\.\d+/|^<)")
_FRAMES = 60
# Torch's own code between two operations takes less.
_PAUSE_S = 2e-4


class ExaminedStep(TorchDispatchMode):
    """A mode that counts the operations of the code in its `with` block.

    Attributes:
        operations: how many operations ran.
        flops: their floating-point operations.
        reads: how often each line of the user's code read a value from the device, as `.item()` does, by "file:line".
        by_line: how many operations of the forward pass each line of the user's code ran.
        seconds: the time of the block, without that of counting.
        pauses: seconds in which no operation ran, by the lines of the user's code before and after ("" for none).
        visits: how often the forward pass came to each line. Operations of one call, such as of a layer, are one visit.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        self.operations = 0
        self.flops = 0.0
        self.reads: Counter[str] = Counter()
        self.by_line: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.pauses: dict[tuple[str, str], float] = {}
        # The line of the last operation, and the time at which it ended.
        self._line, self._ended = "", 0.0
        self.seconds = self._began = self._counting_s = 0.0
        self._latest: Any = None
        self._formulas = flop_registry

    def __enter__(self) -> Self:
        self._began = self._ended = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.seconds = time.perf_counter() - self._began - self._counting_s
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pause_s = time.perf_counter() - self._ended
        result = func(*args, **kwargs)
        returned = time.perf_counter()
        self.operations += 1
        self._count(func, args, kwargs, result)
        place = _users_place()
        if place is not None:
            line, call, is_direct = place
            self.by_line[line] += 1
            self.visits[line] += is_direct or call != self._latest
            self._latest = call
            if func in _READS:
                self.reads[line] += 1
        lines = self._line, "" if place is None else place[0]
        if pause_s > _PAUSE_S and any(lines):
            self.pauses[lines] = self.pauses.get(lines, 0.0) + pause_s
        self._line, self._ended = lines[1], time.perf_counter()
        self._counting_s += self._ended - returned
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = self._formulas.get(func.overloadpacket)
        if formula is None:
            return
        try:
            self.flops += float(formula(*args, **kwargs, out_val=result))
        except Exception:
            # A formula that doesn't know these arguments must not end training.
            return


def _users_place() -> tuple[str, Any, bool] | None:
    """Return where the user's code runs an operation. None in the backward pass and in the optimizer.

    Returns:
        "file:line"; the frame with its instruction; True if the code calls the operation itself, and no library does.
    """
    # The frames above are this function and the mode.
    frame = sys._getframe(2)
    is_direct = True
    for _ in range(_FRAMES):
        if frame is None or _STEP.search(frame.f_code.co_filename):
            return None
        if not _LIBRARY.search(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", (id(frame), frame.f_lasti), is_direct
        is_direct = is_direct and "/torch/" in frame.f_code.co_filename and "/nn/" not in frame.f_code.co_filename
        frame = frame.f_back
    return None
