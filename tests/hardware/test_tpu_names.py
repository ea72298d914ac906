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
    tpu_slice = slice_of(name)
    assert tpu_slice.generation.name == generation
    assert (tpu_slice.chips, tpu_slice.cores, tpu_slice.devices, tpu_slice.hosts) == (chips, cores, devices, hosts)
    assert tpu_slice.topology == topology


@pytest.mark.parametrize("tpu_slice", slices().values(), ids=str)
def test_the_numbers_of_a_slice_fit_together(tpu_slice):
    assert math.prod(map(int, tpu_slice.topology.split("x"))) == tpu_slice.chips
    assert tpu_slice.count == (tpu_slice.cores if tpu_slice.generation.counts == "cores" else tpu_slice.chips)
    assert tpu_slice.chips % tpu_slice.hosts == 0
    assert tpu_slice.chips // tpu_slice.hosts in (1, 4, 8)
    assert slice_of(tpu_slice.name) is tpu_slice
    assert tpu_slice.name in str(tpu_slice) or tpu_slice.generation.name in str(tpu_slice)


@pytest.mark.parametrize("generation", generations().values(), ids=lambda generation: generation.name)
def test_a_generation_agrees_with_the_catalog_and_has_its_sources(generation):
    row = catalog().accelerators[generation.catalog]
    assert row.memory_gb == generation.hbm_gb
    assert row.cores == generation.cores_per_chip
    keys = [key for source in (generation.source, *_slice_sources(generation)) for key in source.split("; ")]
    assert all(key in catalog().sources for key in keys)
    assert generation.as_of >= 2025


def _slice_sources(generation):
    return [tpu_slice.source for tpu_slice in slices().values() if tpu_slice.generation is generation]


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
        tpu_slice = slice_of(text)
    except ConfigError:
        return
    assert generation_of(text) is tpu_slice.generation
