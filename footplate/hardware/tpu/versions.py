"""Which versions of the packages behind a TPU go together: what each says of the others, against what is there.

    jax        says which jaxlib and, in its extra `tpu`, which libtpu it was made with
    torch_tpu  says which torch and which libtpu
    torch_xla  was made for one torch, and ended with torch 2.9

Where they don't fit, a program may fail in a strange place, or run slowly without a word. What the machine itself was
made with (its *software version*) is checked too, as far as its name tells.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from footplate.hardware.packages import is_older
from footplate.hardware.tpu.names import Generation

PACKAGES = ("torch", "jax", "jaxlib", "libtpu", "torch_tpu", "torch_xla")
NEEDED_BY_TPU = {"jax": "tpu"}  # a package whose needs on a TPU are those of an extra
LAST_TORCH_XLA = "2.10"  # torch from which on there is no torch_xla

Requires = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Need:
    """What one package says of another: `jax` needs `libtpu` to be `==0.0.42.*`."""

    package: str
    other: str
    specifiers: str


def installed() -> dict[str, str]:
    """The versions of those of the packages that are installed; imports none of them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requires(package: str) -> Sequence[str]:
    """What an installed package's metadata says that it requires."""
    return importlib.metadata.requires(package) or ()


def needs(packages: Mapping[str, str], requires: Requires = requires) -> list[Need]:
    """What these packages say of each other."""
    return [
        Need(package, other, specifiers)
        for package in packages
        for line in requires(package)
        for other, specifiers in [_read(line, NEEDED_BY_TPU.get(package))]
        if other in packages and specifiers
    ]


def mismatches(packages: Mapping[str, str], requires: Requires = requires) -> list[str]:
    """Packages that don't go together, each with what to do.

    Args:
        packages: the installed versions, by name.
        requires: a function from a package's name to the lines of its `Requires-Dist`.
    """
    said = []
    known = needs(packages, requires)
    for need in known:
        there = packages[need.other]
        if fits(there, need.specifiers):
            continue
        rivals = [
            one
            for one in known
            if one.other == need.other and one.package != need.package and fits(there, one.specifiers)
        ]
        also = "".join(f"; {one.package} {packages[one.package]} needs {one.specifiers}" for one in rivals)
        hint = (
            f"Keep {need.package} and {rivals[0].package} in environments of their own"
            if rivals
            else f'Install what goes with it: pip install "{need.package}{_extra(need.package)}=={packages[need.package]}"'
        )
        said.append(
            f"{need.package} {packages[need.package]} needs {need.other}{need.specifiers}, and {need.other} {there} is "
            f"installed{also}. {hint}."
        )
    torch = packages.get("torch")
    if "torch_xla" in packages and torch is not None and not is_older(torch, LAST_TORCH_XLA):
        said.append(
            f"torch_xla {packages['torch_xla']} is installed beside torch {torch}: torch_xla ended with torch 2.9 and "
            "can't be used with it. Footplate doesn't need it: pip uninstall torch_xla."
        )
    return said


def wrong_software(software: str | None, generation: Generation | None, torch: str | None) -> str | None:
    """What to say of a software version that a TPU machine was made with; None where it fits or its name tells nothing.

    Args:
        software: such as `v2-alpha-tpuv5-lite`, or `tpu-vm-pt-1.13`, as the metadata server says.
        generation: of the machine's TPU.
        torch: the installed version.
    """
    if software is None:
        return None
    made = f"The machine's software is {software}"
    hint = f" Make the machine with --version={generation.software}." if generation is not None else ""
    old = re.fullmatch(r"(?:tpu-vm-pt|pytorch)-(\d+(?:\.\d+)*)(?:-.*)?", software)
    if old and torch is not None:
        return f"{made}, which brings torch {old[1]}, and torch {torch} is installed.{hint}"
    if re.match(r"tpu-vm-tf-|\d+\.\d+", software):
        return f"{made}, which is TensorFlow's.{hint}"
    if re.match(r"v2-alpha-tpu|tpu-ubuntu2204-base$", software) and generation and software != generation.software:
        return f"{made}, and that of TPU {generation.name} is {generation.software}.{hint}"
    return None


def fits(version: str, specifiers: str) -> bool:
    """Whether a version such as `0.0.42.1` is one that `>=0.0.41,<0.1` or `==0.0.42.*` allows."""
    return all(_allows(one.strip(), _numbers(version)) for one in specifiers.split(","))


def _read(line: str, extra: str | None) -> tuple[str, str]:
    """`jaxlib<=0.10.2,>=0.10.1; extra == "tpu"` as name and specifiers; without them where it is of another extra."""
    text, _, marker = line.partition(";")
    asked = re.search(r"""extra == ['"]([^'"]+)""", marker)
    if asked and asked[1] != extra:
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
    here, there = (one + (0,) * (size - len(one)) for one in (version, bound))
    if operator == "~=":
        return here >= there and version[: len(bound) - 1] == bound[:-1]
    return {
        "==": here == there, "===": here == there, "!=": here != there,
        ">=": here >= there, "<=": here <= there, ">": here > there, "<": here < there,
    }.get(operator or "", True)  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: of `2.13.0+cpu` and `2.13.0rc1`, (2, 13, 0)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _extra(package: str) -> str:
    return f"[{NEEDED_BY_TPU[package]}]" if package in NEEDED_BY_TPU else ""
