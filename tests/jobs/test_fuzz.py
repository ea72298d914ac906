"""Any spec and any command line give a job or one message, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.cli.jobs_submit import options
from footplate.cli.jobs_watch import ACTIONS
from footplate.cli.main import main
from footplate.core.errors import ConfigError
from footplate.jobs.spec import flags
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import SpecError
from footplate.jobs.spec.reading import Reading, plain
from footplate.jobs.spec.resolving import keys_of, problems, resolve, unknown
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.supervision import prestart

WORDS = st.sampled_from(
    ["CUSTOM", "BASIC_GPU", "n1-standard-8", "standard_gpu", "cloud_tpu", "K80", "us-central1", "us-west1-b", "gs://abc/d",
     "trainer.task", "2h", "7200s", "1", "-1", "../..", "$(ls)", "--lr", "", "null", "count=1,type=t4", "a=b",
     "~nobody/x", "a" * 400]
)  # fmt: skip
LEAVES = st.one_of(WORDS, st.text(max_size=20), st.none(), st.booleans(), st.integers(), st.floats())
KEYS = st.sampled_from(
    sorted(
        {
            *keys_of(()),
            *keys_of(("trainingInput",)),
            *keys_of(("trainingInput", "masterConfig")),
            *keys_of(("trainingInput", "masterConfig", "acceleratorConfig")),
            *keys_of(("trainingInput", "scheduling")),
            *keys_of(("trainingInput", "hyperparameters")),
            *keys_of(("trainingInput", "hyperparameters", "params", 0)),
        }
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
NO_TEXT = st.just("\udcff")  # what the shell makes of a byte that is no UTF-8
GIVEN = st.dictionaries(st.sampled_from(sorted(flags.KEYS)), WORDS | NO_TEXT | st.text(max_size=15), max_size=6)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=8), GIVEN, st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_spec_is_a_job_or_problems(outer, inner, given, partial):
    text = json.dumps({**outer, "trainingInput": inner})
    try:
        asked = draft(parse(text), given, partial=partial)
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert said.startswith("--")
        return
    mistakes = problems(asked)
    if not mistakes:
        assert resolve(asked).replicas
        return
    with pytest.raises(SpecError) as raised:
        resolve(asked)
    assert raised.value.problems == mistakes
    for mistake in mistakes:
        assert mistake.text
        assert mistake.place or not mistake.path or mistake.path[0] != "trainingInput" or "missing" in mistake.text


@given(st.dictionaries(KEYS, VALUES, max_size=8))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_what_is_resolved_can_be_written_and_read_again(inner):
    asked = draft(parse(json.dumps({"trainingInput": inner})), partial=True)
    if not problems(asked):
        job = json.loads(json.dumps(resolve(asked).to_dict()))
        again = Reading(unknown)
        assert plain(again.read(Job, {"trainingInput": job["trainingInput"]}).training_input) == job["trainingInput"]
        assert not again.mistakes


ARGUMENTS = st.lists(
    st.one_of(st.sampled_from([*sorted(options()), "--", "submit", "training", "check", "-h1", "--lr=3"]), WORDS, NO_TEXT,
              st.text(max_size=10)),
    max_size=8,
)  # fmt: skip


def outcome(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    before, level = warnings.formatwarning, logging.getLogger("footplate").level
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as exit:  # --help
            code = int(exit.code or 0)
        finally:
            warnings.formatwarning = before
            logging.getLogger("footplate").setLevel(level)
    return code, out.getvalue(), err.getvalue()


def expect_an_answer(argv: list[str]) -> Any:
    code, out, err = outcome(argv)
    assert code in (0, 1, 2)
    if code == 2:
        assert not out
        assert err.startswith(f"footplate {argv[0]}: ")
    else:
        assert out
    assert "Traceback" not in err


@pytest.fixture
def no_supervisor_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `jobs submit` start no interpreter for the supervisor of a job that is never submitted (`test_prestart.py`)."""
    monkeypatch.setattr(prestart, "prestarted", contextlib.nullcontext)


@pytest.mark.usefixtures("no_supervisor_in_advance")
@given(ARGUMENTS)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
def test_any_command_line_of_submit_is_answered(argv):
    expect_an_answer(["jobs", "submit", "training", *argv])


@given(st.sampled_from(["machines", "accelerators", "regions", "check"]), ARGUMENTS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
def test_any_command_line_of_the_catalog_is_answered(action, argv):
    expect_an_answer(["catalog", action, *argv])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("FOOTPLATE_STORE", raising=False)
        yield


OTHERS = [action for action in (*ACTIONS, "check", "translate", "nothing") if action != "daemon"]  # which stays
OF_OTHERS = st.lists(
    st.one_of(
        st.sampled_from(
            ["--filter", "--sort-by", "--limit", "--format", "--unused-for", "--dry-run", "--to", "--name", "--modernize",
             "state=RUNNING", "createTime>2026-01-31", "labels.a:*", "~startTime,jobId", "json", "table", "vertex", "30d",
             "0", "nowhere.yaml", "my_job"]
        ),
        WORDS, NO_TEXT, st.text(max_size=10),
    ),
    max_size=6,
)  # fmt: skip


@given(st.sampled_from(OTHERS), OF_OTHERS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=80)
def test_any_command_line_of_the_other_actions_is_answered(home, action, argv):
    expect_an_answer(["jobs", action, *argv])
