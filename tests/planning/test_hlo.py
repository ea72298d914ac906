"""Collectives, read from programs: lines in XLA's format, and a program just compiled by XLA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from footplate.planning.hlo import Collective, collectives, library_bytes, wire_bytes

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
def each(x, y):
    return jax.lax.pmean([x, y], "data"), jax.lax.all_gather(x, "data")
step = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))
print(step.lower(jnp.ones((8, 16)), jnp.ones((4, 4), jnp.bfloat16)).compile().as_text())
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%a = f32[64,3]{1,0} all-reduce(%b), replica_groups={}", Collective("all-reduce", 1, 768)),
        ("%a = (f32[8]{0:T(256)}, bf16[2,2]{1,0}) all-reduce(%b, %c)", Collective("all-reduce", 1, 40)),
        ("%a = f32[] all-reduce-start(%b)", Collective("all-reduce", 1, 4)),
        ("%a = (f32[2]{0}, f32[16]{0}) all-gather-start(%b)", Collective("all-gather", 1, 64)),
        (
            "%a = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%b)",
            Collective("collective-permute", 1, 256),
        ),
        ("ROOT %a = pred[4]{0} all-to-all(%b)", Collective("all-to-all", 1, 4)),
    ],
)
def test_a_line_is_read(line, expected):
    assert collectives(line) == [expected]


@pytest.mark.parametrize("line", ["%a = f32[4]{0} all-reduce-done(%b)", "%all-reduce.1 = f32[4]{0} add(%b, %c)", ""])
def test_other_lines_are_no_collectives(line):
    assert collectives(line) == []


def test_a_program_of_four_devices_says_what_they_exchange():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    by_kind = {collective.kind: collective for collective in collectives(process.stdout)}
    assert by_kind["all-gather"] == Collective("all-gather", 1, 8 * 16 * 4)
    assert by_kind["all-reduce"].nbytes in (2 * 16 * 4 + 4 * 2, 2 * 16 * 4 + 4 * 4)  # XLA may sum bfloat16 as float32


def test_a_ring_sends_nearly_twice_what_it_averages():
    assert wire_bytes([Collective("all-reduce", 1, 800)], 8) == 1400
    assert wire_bytes([Collective("all-reduce", 1, 800)], 1) == 0


def fusion(*operations: str, kind: str = "__ynn_fusion") -> str:
    """A program with one fusion of these operations."""
    inside = "\n".join(f"  {operation}" for operation in operations)
    call = f'ROOT %f = f32[8,4]{{1,0}} fusion(%x), kind=kCustom, calls=%inside, backend_config={{"kind":"{kind}"}}'
    return (
        f"%inside (p: f32[8,2]) -> f32[8,4] {{\n{inside}\n}}\n\nENTRY %main (x: f32[8,2]) -> f32[8,4] {{\n  {call}\n}}"
    )


DOT = "%d = f32[8,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PARAMETER = "%p = f32[8,2]{1,0} parameter(0)"


BIASED = "%a = f32[8,4]{1,0} add(%d, %b)"
WHOLE = 8 * 4 * 4


@pytest.mark.parametrize(
    ("operations", "nbytes"),
    [
        ((PARAMETER, f"ROOT {DOT}"), 0),
        ((DOT, "%r = f32[8]{0} reduce(%d, %c)", "ROOT %s = f32[8,4]{1,0} subtract(%d, %r)"), 0),
        ((DOT, BIASED, "%r = f32[8]{0} reduce(%a, %c)", "ROOT %s = f32[8,4]{1,0} subtract(%a, %r)"), WHOLE),
        ((DOT, "ROOT %r = f32[8]{0} reduce(%d, %c)"), WHOLE),
        ((PARAMETER, "%e = f32[8,2]{1,0} exponential(%p)", "ROOT %r = f32[8]{0} reduce(%e, %c)"), 0),
    ],
    ids=["a product alone", "reduced and used again", "and with a bias before", "result too small for it", "a chain"],
)
def test_within_a_librarys_fusion_one_value_lies_where_the_result_will(operations, nbytes):
    assert library_bytes(fusion(*operations)) == nbytes
    assert library_bytes(fusion(*operations, kind="other")) == 0


def test_a_convolution_takes_as_much_as_its_result_and_the_largest_counts():
    results = ("f32[2,3,3,2]{3,2,1,0}", "bf16[2,3,3,5]{3,2,1,0}")
    lines = [f"  %c{i} = {result} convolution(%e, %f), window={{size=3x3}}" for i, result in enumerate(results)]
    assert library_bytes("\n".join(["ENTRY %main (e: f32[2]) -> f32[2] {", *lines, "}"])) == 2 * 3 * 3 * 5 * 2
