"""`footplate demo`: train an image classifier straight from a Delta table, and show the result."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.cli.arguments import Parser, make_parser


def parser(name: str) -> Parser:
    """Make the parser of `demo`."""
    parser = make_parser(
        name, "Train a small classifier on a Delta table of 12,000 images of Fashion-MNIST, in one to three minutes."
    )
    parser.add_argument("--output-dir", default="runs/demo", help="the directory of the run")
    parser.add_argument(
        "--epochs", type=int, default=10, help="the most epochs; training stops early when the loss stops improving"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    parser.add_argument("--accelerator", default="auto", help="the accelerator to train on, as for the Trainer")
    parser.add_argument("--devices", default="auto", help="the number of its devices, or their indices")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Run the demo; returns its exit code."""
    args = parser(name).parse_args(argv)

    # After parsing: a mistake in the arguments shouldn't wait for the import of torch.
    from footplate.demo.run import run as run_demo

    run_demo(
        output_dir=args.output_dir,
        epochs=args.epochs,
        resume=args.resume,
        accelerator=args.accelerator,
        devices=args.devices,
    )
    return 0
