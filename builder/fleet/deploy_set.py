"""Deploy the best bundle of a set to an agent: choose by what the agent has published, then `deploy`.

The choice is only advice. If the agent refuses a variant, because the device lacks something that the agent
does not publish, the next one is tried. Every refusal is reported through `progress`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agent.errors import BundleError, IncompatibleError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.info import Info
from builder.errors import FleetError
from builder.fleet.bundle_file import BundleFile
from builder.fleet.bundle_set import BundleSet, Refusal, Variant
from builder.fleet.client import Client
from builder.fleet.deploy import DeployProgress, DeployResult, deploy_async
from builder.fleet.hints import AGENT_NAME
from builder.fleet.presence import ABSENT_LIMIT_S, unknown_agent
from builder.fleet.printable import printable
from edgebundle.broker import Broker

# A retained document arrives at once; an agent that was just installed may still be starting.
_INFO_LIMIT_S: Final = 10.0


async def deploy_set_async(
    bundles: Sequence[Path],
    agent: str,
    broker: Broker,
    *,
    source: str | None = None,
    wait_s: float = 600.0,
    steps: Callable[[DeployProgress], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> DeployResult:
    """Deploy the best of several bundles of one model to one agent, and wait for the result.

    Parameters
    ----------
    bundles
        The files, preferred ones first. A single file is deployed without a choice.
    agent, broker, wait_s
        As in `builder.fleet.deploy.deploy`; `wait_s` is for each variant that is tried.
    steps
        Called with every change of the deployment.
    source
        An https URL that the agent may download from; if it ends in `/`, the name of the chosen file is
        added.
    progress
        Called with a line for each variant that is not used, and one for the one that is.

    Returns
    -------
    DeployResult
        Of the variant that was tried last.

    Raises
    ------
    FleetError
        If there is no such agent, no variant runs on it, or no result in time.
    PackageError
        If a file is not a bundle, or they are not of one model.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    progress = progress or (lambda _line: None)
    if len(bundles) == 1:
        return await deploy_async(bundles[0], agent, broker, source=source, wait_s=wait_s, progress=steps)
    if not topics.is_device_name(agent):
        raise FleetError(f"expected the name of an agent, got {agent!r:.80}", hint=AGENT_NAME)
    if source is not None and not source.endswith("/"):
        raise FleetError(
            f"--source: expected a URL that ends in / for several bundles, got {source!r:.200}",
            hint="the name of the chosen file is appended to it",
        )
    chosen = BundleSet.of([await asyncio.to_thread(_variant, path) for path in bundles])
    choice = chosen.choose(await _info(agent, broker, wait_s))
    for refusal in choice.refused:
        progress(f"{refusal.name} does not run on {agent}: {refusal.reason}")
    refused = list(choice.refused)
    for variant in choice.fitting:
        progress(f"{variant.path.name} is the best of {len(bundles)} bundles for {agent}")
        result = await deploy_async(
            variant.path,
            agent,
            broker,
            source=source and f"{source}{variant.path.name}",
            wait_s=wait_s,
            progress=steps,
        )
        if result.code != IncompatibleError.code:
            return result
        refused.append(Refusal(variant.path.name, printable(result.message)))
        progress(f"{agent} refuses {variant.path.name}: {refused[-1].reason}")
    reasons = "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in refused)
    raise FleetError(
        f"expected a bundle that runs on {agent}, got {len(refused)} that do not ({reasons})",
        hint="compile the model with the --target of this device, and add that bundle",
    )


def _variant(path: Path) -> Variant:
    return Variant(path, BundleFile.read(path).manifest)


async def _info(agent: str, broker: Broker, wait_s: float) -> Info:
    """Return what an agent has published about its device.

    Raises `FleetError` if there is no such agent, or it has published nothing.
    """
    arrived: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
    known: list[topics.Topic] = []

    def on_message(topic: topics.Topic, message: Message) -> None:
        if topic == topics.State(agent) and message.payload:
            known.append(topic)
        if topic != topics.Info(agent) or arrived.done():
            return
        try:
            arrived.set_result(Info.from_bytes(message.payload))
        except BundleError:
            return  # removed from the broker

    async with Client(broker, on_message) as client:
        for topic in (topics.State(agent), topics.Info(agent)):
            await client.subscribe(topics.format_topic(topic), 1)
        for limit_s in (ABSENT_LIMIT_S, _INFO_LIMIT_S):
            try:
                async with asyncio.timeout(min(wait_s, limit_s)):
                    return await asyncio.shield(arrived)
            except TimeoutError:
                if not known:
                    break
    if known:
        raise FleetError(
            f"expected {agent} to say what it runs on, got no info document",
            hint="deploy one bundle, compiled for this device; or let this user read edge/v1/+/info",
        )
    raise await unknown_agent(agent, broker)
