"""Random requests, valid or not by the OpenAPI document, get responses that it describes and no server error."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.serve.live import NAME, Live

CHECKS: list[Any] = [not_a_server_error, response_schema_conformance, content_type_conformance]
EXAMPLES = 20


def fuzz(operation: Any, mode: GenerationMode) -> set[int]:
    """Sends generated requests to an operation. Returns the statuses of the responses."""
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body |= {"model": NAME, "max_tokens": 2}  # so that many reach the engine
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    send()
    return statuses


def test_no_request_breaks_the_server(live: Live) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    rounds = [(operation, GenerationMode.POSITIVE) for operation in operations]
    # Operations without input have no invalid one.
    rounds += [(operation, GenerationMode.NEGATIVE) for operation in operations if operation.method == "post"]
    statuses = [fuzz(*round) for round in rounds]
    assert {200, 400} <= set().union(*statuses)
    assert httpx.get(f"{live.url}/health").status_code == 200
