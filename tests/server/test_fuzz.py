"""The API against its own description: any request gets an answer of the described form, and never a server error."""

from __future__ import annotations

from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from jobs.conftest import Bench
from schemathesis import checks
from schemathesis.generation import GenerationMode

from server.conftest import Server, config

pytestmark = pytest.mark.engine

EXAMPLES = 12
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
checks.load_all_checks()


def test_whatever_is_asked_is_answered_as_described(server: Server, bench: Bench):
    bench.program("print('done')")
    body = {"jobId": "my_job", "packagePath": str(bench.directory / "trainer"), "config": config(bench)}
    assert server("POST", "/api/jobs", body).status == 201
    server.is_in("SUCCEEDED", "my_job")
    schema = schemathesis.openapi.from_url(f"{server.url}/api/openapi.json")
    operations = sorted(
        (result.ok() for result in schema.get_all_operations()), key=lambda endpoint: endpoint.method == "delete"
    )
    assert len(operations) >= 16
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            fuzz(operation, mode)
    assert server.process.poll() is None
    assert server("GET", "/api/jobs").json == {"jobs": [], "more": False}  # the last operation was to delete


def fuzz(operation: schemathesis.APIOperation, mode: GenerationMode) -> None:
    """Half of the cases use the existing job."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        for name in (None, "my_job"):
            if name and "name" in (case.path_parameters or {}):
                case.path_parameters["name"] = name
            if "timeout" in (case.query or {}):
                case.query["timeout"] = 0
            case.call_and_validate(headers={"X-Footplate": "1"}, checks=CHECKS)

    with suppress(Unsatisfiable):  # some take nothing that could be wrong
        ask()
