"""Each wire code that a deployment can end with has advice."""

from __future__ import annotations

from builder.fleet.hints import DEPLOYMENT_HINTS, deployment_hint


def test_each_code_has_its_hint() -> None:
    assert {deployment_hint(error.code) for error in DEPLOYMENT_HINTS} == set(DEPLOYMENT_HINTS.values())
    assert deployment_hint("ERR_OF_TOMORROW") == ""
