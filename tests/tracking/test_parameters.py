"""Parameters as loggers record them."""

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.tracking.parameters import flatten, plain, without_credentials

names = st.text("abc", min_size=1, max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(names, values, max_size=4))
def test_flat_parameters_are_one_level_of_plain_values(hparams):
    flat = flatten(hparams)
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in flat.values())
    assert {name.split("/")[0] for name in flat} == set(hparams)


def test_objects_are_kept_by_their_repr():
    hparams = {"act": torch.nn.ReLU(), "root": Path("/data"), "sizes": (1, 2)}
    assert plain(hparams) == {"act": "ReLU()", "root": "PosixPath('/data')", "sizes": [1, 2]}
    json.dumps(plain(hparams))


def test_passwords_in_uris_are_not_recorded():
    assert flatten({"data": {"uri": "postgresql://me:secret@db:5432/x", "all": ["http://a:b@c"]}}) == {
        "data/uri": "postgresql://db:5432/x",
        "data/all": "['http://c']",
    }


@given(st.text("ab:@/. ", max_size=20))
def test_text_without_a_uri_is_left_alone(text):
    if "://" not in text:
        assert without_credentials(text) == text
