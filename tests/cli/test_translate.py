"""`footplate jobs translate`: the document on standard output, the remarks on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jobs.test_spec import ATTACHED


@pytest.fixture
def translated(footplate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(ATTACHED)
    return lambda *argv: footplate("jobs", "translate", "config.yaml", *argv)


def test_what_is_printed_can_be_given_to_that_system(translated):
    translation = translated(
        "--to", "kubeflow", "--master-image-uri", "gcr.io/a/b", "--module-name", "trainer.task", "--", "--lr", "1"
    )
    assert translation.code == 0, translation.err
    document = yaml.safe_load(translation.out)
    assert document["kind"] == "TFJob"
    chief = document["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]["containers"][0]
    assert chief["args"] == ["--lr", "1"]
    assert "K80" in translation.err  # it is no longer available


def test_the_form_can_be_chosen_unless_it_is_a_script(translated):
    given = ("--module-name", "trainer.task", "--parameter-server-count", "0")
    assert json.loads(translated("--to", "ray", *given).out)["entrypoint"].startswith("footplate run ")
    assert yaml.safe_load(translated("--to", "ray", "--format", "yaml", *given).out)["entrypoint"].startswith(
        "footplate run "
    )
    assert translated("--to", "slurm", *given).out.startswith("#!/bin/bash\n")
    translation = translated("--to", "slurm", "--format", "json", *given)
    assert (translation.code, translation.out) == (2, "")
    assert "the output is a script" in translation.err


def test_a_job_that_the_other_system_cannot_run_is_refused_with_every_reason(translated):
    translation = translated("--to", "vertex", "--module-name", "trainer.task", "--job-dir", "here")
    assert translation.code == 2
    assert "Vertex AI can't run this job as it is: 2 problems:" in translation.err
    assert "jobDir here: expected gs://bucket/path." in translation.err


def test_a_mistake_in_the_file_is_told_as_ever(translated):
    Path("config.yaml").write_text("trainingInput: {masterTyp: a}")
    translation = translated("--to", "vertex")
    assert translation.code == 2
    assert 'Did you mean "masterType"?' in translation.err
