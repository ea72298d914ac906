"""Names of TPU slices, and their meaning."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.catalog.rows import catalog
from footplate.core.errors import ConfigError
from footplate.hardware.tpu.names import generation_of, generations, slice_of, slices


@pytest.mark.parametrize(
    ("name", "generation", "chips", "cores", "devices", "hosts", "topology"),
    [
        ("v2-8", "v2", 4, 8, 8, 1, "2x2"),
        ("v3-8", "v3", 4, 8, 8, 1, "2x2"),
        ("v3-32", "v3", 16, 32, 32, 4, "4x4"),
        ("v4-8", "v4", 4, 8, 4, 1, "2x2x1"),
        ("v5litepod-16", "v5e", 16, 16, 16, 4, "4x4"),
        ("v5e-8", "v5e", 8, 8, 8, 1, "2x4"),
        ("V5P-8", "v5p", 4, 8, 4, 1, "2x2x1"),
        ("v6e-8", "v6e", 8, 8, 8, 1, "2x4"),
        ("v6e-1", "v6e", 1, 1, 1, 1, "1x1"),
    ],
)
def test_a_name_stands_for_chips_cores_devices_and_hosts(name, generation, chips, cores, devices, hosts, topology):
    found = slice_of(name)
    assert found.generation.name == generation
    assert (found.chips, found.cores, found.devices, found.hosts) == (chips, cores, devices, hosts)
    assert found.topology == topology


@pytest.mark.parametrize("one", slices().values(), ids=str)
def test_the_numbers_of_a_slice_fit_together(one):
    assert math.prod(map(int, one.topology.split("x"))) == one.chips
    assert one.count == (one.cores if one.generation.counts == "cores" else one.chips)
    assert one.chips % one.hosts == 0
    assert one.chips // one.hosts in (1, 4, 8)
    assert slice_of(one.name) is one
    assert one.name in str(one) or one.generation.name in str(one)


@pytest.mark.parametrize("one", generations().values(), ids=lambda one: one.name)
def test_a_generation_agrees_with_the_catalog_and_has_its_sources(one):
    row = catalog().accelerators[one.catalog]
    assert row.memory_gb == one.hbm_gb
    assert row.cores == one.cores_per_chip
    keys = [key for source in (one.source, *_slice_sources(one)) for key in source.split("; ")]
    assert all(key in catalog().sources for key in keys)
    assert one.as_of >= 2025


def _slice_sources(generation):
    return [one.source for one in slices().values() if one.generation is generation]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-7", "named by their chips. Use one of v5e-1, v5e-4, v5e-8"),
        ("v4-4", "named by their cores, two per chip. Use one of v4-8, v4-16"),
        ("v7-8", 'names no TPU slice. Did you mean "v'),
        ("", "names no TPU slice"),
        ("H100", "names no TPU slice"),
    ],
)
def test_a_name_that_stands_for_nothing_is_answered_with_those_that_there_are(name, said):
    with pytest.raises(ConfigError, match=said):
        slice_of(name)


@given(st.text(max_size=20))
def test_any_text_is_a_slice_or_a_plain_error(text):
    try:
        found = slice_of(text)
    except ConfigError:
        return
    assert generation_of(text) is found.generation
