"""`footplate demo`: trains an image classifier straight from a Delta table, and shows what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def parser(name: str) -> ArgumentParser:
    """The parser of `demo`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(
        name, "Train a small classifier on a Delta table of 12,000 images of Fashion-MNIST, in one to three minutes."
    )
    made.add_argument("--output-dir", type=str, default="runs/demo", help="the run's directory")
    made.add_argument("--epochs", type=int, default=10, help="at most so many; training stops when it gets no better")
    made.add_argument("--resume", action="store_true", help="continue the run that lies in the output directory")
    made.add_argument("--accelerator", type=str, default="auto", help="what to train on, as the Trainer's")
    made.add_argument("--devices", type=str, default="auto", help="how many of its devices, or which")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Run the demo; returns its exit code."""
    from footplate.cli.parsing import parse

    given = parse(parser(name), argv)
    from footplate.demo.run import run as run_demo

    run_demo(
        output_dir=given.output_dir,
        epochs=given.epochs,
        resume=given.resume,
        accelerator=given.accelerator,
        devices=given.devices,
    )
    return 0
