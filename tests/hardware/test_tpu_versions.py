"""Compatible versions of packages, read from their declared requirements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from footplate.hardware.tpu.names import generations
from footplate.hardware.tpu.versions import fits, installed, mismatches, needs, requires, wrong_software

SAID = {
    "jax": ["jaxlib<=0.10.2,>=0.10.1", 'libtpu==0.0.42.*; extra == "tpu"', 'libtpu==9; extra == "other"'],
    "torch_tpu": ["numpy>=2", "libtpu (>=0.0.50)", "torch>=2.11.0,<=2.15.0"],
}
GOOD = {"torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}


def said(**versions: str) -> list[str]:
    return mismatches({**GOOD, **versions}, lambda package: SAID.get(package, ()))


def test_versions_that_go_together_are_not_spoken_of():
    assert said() == []


def test_the_installed_packages_are_asked_themselves():
    versions = installed()
    assert {"torch", "jax", "jaxlib", "libtpu"} <= versions.keys()
    assert ("jax", "libtpu") in {(need.package, need.other) for need in needs(versions)}
    assert mismatches(versions, requires) == []


def test_a_libtpu_that_jax_was_not_made_with_is_told():
    (message,) = said(libtpu="0.0.41")
    assert "jax 0.10.2 needs libtpu==0.0.42.*, but libtpu 0.0.41 is installed." in message
    assert 'pip install "jax[tpu]==0.10.2"' in message


def test_jax_and_torch_tpu_that_want_different_libtpus_belong_apart():
    (message,) = said(libtpu="0.0.52", torch_tpu="0.2.0")
    assert "torch_tpu 0.2.0 needs >=0.0.50" in message
    assert "Install jax and torch_tpu into separate environments." in message


def test_a_jaxlib_of_another_version_is_told():
    assert "needs jaxlib<=0.10.2,>=0.10.1, but jaxlib 0.9.0" in said(jaxlib="0.9.0")[0]


def test_torch_xla_beside_todays_torch_is_told():
    assert "its last release was for torch 2.9" in said(torch_xla="2.9.0")[0]
    assert said(torch_xla="2.9.0", torch="2.9.1") == []


@pytest.mark.parametrize(
    ("software", "generation", "expected"),
    [
        ("v2-alpha-tpuv5-lite", "v5e", None),
        ("tpu-ubuntu2204-base", "v4", None),
        ("gcr.io/cloud-tpu-v2-images/fake_tensorflow:latest", "v4", None),
        (None, "v4", None),
        ("v2-alpha-tpuv5-lite", "v6e", "that of TPU v6e is v2-alpha-tpuv6e"),
        ("tpu-vm-pt-1.13", "v3", "brings torch 1.13, but torch 2.13.0 is installed"),
        ("pytorch-1.9", None, "brings torch 1.9"),
        ("2.4.1", "v3", "is for TensorFlow"),
    ],
)
def test_a_machine_made_with_other_software_is_told(software, generation, expected):
    message = wrong_software(software, generations().get(generation), "2.13.0")
    assert message is None if expected is None else expected in message


NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
SPECIFIERS = st.one_of(
    st.tuples(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), NUMBERS).map("".join),
    NUMBERS.map(lambda version: f"=={version}.*"),
    NUMBERS.filter(lambda version: "." in version).map(lambda version: f"~={version}"),
)


@given(NUMBERS, st.lists(SPECIFIERS, min_size=1, max_size=3).map(",".join))
def test_specifiers_mean_what_packaging_says(version, specifiers):
    assert fits(version, specifiers) == SpecifierSet(specifiers).contains(Version(version))
