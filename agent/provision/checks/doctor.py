"""A report on a device, which tries out everything that the device needs to serve.

Promises: nothing changes on the device, and nothing remains at the broker; a failure does not end the
report, so one report names everything that is wrong; each finding is yielded as soon as it is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.config.file import load_config
from agent.config.settings import Config
from agent.deploy.store.store import Store
from agent.errors import ConfigError, PermissionDeniedError, StoreError, UnreachableError
from agent.provision.checks import identity, machine, models, service
from agent.provision.checks.rights import check_broker
from agent.provision.finding import Finding, fail


def examine(path: Path | None, *, connect: bool, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Check the machine, the service, the configuration, the models and the broker, and yield the findings.

    `connect` says whether to connect to the broker too; `progress` is called with a line of text before each
    slow step.
    """
    progress("loading the libraries ...")
    yield from machine.check_python()
    config: Config | None = None
    try:
        # Some defaults come from the environment, which is ours here, not the unit's.
        config = load_config(path, {}, os.environ)
    except PermissionDeniedError as error:
        yield fail("configuration", str(error), "run it with sudo")
    except ConfigError as error:
        yield fail("configuration", " ".join(str(error).split()), error.hint or "edge-agent enroll")
    this = Machine.detect(configured=() if config is None else config.compatible)
    yield from machine.check_processor(this)
    yield from machine.check_clock()
    yield from machine.check_memory()
    yield from machine.check_heat()
    yield from machine.check_sandbox(required=config is not None and config.worker.require_sandbox)
    yield from service.check_service()
    if config is not None:
        yield from machine.check_disk(config.state_dir)
        yield from _check_enrollment(path, config, this, connect, progress)


def _check_enrollment(
    path: Path | None, config: Config, this: Machine, connect: bool, progress: Callable[[str], None]
) -> Iterator[Finding]:
    yield from identity.check_configuration(path, config)
    yield from identity.check_certificates(config)
    yield from identity.check_keyring(config)
    try:
        keyring = Keyring.from_dir(config.trust_dir)
    except ConfigError:
        pass  # reported above; nothing can be verified without a keyring
    else:
        yield from models.check_models(config.state_dir, keyring, this, progress)
    if connect:
        progress(f"trying {config.broker.url} ...")
        yield from _check_broker(config)


def _is_running(config: Config) -> bool:
    """Return whether this device's own agent runs, as a service or however a person started it."""
    with contextlib.suppress(StoreError):
        if Store(config.state_dir, opened=False).in_use():
            return True
    return service.state().get("ActiveState") == "active"


def _check_broker(config: Config) -> list[Finding]:
    serving = _is_running(config)
    try:
        return asyncio.run(check_broker(config.broker, config.device, config.groups, serving=serving))
    except UnreachableError as error:
        return [fail("broker", str(error), error.hint)]
    except ConfigError as error:
        return [fail("broker", str(error), error.hint or "enroll again, with --force")]
