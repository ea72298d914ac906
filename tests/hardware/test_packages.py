import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.hardware.packages import EXTRAS, REQUIRED, is_older, optional_packages, required_packages

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def _name_and_oldest(requirement: str) -> tuple[str, str]:
    name, oldest = re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement).groups()
    return name, oldest


def test_the_required_versions_are_those_of_pyproject():
    assert REQUIRED.items() <= dict(map(_name_and_oldest, PYPROJECT["dependencies"])).items()


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.name)
def test_each_extra_is_the_one_that_pyproject_installs_the_package_by(extra):
    (requirement,) = PYPROJECT["optional-dependencies"][extra.name]

    assert _name_and_oldest(requirement)[0] == extra.package


def test_what_is_installed_here_has_no_problem_and_a_version():
    for package in required_packages():
        assert package.version
        assert package.problem is None


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(tmp_path):
    script = f"""
import sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry] + [{str(Path(__file__).parents[2])!r}]
from footplate.hardware import packages
numpy = packages._required("numpy", "1.26", packages.installed_version("numpy"))
assert numpy.version is None, numpy
assert 'pip install "numpy>=1.26"' in numpy.problem, numpy
images = packages.optional_packages()[0]
assert images.version is None and images.install == 'pip install "footplate[images]"', images
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_looking_imports_none_of_the_packages():
    script = """
import sys
from footplate.hardware import packages
packages.required_packages(), packages.optional_packages()
assert not {"mlflow", "cv2", "lightning", "matplotlib", "pyarrow", "deltalake"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_optional_packages_name_their_extra():
    assert [package.install for package in optional_packages()] == [
        f'pip install "footplate[{extra.name}]"' for extra in EXTRAS
    ]


@pytest.mark.parametrize(
    ("given", "oldest", "older"),
    [
        ("2.13.0+cpu", "2.11", False),
        ("2.11.0", "2.11", False),
        ("2.9.1", "2.11", True),
        ("16", "16", False),
        ("15.0.2", "16", True),
        ("2.11.0a0+git1234", "2.11", False),
    ],
)
def test_versions_compare_by_their_numbers(given, oldest, older):
    assert is_older(given, oldest) is older


@given(*[st.tuples(*[st.integers(0, 99)] * 3)] * 2)
def test_of_two_different_versions_exactly_one_is_older(one, other):
    texts = [".".join(map(str, version)) for version in (one, other)]

    assert is_older(*texts) == (one < other)
    assert is_older(*reversed(texts)) == (other < one)
