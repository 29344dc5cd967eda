"""Whatever is sent, as the OpenAPI document allows it or not, the server does not fail and answers as it says."""

from __future__ import annotations

import time
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.serve.live import NAME, Live

CHECKS: list[Any] = [not_a_server_error, response_schema_conformance, content_type_conformance]
EXAMPLES, SECONDS = 20, 15.0


def fuzz(operation: Any, mode: GenerationMode, seconds: float) -> set[int]:
    """Send what hypothesis makes up for an operation; the statuses that came back."""
    statuses: set[int] = set()
    deadline = time.monotonic() + seconds

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if time.monotonic() > deadline:
            return
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
    # What takes no input cannot be given a wrong one.
    rounds += [(operation, GenerationMode.NEGATIVE) for operation in operations if operation.method == "post"]
    statuses = [fuzz(*round, SECONDS / len(rounds)) for round in rounds]
    assert {200, 400} <= set().union(*statuses)
    assert httpx.get(f"{live.url}/health").status_code == 200
