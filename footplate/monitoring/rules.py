"""Rules that find what slows a training down. Each is a pure function of the evidence, and returns advice or None.

An advice says what was measured, what to change, and how much faster the training could become at most. The gain is that
of Amdahl's law: the part that the change could save is gone, and everything else stays.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from footplate.monitoring.evidence import Compilation, Evidence

MOST = 5
MUCH_INPUT = 0.2
IDLE = 0.25
MUCH_LOGGING = 0.05
MUCH_SAVING = 0.1
MUCH_BETWEEN = 0.2
MUCH_OVERHEAD = 0.5
MUCH_DISPATCH = 0.2
MUCH_PAUSING = 0.2
SLOW_RANK = 1.2
MANY_FORMS = 3
MANY_VISITS = 64
LARGE_PART = 0.3
SMALL_MODEL = 0.7
WORTHWHILE = 1.15


@dataclass(frozen=True)
class Advice:
    """What to change.

    Attributes:
        rule: the name of the rule.
        text: what was measured, and what to do.
        gain: how much faster the training could become at most; None if it can't be said.
        evidence: the figures behind it.
    """

    rule: str
    text: str
    gain: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text if self.gain is None else f"{self.text} Up to {self.gain:.1f}×."


Rule = Callable[[Evidence], Advice | None]


def advise(evidence: Evidence) -> list[Advice]:
    """Return the advice of all rules, the largest gain first, at most five."""
    all_advice = [advice for rule in RULES if (advice := rule(evidence)) is not None]
    return sorted(all_advice, key=lambda advice: -(advice.gain or 0.0))[:MOST]


def waiting_for_input(evidence: Evidence) -> Advice | None:
    """The loader is slower than the training step."""
    share, loader = evidence.share("input"), evidence.loader
    if share < MUCH_INPUT:
        return None
    figures = {"input": share, "workers": loader.workers, "busy": loader.busy}
    gain = _gain(share)
    waits = f"{share:.0%} of the time waits for input"
    if loader.kind == "torch" and loader.workers == 0:
        text = (
            f"{waits}: the DataLoader makes its batches in the training process, one after the other. Set "
            f"num_workers={max(1, loader.cores)} and persistent_workers=True."
        )
        return Advice("loader_without_workers", text, min(gain, 1 + loader.cores), figures)
    if loader.kind == "torch":
        text = (
            f"{waits}: {loader.workers} worker processes of the DataLoader aren't enough, or the storage is slow. Set a "
            f"larger num_workers (this machine has {loader.cores} cores), or do less for each row."
        )
        return Advice("input", text, gain, figures)
    if loader.kind == "other":
        return Advice("input", f"{waits}. Make the batches in other threads or processes than the step.", gain, figures)
    return Advice("input", f"{waits}: {_limit_of_table(evidence)}", gain, figures)


def _limit_of_table(evidence: Evidence) -> str:
    """Say what limits a table's loader, and what to set."""
    loader = evidence.loader
    work = [f"decoding {' and '.join(f'`{column}`' for column in loader.decodes)}"] if loader.decodes else []
    work += ["`transform`"] if loader.transform else []
    threads = f"{loader.workers} {'thread' if loader.workers == 1 else 'threads'}"
    if not work or (loader.busy is not None and loader.busy < IDLE):
        busy = "" if loader.busy is None else f" ({threads}, {loader.busy:.0%} busy)"
        return f"reading the table is the limit{busy}. Copy it to a disk of this machine, or read fewer columns."
    busy = threads if loader.busy is None else f"{threads}, {loader.busy:.0%} busy"
    limit = f"{' and '.join(work)} {'are' if len(work) > 1 else 'is'} the limit ({busy})."
    changes = [f"num_threads={loader.cores}"] if loader.workers < loader.cores else []
    if loader.transform and loader.computing is not None and loader.computing < 0.8:
        # The threads wait for Python's lock, so more threads don't help.
        changes = [f"num_workers={loader.cores}"]
    changes += ["cache="] if loader.decodes else []
    return f"{limit} Set {', or '.join(changes)}." if changes else f"{limit} Do less for each row, or use more cores."


def reading_values(evidence: Evidence) -> Advice | None:
    """`training_step` reads values from the device, which has to finish all its work for each."""
    if not evidence.reads or evidence.device == "cpu":
        return None
    line, count = max(evidence.reads.items(), key=lambda item: item[1])
    times = "" if count == 1 else f" {count} times"
    text = (
        f"{_short(line)} reads a value from the device{times} in each step, as .item(), float() and `if tensor` do. The "
        "host waits until the device has finished, and the device then waits for the host. Log the tensor itself with "
        "self.log, or use torch.where."
    )
    return Advice("reads", text, None, {"reads": dict(evidence.reads)})


def changing_shapes(evidence: Evidence) -> Advice | None:
    """A compiled step is compiled for many forms of batch."""
    by_name: defaultdict[str, list[Compilation]] = defaultdict(list)
    for compilation in evidence.compilations:
        by_name[compilation.name].append(compilation)
    name, programs = max(by_name.items(), key=lambda item: len(item[1]), default=("", []))
    if len({program.form for program in programs}) < MANY_FORMS:
        return None
    seconds = sum(program.seconds for program in programs)
    forms = "; ".join(dict.fromkeys(program.form for program in programs[:3]))
    text = (
        f"{name} was compiled {len(programs)} times, {seconds:.1f} s in total: for {forms}. Use one form of batch "
        "(drop_last=True, images of one size), or pad sequences to a few lengths."
    )
    gain = _gain(seconds / max(evidence.wall_s, 1e-9))
    return Advice("shapes", text, gain, {"compilations": len(programs), "seconds": seconds})


def logging_often(evidence: Evidence) -> Advice | None:
    """Metrics are read and logged so often that it takes time."""
    share = evidence.share("logging")
    if share < MUCH_LOGGING or evidence.log_every_n_steps >= 50:
        return None
    saved = share * (1 - evidence.log_every_n_steps / 50)
    text = (
        f"{share:.0%} of the time goes into reading and logging metrics, every {evidence.log_every_n_steps} steps. Set "
        "log_every_n_steps=50."
    )
    return Advice("logging", text, _gain(saved), {"logging": share, "log_every_n_steps": evidence.log_every_n_steps})


def saving_often(evidence: Evidence) -> Advice | None:
    """Training waits for checkpoints."""
    share = evidence.share("checkpoint")
    if share < MUCH_SAVING or not evidence.saves:
        return None
    each_s = evidence.seconds["checkpoint"] / evidence.saves
    text = (
        f"{share:.0%} of the time goes into {evidence.saves} checkpoints, {each_s:.2g} s each. Save less often: "
        "ModelCheckpoint(every_n_train_steps=…), or train_time_interval=."
    )
    return Advice("checkpoints", text, _gain(share), {"checkpoint": share, "saves": evidence.saves})


def hooks_between_steps(evidence: Evidence) -> Advice | None:
    """Hooks and callbacks take long between two steps."""
    share = evidence.share("callbacks")
    if share < MUCH_BETWEEN or not evidence.hooks:
        return None
    owners = " and ".join(evidence.hooks)
    text = f"{share:.0%} of the time goes into hooks between two steps: {owners}. Do the work every few steps."
    return Advice("hooks", text, _gain(share), {"callbacks": share, "hooks": list(evidence.hooks)})


def slow_rank(evidence: Evidence) -> Advice | None:
    """One rank is slower than the others, which wait for it in every step."""
    if len(evidence.own_s) < 2:
        return None
    rank, slowest = max(evidence.own_s.items(), key=lambda item: item[1])
    usual = statistics.median_low(seconds for other, seconds in evidence.own_s.items() if other != rank)
    if usual <= 0 or slowest / usual < SLOW_RANK:
        return None
    text = (
        f"Rank {rank} needs {slowest / usual:.1f} times as long as the other ranks, and they wait for it in each step. "
        "Look at its machine: other programs, a slow disk, heat; and at its share of the data."
    )
    return Advice("slow_rank", text, slowest / usual, {"own_s": dict(evidence.own_s)})


def full_precision(evidence: Evidence) -> Advice | None:
    """The device multiplies bfloat16 much faster, and the training uses float32."""
    peak, faster = evidence.peak_flops_per_s, evidence.bfloat16_flops_per_s
    if evidence.precision != "32-true" or not evidence.flops or not peak or not faster:
        return None
    # Products need this share of the wall time at least, since the device can't be faster than its peak.
    products = min(1.0, evidence.mfu or 0.0)
    gain = _gain(products * (1 - peak / faster))
    if gain < WORTHWHILE:
        return None
    text = (
        f'precision="32-true": at least {products:.0%} of the time is matrix products in float32, which this device does '
        f'{faster / peak:.1f} times as fast in bfloat16. Set precision="bf16-mixed".'
    )
    return Advice("precision", text, gain, {"products": products, "faster": faster / peak})


def tiny_batches(evidence: Evidence) -> Advice | None:
    """The cost of starting operations is larger than that of computing them."""
    overhead = _overhead(evidence)
    if overhead is None or overhead < MUCH_OVERHEAD or _loop(evidence) is not None or evidence.launching is not None:
        return None
    than = "" if evidence.rows is None else f" than one of {evidence.rows} rows"
    milliseconds = 1e3 * (evidence.least_step_s or 0.0)
    text = (
        f"A step starts {evidence.operations:,} operations in {milliseconds:.2g} ms, and {overhead:.0%} of that "
        f"is the cost of starting them. A larger batch takes little longer{than}: raise batch_size."
    )
    gain = _gain(overhead * evidence.share("forward", "backward", "optimizer", "step"))
    return Advice("tiny_batches", text, gain, {"overhead": overhead, "operations": evidence.operations})


def python_loop(evidence: Evidence) -> Advice | None:
    """One line of the model starts most of a step's operations."""
    overhead, loop = _overhead(evidence), _loop(evidence)
    if overhead is None or overhead < LARGE_PART or loop is None:
        return None
    line, operations = loop
    # Each operation of the forward pass has about one in the backward pass.
    part = min(1.0, 2 * operations / evidence.operations)
    text = (
        f"The Python loop at {_short(line)} starts {operations:,} of the {evidence.operations:,} operations of a step. "
        "Write it as one operation on a larger tensor, or set compile=True."
    )
    return Advice("python_loop", text, _gain(overhead * part), {"line": line, "operations": operations})


def pauses_in_step(evidence: Evidence) -> Advice | None:
    """The user's code does something else than operations of torch in a step."""
    (before, after), share = max(evidence.pauses.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    if share < MUCH_PAUSING:
        return None
    if before and after:
        where = f"at {_short(after)}" if before == after else f"between {_short(before)} and {_short(after)}"
    else:
        where = f"before {_short(after)}" if after else f"after {_short(before)}"
    text = (
        f"{share:.0%} of a step is Python code {where} that runs no operation of torch: NumPy, a "
        "loop over rows, a file. Do it in the loader, whose workers run beside the step, or write it with torch."
    )
    # A GPU may compute meanwhile.
    saved = share * evidence.share("forward", "backward", "optimizer", "step")
    gain = _gain(saved) if evidence.device == "cpu" else None
    return Advice("python", text, gain, {"share": share, "before": before, "after": after})


def small_for_gpu(evidence: Evidence) -> Advice | None:
    """The GPU waits for the host, which can't launch operations fast enough."""
    if evidence.launching is None or evidence.launching < SMALL_MODEL or _loop(evidence) is not None:
        return None
    text = (
        f"In {evidence.launching:.0%} of a step the host launches operations, and the GPU waits for them: the model or the "
        "batch is too small for it. Raise batch_size, set compile=True, or train on a smaller device."
    )
    return Advice("small_for_gpu", text, None, {"launching": evidence.launching, "operations": evidence.operations})


def slow_dispatch(evidence: Evidence) -> Advice | None:
    """The devices wait for the host to start the next compiled program."""
    share = evidence.share("dispatch")
    if share < MUCH_DISPATCH:
        return None
    text = (
        f"{share:.0%} of the time the devices wait for the host to start the next program: a step is too short for it. "
        "Set iterations_per_loop=10, or a larger one, or raise batch_size."
    )
    return Advice("dispatch", text, _gain(share), {"dispatch": share})


RULES: tuple[Rule, ...] = (
    waiting_for_input,
    reading_values,
    changing_shapes,
    logging_often,
    saving_often,
    hooks_between_steps,
    slow_rank,
    full_precision,
    tiny_batches,
    python_loop,
    pauses_in_step,
    small_for_gpu,
    slow_dispatch,
)


def _gain(saved: float) -> float:
    """Return how much faster a training becomes that saves a share of its time."""
    return 1 / max(1 - saved, 0.01)


def _overhead(evidence: Evidence) -> float | None:
    """Return the share of a step that is the cost of starting its operations; None if no step was examined."""
    if evidence.launching is not None:
        return evidence.launching
    if not evidence.operations or evidence.operation_s is None or not evidence.least_step_s:
        return None
    return min(1.0, evidence.operations * evidence.operation_s / evidence.least_step_s)


def _loop(evidence: Evidence) -> tuple[str, int] | None:
    """Return the line that the forward pass comes to most often, and the operations of all lines of such loops."""
    often = {line: visits for line, visits in evidence.visits.items() if visits >= MANY_VISITS}
    operations = sum(evidence.by_line[line] for line in often)
    if not often or operations < LARGE_PART * sum(evidence.by_line.values()):
        return None
    return max(often, key=lambda line: often[line]), operations


def _short(line: str) -> str:
    """Return "model.py:31" for "/home/me/model.py:31"."""
    return line.rpartition("/")[2]
