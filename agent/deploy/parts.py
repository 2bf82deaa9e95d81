"""What the parts of a deployment share; `deployment` makes it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.deploy.circumstances import Circumstances
from agent.deploy.desired_state import DesiredState
from agent.deploy.fetch.sources import Downloader
from agent.deploy.history import History
from agent.deploy.interfaces import Models
from agent.deploy.jobs import Journal
from agent.deploy.reconcile import Attempts
from agent.deploy.store.records import Records
from agent.deploy.store.store import Store


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one deployment.

    `circumstances` are what decides, beside the document, whether a bundle is refused. `report` publishes the
    reported document.
    """

    store: Store
    records: Records
    downloader: Downloader
    models: Models
    desired: DesiredState
    journal: Journal
    history: History
    attempts: Attempts
    circumstances: Circumstances
    report: Callable[[], None]
