"""A report on a device: everything that must be so for it to serve, each thing looked at for real.

Promises to change nothing on the device, and on the broker nothing that stays; to go on after whatever is
wrong, so that one report names all of it; and to yield each finding as soon as it is made.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.config import Config, load_config
from agent.errors import ConfigError, PermissionDeniedError, UnreachableError
from agent.provision.checks import identity, machine, models, service
from agent.provision.checks.finding import Finding, fail
from agent.provision.checks.rights import check_broker


def examine(path: Path | None, *, connect: bool, say: Callable[[str], None]) -> Iterator[Finding]:
    """Look at everything.

    Parameters
    ----------
    path
        The configuration; None where there is none.
    connect
        Try the broker too.
    say
        Called with what is being done, where it takes a while.
    """
    say("loading the libraries ...")
    yield from machine.look_at_python()
    config: Config | None = None
    try:
        # The unit's own environment, of which the configuration's defaults are made, is not ours.
        config = load_config(path, {}, os.environ)
    except PermissionDeniedError as error:
        yield fail("configuration", str(error), "run it with sudo")
    except ConfigError as error:
        yield fail("configuration", " ".join(str(error).split()), error.hint or "edge-agent enroll")
    this = Machine.detect(configured=() if config is None else config.compatible)
    yield from machine.look_at_processor(this)
    yield from machine.look_at_clock()
    yield from machine.look_at_memory()
    yield from machine.look_at_heat()
    yield from machine.look_at_sandbox(required=config is not None and config.worker.require_sandbox)
    yield from service.look_at_service()
    if config is not None:
        yield from machine.look_at_disk(config.state_dir)
        yield from _look_at_enrollment(path, config, this, connect, say)


def _look_at_enrollment(
    path: Path | None, config: Config, this: Machine, connect: bool, say: Callable[[str], None]
) -> Iterator[Finding]:
    yield from identity.look_at_configuration(path, config)
    yield from identity.look_at_certificates(config)
    yield from identity.look_at_keyring(config)
    try:
        keyring = Keyring.from_dir(config.trust_dir)
    except ConfigError:
        pass  # said already; nothing could be verified
    else:
        yield from models.look_at_models(config.state_dir, keyring, this, say)
    if connect:
        say(f"trying {config.broker.url} ...")
        yield from _look_at_broker(config)


def _look_at_broker(config: Config) -> list[Finding]:
    serving = service.state().get("ActiveState") == "active"
    try:
        return asyncio.run(check_broker(config.broker, config.device, config.groups, serving=serving))
    except UnreachableError as error:
        return [fail("broker", str(error), error.hint)]
    except ConfigError as error:
        return [fail("broker", str(error), error.hint or "enroll again, with --force")]
