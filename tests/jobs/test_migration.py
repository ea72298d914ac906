"""Migration of a config.yaml to current machine types. Nothing else in the file changes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.catalog.rows import catalog
from footplate.core.errors import ConfigError
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.migration import apply, rewrite
from footplate.jobs.spec.problems import SpecError
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.spec.yamlfile import parse

OLD = [machine for machine in catalog().machines.values() if machine.legacy and machine.name != "cloud_tpu"]
ATTACHED = [(machine, name, count) for (machine, name), counts in catalog().counts.items() for count in counts]


def test_comments_and_order_stay():
    text = """\
# census
trainingInput:
  scaleTier: CUSTOM       # of our own
  masterType: "standard_gpu"  # one K80
  region: us-central1
  parameterServerType: large_model
  parameterServerCount: 3
"""
    assert rewrite(parse(text))[0] == (
        """\
# census
trainingInput:
  scaleTier: CUSTOM       # of our own
  masterType: n1-standard-8  # one K80
  masterConfig:
    acceleratorConfig:
      count: 1
      type: NVIDIA_TESLA_T4
  region: us-central1
  parameterServerType: n1-highmem-8
  parameterServerCount: 3
"""
    )


def test_attached_accelerators_are_changed_where_they_stand():
    text = """\
trainingInput:
  masterType: n1-highcpu-16
  masterConfig:
    # four of them
    acceleratorConfig: {count: 4, type: NVIDIA_TESLA_K80}
    imageUri: gcr.io/a/b
"""
    assert rewrite(parse(text))[0] == text.replace("NVIDIA_TESLA_K80", "NVIDIA_TESLA_T4")


def test_a_scale_tier_becomes_its_machines():
    assert yaml.safe_load(rewrite(parse("trainingInput:\n  scaleTier: BASIC_TPU"))[0])["trainingInput"] == {
        "scaleTier": "CUSTOM",
        "masterType": "n1-standard-4",
        "workerType": "ct5lp-hightpu-4t",
        "workerCount": 1,
        "workerConfig": {"acceleratorConfig": {"count": 4, "type": "TPU_V5_LITEPOD"}},
    }


def test_json_stays_json():
    new, _ = rewrite(parse('{"trainingInput": {"masterType": "standard_gpu", "args": ["--a"]}}'))
    assert json.loads(new)["trainingInput"]["masterConfig"]["acceleratorConfig"]["type"] == "NVIDIA_TESLA_T4"


def test_what_is_of_today_is_not_touched():
    text = "trainingInput: {masterType: n1-standard-8, masterConfig: {acceleratorConfig: {count: 1, type: t4}}}"
    assert rewrite(parse(text)) == (text, [])


def test_what_is_wrong_is_not_rewritten():
    with pytest.raises(SpecError):
        rewrite(parse("trainingInput: {masterTyp: standard_gpu}"))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A cluster of legacy machine types, or of machine types with accelerators that may be retired."""
    legacy = draw(st.booleans())
    spec: dict[str, Any] = {"scaleTier": "CUSTOM"} if draw(st.booleans()) else {}
    for role in ["master", *draw(st.lists(st.sampled_from(["worker", "parameterServer", "evaluator"]), unique=True))]:
        config: dict[str, Any] = {"imageUri": "gcr.io/a/b"} if draw(st.booleans()) else {}
        if legacy:
            spec[f"{role}Type"] = draw(st.sampled_from(OLD)).name
        else:
            machine, name, count = draw(
                st.sampled_from([attached for attached in ATTACHED if attached[0] != "cloud_tpu"])
            )
            spec[f"{role}Type"] = machine
            config["acceleratorConfig"] = {"count": count, "type": name}
        if config:
            spec[f"{role}Config"] = config
        if role != "master":
            spec[f"{role}Count"] = draw(st.integers(1, 3))
    keys = draw(st.permutations(list(spec)))
    return {"trainingInput": {key: spec[key] for key in keys}}


@settings(deadline=None)
@given(specs(), st.sampled_from([True, False, None]), st.booleans())
def test_a_rewritten_file_is_the_same_job_on_todays_machines(spec, flow, as_json):
    text = json.dumps(spec, indent=2) if as_json else yaml.safe_dump(spec, default_flow_style=flow, sort_keys=False)
    before = parse(text)
    new, changes = rewrite(before)
    after = resolve(draft(parse(new), partial=True))
    assert after.replicas == resolve(apply(draft(before, partial=True))).replicas
    assert after.notices == ()
    assert [(replica.role, replica.count, replica.image_uri) for replica in after.replicas] == [
        (replica.role, replica.count, replica.image_uri) for replica in resolve(draft(before, partial=True)).replicas
    ]
    assert rewrite(parse(new)) == (new, [])
    assert bool(changes) == (new != text)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_rewritten_or_one_mistake(tail):
    with contextlib.suppress(ConfigError):
        assert "standard_gpu" not in rewrite(parse(f"trainingInput:\n  masterType: standard_gpu\n{tail}"))[0][:50]
