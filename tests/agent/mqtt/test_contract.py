"""docs/mqtt.md is the contract, docs/sandbox.md the worker's; their promises name tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

from agent.config.keys import KEYS
from agent.service.metrics.metric_table import METRICS

ROOT = Path(__file__).parents[3]
CONTRACT = (ROOT / "docs" / "mqtt.md").read_text()
SANDBOX = (ROOT / "docs" / "sandbox.md").read_text()


def defined_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }


def test_every_test_that_the_sandbox_names_exists() -> None:
    rows = [row for row in SANDBOX.splitlines() if row.startswith("| ") and "`test_" in row]
    assert len(rows) >= 6
    defined = defined_tests()
    for row in rows:
        assert set(re.findall(r"`(test_\w+)`", row)) <= defined, row


def test_every_test_that_the_contract_names_exists() -> None:
    defined = defined_tests()
    promises = CONTRACT.partition("## Promises")[2].partition("\n## ")[0]
    rows = [row for row in promises.splitlines() if row.startswith("| ") and not row.startswith("| promise")]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row


def test_every_key_of_the_configuration_that_the_contract_names_exists() -> None:
    sections = {key.name.partition(".")[0] for key in KEYS if "." in key.name}
    named = {
        name
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", CONTRACT + SANDBOX)
        if name.partition(".")[0] in sections
    }
    assert named
    assert named <= {key.name for key in KEYS}


def test_metrics_that_the_agent_writes_are_those_of_the_contract() -> None:
    table = CONTRACT.partition("## Metrics")[2].partition("## Promises")[0]
    documented = set(re.findall(r"`(edge_[a-z0-9_]+)", table))
    documented |= {f"edge_inference{tail}" for tail in re.findall(r"`(_[a-z]+_seconds)`", table)}
    assert documented == set(METRICS)
