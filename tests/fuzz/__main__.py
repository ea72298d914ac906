"""Draw random training programs for some minutes. Report the number of programs, and the ways of running that differ.

    python -m fuzz --minutes 60        in tests/

The last line has both counts. The exit code is 1 if anything differs. The smallest program of each kind of difference is
printed.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
import traceback
import warnings
from typing import Any

import models  # noqa: F401  declares the operators that torchvision misses on CPU torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fuzz import test_programs

ROUND = 20  # programs of one property in a row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"seed {given.seed}", flush=True)
    end, draw = time.monotonic() + given.minutes * 60, random.Random(given.seed)
    properties = {name: value for name, value in vars(test_programs).items() if name.startswith("test_")}
    programs: collections.Counter[str] = collections.Counter()
    different: list[str] = []
    while time.monotonic() < end:
        for name, test in properties.items():
            try:
                programs[name] += _round(test, draw.randrange(2**32), end)
            except Exception as error:
                different.append(name)
                print(f"\n{name}:", *traceback.format_exception(error, limit=-3), sep="\n", flush=True)
    for name, count in programs.items():
        print(f"{count:6}  {name}")
    print(f"{sum(programs.values())} programs, {len(different)} differences")
    return int(bool(different))


def _round(test: Any, number: int, end: float) -> int:
    """Test one property on some programs. Return the number of programs."""
    count = 0

    @seed(number)
    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries(test.hypothesis._given_kwargs))
    def run(drawn: dict[str, Any]) -> None:
        nonlocal count
        if time.monotonic() < end:
            count += 1
            test.hypothesis.inner_test(**drawn)

    run()
    return count


if __name__ == "__main__":
    sys.exit(main())
