"""The verb `metrics`: print the metrics that an agent publishes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import json_flag
from builder.cli.broker_flags import BrokerFlags, agent_flag
from builder.cli.flags import flag, part, takes


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Metrics:
    agent: str = agent_flag()
    at: BrokerFlags = part(BrokerFlags, "broker")
    match: re.Pattern[str] | None = flag(
        type=_pattern, metavar="REGEX", help="print only the samples whose name matches"
    )
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "metrics",
        help="print an agent's metrics",
        description="Wait for an agent's next metrics, and print them in the Prometheus text format.",
        epilog="examples:\n"
        "  edgebundle metrics --agent kitchen --broker mqtt://localhost\n"
        "  edgebundle metrics --agent kitchen --broker mqtt://localhost --match 'requests_total|memory'",
    )
    takes(parser, _Metrics, _metrics)


def _metrics(args: _Metrics) -> int:
    from builder.fleet.metrics import metrics

    sample = metrics(args.agent, args.at.made())
    chosen = {
        name: value
        for name, value in sorted(sample.values.items())
        if args.match is None or args.match.search(name)
    }
    if args.json:
        say_json(chosen, indent=2)
    else:
        for name, value in chosen.items():
            say(f"{name} {value:.10g}")
    return 0
