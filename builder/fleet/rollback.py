"""Return a model on an agent to the version that ran before.

Promises: it is a deployment like any other, of the bundle that the agent has kept, so nothing is transferred
and the agent makes every check. It refuses a bundle whose security counter is lower than the committed one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.bundle.names import MODEL_NAME, hex_digest
from agent.errors import BundleError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.desired import MQTT_SOURCE, DesiredModel
from agent.wire.reported import Reported, ReportedModel
from builder.errors import FleetError
from builder.fleet.client import Client
from builder.fleet.deploy import Deployment, DeployProgress, DeployResult
from builder.fleet.hints import AGENT_NAME, OLD_REPORT
from builder.fleet.presence import PresenceWatch, unknown_agent
from edgebundle.broker import Broker
from edgebundle.errors import BrokerError

# The report of an agent is retained: it arrives with the subscription.
_REPORT_LIMIT_S: Final = 1.0
# The document claims a size, which is only used to transfer a bundle; this one is on the device already.
_UNKNOWN_SIZE: Final = 1
_UNKNOWN_VERSION: Final = "previous"


async def rollback_async(
    agent: str,
    model: str,
    broker: Broker,
    *,
    wait_s: float = 600.0,
    progress: Callable[[DeployProgress], None] | None = None,
) -> DeployResult:
    """Return a model to its previous version, in a running event loop.

    Parameters
    ----------
    agent, model
        Names of the device and of the model.
    wait_s
        How long to wait for the result, in seconds.
    progress
        Called with every change.

    Raises
    ------
    FleetError
        If there is no such agent or model, the agent has kept no previous version, or no result in time.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    if not topics.is_device_name(agent) or not MODEL_NAME.fullmatch(model):
        raise FleetError(
            f"expected the names of an agent and a model, got {agent!r:.80} and {model!r:.80}",
            hint=AGENT_NAME,
        )
    reported = await _reported(agent, model, broker)
    try:
        digest = reported.previous or ""
        hex_digest(digest)
    except ValueError as error:
        raise FleetError(
            f"{agent} has kept no previous version of {model}", hint="deploy the version that should run"
        ) from error
    wanted = DesiredModel(
        model=model,
        digest=digest,
        size=_UNKNOWN_SIZE,
        version=_UNKNOWN_VERSION,
        job=f"rollback-{hex_digest(digest)[:12]}-{secrets.token_hex(4)}",
        sources=(MQTT_SOURCE,),
    )
    task = Deployment(agent, wanted, None, progress or (lambda _progress: None))
    async with Client(broker, task.on_message, on_up=task.on_up) as client:
        result = await task.run(client, wait_s, broker)
    if not result.ok:
        return result
    try:
        active = await _reported(agent, model, broker)
    except (FleetError, BrokerError):  # the agent has changed; only the version's name is unknown
        return result
    return replace(result, version=active.version) if active.digest == digest else result


async def _reported(agent: str, model: str, broker: Broker) -> ReportedModel:
    payload: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    presence = PresenceWatch(agent)

    def on_message(topic: topics.Topic, message: Message) -> None:
        presence.on_message(topic, message)
        if topic == topics.Reported(agent) and not payload.done():
            payload.set_result(bytes(message.payload))

    async with Client(broker, on_message) as client:
        presence.subscribe(client)
        await client.subscribe(topics.format_topic(topics.Reported(agent)), 0)
        try:
            async with asyncio.timeout(_REPORT_LIMIT_S):
                reported = Reported.from_bytes(await payload)
        except TimeoutError as error:
            if not presence.state:
                raise await unknown_agent(agent, broker) from error
            raise FleetError(
                f"{agent} has not reported what it runs",
                hint="`edgebundle agents` lists the agents; the broker's access list must let this user read "
                "their reports",
            ) from error
        except BundleError as error:
            raise FleetError(f"the report of {agent} cannot be read: {error}", hint=OLD_REPORT) from error
    found = next((each for each in reported.models if each.name == model), None)
    if found is None:
        names = ", ".join(each.name[:64] for each in reported.models[:8]) or "none"
        raise FleetError(f"{agent} reports no model {model}", hint=f"its models: {names}")
    return found
