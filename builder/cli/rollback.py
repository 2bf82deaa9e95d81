"""The verb `rollback`: return a model on an agent to the version that ran before."""

from __future__ import annotations

import argparse

from builder.cli import SubParsers
from builder.cli.arguments import add_json
from builder.cli.broker_flags import add_agent, add_broker, add_wait, broker_of
from builder.cli.confirmation import confirmed
from builder.cli.deploy import print_result, show_deployment


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
    add_agent(parser)
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name on the agent")
    add_broker(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    add_wait(parser, 600.0, "the result")
    add_json(parser)
    parser.set_defaults(handler=_rollback)


def _rollback(args: argparse.Namespace) -> int:
    import asyncio

    from builder.errors import FleetError
    from builder.fleet.rollback import rollback_async

    broker = broker_of(args)
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
