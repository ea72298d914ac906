import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.hardware.devices import read_devices

INDICES = st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True)


@given(st.integers(1, 10_000))
def test_a_count_reads_the_same_as_number_and_as_text(count):
    assert read_devices(count, "") == read_devices(str(count), "") == count


@given(INDICES)
def test_indices_read_the_same_as_list_and_as_text(indices):
    text = ",".join(map(str, indices)) + ("," if len(indices) == 1 else "")

    assert read_devices(indices, "") == read_devices(text, "") == tuple(indices)


@pytest.mark.parametrize("devices", [-1, "-1"])
def test_minus_one_stands_for_all(devices):
    assert read_devices(devices, "") == -1


@pytest.mark.parametrize("devices", ["auto", " auto "])
def test_auto_is_left_to_the_accelerator(devices):
    assert read_devices(devices, "") == "auto"


@pytest.mark.parametrize(
    "devices",
    [0, -2, "0", "", ",", "two", "0;1", [], [0, 0], "1,1", [-1], [True], True, None, 1.5, [1.5], ["0"], {0: 1}],
)
def test_anything_else_is_refused_with_what_was_given_and_what_to_do(devices):
    with pytest.raises(ConfigError) as caught:
        read_devices(devices, "Use devices=2.")

    assert str(caught.value).startswith(f"devices={devices!r}: expected ")
    assert str(caught.value).endswith("Use devices=2.")


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers() | st.text())))
def test_whatever_is_given_the_answer_is_one_of_three_forms_or_a_config_error(devices):
    try:
        form = read_devices(devices, "")
    except ConfigError:
        return

    if isinstance(form, tuple):
        assert form
        assert len(set(form)) == len(form)
        assert min(form) >= 0
    else:
        assert form == "auto" or form == -1 or form >= 1
