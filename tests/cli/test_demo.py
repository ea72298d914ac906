"""`footplate demo`: its arguments. tests/demo tests the demo itself."""

from __future__ import annotations

import pytest

from footplate.cli.demo import parser


def test_defaults():
    given = parser("demo").parse_args([])
    assert (given.output_dir, given.epochs, given.resume) == ("runs/demo", 10, False)
    assert (given.accelerator, given.devices) == ("auto", "auto")


def test_arguments():
    given = parser("demo").parse_args(
        ["--output-dir=here", "--epochs", "3", "--resume", "--accelerator=xla", "--devices=8"]
    )
    assert (given.output_dir, given.epochs, given.resume) == ("here", 3, True)
    assert (given.accelerator, given.devices) == ("xla", "8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs=few"], 'epochs="few": expected an integer.'),
        (["--outputdir=x"], 'Did you mean "--output-dir"?'),
        (["--output-dir=flowers.py/demo"], 'default_root_dir="flowers.py/demo" can\'t be written to'),
    ],
)
def test_mistakes(footplate, argv, message):
    result = footplate("demo", *argv)
    assert result.code == 2
    assert message in result.err
