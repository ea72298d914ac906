"""Sections about the record of a run: plan, hyper-parameters, environment, alerts, and the command to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from footplate.reporting.formats import NOTHING, duration, moment, number, size
from footplate.reporting.html import Html, facts, folded, paragraph, section, table, tag
from footplate.reporting.run_record import PLAN, RunRecord
from footplate.reporting.sections_time import mean_samples_per_s


def plan_section(run: RunRecord, usd: float | None = None) -> Html:
    """Compare a plan with what was measured.

    Args:
        run: the run.
        usd: what the run has cost; None if no price is known.
    """
    title = "Plan and measurement"
    choices = run.plan.get("choices") if run.plan else None
    if not isinstance(choices, list) or not choices:
        absent = (
            f"No plan is saved with this run. Save one as {PLAN} in its directory: footplate plan … "
            f"--output RUN/{PLAN}."
        )
        return section("plan", title, paragraph(absent, note=True))
    assert run.plan is not None
    rows = [_plan_row(choice) for choice in choices if isinstance(choice, Mapping)]
    fact = _fact(run)
    headings = ("on", "devices", "step", "samples/s", "memory of a device", "whole time", "price")
    intro = paragraph(
        "A plan gives the least time of a step at peak rates, so the measured step is always slower. The measured memory "
        "is that of the process, or of the device if it has its own."
    )
    known = facts(
        [
            ("model", run.plan.get("model")),
            ("batch size", number(run.plan.get("batch_size"))),
            ("precision", run.plan.get("precision")),
        ]
    )
    compared = _compared(choices, fact, run)
    return section("plan", title, intro, known, table(headings, [*rows, _fact_row(fact, usd)]), compared)


def hparams_section(hparams: Mapping[str, Any]) -> Html:
    """Show the hyper-parameters."""
    if not hparams:
        absent = "No hyper-parameters are recorded. Call self.save_hyperparameters() in the module's __init__."
        return section("hyper-parameters", "Hyper-parameters", paragraph(absent, note=True))
    rows = [(name, value_text(value)) for name, value in hparams.items()]
    return section("hyper-parameters", "Hyper-parameters", table(("name", "value"), rows, numbers=False))


def environment_section(run: RunRecord) -> Html:
    """Show the machine and the packages of the run."""
    environment = run.environment
    if not environment:
        meta = run.checkpoint.meta if run.checkpoint is not None else {}
        versions = facts([("Footplate", meta.get("footplate")), ("torch", meta.get("torch"))]) if meta else ""
        absent = paragraph(
            "The environment isn't recorded. Add fp.Report() to the callbacks: it records it.", note=True
        )
        return section("environment", "Environment", versions, absent)
    devices = environment.get("devices")
    packages = environment.get("packages")
    listed = (
        folded(f"{len(packages):,} packages", table(("package", "version"), list(packages.items()), numbers=False))
        if isinstance(packages, Mapping) and packages
        else ""
    )
    memory = environment.get("memory_bytes")
    return section(
        "environment",
        "Environment",
        facts(
            [
                ("host", environment.get("host")),
                ("system", environment.get("system")),
                ("processor", environment.get("cpu")),
                ("cores", number(environment.get("cores"))),
                ("memory", size(memory) if isinstance(memory, (int, float)) else None),
                ("devices", ", ".join(map(str, devices)) if isinstance(devices, list) else None),
                ("Python", environment.get("python")),
                ("recorded", moment(environment.get("recorded")) if _is_number(environment.get("recorded")) else None),
            ]
        ),
        listed,
    )


def alerts_section(alerts: Sequence[Mapping[str, Any]]) -> Html:
    """Show the messages of alerts."""
    if not alerts:
        return section("alerts", "Alerts", paragraph("No alert was sent.", note=True))
    rows = [
        (
            moment(alert.get("time_s")) if _is_number(alert.get("time_s")) else NOTHING,
            number(alert.get("step")),
            str(alert.get("rule", "")),
            str(alert.get("text", "")),
        )
        for alert in alerts
    ]
    return section("alerts", "Alerts", table(("time", "step", "rule", "message"), rows, numbers=False))


def command_section(run: RunRecord) -> Html:
    """Show the commands that repeat and continue the run."""
    title = "Repeat this run"
    again = str(run.directory.with_name(f"{run.directory.name}-again"))
    if run.config is not None:
        config = shlex.quote(str(run.config))
        repeat = f"footplate fit --config {config} --trainer.default_root_dir {shlex.quote(again)}"
        return section(
            "repeat", title, _command(repeat), paragraph("Continue it from its last checkpoint:"),
            _command(f"footplate fit --config {config} --ckpt_path last"), *_where(run),
        )  # fmt: skip
    command = run.environment.get("command")
    if isinstance(command, str) and command:
        return section("repeat", title, _command(command), *_where(run))
    absent = (
        "A script made this run, and its command isn't recorded. Add fp.Report() to the callbacks: it records the command. "
        f"The seed was {value_text(run.hparams.get('trainer/seed'))}."
    )
    return section("repeat", title, paragraph(absent, note=True))


def value_text(value: Any) -> str:
    """Format a hyper-parameter: numbers as they are written in Python."""
    return NOTHING if value is None else repr(value) if isinstance(value, (bool, int, float)) else str(value)


def _where(run: RunRecord) -> list[Html]:
    git = run.environment.get("git")
    lines = []
    if run.environment.get("directory"):
        lines.append(paragraph(f"In {run.environment['directory']}"))
    if isinstance(git, Mapping) and git.get("commit"):
        changed = ". Files of the commit had changes that it doesn't have" if git.get("changed") else ""
        lines.append(paragraph(f"At commit {git['commit']}{changed}."))
    if run.hparams.get("trainer/seed") is not None:
        lines.append(paragraph(f"With seed {value_text(run.hparams['trainer/seed'])}."))
    return lines


def _command(text: str) -> Html:
    return tag("pre", text, class_="command", tabindex="0")


def _fact(run: RunRecord) -> dict[str, float | None]:
    windows = run.monitor.windows
    batches = sum(window.batches for window in windows)
    wall_s = sum(window.wall_s for window in windows)
    device = max((w.device_memory_bytes for w in windows if w.device_memory_bytes), default=None)
    process = max((w.memory_bytes for w in windows if w.memory_bytes), default=None)
    return {
        "step_s": wall_s / batches if batches else None,
        "samples_per_second": mean_samples_per_s(windows),
        "memory": device or process,
        "wall_s": wall_s or None,
    }


def _plan_row(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    memory = choice.get("memory")
    peak = memory.get("peak") if isinstance(memory, Mapping) else None
    hours, usd = choice.get("hours"), choice.get("usd")
    fits = "" if choice.get("fits") else " (doesn't fit)"
    return (
        f"plan: {choice.get('on')}{fits}", number(choice.get("devices")), _at_least(choice.get("step_s")),
        f"≤ {choice['samples_per_second']:,.0f}" if _is_number(choice.get("samples_per_second")) else NOTHING,
        size(peak) if _is_number(peak) else NOTHING, _at_least(hours * 3600 if isinstance(hours, (int, float)) else None),
        f"≥ ${usd:,.2f}" if _is_number(usd) else NOTHING,
    )  # fmt: skip


def _fact_row(fact: Mapping[str, float | None], usd: float | None) -> tuple[Any, ...]:
    rate = fact["samples_per_second"]
    return (
        "measured", "", duration(fact["step_s"]), NOTHING if rate is None else f"{rate:,.0f}", size(fact["memory"]),
        duration(fact["wall_s"]), NOTHING if usd is None else f"${usd:,.2f}",
    )  # fmt: skip


def _compared(choices: Sequence[Any], fact: Mapping[str, float | None], run: RunRecord) -> Html:
    """Say how far the measurement is from the plan of the same kind of device."""
    last = run.monitor.last
    if last is None or fact["samples_per_second"] is None:
        return paragraph("Nothing is measured yet: the run has no monitor.jsonl with samples.", note=True)
    kinds = {"cuda": "gpu", "tpu": "tpu", "cpu": "cpu"}
    kind = kinds.get(last.start.device, last.start.device)
    same = [
        choice
        for choice in choices
        if isinstance(choice, Mapping)
        and str(choice.get("kind", "")).lower() in (kind, last.start.device)
        and choice.get("devices") == last.start.world_size
        and _is_number(choice.get("samples_per_second"))
        and choice["samples_per_second"] > 0
    ]
    if len(same) != 1:
        return paragraph("The plan has not exactly one choice for the devices of this run.", note=True)
    reached = fact["samples_per_second"] / same[0]["samples_per_second"]
    return paragraph(
        f"The run reached {reached:.0%} of the samples per second that {same[0].get('on')} allows at most."
    )


def _at_least(seconds: Any) -> str:
    return f"≥ {duration(seconds)}" if _is_number(seconds) else NOTHING


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
