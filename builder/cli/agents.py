"""The verb `agents`: who is at a broker, and what runs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.terminal import note, say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import json_flag
from builder.cli.broker_flags import BrokerFlags, wait_flag
from builder.cli.flags import part, takes

if TYPE_CHECKING:
    from builder.fleet.agents import AgentSummary

# After the common hint.
_RABBITMQ_HINT: Final = "RabbitMQ does not list agents: give their names"


@dataclass(frozen=True, slots=True)
class _Agents:
    at: BrokerFlags = part(BrokerFlags, "broker")
    wait: float = wait_flag(2.0, "agents")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "agents",
        help="list the agents at a broker and their models",
        description="List the agents at a broker, each with its state, device and models.",
        epilog="example:\n  edgebundle agents --broker mqtt://localhost",
    )
    takes(parser, _Agents, _agents)


def _agents(args: _Agents) -> int:
    from builder.fleet.agents import agents
    from edgebundle.directory import NO_AGENT_HINT

    found = agents(args.at.made(), wait_s=args.wait)
    if args.json:
        say_json([_agent_json(agent) for agent in found], indent=2)
        return 0
    if not found:
        note("no agents at this broker")
        note(f"hint: {NO_AGENT_HINT}; {_RABBITMQ_HINT}")
    for agent in found:
        words = (agent.condition, f"edge-agent {agent.version}" if agent.version else "", agent.machine)
        say(f"{agent.name}  {'  '.join(word for word in words if word)}")
        if agent.name_conflict:
            say("    TWO AGENTS HAVE THIS NAME: give one another name (edge-agent enroll --device NAME)")
        if agent.sandbox_missing:
            say(f"    sandbox without {', '.join(agent.sandbox_missing)}")
        for model in agent.models:
            condition, _, reason = model.condition.partition(": ")
            say(f"    {model.name} {model.version}  {condition}  {model.digest[:19]}")
            if reason:
                say(f"        {reason}")
    return 0


def _agent_json(agent: AgentSummary) -> dict[str, Any]:
    return {
        "name": agent.name,
        "state": agent.state,
        "inference": agent.inference,
        "groups": agent.groups,
        "name_conflict": agent.name_conflict,
        "version": agent.version,
        "machine": agent.machine,
        "sandbox": None
        if agent.sandbox_missing is None
        else {"complete": not agent.sandbox_missing, "missing": list(agent.sandbox_missing)},
        "models": [
            {
                "name": model.name,
                "version": model.version,
                "ready": model.ready,
                "digest": model.digest,
                "inputs": list(model.inputs),
                "service": model.service,
                "reason": model.reason,
            }
            for model in agent.models
        ],
    }
