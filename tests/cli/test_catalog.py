"""`footplate catalog`: lists in three forms, filters, and checks that explain."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml


def listed(footplate, *argv: object):
    result = footplate("catalog", *argv, "--format", "json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_machines_with_all_that_is_known_of_them(footplate):
    machines = {machine["name"]: machine for machine in listed(footplate, "machines")}
    assert machines["n1-standard-8"]["vcpus"] == 8
    assert machines["n1-standard-8"]["takes"]["NVIDIA_TESLA_V100"] == [1, 2, 4, 8]
    assert machines["a3-ultragpu-8g"]["accelerator"] == "NVIDIA_H200_141GB"
    assert all(machine["source"] and machine["as_of"] for machine in machines.values())


@pytest.mark.parametrize(
    ("filters", "name", "other"),
    [
        (["--series", "legacy"], "standard_gpu", "n1-standard-8"),
        (["--accelerator", "v100"], "n1-standard-8", "a2-highgpu-1g"),
        (["--accelerator", "A100"], "a2-highgpu-1g", "n1-standard-8"),
        (["--min-vcpus", 96], "n1-standard-96", "n1-standard-64"),
        (["--min-memory", 1000], "a4-highgpu-8g", "n1-highmem-96"),
    ],
)
def test_machines_are_filtered(footplate, filters, name, other):
    names = {machine["name"] for machine in listed(footplate, "machines", *filters)}
    assert name in names
    assert other not in names


@pytest.mark.parametrize(
    ("filters", "name", "other"),
    [
        (["--kind", "tpu"], "TPU_V6E", "NVIDIA_L4"),
        (["--machine", "n1-standard-64"], "NVIDIA_TESLA_V100", "NVIDIA_TESLA_K80"),
        (["--machine", "g2-standard-8"], "NVIDIA_L4", "NVIDIA_TESLA_T4"),
        (["--region", "us-west2"], "NVIDIA_TESLA_P4", "NVIDIA_TESLA_V100"),
        (["--available"], "NVIDIA_TESLA_P100", "NVIDIA_TESLA_K80"),
    ],
)
def test_accelerators_are_filtered(footplate, filters, name, other):
    names = {accelerator["name"] for accelerator in listed(footplate, "accelerators", *filters)}
    assert name in names
    assert other not in names


def test_what_is_gone_is_marked(footplate):
    k80 = next(
        accelerator for accelerator in listed(footplate, "accelerators") if accelerator["name"] == "NVIDIA_TESLA_K80"
    )
    assert k80["state"] == "gone since 2024-05-01"
    assert k80["successors"] == ["NVIDIA_TESLA_T4", "NVIDIA_L4"]


def test_regions_and_the_zones_of_an_accelerator(footplate):
    regions = {region["region"]: region for region in listed(footplate, "regions", "--accelerator", "V100")}
    assert regions["us-east1"]["accelerators"] == {"NVIDIA_TESLA_V100": ["us-east1-c"]}
    assert "us-east4" not in regions


@pytest.mark.parametrize("action", ["machines", "accelerators", "regions"])
def test_the_three_forms_say_the_same(footplate, action):
    rows = listed(footplate, action)
    assert yaml.safe_load(footplate("catalog", action, "--format", "yaml").out) == rows
    table = footplate("catalog", action).out
    assert all((row.get("region") or row.get("name")) in table for row in rows)


def test_a_check_that_explains(footplate):
    result = footplate(
        "catalog", "check", "n1-standard-32", "--accelerator", "count=2,type=nvidia-tesla-v100", "--region", "us-east4"
    )
    assert result.code == 1
    refused, elsewhere = result.out.splitlines()
    assert refused.startswith("n1-standard-32 can't take 2 V100: allowed counts are 4 and 8 (each V100 allows at most")
    assert "Nearest: n1-standard-32 with 4 V100" in refused
    assert elsewhere.startswith("V100 is not offered in us-east4, but in asia-east1")


def test_a_check_that_is_passed(footplate):
    result = footplate("catalog", "check", "n1-standard-8", "--accelerator", "type=t4", "--region", "us-central1")
    assert result.code == 0
    assert result.out == (
        "n1-standard-8 with 1 T4 is valid, in us-central1-a, us-central1-b, us-central1-c and us-central1-f.\n"
    )


def test_a_check_of_what_is_gone_names_todays_equivalent(footplate):
    result = footplate("catalog", "check", "complex_model_m_gpu", "--format", "json")
    assert result.code == 0
    answer = json.loads(result.out)
    assert "K80 no longer exists" in answer["notice"]
    assert answer["today"] == {"machine": "n1-standard-16", "accelerator": "NVIDIA_TESLA_T4", "count": 4}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "n1-standrd-8"], 'Did you mean "n1-standard-8"'),
        (["check", "n1-standard-8", "--accelerator", "2"], "expected KEY=VALUE"),
        (["check", "n1-standard-8", "--accelerator", "count=two,type=t4"], '"two" is no count'),
        (["check", "n1-standard-8", "--accelerator", "type=nvidia-tesla-t5"], 'Did you mean "NVIDIA_TESLA_T4"'),
        (["machines", "--series", "n9"], "--series=n9: there are n1, e2"),
        (["accelerators", "--region", "us-cental1"], 'Did you mean "us-central1"'),
        (["machines", "--format", "xml"], 'expected "table" or "json" or "yaml"'),
    ],
)
def test_mistakes(footplate, argv, message):
    result = footplate("catalog", *argv)
    assert result.code == 2
    assert message in result.err


def test_the_catalog_needs_neither_torch_nor_pydantic(project):
    script = (
        "import sys; from footplate.cli.main import main; code = main(['catalog', 'machines']); "
        "sys.exit(code or 'torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=project, check=False).returncode == 0
