"""The verb `rollback`: return a model on an agent to the version that ran before."""

from __future__ import annotations

from dataclasses import dataclass

from builder.cli import SubParsers
from builder.cli.arguments import json_flag
from builder.cli.broker_flags import BrokerFlags, agent_flag, wait_flag
from builder.cli.confirmation import confirmed
from builder.cli.deploy import print_result, show_deployment
from builder.cli.flags import flag, part, takes


@dataclass(frozen=True, slots=True)
class _Rollback:
    agent: str = agent_flag()
    model: str = flag(required=True, metavar="NAME", help="the model's name on the agent")
    at: BrokerFlags = part(BrokerFlags, "broker")
    yes: bool = flag("-y", action="store_true", help="do not ask for confirmation")
    wait: float = wait_flag(600.0, "the result")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "rollback",
        help="return a model on an agent to the version that ran before",
        description="Return a model on an agent to the version that ran before, which the agent has kept:\n"
        "nothing is sent. The agent verifies and tests it as in a deployment, and refuses it if its\n"
        "security counter is lower than the committed one. A second rollback returns to the newer version.",
        epilog="examples:\n"
        "  edgebundle rollback --agent kitchen --model resnet50 --broker mqtt://localhost\n"
        "  edgebundle rollback --agent kitchen --model resnet50 --broker mqtt://localhost --yes --json",
    )
    takes(parser, _Rollback, _rollback)


def _rollback(args: _Rollback) -> int:
    import asyncio

    from builder.errors import FleetError
    from builder.fleet.rollback import rollback_async

    broker = args.at.made()
    if not args.yes and not confirmed(
        f"return {args.model} on {args.agent} to the version that ran before? [y/N] "
    ):
        raise FleetError(
            "nothing was changed: expected a confirmation, got none",
            hint="answer y on a terminal, or add --yes",
        )
    with show_deployment(quiet=args.json) as steps:
        result = asyncio.run(rollback_async(args.agent, args.model, broker, wait_s=args.wait, progress=steps))
    print_result(result, as_json=args.json)
    return 0
