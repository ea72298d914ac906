import pytest
import torch

from footplate.core.errors import ConfigError
from footplate.hardware.base import Accelerator, Device


class Board(Accelerator):
    """Three devices whose indices have a gap."""

    name = "board"
    precisions = frozenset({"32-true", "bf16-mixed"})

    def unavailable(self):
        return None

    def devices(self):
        return [Device(0, "a"), Device(1, "b"), Device(3, "c")]

    def torch_device(self, index):
        return torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "indices"),
    [("auto", [0, 1, 3]), (-1, [0, 1, 3]), (2, [0, 1]), ("2", [0, 1]), ([3, 0], [3, 0]), ("1,3", [1, 3]), ("3,", [3])],
)
def test_devices_are_counted_in_order_or_chosen_by_index(devices, indices):
    assert Board().parse_devices(devices) == indices


def test_more_devices_than_there_are_names_those_that_are_there():
    with pytest.raises(ConfigError) as caught:
        Board().parse_devices(5)

    assert str(caught.value) == ('devices=5: This machine has 3 (board:0, board:1, board:3). Use devices=3 or "auto".')


def test_an_index_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"devices=\[0, 2\]: no device has index 2.*board:3"):
        Board().parse_devices([0, 2])


def test_a_precision_that_the_hardware_lacks_is_refused_with_the_nearest():
    Board().check_precision("bf16-mixed")

    with pytest.raises(ConfigError, match=r'precision="bf16-mixd": board .* Did you mean "bf16-mixed"\?'):
        Board().check_precision("bf16-mixd")
