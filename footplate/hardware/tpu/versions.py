"""Version checks of the packages for a TPU: the requirements in their metadata against the installed versions.

    jax        requires a jaxlib and, in its extra `tpu`, a libtpu
    torch_tpu  requires a torch and a libtpu
    torch_xla  supports one torch; its last release was for torch 2.9

If versions don't match, a program may fail in an unrelated place, or run slowly without an error. The *software version*
of the machine is checked, too, if its name is known.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from footplate.hardware.packages import installed_version, is_older
from footplate.hardware.tpu.names import Generation

PACKAGES = ("torch", "jax", "jaxlib", "libtpu", "torch_tpu", "torch_xla")
# Packages whose requirements on a TPU are in an extra.
NEEDED_BY_TPU = {"jax": "tpu"}
# The first torch without a torch_xla.
FIRST_WITHOUT_TORCH_XLA = "2.10"

Requires = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Need:
    """A requirement of one package on another: `jax` needs `libtpu` to be `==0.0.42.*`."""

    package: str
    other: str
    specifiers: str


def installed() -> dict[str, str]:
    """Return the versions of the installed packages, without importing them."""
    versions = {package: installed_version(package) for package in PACKAGES}
    return {package: version for package, version in versions.items() if version is not None}


def requires(package: str) -> Sequence[str]:
    """Return the requirements in an installed package's metadata."""
    return importlib.metadata.requires(package) or ()


def needs(packages: Mapping[str, str], requires: Requires = requires) -> list[Need]:
    """Return the requirements that these packages have on each other."""
    return [
        Need(package, other, specifiers)
        for package in packages
        for line in requires(package)
        for other, specifiers in [_read(line, NEEDED_BY_TPU.get(package))]
        if other in packages and specifiers
    ]


def mismatches(packages: Mapping[str, str], requires: Requires = requires) -> list[str]:
    """List packages whose versions don't match, each with its solution.

    Args:
        packages: the installed versions, by name.
        requires: a function from a package's name to the lines of its `Requires-Dist`.
    """
    warnings = []
    known = needs(packages, requires)
    for need in known:
        version = packages[need.other]
        if fits(version, need.specifiers):
            continue

        # Other packages may need exactly the installed version, so that no version suits all.
        rivals = [
            rival
            for rival in known
            if rival.other == need.other and rival.package != need.package and fits(version, rival.specifiers)
        ]
        also = "".join(f"; {rival.package} {packages[rival.package]} needs {rival.specifiers}" for rival in rivals)
        hint = (
            f"Install {need.package} and {rivals[0].package} into separate environments"
            if rivals
            else f'Install what matches: pip install "{need.package}{_extra(need.package)}=={packages[need.package]}"'
        )
        warnings.append(
            f"{need.package} {packages[need.package]} needs {need.other}{need.specifiers}, but {need.other} {version} is "
            f"installed{also}. {hint}."
        )

    torch = packages.get("torch")
    if "torch_xla" in packages and torch is not None and not is_older(torch, FIRST_WITHOUT_TORCH_XLA):
        warnings.append(
            f"torch_xla {packages['torch_xla']} is installed with torch {torch}, but its last release was for torch 2.9. "
            "Footplate doesn't need it: pip uninstall torch_xla."
        )
    return warnings


def wrong_software(software: str | None, generation: Generation | None, torch: str | None) -> str | None:
    """Return a warning about a TPU machine's software version; None if it matches or its name is unknown.

    Args:
        software: the metadata server's value, such as `v2-alpha-tpuv5-lite` or `tpu-vm-pt-1.13`.
        generation: the generation of the machine's TPU.
        torch: the installed version of torch.
    """
    if software is None:
        return None
    prefix = f"The machine's software is {software}"
    hint = f" Create the machine with --version={generation.software}." if generation is not None else ""
    old = re.fullmatch(r"(?:tpu-vm-pt|pytorch)-(\d+(?:\.\d+)*)(?:-.*)?", software)
    if old and torch is not None:
        return f"{prefix}, which brings torch {old[1]}, but torch {torch} is installed.{hint}"
    if re.match(r"tpu-vm-tf-|\d+\.\d+", software):
        return f"{prefix}, which is for TensorFlow.{hint}"
    if re.match(r"v2-alpha-tpu|tpu-ubuntu2204-base$", software) and generation and software != generation.software:
        return f"{prefix}, but that of TPU {generation.name} is {generation.software}.{hint}"
    return None


def fits(version: str, specifiers: str) -> bool:
    """Return True if specifiers such as `>=0.0.41,<0.1` or `==0.0.42.*` allow a version such as `0.0.42.1`."""
    return all(_allows(specifier.strip(), _numbers(version)) for specifier in specifiers.split(","))


def _read(line: str, extra: str | None) -> tuple[str, str]:
    """Split `jaxlib<=0.10.2,>=0.10.1; extra == "tpu"` into name and specifiers. Those of other extras come out empty."""
    text, _, marker = line.partition(";")
    needed_by = re.search(r"""extra == ['"]([^'"]+)""", marker)
    if needed_by and needed_by[1] != extra:
        return "", ""
    name = re.match(r"[\w.-]+", text.strip())
    if name is None:
        return "", ""
    rest = re.sub(r"\[[^\]]*\]|[()\s]", "", text.strip()[name.end() :])
    return name[0].replace("-", "_").lower(), rest


def _allows(specifier: str, version: tuple[int, ...]) -> bool:
    operator, wanted = re.match(r"([<>=!~]=?=?)?(.*)", specifier).groups()  # type: ignore[union-attr]
    bound = _numbers(wanted)
    if wanted.endswith(".*"):
        begins = version[: len(bound)] == bound
        return not begins if operator == "!=" else begins
    size = max(len(version), len(bound))
    actual, limit = (numbers + (0,) * (size - len(numbers)) for numbers in (version, bound))
    if operator == "~=":
        return actual >= limit and version[: len(bound) - 1] == bound[:-1]
    return {
        "==": actual == limit, "===": actual == limit, "!=": actual != limit,
        ">=": actual >= limit, "<=": actual <= limit, ">": actual > limit, "<": actual < limit,
    }.get(operator or "", True)  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for `2.13.0+cpu` and `2.13.0rc1`."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _extra(package: str) -> str:
    return f"[{NEEDED_BY_TPU[package]}]" if package in NEEDED_BY_TPU else ""
