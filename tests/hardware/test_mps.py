import pytest
import torch

from footplate.hardware.mps import MPS, why_not


def test_on_this_machine_the_answer_agrees_with_torch():
    assert (MPS().unavailable() is None) == torch.backends.mps.is_available()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (("linux", "x86_64", "", False), "does not run macOS"),
        (("darwin", "x86_64", "14.5", True), "Python for arm64"),
        (("darwin", "arm64", "14.5", False), "built without MPS"),
        (("darwin", "arm64", "13.7", True), "macOS 13.7. It needs macOS 14"),
    ],
)
def test_the_reason_names_what_is_wrong(facts, words):
    assert words in (why_not(*facts, available=False) or "")


def test_a_mac_where_torch_finds_it_is_usable():
    assert why_not("darwin", "arm64", "15.1", built=True, available=True) is None
